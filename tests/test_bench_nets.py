"""The networks of the planner's benchmark: their published sizes, that tiny ones train, and how wrappers get round them."""

import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxremat
from experiments import chain as plain_chain
from experiments import models, training
from experiments.bench import nets
from experiments.bench.nets import NETS
from experiments.bench.nets.modules import module_block
from experiments.errors import ExperimentError


def count(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def dense(a, b):
    return a * b + b


# By hand; conv k x k from a to b has k*k*a*b, a norm of c channels 2c. The sums are the published counts.
def resnet50():
    # Stem 7*7*3*64 + 128. A bottleneck of width w from v: v*w + 9ww + 4ww and norms 2w + 2w + 8w; the first of each stage
    # has a projection 4vw + 8w too.
    total, v = 7 * 7 * 3 * 64 + 128, 64
    for w, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(depth):
            total += v * w + 13 * w * w + 12 * w + (4 * v * w + 8 * w if i == 0 else 0)
            v = 4 * w
    return total + dense(2048, 1000)


def vgg16():
    widths = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    convolutions = sum(dense(9 * a, b) for a, b in pairwise(widths))
    # Five halvings leave 7 x 7 positions of 512 channels.
    return convolutions + dense(7 * 7 * 512, 4096) + dense(4096, 4096) + dense(4096, 1000)


def unet():
    # Two convolutions from a to b with their norms; a transposed convolution 2 x 2 with bias on the way up.
    two = lambda a, b: 9 * a * b + 9 * b * b + 4 * b  # noqa: E731
    down = two(3, 64) + sum(two(w, 2 * w) for w in (64, 128, 256, 512))
    return down + sum(4 * 2 * w * w + w + two(2 * w, w) for w in (512, 256, 128, 64)) + dense(64, 2)


def densenet():
    total, c = 9 * 3 * 24, 24
    for stage in range(3):
        for _ in range(16):  # norm of c, 1x1 to 48, norm of 48, 3x3 to 12
            total, c = total + 2 * c + c * 48 + 2 * 48 + 9 * 48 * 12, c + 12
        if stage < 2:
            total, c = total + 2 * c + c * (c // 2), c // 2
    return total + 2 * c + dense(c, 10)


def transformer(width, depth):
    # Two norms, queries, keys and values, projection, perceptron; and the norm at the end.
    layer = 2 * 2 * width + dense(width, 3 * width) + dense(width, width)
    return depth * (layer + dense(width, 4 * width) + dense(4 * width, width)) + 2 * width


COUNTS = {  # name: (by hand, published)
    "chain16": (16 * 9 * 32 * 32, 147_456),
    "chain64": (64 * 9 * 32 * 32, 589_824),
    "resnet50": (resnet50(), 25_557_032),
    "vgg16": (vgg16(), 138_357_544),
    "unet": (unet(), 31_037_698),
    "densenet100": (densenet(), 769_162),
    # Patches of 16*16*3, 16*16 positions. Published for a class token and 14*14 + 1 positions.
    "vit_s16": (
        dense(768, 384) + 256 * 384 + transformer(384, 12) + dense(384, 1000),
        22_050_664 - (1 + 197 - 256) * 384,
    ),
    "gpt2": (50257 * 768 + 1024 * 768 + transformer(768, 12), 124_439_808),
    "gpt2_scanned": (50257 * 768 + 1024 * 768 + transformer(768, 12), 124_439_808),
    # Four gates read one pixel and 512 units, with one bias each.
    "lstm": (4 * 512 * (1 + 512 + 1) + dense(512, 10), 1_057_802),
    # tests/test_models.py derives these two.
    "resnet18": (11_173_962, 11_173_962),
    "wrn16_4": (2_748_890, 2_748_890),
}


@pytest.mark.parametrize("name", NETS)
def test_full_networks_trace_and_have_the_published_size(name):
    by_hand, published = COUNTS[name]
    net = NETS[name]()
    assert count(net.args[0]) == by_hand == published
    params = jax.eval_shape(jax.grad(net.loss), *net.args)
    assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(lambda x: x.shape, net.args[0])


TINY = {
    "chain": lambda: nets.chain(3, batch_size=2, size=8, channels=4),
    "resnet18": lambda: nets.resnet18(2, size=8),
    "wrn16_4": lambda: nets.wrn16_4(2, size=8),
    "resnet50": lambda: nets.resnet50(2, size=32, classes=5, stages=(1, 2), width=4),
    "vgg16": lambda: nets.vgg16(2, size=32, classes=5, width=2, hidden=8),
    "unet": lambda: nets.unet(2, size=8, levels=2, width=4),
    "densenet": lambda: nets.densenet_bc(2, layers=2, growth=4, size=8),
    "vit": lambda: nets.vit(2, size=32, classes=5, depth=2, width=16, heads=2),
    "gpt2": lambda: nets.gpt2(2, length=8, depth=4, width=16, heads=2, vocabulary=11),
    "gpt2 scanned": lambda: nets.gpt2(2, length=8, depth=4, width=16, heads=2, vocabulary=11, scanned=True),
    "lstm": lambda: nets.lstm(2, steps=6, units=8, classes=5),
}


# These tests look at values, not at what a compiler makes of them: the quickest compile will do.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def example(net, seed=0):
    """Arrays for the arguments of a net, without compiling its initialisation."""
    rng = np.random.default_rng(seed)

    def array(shape):
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return rng.integers(0, net.classes, shape.shape, shape.dtype)
        return rng.normal(0, 0.3, shape.shape).astype(shape.dtype)

    return jax.tree.map(array, net.args)


def value_and_grad(loss, args):
    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(*args)


def value(loss, args):
    return jax.jit(loss, compiler_options=QUICK)(*args)


@pytest.mark.parametrize("name", TINY)
def test_tiny_networks_train(name):
    net = TINY[name]()
    loss, gradient = value_and_grad(net.loss, example(net))
    assert np.isfinite(loss)
    for path, leaf in jax.tree.leaves_with_path(gradient):
        assert np.isfinite(leaf).all(), jax.tree_util.keystr(path)
    # Every parameter takes part: no gradient is zero all over. ReLUs of tiny networks may die, so only most must live.
    alive = [bool((leaf != 0).any()) for leaf in jax.tree.leaves(gradient)]
    assert sum(alive) >= 0.9 * len(alive)


def test_arguments_fit_and_come_from_the_seed():
    net = TINY["gpt2 scanned"]()
    args, again, other = net.arguments(seed=3), net.arguments(seed=3), net.arguments(seed=4)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), args) == jax.tree.map(lambda x: (x.shape, x.dtype), net.args)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(args), jax.tree.leaves(again)))
    assert not (args[1] == other[1]).all()
    assert args[1].min() >= 0
    assert args[1].max() < 11
    # Layers have weights of their own.
    kernel = args[0]["blocks"]["fc1"]["kernel"]
    assert kernel.shape == (4, 16, 64)
    assert not (kernel[0] == kernel[1]).all()


@pytest.mark.parametrize("name", ["resnet50", "unet", "gpt2"])
def test_wrappers_change_no_value(name):
    net = TINY[name]()
    args = example(net)
    loss, gradient = value_and_grad(net.loss, args)
    wrapped = net.build(wrap_block=jax.checkpoint, group=2, wrap_group=jax.checkpoint, wrap_last=False)
    other, other_gradient = value_and_grad(wrapped, args)
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * np.abs(b).max()), other_gradient, gradient
    )


@pytest.mark.parametrize(("name", "group"), [("gpt2 scanned", 2), ("lstm", 3)])
def test_wrappers_of_loops_change_no_value(name, group):
    net = TINY[name]()
    args = example(net)
    loss, gradient = value_and_grad(net.loss, args)
    other, other_gradient = value_and_grad(
        net.build(wrap_block=jax.checkpoint, group=group, wrap_group=jax.checkpoint), args
    )
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * np.abs(b).max()), other_gradient, gradient
    )


def test_wrappers_get_every_block_and_every_run():
    net = TINY["densenet"]()  # conv1, 2 layers, transition, 2 layers, transition, 2 layers
    assert net.depth == 9
    calls = {"blocks": 0, "runs": list[list[str]]()}

    def wrap_block(f):
        calls["blocks"] += 1
        return f

    def wrap_group(f):
        return lambda params, state: calls["runs"].append(sorted(params)) or f(params, state)

    jax.eval_shape(net.build(wrap_block=wrap_block, group=4, wrap_group=wrap_group), *net.args)
    assert calls["blocks"] == 9
    assert [len(run) for run in calls["runs"]] == [4, 4, 1]
    assert calls["runs"][0] == ["conv1", "stage1_layer01", "stage1_layer02", "stage1_transition"]
    calls["runs"].clear()
    jax.eval_shape(net.build(group=4, wrap_group=wrap_group, wrap_last=False), *net.args)
    assert [len(run) for run in calls["runs"]] == [4, 4]


@pytest.mark.parametrize("name", ["resnet18", "wrn16_4"])
def test_the_networks_of_the_experiments_are_these(name):
    net = TINY[name]()
    params, images, labels = example(net)
    model = models.build(name)
    together = {k: v for k, v in params.items() if k != "head"} | params["head"]
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), images, False))["batch_stats"]
    stats = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    reference, _ = value(training.make_loss(model), (together, stats, images, labels, jax.random.key(0)))
    np.testing.assert_allclose(value(net.loss, (params, images, labels)), reference, rtol=1e-5)


def test_the_chain_is_the_chain():
    net = TINY["chain"]()
    params, x = example(net)
    assert net.loss(params, x) == plain_chain.loss(list(params.values()), x)


def test_scanned_and_unrolled_gpt2_are_one_network():
    unrolled, scanned = TINY["gpt2"](), TINY["gpt2 scanned"]()
    params, *batch = example(unrolled)
    blocks = [params[block.name] for block in unrolled.body]
    stacked = {k: v for k, v in params.items() if not k.startswith("block")} | {
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    }
    np.testing.assert_allclose(
        value(scanned.loss, (stacked, *batch)), value(unrolled.loss, (params, *batch)), rtol=1e-6
    )


def test_gpt2_sees_no_later_token_and_vit_does():
    for name, causal in (("gpt2", True), ("vit", False)):
        net = TINY[name]()
        params = example(net)[0]
        block = net.body[-1]
        x = jax.random.normal(jax.random.key(1), (1, 4, 16))
        y, moved = (block.function(params[block.name], x) for x in (x, x.at[0, 3, 0].add(1.0)))
        assert bool((y[0, :3] == moved[0, :3]).all()) == causal
        assert not (y[0, 3] == moved[0, 3]).all()


def test_vit_has_a_token_for_each_patch_and_a_head_that_reads_their_mean():
    net = TINY["vit"]()
    params, images, _ = example(net)
    patches, *_ = net.body
    tokens = patches.function(params["patches"], images)
    assert tokens.shape == (2, 2 * 2, 16)  # patches of 16 x 16 tile 32 x 32 pixels
    labels = np.array([1, 3], np.int32)
    # The mean knows no order.
    losses = [net.after(params, x, images, labels) for x in (tokens, tokens[:, ::-1])]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    moved = net.after(params, tokens.at[:, -1, 0].add(1.0), images, labels)
    assert moved != losses[0]


@pytest.mark.parametrize("name", ["unet", "gpt2", "lstm", "chain"])
def test_values_know_their_block(name):
    net = TINY[name]()
    paths = {row.path.split("/")[0] for row in jaxremat.residuals(net.loss, *net.args).rows if row.path}
    names = {net.body.name} if isinstance(net.body, nets.Loop) else {block.name for block in net.body}
    assert names <= paths


BAD = {
    "unet: 4 levels halve the size, so size is a multiple of 16; got 100": lambda: nets.unet(2, size=100),
    "unet: size is a whole number of at least 1; got 0": lambda: nets.unet(2, size=0),
    "vgg16: five poolings halve the size, so size is a multiple of 32; got 16": lambda: nets.vgg16(2, size=16),
    "gpt2: heads share the width, so width is a multiple of 12; got 100": lambda: nets.gpt2(width=100),
    "gpt2: depth is a whole number of at least 1; got 0": lambda: nets.gpt2(depth=0, scanned=True),
    "resnet18: batch_size is a whole number of at least 1; got 1.5": lambda: nets.resnet18(1.5),
    "resnet50: stages[1] is a whole number of at least 1; got 0": lambda: nets.resnet50(stages=(1, 0)),
    "3 blocks: group is a whole number of at least 1; got 0": lambda: TINY["chain"]().build(group=0),
    "3 blocks: group is a whole number of at least 1; got True": lambda: TINY["chain"]().build(group=True),
    "a loop of 6 steps has no runs of 4; use a divisor": lambda: TINY["lstm"]().build(group=4),
    "whose last run cannot be left unwrapped": lambda: TINY["lstm"]().build(group=3, wrap_last=False),
    "give the Dense one": lambda: module_block(nn.Dense(3)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_sizes_are_refused(message):
    with pytest.raises(ExperimentError, match=re.escape(message)):
        BAD[message]()
