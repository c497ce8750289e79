"""`--ops`: models built from either set of operations are the same networks, and lean ones keep less."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxremat
from experiments.config import Config
from experiments.errors import ExperimentError
from experiments.models import build

NAMES = ("net", "resnet18", "wrn16_4", "vit")
BATCH = 8
IMAGES = jax.ShapeDtypeStruct((BATCH, 32, 32, 3), jnp.float32)


def of(name, ops):
    """A loss of the logits alone in training mode, and the function that makes the variables."""
    model = build(name, ops=ops)

    def loss(params, statistics, images):
        variables = {"params": params, "batch_stats": statistics}
        keys = {"dropout": jax.random.key(0, impl="rbg")}
        logits, _ = model.apply(variables, images, True, rngs=keys, mutable=["batch_stats"])
        return jnp.sum(logits**2)

    return loss, lambda: model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), False)


def kept(name, ops):
    loss, init = of(name, ops)
    variables = jax.eval_shape(init)
    return jaxremat.residuals(loss, variables["params"], variables.get("batch_stats", {}), IMAGES)


@pytest.mark.parametrize("name", NAMES)
def test_same_variables(name):
    standard, lean = (jax.eval_shape(of(name, ops)[1]) for ops in ("standard", "lean"))
    assert jax.tree.structure(standard) == jax.tree.structure(lean)
    assert jax.tree.leaves(standard) == jax.tree.leaves(lean)


def test_same_initial_weights_and_training():
    (standard, init), (lean, init_lean) = of("net", "standard"), of("net", "lean")
    fast = {"xla_backend_optimization_level": 0}
    variables, variables_lean = (jax.jit(f, compiler_options=fast)() for f in (init, init_lean))
    jax.tree.map(np.testing.assert_array_equal, variables, variables_lean)
    images = jnp.asarray(np.random.default_rng(0).normal(size=IMAGES.shape), jnp.float32)
    one, two = (jax.jit(jax.value_and_grad(f))(variables["params"], {}, images) for f in (standard, lean))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), one, two)
    np.testing.assert_array_equal(one[0], two[0])


def test_what_the_lean_net_keeps():
    # An image's activations: 28 x 28 x 6 after the first convolution and 10 x 10 x 16 after the second, of which one bit is
    # kept for the ReLU, and a quarter of them after each pooling: an index of a byte, and the next layer's float32 input.
    # Then the outputs of two ReLUs and the logits.
    bits = (28 * 28 * 6 + 10 * 10 * 16) // 8
    pooled = (1 + 4) * (14 * 14 * 6 + 5 * 5 * 16)
    report = kept("net", "lean")
    assert report.total_bytes == BATCH * (bits + pooled + 4 * (120 + 84 + 10))
    assert report.by("op")["relu"] == BATCH * (bits + 4 * (120 + 84))


def test_what_the_lean_resnet_keeps():
    # An image's outputs of 20 convolutions, the three of the projections among them, and of the stem and the 8 blocks: a
    # convolution after a batch norm and a ReLU keeps the batch norm's input. What comes on top are statistics, scales and
    # the pooled features.
    one, two, three, four = (32 * 32 * 64, 16 * 16 * 128, 8 * 8 * 256, 4 * 4 * 512)
    convolutions, blocks = 5 * (one + two + three + four), one + 2 * (one + two + three + four)
    activations = BATCH * 4 * (convolutions + blocks)
    assert activations <= kept("resnet18", "lean").total_bytes <= 1.002 * activations


@pytest.mark.parametrize(("name", "most"), [("net", 0.3), ("resnet18", 0.5), ("wrn16_4", 0.5), ("vit", 0.6)])
def test_lean_models_keep_less(name, most):
    assert kept(name, "lean").total_bytes <= most * kept(name, "standard").total_bytes


def test_ops_belong_to_the_record_and_the_checkpoint():
    assert Config(ops="lean").as_json()["ops"] == "lean"
    assert Config(ops="lean").identity() != Config(ops="standard").identity()


def test_unknown_operations():
    with pytest.raises(ExperimentError, match="one of standard, lean; got 'leen'"):
        build("net", ops="leen")  # type: ignore[arg-type]
