"""Warnings of waste: each fires for the policy that wastes, and stays silent for the one that does not."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxremat

W = jnp.eye(32)
X = jnp.ones((16, 32))


def deep(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def rectified(w, x):
    for _ in range(4):
        x = jaxremat.name(jax.nn.relu(jaxremat.name(x @ w, "before")), "after")
    return (x**2).sum()


def convolutional(w, x):
    for _ in range(3):
        x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return (x**2).sum()


def dropout(w, x, key):
    mask = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.sin(jnp.where(mask, x, 0) @ w).sum()


CONV_W, CONV_X = jnp.ones((3, 3, 8, 8)) / 72, jnp.ones((2, 8, 8, 8))
RBG, THREEFRY = jax.random.key(0, impl="rbg"), jax.random.key(0, impl="threefry2x32")


def messages(f, policy, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.grad(jaxremat.remat(f, policy))(*args)
    return [str(w.message) for w in caught if issubclass(w.category, jaxremat.RematWarning)]


@pytest.mark.parametrize(
    ("f", "policy", "args", "says"),
    [
        (deep, "nothing", (W, X), "4 matrix products and convolutions"),
        # Per layer 4 bytes a value before and after the ReLU; plain reverse mode keeps a mask of 1 byte for the former.
        (rectified, "names:*", (W, X), "more than the"),
        # All three: the derivative of each ReLU needs its input.
        (convolutional, "dots_no_batch", (CONV_W, CONV_X), "3 are recomputed"),
        (dropout, "dots", (W, X, RBG), "rbg key"),
        (lambda x: jnp.sin(jnp.sin(x)).sum(), "dots", (X,), "nothing that dots stores"),
    ],
)
def test_warns(f, policy, args, says):
    found = messages(f, policy, *args)
    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    ("f", "policy", "args"),
    [
        (deep, "dots", (W, X)),
        (deep, "segments:sqrt", (W, X)),
        (deep, "everything", (W, X)),
        (convolutional, "dots", (CONV_W, CONV_X)),
        (dropout, "dots", (W, X, THREEFRY)),
        (dropout, "ops:random_bits=store,*=store", (W, X, THREEFRY)),
        (dropout, "dots+ops:random_bits=store", (W, X, RBG)),
    ],
)
def test_silent(f, policy, args):
    assert not [m for m in messages(f, policy, *args) if "more than" not in m]


def test_a_block_may_recompute_all():
    block = jaxremat.remat(lambda w, x: jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w), "nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(lambda w: block(w, X).sum())(W)


def test_warned_once_per_shapes():
    g = jaxremat.remat(deep, "nothing")
    with pytest.warns(jaxremat.RematWarning):
        jax.grad(g)(W, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(g)(W, X)
