"""Warnings of waste: each fires for the policy that wastes, and stays silent for the one that does not."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxremat
from jaxremat.compat import private_cpu_device

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


def caught_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if issubclass(w.category, jaxremat.RematWarning)]


def test_a_warning_points_at_the_line_that_called():
    g = jaxremat.remat(deep, "nothing")
    step = jax.jit(jax.value_and_grad(g))
    first_line = test_a_warning_points_at_the_line_that_called.__code__.co_firstlineno
    for call in (lambda: step(W, X), lambda: jax.grad(jaxremat.remat(deep, "nothing"))(W, X)):
        (warning,) = caught_of(call)
        assert warning.filename == __file__
        assert first_line + 4 == warning.lineno


def test_a_warning_is_given_once_per_function_however_often_it_is_traced():
    g = jaxremat.remat(deep, "nothing")
    shapes = jax.ShapeDtypeStruct(W.shape, W.dtype), jax.ShapeDtypeStruct(X.shape, X.dtype)

    def ledger_and_step():
        jaxremat.residuals(g, *shapes)
        jax.jit(jax.grad(g)).lower(W, X)
        jax.grad(g)(W, jnp.ones((2, 32)))

    assert len(caught_of(ledger_and_step)) == 1


def scanned(w, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(jaxremat.name(x @ w, "h")), None), x, None, length=3)[0].sum()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere host memory is another one")
@pytest.mark.parametrize(
    ("f", "policy"),
    [(rectified, "offload:names:before"), (rectified, "ops:dot=offload,*=recompute"), (scanned, "offload:names:h")],
)
def test_offloading_on_a_cpu_is_said_to_save_nothing(f, policy):
    (said,) = messages(f, policy, W, X)
    assert said.startswith(f"{policy}: this runs on a CPU, whose memory is the host's")
    assert "nothing is saved" in said


@pytest.mark.parametrize("policy", ["names:before", "dots"])
def test_what_stores_is_not_said_to_offload(policy):
    assert not [said for said in messages(rectified, policy, W, X) if "offloaded" in said]


def test_offloading_is_not_warned_of_for_a_chip_that_is_compiled_for():
    step = jax.value_and_grad(jaxremat.remat(rectified, "offload:names:before"))
    with jax.default_device(private_cpu_device()):  # as jaxremat.cost traces for chips that are not here
        assert not caught_of(lambda: jax.jit(step).trace(W, X))
