"""Dense connections: each layer concatenates something to all that it reads, and the cotangent is cut and added to layer by layer."""

import jax
import jax.numpy as jnp
import pytest
from programs import equations, same

import jaxremat

LAYERS, GROWTH, ROWS = 8, 16, 2048
UNIT = ROWS * GROWTH * 4  # bytes of what a layer adds


def layer(w, x):
    y = jnp.sin(x)
    y = (y - y.mean(0)) * jax.lax.rsqrt(y.var(0) + 1.0)
    return jaxremat.name(jnp.concatenate([x, jnp.tanh(y @ w)], axis=1), "out")


def dense(ws, x, wrap=lambda f: f):
    for w in ws:
        x = wrap(layer)(w, x)
    return (x**2).sum()


def arguments():
    widths = [GROWTH * (i + 1) for i in range(LAYERS)]
    ws = [jax.random.normal(jax.random.key(i), (width, GROWTH)) / width**0.5 for i, width in enumerate(widths)]
    return ws, jax.random.normal(jax.random.key(99), (ROWS, GROWTH))


def peak(loss):
    return jaxremat.cost(jax.value_and_grad(loss), *jax.eval_shape(arguments)).temp_bytes


def test_parts_that_are_read_later_pass_the_gate():
    """The cotangent of a layer's output is cut in two: one part goes through the layer, the other waits to be added to that.

    Before the layer is computed again, the waiting part passes the barrier, too: of layer i it is as wide as i units. The first
    layer's is not among them, as nothing is added to it: x is not differentiated.
    """
    jaxpr = jax.make_jaxpr(jax.grad(jaxremat.remat(dense, "names:out")))(*arguments())
    eqns = equations(jaxpr)
    parts = {v for eqn in eqns if eqn.primitive.name == "split" for v in eqn.outvars}
    gates = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    widths = sorted(
        max(v.aval.shape[1] for v in part) // GROWTH
        for eqn in gates
        if (part := [v for v in eqn.invars if v in parts and v.aval.shape[1] > GROWTH])
    )
    assert widths == list(range(2, LAYERS + 1))


@pytest.fixture(scope="module")
def expected():
    """The arguments and the gradient without rematerialization."""
    args = arguments()
    return args, jax.jit(jax.grad(dense, (0, 1)))(*args)


@pytest.mark.parametrize("policy", ["names:out", "dots", "segments:4", "nothing"])
def test_gradients(policy, expected):
    args, theirs = expected
    same(jax.jit(jax.grad(jaxremat.remat(dense, policy), (0, 1)))(*args), theirs, rtol=2e-5)


def test_cotangents_do_not_add_up():
    """Stored are 2 + 3 + ... + 9 units, and there is what a layer works on.

    Put off, the additions would keep all layers' cotangents. JAX's barriers round its regions do not put them off; what is more
    than there is the last layer's output, which is tagged, too.
    """
    ours, theirs = peak(jaxremat.remat(dense, "names:out")), peak(lambda ws, x: dense(ws, x, jax.checkpoint))
    assert ours <= theirs + (LAYERS + 1) * UNIT
    stored = sum(range(2, LAYERS + 2)) * UNIT
    assert ours <= stored + 8 * LAYERS * UNIT < stored + sum(range(2, LAYERS + 2)) * 2 * UNIT
