"""What the competitors of the planner recompute, derived by hand; and that their values are those of the network."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import nets
from experiments.bench.competitors import competitors, segment_lengths, thinned
from experiments.bench.nets import NETS
from experiments.bench.recomputed import contraction_flops, recomputed_flops
from experiments.errors import ExperimentError
from jaxremat.flops import conv_and_dot_counts


def losses(net):
    return {competitor.name: competitor.loss for competitor in competitors(net)}


# A convolution of the chain at 8 x 8 with 4 channels and batch 2: 3 * 8 - 2 pairs of position and tap an axis.
CONV = 2 * 2 * 22**2 * 4 * 4
CHAIN = {  # competitor: convolutions recomputed of 16
    "no remat": 0,
    "per block: nothing": 16,
    "per block: dots": 0,
    "per block: dots_no_batch": 16,  # it stores no convolution
    "whole net: dots": 0,
    "whole net: block outputs": 16,  # batch norm needs the convolution's own output
    # All but the last run: 15 of 15 + 1, 14 of 7 runs + 1, 15 of 5 runs + 1, 12 of 3 runs + 1, 15 of 3 runs + 1, ...
    "segments of 1": 15,
    "segments of 2": 14,
    "segments of 3": 15,
    "segments of 4": 12,
    "segments of 5": 15,
    "segments of 6": 12,
    "segments of 7": 14,
    "segments of 8": 8,
}


def test_chain_by_hand():
    net = nets.chain(16, batch_size=2, size=8, channels=4)
    found = losses(net)
    assert list(found) == list(CHAIN)
    for name, loss in found.items():
        # Without remat 47: each block's convolution, its kernel's and its input's, the first input's excepted.
        jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(*net.args)
        assert conv_and_dot_counts(jaxpr).convolutions == 47 + CHAIN[name], name
        assert recomputed_flops(loss, net.loss, net.args) == CHAIN[name] * CONV, name
    assert contraction_flops(net.loss, net.args) == 47 * CONV


# GPT-2 of width 16 and 2 heads on 2 x 8 tokens, FLOPs of a layer's products.
TOKENS, WIDTH, LENGTH, DEPTH = 2 * 8, 16, 8, 4
ATTENTION = 2 * (2 * TOKENS * LENGTH * WIDTH)  # scores and mixing; both have a batch axis
DENSE = 2 * TOKENS * WIDTH * (3 * WIDTH + WIDTH + 4 * WIDTH)  # qkv, out, fc1
FC2 = 2 * TOKENS * WIDTH * 4 * WIDTH  # its output is only added: the layer's own backward pass does not read it
LOGITS = 2 * TOKENS * WIDTH * 11
GPT2 = {
    "no remat": 0,
    "per block: nothing": DEPTH * (DENSE + ATTENTION),
    "per block: dots": 0,
    "per block: dots_no_batch": DEPTH * ATTENTION,
    "whole net: dots": 0,
    "whole net: block outputs": DEPTH * (DENSE + ATTENTION) + LOGITS,
}
UNROLLED = GPT2 | {
    # A run needs fc2 of each of its layers but the last.
    "segments of 1": 3 * (DENSE + ATTENTION),
    "segments of 2": 2 * (DENSE + ATTENTION) + FC2,
}
SCANNED = GPT2 | {
    # A loop's steps are all alike: fc2 is recomputed for the last layer of a run too.
    "segments of 2": DEPTH * (DENSE + ATTENTION + FC2),
    # Once to reach each step's input, and once in the step.
    "nested loop of 2": DEPTH * (DENSE + ATTENTION + FC2) + DEPTH * (DENSE + ATTENTION),
}


@pytest.mark.parametrize(("scanned", "expected"), [(False, UNROLLED), (True, SCANNED)], ids=["unrolled", "scanned"])
def test_gpt2_by_hand(scanned, expected):
    net = nets.gpt2(2, length=LENGTH, depth=DEPTH, width=WIDTH, heads=2, vocabulary=11, scanned=scanned)
    found = {name: recomputed_flops(loss, net.loss, net.args) for name, loss in losses(net).items()}
    assert found == expected


def test_names_keep_block_outputs_and_nothing_else():
    net = nets.chain(3, batch_size=2, size=8, channels=4)
    loss = losses(net)["whole net: block outputs"]
    residuals = jax.eval_shape(lambda params, x: jax.vjp(lambda params: loss(params, x), params)[1], *net.args)
    # The inputs, which are three kernels and x, and the outputs of three blocks, which have the shape of x.
    shapes = Counter(leaf.shape for leaf in jax.tree.leaves(residuals) if leaf.ndim)
    assert shapes == {(3, 3, 4, 4): 3, (2, 8, 8, 4): 1 + 3}


@pytest.mark.parametrize(
    "net",
    [nets.lstm(2, steps=4, units=4, classes=3), nets.unet(1, size=4, levels=1, width=2)],
    ids=lambda net: net.name.split()[0],
)
def test_competitors_have_the_values_of_the_network(net):
    rng = np.random.default_rng(0)
    args = jax.tree.map(
        lambda x: (
            rng.integers(0, net.classes, x.shape, x.dtype)
            if jnp.issubdtype(x.dtype, jnp.integer)
            else rng.normal(0, 0.3, x.shape).astype(x.dtype)
        ),
        net.args,
    )
    found = losses(net)
    # One program for all: compiling each alone takes longer.
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    step = jax.jit(lambda *args: [jax.value_and_grad(loss)(*args) for loss in found.values()], compiler_options=quick)
    (value, gradient), *others = step(*args)
    for name, (other, other_gradient) in zip(list(found)[1:], others, strict=True):
        np.testing.assert_allclose(other, value, rtol=1e-6, err_msg=name)
        for a, b in zip(jax.tree.leaves(other_gradient), jax.tree.leaves(gradient)):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * np.abs(b).max(), err_msg=name)


def test_lengths_of_segments():
    # Half of the 9 blocks of resnet18, of the 51 of the DenseNet; the divisors of 12 and of 784 up to half of it.
    assert segment_lengths(NETS["resnet18"]()) == (1, 2, 3, 4, 5)
    assert segment_lengths(NETS["gpt2_scanned"]()) == (2, 3, 4, 6)
    assert segment_lengths(nets.chain(1)) == ()
    assert segment_lengths(nets.chain(2)) == (1,)
    deep = segment_lengths(NETS["chain64"]())
    assert len(deep) <= 8
    assert {1, 8, 32} <= set(deep) <= set(range(1, 33))
    loop = segment_lengths(NETS["lstm"]())
    assert len(loop) <= 8
    assert {2, 28, 392} <= set(loop)
    assert all(784 % k == 0 for k in loop)


def test_thinning_keeps_ends_and_ratios():
    assert thinned([1, 2, 3], 3) == (1, 2, 3)
    assert thinned([2, 4, 7, 8, 14, 16, 28, 49, 56, 98, 112, 196, 392], 2) == (2, 392)
    assert thinned([], 4) == ()
    with pytest.raises(ExperimentError, match="at least 2 must be allowed; got 1"):
        thinned([1, 2], 1)


def test_what_cannot_be_counted_is_refused():
    loss = lambda x: jnp.linalg.eigvalsh(x).sum()  # noqa: E731
    with pytest.raises(ExperimentError, match="0 loops of unknown length, and of unknown work: eigh"):
        contraction_flops(loss, (jax.ShapeDtypeStruct((3, 3), jnp.float32),))
