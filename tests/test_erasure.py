"""Erased recomputation is noticed from the outcome, and never reported where it was kept."""

import jax
import jax.numpy as jnp
import pytest

import jaxremat

W, X = jnp.ones((64, 64)), jnp.ones((32, 64))


def layer(w, x):
    return jnp.tanh(jnp.tanh(jaxremat.name(x @ w, "h")) @ w)


def loss(w, x, policy="nothing"):
    for _ in range(3):
        x = jaxremat.remat(layer, policy)(w, x)
    return (x**2).sum()


def verdict(options, policy="nothing"):
    lowered = jax.jit(jax.grad(lambda w, x: loss(w, x, policy)), compiler_options=options).lower(W, X)
    return jaxremat.erased(lowered, lowered.compile())


@pytest.mark.parametrize("policy", ["nothing", "dots", "everything"])
def test_kept(policy):
    assert verdict(jaxremat.compiler_options(), policy) is None


@pytest.mark.skipif(not jaxremat.compiler_options(), reason="this compiler keeps rematerialization by itself")
def test_erased():
    # Each layer recomputes its two products' inputs: x @ w, and its square root of a chain, tanh(..) @ w.
    message = verdict({})
    assert message is not None
    # Forward 6 products; backward 3 x (2 recomputed + 2 for w + 2 for x), less the one for the first x: 6 + 17.
    assert "erased 6 of the 23 matrix products" in message
    assert "compiler_options=jaxremat.compiler_options()" in message


@pytest.mark.skipif(not jaxremat.compiler_options(), reason="this compiler keeps rematerialization by itself")
@pytest.mark.filterwarnings("ignore::jaxremat.RematWarning")
def test_erased_beside_offloading():
    message = verdict({}, "offload:names:h")
    assert message is not None
    # The first product of each layer is offloaded; the second is recomputed for its tanh.
    assert "erased 3 of the 20 matrix products" in message
    assert "saves no memory" not in message
    assert "what it stores or offloads is not concerned" in message


def test_no_gates_no_verdict():
    lowered = jax.jit(lambda x: x @ x + x @ x).lower(W)  # merged by any compiler, and rightly
    assert jaxremat.erased(lowered, lowered.compile()) is None
