"""Packed masks of any shape, and pooling windows of any kind, against NumPy and Flax."""

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import pullback, uneven

from jaxremat import ops

SETTINGS = {"deadline": None, "derandomize": True, "max_examples": 8}


@hypothesis.settings(**SETTINGS)
@hypothesis.given(shape=st.lists(st.integers(0, 17), max_size=4), seed=st.integers(0, 999))
def test_packing_and_unpacking_gives_the_mask_back(shape, seed):
    mask = np.random.default_rng(seed).random(shape) < 0.5
    bits = jax.jit(ops.pack_bits)(mask)
    assert bits.dtype == jnp.uint8
    assert bits.size == -(-mask.size // 8)
    np.testing.assert_array_equal(jax.jit(ops.unpack_bits, static_argnums=1)(bits, mask.shape), mask)


@pytest.mark.parametrize(
    ("shape", "packed"),
    [
        ((2, 16, 3), (2, 2, 3)),  # an axis in the middle first
        ((8, 5, 24), (8, 5, 3)),  # then the last
        ((16, 5), (2, 5)),  # then the first
        ((3, 5), (2,)),  # and none: flat, with one bit of padding
        ((), (1,)),
    ],
)
def test_the_axis_of_the_bits(shape, packed):
    assert ops.pack_bits(jnp.zeros(shape, bool)).shape == packed


def _data(shape, seed, ties):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) if ties == "none" else rng.integers(0, 3, shape)
    x = x.astype(np.float32)
    if ties == "special":
        x.ravel()[rng.integers(0, x.size, x.size // 6)] = np.nan
        x.ravel()[rng.integers(0, x.size, x.size // 6)] = np.inf
    return x


@hypothesis.settings(**SETTINGS, phases=(hypothesis.Phase.generate,))  # each example compiles: shrinking takes minutes
@hypothesis.given(
    spatial=st.tuples(st.integers(3, 8), st.integers(3, 8)),
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.sampled_from([None, (1, 2), (2, 2), (3, 2), "window"]),
    padding=st.sampled_from(["VALID", "SAME"]),
    ties=st.sampled_from(["none", "many", "special"]),
    seed=st.integers(0, 99),
)
def test_max_pool_of_any_window(spatial, window, strides, padding, ties, seed):
    strides = window if strides == "window" else strides
    x = _data((2, *spatial, 3), seed, ties)
    mine = pullback(lambda x: ops.max_pool(x, window, strides, padding), uneven)(x)
    theirs = pullback(lambda x: nn.max_pool(x, window, strides, padding), uneven)(x)
    np.testing.assert_array_equal(mine[0], theirs[0])
    np.testing.assert_allclose(mine[1][0], theirs[1][0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(7, 3), (2, 3, 9, 5, 4), (6, 4)])
def test_pools_of_other_ranks(shape):
    axes = 1 if len(shape) == 2 else 2
    x = _data(shape, 0, "none")
    window = (2,) * axes
    for name in ("max_pool", "avg_pool"):
        mine, theirs = (pullback(lambda x, m=m, n=name: getattr(m, n)(x, window, window), uneven)(x) for m in (ops, nn))
        np.testing.assert_array_equal(mine[0], theirs[0])
        np.testing.assert_array_equal(mine[1][0], theirs[1][0])


def test_a_window_larger_than_the_image_gives_nothing():
    x = jnp.ones((1, 2, 2, 1))
    out, (grad,) = pullback(lambda x: ops.max_pool(x, (3, 3)), uneven)(x)
    assert out.shape == (1, 0, 0, 1)
    assert grad.tolist() == jnp.zeros_like(x).tolist()


def test_a_large_window_has_the_counterparts_gradient():
    x = _data((1, 20, 18, 2), 1, "none")
    mine, theirs = (pullback(lambda x, m=m: m.max_pool(x, (17, 16)), uneven)(x) for m in (ops, nn))
    np.testing.assert_array_equal(mine[0], theirs[0])
    np.testing.assert_allclose(mine[1][0], theirs[1][0], rtol=1e-6)


def test_pooling_compares_in_the_order_of_the_window():
    x = jnp.array([1.0, 1.0, 2.0, 2.0]).reshape(4, 1)
    grad = jax.grad(lambda x: ops.max_pool(x, (4,), (4,)).sum())(x)
    assert grad.ravel().tolist() == [0.0, 0.0, 1.0, 0.0]
