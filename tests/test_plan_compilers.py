"""What the planner knows of each compiler: what is computed inside of its readers, and what is written in half of its bytes."""

import jax
import jax.numpy as jnp
import pytest
from plans import search_of

import jaxremat
from jaxremat.plan.compilers import COMPILERS

ROWS, SIDE, DEPTH = 1024, 128, 4
UNIT = ROWS * SIDE * 4
DEFAULT, HIGHEST = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST


def layers(precision=None):
    """Products and squares, tagged: the derivative of a square reads the product, that of a product the square."""

    def loss(ws, x):
        for w in ws:
            x = jaxremat.name(jnp.square(jnp.dot(x, w, precision=precision)), "out")
        return x.sum()

    return loss


def search(platform, precision=None):
    ws = [jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)] * DEPTH
    return search_of(layers(precision), ws, jax.ShapeDtypeStruct((ROWS, SIDE), jnp.float32), platform=platform)


@pytest.mark.parametrize(
    ("platform", "units"),
    [
        # The products, 4 of them, and the squares that products read, 3; at the turn the last square is summed as it is made.
        ("gpu", DEPTH + DEPTH - 1),
        # The squares are made inside of the products that read them.
        ("tpu", DEPTH),
    ],
)
def test_what_products_read_is_written_or_not(platform, units):
    found = search(platform)
    program = [*found.operations.forward, *found.operations.backward]
    live = int(found.lifetimes._live(program, results=found.lifetimes._results).max())
    gradients = DEPTH * SIDE * SIDE * 4
    # Beside them a cotangent or two.
    assert units * UNIT < live - gradients <= (units + 2) * UNIT


@pytest.mark.parametrize(
    ("platform", "precision", "is_narrow"),
    [
        ("gpu", None, False), ("cpu", None, False), ("tpu", None, True), ("tpu", DEFAULT, True), ("tpu", HIGHEST, False),
    ],
)  # fmt: skip
def test_what_products_alone_read_takes_half(platform, precision, is_narrow):
    """Squares are stored: the products that run again read them, and those of the weights' gradients; nothing else does."""
    found = search(platform, precision)
    policy = jaxremat.parse("names:out")
    candidate = found.of_policy(policy)
    choice = candidate.choices[0][1]
    stored = found.picture.stored(choice)
    assert len(stored) == DEPTH - 1  # the last is summed, and nothing reads it in the backward pass
    profile = found.lifetimes.backward(stored, (), range(len(found.operations.backward)))
    assert profile.narrow == (stored if is_narrow else frozenset())
    assert sum(found.operations.least_sizes[n] for n in stored) == (DEPTH - 1) * UNIT // (2 if is_narrow else 1)


def test_what_others_read_as_well_does_not():
    """Where products are stored, the derivatives of squares read them, element by element."""
    found = search("tpu")
    choice = found.of_policy(jaxremat.parse("dots")).choices[0][1]
    stored = found.picture.stored(choice)
    profile = found.lifetimes.backward(stored, (), range(len(found.operations.backward)))
    assert len(stored) == DEPTH
    assert not profile.narrow


def test_the_bound_allows_for_the_memory_beside_the_main_one():
    """What a TPU keeps in its vector memory no peak counts: a budget is as good as one of so many bytes more."""
    tpu = search("tpu")
    assert COMPILERS["tpu"].near_bytes > DEPTH * UNIT
    assert tpu.bound(0) == 0.0
    assert search("gpu").bound(0) > 0.0


@pytest.mark.parametrize(
    ("shape", "factor"),
    [
        ((64, 8, 8, 32), 2),  # the batch along the lanes, of which there are 128
        ((128, 8, 8, 32), 1),
        ((16, 8, 8, 64), 2),  # the features along the lanes
        ((16, 8, 8, 128), 1),
        (
            (4, 8, 8, 96),
            4 / 3,
        ),  # 96 features in 128 lanes; the width goes along the 8 sublanes, as 4 in the batch would not fill them
    ],
)
def test_images_are_padded_to_tiles(shape, factor):
    """By hand: the least of batch or features padded to 128 times another dimension padded to 8."""

    def loss(kernel, x):
        for _ in range(2):
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (x**2).sum()

    kernel = jax.ShapeDtypeStruct((3, 3, shape[-1], shape[-1]), jnp.float32)
    image = jax.ShapeDtypeStruct(shape, jnp.float32)
    sizes = {}
    for platform in ("gpu", "tpu"):
        operations = search_of(loss, kernel, image, platform=platform).operations
        sizes[platform] = {size for v, size in zip(operations.variables, operations.sizes) if v.aval.shape == shape}
    (plain,), (padded,) = sizes["gpu"], sizes["tpu"]
    assert padded == int(plain * factor)


def test_what_no_convolution_reads_goes_along_the_lanes_as_is_best():
    """Of (batch, heads, time, features) = (2, 3, 256, 64) time goes along the lanes and the features along the sublanes."""

    def loss(w, x):
        y = jnp.einsum("bhtf,fg->bhtg", x, w)
        return (jnp.einsum("bhtf,bhsf->bhts", y, y) ** 2).sum()

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (2, 3, 256, 64)))
    operations = search_of(loss, w, x, platform="tpu").operations
    assert {size for v, size in zip(operations.variables, operations.sizes) if v.aval.shape == x.shape} == {
        2 * 3 * 256 * 64 * 4
    }


def test_an_unknown_platform_counts_as_a_gpu():
    assert search("metal").everything.predicted_bytes == search("gpu").everything.predicted_bytes


def test_candidates_of_a_small_program_are_told_apart():
    """One that would fit into the vector memory as a whole is not expected to: no more than a quarter of it is there."""
    found = search("tpu")
    lean, rich = (found.of_policy(jaxremat.parse(policy)) for policy in ("names:out", "everything"))
    assert found.lifetimes.input_bytes < lean.predicted_bytes < rich.predicted_bytes


@pytest.mark.parametrize(("platform", "is_fused"), [("gpu", False), ("tpu", True)])
def test_one_number_along_each_row(platform, is_fused):
    """The derivative of picking a logit in every row is made where it is read; that of looking up rows of a table is not."""

    def loss(table, tokens):
        logits = jnp.tanh(table[tokens]) @ table.T
        picked = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        return (jax.nn.logsumexp(logits, axis=1) - picked[:, 0]).sum()

    table, tokens = jax.ShapeDtypeStruct((256, 64), jnp.float32), jax.ShapeDtypeStruct((512,), jnp.int32)
    found = search_of(loss, table, tokens, platform=platform)
    scattered = {
        eqn.outvars[0].aval.shape: operation.is_fused
        for eqn, operation in zip(found.graph.backward, found.operations.backward)
        if eqn.primitive.name == "scatter-add"
    }
    assert scattered == {(512, 256): is_fused, (256, 64): False}
