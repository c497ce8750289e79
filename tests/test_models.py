import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.extend.core import jaxprs_in_params

import jaxremat
from experiments import models, operations, policies
from experiments.errors import ExperimentError
from experiments.models import build

NAMES = ("net", "resnet18", "wrn16_4", "vit")
IMAGES = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)


def shapes(model: nn.Module):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), False))


def count(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def paths(tree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


# By hand. conv k x k, a to b: k*k*a*b, plus b with bias; dense a to b: a*b + b; batch or layer norm of c: 2c.
COUNTS = {
    # conv 5x5x3x6+6 = 456, conv 5x5x6x16+16 = 2416, dense 400x120+120 = 48120, 120x84+84 = 10164, 84x10+10 = 850
    "net": 456 + 2416 + 48120 + 10164 + 850,
    # Stem 3x3x3x64 = 1728 and its norm 128. A block of width w from width v: 9vw + 9ww + 4w, with projection vw + 2w.
    # Head 512x10+10.
    "resnet18": 1728
    + 128
    + 2 * (2 * 9 * 64 * 64 + 4 * 64)
    + sum((9 * w // 2 * w + 9 * w * w + 4 * w + w // 2 * w + 2 * w) + (2 * 9 * w * w + 4 * w) for w in (128, 256, 512))
    + 5130,
    # First convolution 3x3x3x16 = 432. A block of width w from v: norms 2v + 2w, 9vw + 9ww, projection vw where v != w.
    # Last norm 512, head 256x10+10.
    "wrn16_4": 432
    + sum(
        (2 * v + 2 * w + 9 * v * w + 9 * w * w + v * w) + (4 * w + 2 * 9 * w * w)
        for v, w in ((16, 64), (64, 128), (128, 256))
    )
    + 512
    + 2570,
    # Patches 4x4x3x192+192, positions 64x192; a layer: two norms 4*192, four projections 192x192+192, perceptron
    # 192x768+768 and 768x192+192; last norm 2*192; head 192x10+10.
    "vit": 9408 + 12288 + 6 * (768 + 4 * 37056 + 148224 + 147648) + 384 + 1930,
}


@pytest.mark.parametrize("name", NAMES)
def test_parameter_count(name):
    assert count(shapes(build(name))["params"]) == COUNTS[name]


def test_published_parameter_counts():
    # He et al.'s CIFAR ResNet-18 of the common re-implementations has 11.17 million, WRN-16-4 2.7 million (its paper,
    # table 4 rounds to 2.8).
    assert COUNTS["resnet18"] == 11_173_962
    assert COUNTS["wrn16_4"] == 2_748_890


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_and_parameters_are_float32_whatever_the_computation(name, dtype):
    model = build(name, classes=7, dtype=dtype)
    variables = shapes(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    logits = jax.eval_shape(lambda v, x: model.apply(v, x, False), variables, IMAGES)
    assert (logits.shape, logits.dtype) == ((2, 7), jnp.float32)


def primitives(jaxpr, found: list) -> list:
    for equation in jaxpr.eqns:
        found.append(equation)
        for inner in jaxprs_in_params(equation.params):
            primitives(inner, found)
    return found


def training_equations(name: str) -> list:
    model = build(name)

    def forward(variables, images):
        return model.apply(variables, images, True, rngs={"dropout": jax.random.key(0)}, mutable=["batch_stats"])

    return primitives(jax.make_jaxpr(forward)(shapes(model), IMAGES).jaxpr, [])


# net: 2. ResNet-18: the stem, 8 blocks of 2, 3 projections. WRN-16-4: the first, 6 blocks of 2, 3 projections. ViT: patches.
@pytest.mark.parametrize(("name", "expected"), [("net", 2), ("resnet18", 20), ("wrn16_4", 16), ("vit", 1)])
def test_number_of_convolutions(name, expected):
    equations = training_equations(name)
    assert sum(equation.primitive.name == "conv_general_dilated" for equation in equations) == expected


def documented_tags() -> dict[str, set[str]]:
    lines = (inspect.getdoc(models) or "").splitlines()
    head = next(i for i, line in enumerate(lines) if line.strip().startswith("model "))
    column, tags, model = lines[head].index("tags"), dict[str, set[str]](), ""
    for line in lines[head + 1 :]:
        if not line.strip():
            break
        model = line[:column].split()[0] if line[:column].strip() else model
        tags[model] = tags.get(model, set()) | set(line[column:].split())
    return tags


@pytest.mark.parametrize("name", NAMES)
def test_the_tags_are_those_of_the_documentation(name, monkeypatch):
    found = set[str]()

    def record(x, tag):
        found.add(tag)
        return x

    monkeypatch.setattr(models, "name", record)
    monkeypatch.setattr(operations, "name", record)
    shapes(build(name))
    assert found == documented_tags()[name]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_under_a_policy_have_the_same_parameters_and_initial_weights(name):
    wrapped = build(name, wrap_block=policies.block_wrapper(jaxremat.parse("nothing"), "block"))
    plain = build(name)
    assert paths(shapes(wrapped)) == paths(shapes(plain))
    if name == "net":

        def weights(model):
            init = jax.jit(
                lambda: model.init(jax.random.key(3), jnp.zeros((1, 32, 32, 3)), False),
                compiler_options={"xla_backend_optimization_level": 0},  # compiling is what takes time here
            )
            return init()

        jax.tree.map(np.testing.assert_array_equal, weights(wrapped), weights(plain))


def test_every_parameter_has_an_explicit_name():
    for name in NAMES:
        for path in paths(shapes(build(name))):
            # Flax names modules on its own after their class: a capital letter.
            assert path == path.lower(), path


def test_wrap_block_gets_every_block_class():
    seen = list[str]()

    def watch(block):
        seen.append(block.__name__)
        return block

    for name in NAMES:
        shapes(build(name, wrap_block=watch))
    # init calls each network once
    assert seen == ["ConvBlock", "DenseHead", "Stem", "BasicBlock", "PreActivationBlock", "EncoderBlock"]


def test_dropout_is_active_in_training_alone():
    model = build("vit")
    variables = shapes(model)
    with pytest.raises(Exception, match="dropout"):  # flax: a training call needs the dropout key
        jax.eval_shape(lambda v, x: model.apply(v, x, True), variables, IMAGES)
    assert jax.eval_shape(lambda v, x: model.apply(v, x, False), variables, IMAGES).shape == (2, 10)


def test_unknown_model():
    with pytest.raises(ExperimentError, match="one of net, resnet18, wrn16_4, vit; got 'alexnet'"):
        build("alexnet")  # type: ignore[arg-type]
