"""The PyTorch networks compute what the Flax networks compute, under every strategy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install "torch==2.13.0"')

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import jaxremat  # noqa: E402
from experiments import agreement, models, torch_models, torch_policies, torch_training, torch_weights  # noqa: E402
from experiments.errors import ExperimentError  # noqa: E402
from experiments.torch_layers import BatchNorm, commit_statistics  # noqa: E402
from experiments.training import decayed  # noqa: E402

MODELS = ("net", "resnet18", "wrn16_4", "vit")


@pytest.fixture(scope="module", params=MODELS)
def reference(request):
    return agreement.reference(request.param)


def test_loss_gradients_and_statistics_agree_under_every_strategy(reference):
    for policy in agreement.POLICIES:
        for figure in agreement.compare(reference, policy):
            assert figure.good, figure
    largest = max(np.linalg.norm(leaf) for leaf in jax.tree.leaves(reference.gradients))
    assert largest > 0.1  # so that the floor of the comparison hides nothing


def test_a_gradient_that_differs_is_found(reference):
    wrong = replace(reference, gradients=jax.tree.map(lambda leaf: leaf * 1.001 + 1e-6, reference.gradients))
    assert not all(figure.good for figure in agreement.compare(wrong, "everything"))


def test_weights_travel_both_ways_bit_for_bit(reference):
    network = torch_models.build(reference.model)
    torch_weights.load_flax(network, reference.params, reference.new_batch_stats)
    params, stats = torch_weights.to_flax(network, reference.params)
    jax.tree.map(np.testing.assert_array_equal, params, reference.params)
    jax.tree.map(np.testing.assert_array_equal, stats, reference.new_batch_stats)
    twin = torch_models.build(reference.model)
    torch_weights.load_flax(twin, params, stats)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name


def test_evaluation_agrees(reference):
    network = torch_models.build(reference.model)
    torch_weights.load_flax(network, reference.params, reference.new_batch_stats)
    variables = {"params": reference.params, "batch_stats": reference.new_batch_stats}
    expected = models.build(reference.model).apply(variables, jnp.asarray(reference.images[:2]), False)
    with torch.no_grad():
        got = network.eval()(torch.from_numpy(reference.images[:2].transpose(0, 3, 1, 2).copy()))
    np.testing.assert_allclose(got.numpy(), np.asarray(expected), rtol=1e-4, atol=1e-4)


def test_weight_decay_is_on_the_same_parameters(reference):
    network = torch_models.build(reference.model)
    kernels = {id(parameter) for parameter in torch_training.make_sgd(network).param_groups[0]["params"]}
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, float(id(parameter) in kernels))
    got = torch_weights.gradients_to_flax(network, reference.params)
    jax.tree.map(lambda grad, flag: np.testing.assert_array_equal(grad, float(flag)), got, decayed(reference.params))


@pytest.mark.parametrize("policy", ["everything", "nothing", "dots", "segments:2"])
def test_statistics_count_a_batch_once(policy):
    torch.manual_seed(0)
    network = torch_models.build("resnet18").train()
    images = torch.randn(2, 3, 32, 32)
    torch_policies.apply(network, jaxremat.parse(policy)).forward(images).sum().backward()
    commit_statistics(network)
    commit_statistics(network)  # there is nothing left to commit
    first = torch.nn.functional.conv2d(images, network.get_submodule("stem.conv1").weight, padding=1)
    norm = network.get_submodule("stem.bn1")
    assert isinstance(norm, BatchNorm)
    # From mean 0 and variance 1, one tenth of the way to the batch's.
    torch.testing.assert_close(norm.mean, 0.1 * first.mean((0, 2, 3)))
    torch.testing.assert_close(norm.var, 0.9 + 0.1 * first.var((0, 2, 3), correction=0))


def test_pytorchs_own_batch_norm_counts_it_twice():
    """What the one above is corrected against: the day this fails, the correction may go."""
    norm = nn.BatchNorm2d(3)
    checkpoint(norm, torch.randn(2, 3, 4, 4, requires_grad=True), use_reentrant=False).sum().backward()
    assert int(norm.num_batches_tracked) == 2


@pytest.mark.parametrize("policy", ["nothing", "dots", "names:*_out", "segments:3", "ops:dropout=store,*=recompute"])
def test_recomputation_draws_the_same_dropout_masks(policy):
    gradients = []
    for spelling in ("everything", policy):
        torch.manual_seed(0)
        network = torch_models.build("vit", dropout=0.5).train()
        applied = torch_policies.apply(network, jaxremat.parse(spelling))
        torch.manual_seed(1)
        applied.forward(torch.ones(2, 3, 32, 32)).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in network.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_variables_of_another_model_are_refused():
    params = {"block1": {"conv": {"kernel": np.zeros((5, 5, 3, 6))}}}
    with pytest.raises(ExperimentError, match="they differ in params/block1/conv/bias"):
        torch_weights.load_flax(torch_models.build("net"), params, {})


def test_variables_of_another_shape_are_refused():
    params, stats = torch_weights.to_flax(torch_models.build("net", classes=7))
    with pytest.raises(ExperimentError, match="must have"):
        torch_weights.load_flax(torch_models.build("net"), params, stats)


def test_there_is_no_other_model():
    with pytest.raises(ExperimentError, match="resnet18"):
        torch_models.build("resnet81")  # pyright: ignore[reportArgumentType]
