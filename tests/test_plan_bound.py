"""The lower bound that a plan is measured by: it must hold for what compilers do by themselves, too."""

import jax
import jax.numpy as jnp
import pytest
from plans import search_of

SIDE, ROWS, STEPS = 64, 2048, 16
BYTES = ROWS * SIDE * 4  # of an activation


def shape(*dimensions):
    return jax.ShapeDtypeStruct(dimensions, jnp.float32)


def chain(x, w):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def once(w, x):
    return (chain(x, w) ** 2).sum()


def thrice(w, x):
    return sum(((k + 1) * chain(x, w) ** 2).sum() for k in range(3))


@pytest.mark.parametrize("kept", [0, BYTES, 2 * BYTES])
def test_what_is_computed_several_times_counts_once(kept):
    """A compiler makes one of three equal chains, and so keeps its two activations once."""
    args = shape(SIDE, SIDE), shape(ROWS, SIDE)
    one, three = (search_of(loss, *args, platform="gpu") for loss in (once, thrice))
    limit = one.input_bytes + kept
    assert one.operations.repeated_bytes == 0
    assert three.operations.repeated_bytes >= 2 * 2 * BYTES
    assert three.bound(limit) <= one.bound(limit)
    if kept == 0:
        assert one.bound(limit) > 0.0
    if kept == 2 * BYTES:
        assert three.bound(limit) == 0.0


def test_what_is_the_same_in_every_step_of_a_scan_counts_once():
    """The product of two matrices that all steps read: compilers take it out of the loop."""

    def loss(weights, x):
        def step(h, row):
            u, v = weights
            return jnp.tanh(h @ (u @ v) + row), None

        return (jax.lax.scan(step, jnp.zeros((8, SIDE)), x)[0] ** 2).sum()

    search = search_of(loss, (shape(SIDE, SIDE),) * 2, shape(STEPS, 8, SIDE), platform="gpu")
    product, row = SIDE * SIDE * 4, 8 * SIDE * 4
    assert search._main.picture.operations.unmoved_bytes(search._main.moving) == product
    # What a step reads from the one before, and its result; and the product once.
    assert search.bound(search.input_bytes + STEPS * 2 * row + product) == 0.0
    assert search.bound(search.input_bytes) > 0.0
