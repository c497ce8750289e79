"""Policies in PyTorch: what they keep and recompute, to the byte and to the operation."""

import pytest

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install "torch==2.13.0"')

from torch.nn import functional  # noqa: E402

import jaxremat  # noqa: E402
from experiments import torch_layers, torch_measure, torch_models, torch_policies  # noqa: E402
from experiments.torch_ops import LABELS, list_operations  # noqa: E402
from experiments.torch_relu import pack_bits, relu, unpack_bits  # noqa: E402
from jaxremat import PolicyError  # noqa: E402

BATCH = 4
# net, elements an image: 28*28*6 after the first convolution, 14*14*6 pooled, 10*10*16, 5*5*16, then 120, 84 and 10.
CONV1, POOL1, CONV2, POOL2 = 4704, 1176, 1600, 400
# Beyond the network: log softmax of 10 classes an image, and one scalar, the weight of the batch.
LOSS = 10 * BATCH * 4 + 4


def measure(policy: str, model="net", keep="native"):
    torch.manual_seed(0)
    network = torch_models.build(model, dropout=0.0, keep_relu=keep).train()
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.zeros(BATCH, dtype=torch.long)

    def loss(logits):
        return functional.cross_entropy(logits, labels)

    applied = torch_policies.apply(network, jaxremat.parse(policy))
    kept = torch_measure.kept(network, applied, loss, images, [labels])
    return kept, torch_measure.recomputed(network, applied, loss, images), applied


KEPT_PER_IMAGE = {
    # ReLU's and pooling's outputs as float32, pooling's indices as int64.
    "everything": 4 * (CONV1 + CONV2 + 120 + 84 + POOL1 + POOL2) + 8 * (POOL1 + POOL2),
    # The inputs of the second block and of the head; the first block's is the batch itself.
    "nothing": 4 * (POOL1 + POOL2),
    "dots": 4 * (POOL1 + POOL2 + CONV1 + CONV2 + 120 + 84 + 10),
    "ops:conv=store,*=recompute": 4 * (POOL1 + POOL2 + CONV1 + CONV2),
    "ops:max_pool=store,*=recompute": (4 + 8) * (POOL1 + POOL2),
    "names:fc_out": 4 * (POOL1 + POOL2 + 120 + 84),
    "paths:block2/conv": 4 * (POOL1 + POOL2 + CONV2),
    "names:relu_out+paths:block2/conv": 4 * (POOL1 + POOL2 + CONV1 + CONV2 + 120 + 84 + CONV2),
    # Two segments of two parts and one: the second is not checkpointed.
    "segments:2": 4 * (POOL2 + 120 + 84),
    "segments:1": 4 * (CONV1 + CONV2 + 120 + 84 + POOL1 + POOL2) + 8 * (POOL1 + POOL2),
}


@pytest.mark.parametrize("policy", KEPT_PER_IMAGE)
def test_kept_bytes_are_those_derived_by_hand(policy):
    kept, _, _ = measure(policy)
    assert sum(row.size_bytes for row in kept) == BATCH * KEPT_PER_IMAGE[policy] + LOSS


# Recomputation stops as soon as the last value is there that the backward pass wants: never at a block's own result, whose
# maker wants only its inputs, except pooling, which wants its indices.
RECOMPUTED = {
    "everything": {},
    "nothing": {"conv": 2, "relu": 4, "max_pool": 2, "dot": 2},
    "dots": {"relu": 4, "max_pool": 2},
    "ops:conv=store,*=recompute": {"relu": 4, "max_pool": 2, "dot": 2},
    "segments:2": {"conv": 2, "relu": 2, "max_pool": 2},
}


@pytest.mark.parametrize("policy", RECOMPUTED)
def test_recomputed_operations_are_exact(policy):
    assert measure(policy)[1] == RECOMPUTED[policy]


def test_each_selector_counts_its_matches():
    _, _, applied = measure("ops:conv=store,relu=recompute,*=recompute")
    assert applied.matches == {"ops:conv": 2, "ops:relu": 4, "ops:*": 5}  # two poolings, three products


def test_the_cache_of_selective_checkpointing_is_told_apart():
    kept, _, _ = measure("dots")
    assert {row.op for row in kept if row.how == "cached"} == {"conv", "dot"}
    assert {row.path for row in kept if row.how == "region input"} == {"block1/pool", "block2/pool"}
    assert {row.op for row in kept if row.how == "saved"} == {"_log_softmax", "nll_loss_forward"}


def test_a_packet_matches_nothing_but_the_overloads_are_used():
    assert torch.ops.aten.mm not in LABELS
    assert torch.ops.aten.mm.default in LABELS


def test_the_trial_leaves_no_trace():
    network = torch_models.build("resnet18").train()
    before = torch.get_rng_state()
    assert sum(operation.label == "conv" for operation in list_operations(network)) == 20
    assert torch.equal(before, torch.get_rng_state())
    torch_layers.commit_statistics(network)
    assert float(network.get_submodule("stem.bn1").mean.abs().sum()) == 0


REFUSED = {
    "names:conv_outt": "Did you mean 'conv_out'",
    "names:block_out": "matches no operation",
    "paths:block9": "Did you mean",
    "ops:gelu=store,*=recompute": "'ops:gelu' matches no operation",
    "ops:convv=store": "Did you mean 'conv'",
    "ops:exp=store": "PyTorch cannot express ops:exp=store",
    "ops:conv=offload": "cannot express ops:conv=offload",
    "offload:dots": "cannot express offload:dots",
    "values:3": "cannot express values:3",
    "segments:4": "at most 3 segments",
    "segments:2+dots": "form no union",
    "budget:fits": "knows no device",
    "budget:1MiB": "needs a batch",
}


@pytest.mark.parametrize(("policy", "message"), REFUSED.items())
def test_what_pytorch_cannot_express_is_said(policy, message):
    with pytest.raises(PolicyError, match=message):
        torch_policies.apply(torch_models.build("net"), jaxremat.parse(policy))


@pytest.mark.parametrize("policy", ["segments:2", "budget:50%"])
def test_whole_network_strategies_refuse_blocks(policy):
    with pytest.raises(PolicyError, match="got block"):
        torch_policies.apply(torch_models.build("net"), jaxremat.parse(policy), "block")


def test_one_region_round_the_network_keeps_its_input_alone():
    torch.manual_seed(0)
    network = torch_models.build("net").train()
    applied = torch_policies.apply(network, jaxremat.parse("nothing"), "net")
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.zeros(BATCH, dtype=torch.long)
    kept = torch_measure.kept(
        network, applied, lambda logits: functional.cross_entropy(logits, labels), images, [labels]
    )
    assert sum(row.size_bytes for row in kept) == LOSS


def test_peak_sums_the_allocator_up():
    kept = []

    def step():
        first = torch.empty(1 << 18)  # 1 MiB, gone before the next two
        del first
        kept.append(torch.empty(1 << 17))
        kept.append(torch.empty(1 << 19))

    assert torch_measure.peak_bytes(step, torch.device("cpu")) == (1 << 19) + (1 << 21)


@pytest.mark.parametrize("keep", ["mask", "output"])
def test_selective_relu_passes_gradcheck(keep):
    torch.manual_seed(0)
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: relu(x, keep), x)
    assert torch.autograd.gradgradcheck(lambda x: relu(x, keep), x)


@pytest.mark.parametrize("shape", [(), (1,), (8,), (9,), (2, 3, 5), (0,)])
def test_bits_come_back(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    assert pack_bits(mask).numel() == -(-mask.numel() // 8)
    assert torch.equal(unpack_bits(pack_bits(mask), mask.shape), mask)


@pytest.mark.parametrize("keep", ["mask", "output"])
def test_selective_relu_is_relu(keep):
    x = torch.tensor([-1.0, -0.0, 0.0, 2.0, float("inf")])
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    relu(one, keep).sum().backward()
    functional.relu(other).sum().backward()
    assert torch.equal(relu(x, keep), functional.relu(x))
    assert torch.equal(one.grad, other.grad)


def test_a_bit_mask_saves_only_where_nothing_else_keeps_the_output():
    """In `net` convolution, pooling and products keep ReLU's output anyway: the mask is 1/32 more."""
    native, mask = (sum(row.size_bytes for row in measure("everything", keep=keep)[0]) for keep in ("native", "mask"))
    bits = BATCH * (CONV1 + CONV2 + 120 + 84) // 8
    assert mask == native + bits
    # In resnet18 the last of 17 ReLUs is followed by a mean, which keeps nothing: there 31/32 of its output are saved.
    kept = {keep: measure("everything", "resnet18", keep)[0] for keep in ("native", "mask")}
    elements = BATCH * (5 * 64 * 32**2 + 4 * 128 * 16**2 + 4 * 256 * 8**2 + 4 * 512 * 4**2)
    last = BATCH * 512 * 4**2
    native, mask = (sum(row.size_bytes for row in kept[keep]) for keep in ("native", "mask"))
    assert mask == native + elements // 8 - 4 * last


def test_a_budget_compiles_and_keeps_less():
    torch.manual_seed(0)
    network = torch_models.build("net").train()
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.zeros(BATCH, dtype=torch.long)

    def loss(logits):
        return functional.cross_entropy(logits, labels)

    def kept(policy):
        plain = torch_policies.apply(network, jaxremat.parse("everything"))
        # This backend cuts the graph as inductor's does and runs it without compiling C++, which takes minutes.
        applied = torch_policies.apply(
            network,
            jaxremat.parse(policy),
            kept_without_policy=lambda: total(plain),
            compiler="aot_eager_decomp_partition",
        )
        return total(applied), applied

    def total(applied):
        return sum(row.size_bytes for row in torch_measure.kept(network, applied, loss, images, [labels]))

    unlimited, _ = kept("budget:100%")
    least, applied = kept("budget:1KiB")
    assert least < unlimited
    assert "1024 of the" in applied.note
    loss(applied.forward(images)).backward()
    compiled = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad()
    loss(network(images)).backward()
    for one, parameter in zip(compiled, network.parameters()):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-6)
