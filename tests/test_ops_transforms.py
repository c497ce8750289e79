"""The operations under JAX's transformations: forward mode, second order, vmap, scan, shard_map, remat."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from ops_cases import CASES, POINTWISE, QUICK, arguments, pullback, uneven

from experiments.bench.kept import kept
from jaxremat import ops

TYPICAL = ["relu-bits", "hard_tanh", "gelu", "softmax", "logsumexp", "cross_entropy", "layer_norm", "batch_norm_relu",
           "dropout-key", "dropout-shared", "max_pool", "max_pool-3", "conv", "batch_norm_relu_conv"]  # fmt: skip
SMOOTH = [
    "tanh",
    "gelu",
    "silu",
    "softmax",
    "log_softmax-output",
    "logsumexp-where",
    "layer_norm",
    "rms_norm",
    "batch_norm",
    "conv-groups",
]


def close(a, b, tolerance=2e-5):
    for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(p, q, rtol=tolerance, atol=tolerance * np.abs(q).max(initial=1e-3))


@pytest.mark.parametrize("name", TYPICAL)
def test_forward_mode(name):
    case = CASES[name]
    args, tangents = arguments(case, 0), arguments(case, 1)
    mine, theirs = (jax.jit(partial(jax.jvp, f))(args, tangents) for f in (case.op, case.counterpart))
    close(mine, theirs)


@pytest.mark.parametrize("name", SMOOTH)
def test_second_order(name):
    case = CASES[name]
    args, tangents = arguments(case, 0), arguments(case, 1)

    def curvature(f):
        def loss(*args):
            return sum(jnp.sum(y * w) for y, w in zip(*map(jax.tree.leaves, (f(*args), uneven(f(*args))))))

        return jax.jit(lambda a, t: jax.jvp(jax.grad(loss, argnums=tuple(range(len(a)))), a, t)[1])(
            tuple(args), tuple(tangents)
        )

    close(curvature(case.op), curvature(case.counterpart), 2e-4)


@pytest.mark.parametrize("name", ["relu", "relu-bits", "gelu", "tanh"])
def test_reverse_over_reverse(name):
    case = POINTWISE[name]
    x = arguments(case, 0)[0]
    mine, theirs = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(jax.grad(lambda z: jnp.sum(f(z) ** 2))(x) ** 2)))(x) for f in case[:2]
    )
    close(mine, theirs)


@pytest.mark.parametrize("name", [n for n in TYPICAL if not n.startswith("dropout")])
def test_vmap(name):
    case = CASES[name]
    batch = [np.stack(a) for a in zip(*(arguments(case, seed) for seed in range(3)))]
    pull = pullback(case.op, uneven)
    mapped = jax.jit(jax.vmap(lambda *a: pull(*a)))(*batch)
    for i in range(3):
        close(jax.tree.map(lambda y, i=i: y[i], mapped), pull(*(a[i] for a in batch)))


def test_vmap_over_dropout_keys():
    keys, x = jax.random.split(QUICK, 3), jnp.ones((3, 16))
    for keep in ("bits", "key"):
        drop = partial(ops.dropout, keep=keep)
        grads = jax.vmap(jax.grad(lambda x, key: jnp.sum(drop(x, 0.5, key))))(x, keys)  # noqa: B023
        outs = jax.vmap(lambda x, key: drop(x, 0.5, key))(x, keys)  # noqa: B023
        np.testing.assert_array_equal(grads, outs)  # of ones: x / (1 - rate) where kept


@pytest.mark.parametrize("name", ["relu-bits", "gelu", "softmax", "layer_norm-bare"])
def test_scan(name):
    f = CASES[name].op
    x = arguments(CASES[name], 0)[0]

    def scanned(x):
        return jnp.sum(jnp.cos(jax.lax.scan(lambda h, _: (f(h + 0.5), None), x, length=3)[0]))

    def unrolled(x):
        return jnp.sum(jnp.cos(f(f(f(x + 0.5) + 0.5) + 0.5)))

    close(jax.jit(jax.grad(scanned))(x), jax.jit(jax.grad(unrolled))(x))


@pytest.mark.parametrize("name", [n for n in TYPICAL if not n.startswith("dropout")])
def test_shard_map(name):
    case = CASES[name]
    args = arguments(case, 0)
    mesh = Mesh(np.array(jax.devices()[:1]), ("batch",))
    spec = PartitionSpec()
    pull = pullback(case.op, uneven)
    close(jax.jit(jax.shard_map(lambda *a: pull(*a), mesh=mesh, in_specs=spec, out_specs=spec))(*args), pull(*args))


def test_batch_norm_averages_statistics_over_a_mapped_axis():
    case = CASES["batch_norm"]
    x, scale, bias = arguments(case._replace(shapes=((4, 6, 6, 8), (8,), (8,))), 0)
    split = partial(ops.batch_norm_relu, axis_name="batch")

    def loss(y):
        return jnp.sum(jnp.sin(y))

    def together(x, scale, bias):
        return loss(ops.batch_norm_relu(x, scale, bias)[0])

    def apart(x, scale, bias):
        halves = jax.vmap(split, (0, None, None), axis_name="batch")(x.reshape(2, 2, *x.shape[1:]), scale, bias)
        return loss(halves[0])

    grads = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(x, scale, bias) for f in (together, apart))
    close(*grads, tolerance=1e-4)


@pytest.mark.parametrize("name", TYPICAL)
def test_inside_checkpoint(name):
    case = CASES[name]
    args = arguments(case, 0)
    close(pullback(jax.checkpoint(case.op), uneven)(*args), pullback(case.op, uneven)(*args))


@pytest.mark.parametrize("op", [ops.relu, ops.gelu, ops.softmax, ops.silu, ops.layer_norm, ops.batch_norm])
def test_jaxprs_show_the_operation_by_name_forward_and_backward(op):
    x = jnp.ones((2, 8))
    jaxpr = jax.make_jaxpr(lambda x: jax.vjp(op, x)[1](jax.tree.map(jnp.ones_like, op(x))))(x).jaxpr
    named = [e.params["name"] for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
    assert named.count(op.__name__) >= 2


def test_gradients_of_parameters_alone():
    x, scale, bias = arguments(CASES["layer_norm"], 0)
    mine, theirs = (
        jax.jit(jax.grad(lambda p, f=f: jnp.sum(jnp.sin(f(x, *p)))))((scale, bias)) for f in CASES["layer_norm"][:2]
    )
    close(mine, theirs)


def test_neighbours_share_what_both_keep():
    # The ReLU's output is the matrix product's input: kept once. The product's output is the GELU's input: kept once.
    x, w = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    found = kept(lambda x, w: ops.gelu(ops.relu(x) @ w), x, w)
    assert found.inputs == 4 * 16 * 16
    assert found.made == 2 * 4 * 8 * 16
