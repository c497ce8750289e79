"""Random programs under random policies: the same values and gradients, the stored set and the recomputation exactly.

Two comparisons for each program. With JAX's own gradient of the program within 2e-5 of the largest element, as JAX compiles
parts of it as one and so may round otherwise. And, bit for bit, with the uncut forward and backward equations: run
operation by operation, a cut must do exactly the arithmetic of the uncut graph.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import same

import jaxremat
from jaxremat import compat
from jaxremat.errors import PolicyError
from jaxremat.forward import forward_program
from jaxremat.program import Program
from jaxremat.rewrite import backward_program

N = 4  # every value is an array of shape (4, 4)
INPUTS = 3


def conv(x, kernel):
    image, window = x.reshape(1, 1, N, N), kernel[:3, :3].reshape(1, 1, 3, 3)
    return jax.lax.conv_general_dilated(image, window, (1, 1), "SAME").reshape(N, N)


def scan(x, y):
    return jax.lax.scan(lambda c, row: (jnp.tanh(c @ y) + row, c.sum()), x, y)[0]


def scan_stacking(x, y):
    return jax.lax.scan(lambda c, row: (c * 0.5 + row, jnp.sin(c)), x[0], y, reverse=True)[1]


def branch(x, y):
    return jax.lax.cond(x.sum() > y.sum(), lambda x, y: jnp.sin(x @ y), lambda x, y: x - y, x, y)


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defjvp(lambda p, t: (clipped(*p), t[0] * (1 - jnp.tanh(p[0]) ** 2)))

# Operations on two values and a key; all keep numbers small.
OPERATIONS = {
    "add": lambda x, y, key: x + y,
    "multiply": lambda x, y, key: jnp.tanh(x) * y,
    "sin": lambda x, y, key: jnp.sin(x),
    "exp": lambda x, y, key: jnp.exp(-jnp.abs(x)),
    "divide": lambda x, y, key: x / (1 + y * y),
    "relu": lambda x, y, key: jax.nn.relu(x),
    "gelu": lambda x, y, key: jax.nn.gelu(x),
    "maximum": lambda x, y, key: jnp.maximum(x, y),
    "where": lambda x, y, key: jnp.where(x > y, x, 0.5 * y),
    "dot": lambda x, y, key: x @ y / N,
    "batched": lambda x, y, key: jnp.einsum("ij,ij->i", x, y)[:, None] * jnp.ones((1, N)) / N,
    "conv": lambda x, y, key: conv(x, y) / 3,
    "sum": lambda x, y, key: x - x.sum(0) / N,
    "normal": lambda x, y, key: (x - x.mean()) * jax.lax.rsqrt(x.var() + 1),
    "softmax": lambda x, y, key: jax.nn.softmax(x),
    "dropout": lambda x, y, key: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0),
    "gather": lambda x, y, key: x[jnp.argsort(y[0])],
    "transpose": lambda x, y, key: x.T.reshape(2, 8).reshape(N, N),
    "concatenate": lambda x, y, key: jnp.sin(jnp.concatenate([x, y, x], 1)).reshape(N, N, 3).sum(2),
    "name": lambda x, y, key: jaxremat.name(x, "tag"),
    "stop": lambda x, y, key: x + jax.lax.stop_gradient(y),
    "custom": lambda x, y, key: clipped(x),
    "jit": lambda x, y, key: jax.jit(lambda x, y: jnp.cos(x) * y)(x, y),
    "checkpoint": lambda x, y, key: jax.checkpoint(lambda x, y: jnp.sin(x) * y)(x, y),
    "scan": lambda x, y, key: scan(x, y / N),
    "scan_stacking": lambda x, y, key: scan_stacking(x, y),
    "branch": lambda x, y, key: branch(x, y / N),
}
# Loops and branches are compiled anew for each program: fewer of them keep the test quick.
SLOW = ("scan", "scan_stacking", "branch", "checkpoint")
QUICK = [name for name in OPERATIONS if name not in SLOW]

steps = st.tuples(st.sampled_from(QUICK * 2 + list(SLOW)), st.integers(0, 99), st.integers(0, 99))
policies = ["nothing", "dots", "dots_no_batch", "segments:sqrt", "ops:relu=store,dot=store,*=recompute", "ops:*=store"]
policies += ["names:tag", "offload:dots", "nothing"]


def program_of(recipe):
    """The function that a list of (operation, operand, operand) spells: of three matrices and a key, to a number and more."""

    def f(a, b, c, key):
        values = [a, b, c]
        for i, (operation, first, second) in enumerate(recipe):
            x, y = values[first % len(values)], values[second % len(values)]
            values.append(OPERATIONS[operation](x, y, jax.random.fold_in(key, i)))
        return (values[-1] ** 2).sum() + values[len(values) // 2].sum(), (values[-1] > 0, values[-2])

    return f


def inputs():
    return [*(jax.random.normal(jax.random.key(i), (N, N)) for i in range(INPUTS)), jax.random.key(9)]


def run(eqns, env, results):
    """Runs equations one by one."""
    read = lambda atom: atom.val if isinstance(atom, compat.Literal) else env[atom]  # noqa: E731
    for eqn in eqns:
        env.update(zip(eqn.outvars, compat.bind(eqn, [read(v) for v in eqn.invars])))
    return [read(v) for v in results]


def run_program(closed, args):
    return run(closed.jaxpr.eqns, dict(zip(closed.jaxpr.invars, args)), closed.jaxpr.outvars)


def cut_of(f, policy, args) -> tuple[Program, object]:
    program, _, _ = jaxremat.remat(f, policy).program(*args)
    return program, program.cut((True,) * INPUTS + (False,))


def check(f, policy):
    args = inputs()
    cut = cut_of(f, policy, args)[1]
    choice, graph = cut.choice, cut.choice.graph
    backward = backward_program(choice, (False,) * len(graph.outputs))
    forward = forward_program(choice)

    # The stored set: what the policy marks and the backward program reads, and nothing else but small values.
    assert [v for v in backward.reads if v not in graph.inputs] == list(choice.kept)
    if policy.startswith("values:"):
        asked = {graph.values[int(i)].var for i in policy.removeprefix("values:").split(",")}
        assert set(choice.kept) <= asked
        # What was asked for and not stored is read by no backward equation, nor by what is run again for one.
        again = [graph.forward[i] for i in choice.recomputed]
        read = {*graph.read_backward, *(v for eqn in again for v in eqn.invars if isinstance(v, compat.Var))}
        assert not (asked - set(choice.kept)) & read

    # Recomputation: each equation at most once, and exactly those that the choice names.
    made_forward = [eqn for eqn in backward.program.jaxpr.eqns if any(v in graph.maker for v in eqn.outvars)]
    assert len(made_forward) == len(choice.recomputed)
    barriers = sum(eqn.primitive.name == "optimization_barrier" for eqn in backward.program.jaxpr.eqns)
    own_barriers = sum(eqn.primitive.name == "optimization_barrier" for eqn in (*graph.backward, *graph.forward))
    # A convolution in the backward pass may wait for its cotangent, and what follows for it, a product or a sum.
    waiting = {"conv_general_dilated": 2, "dot_general": 1, "reduce_sum": 1}
    waits = sum(waiting.get(eqn.primitive.name, 0) for eqn in graph.backward)
    fetched = sum(mark.host for mark in choice.kept.values())
    assert barriers - own_barriers <= len(choice.recomputed) + fetched + waits

    # Bit for bit what the uncut equations give, operation by operation.
    values = [*args, *graph.constants]
    outs = run_program(forward, values)
    env = dict(zip(graph.inputs, values))
    expected = run(graph.forward, env, graph.outputs)
    same(outs[: len(expected)], expected)
    cotangents = {v: jnp.ones(v.aval.shape, v.aval.dtype) for v in graph.cotangents if v is not None}
    wanted = [g for g in graph.gradients if g is not None]
    expected = run(graph.backward, {**env, **cotangents}, wanted)
    kept = dict(zip((*choice.kept, *graph.inputs), [*outs[len(graph.outputs) :], *values]))
    given_cotangents = [cotangents[graph.cotangents[i]] for i in backward.cotangents]
    same(run_program(backward.program, [*(kept[v] for v in backward.reads), *given_cotangents]), expected)

    # And what JAX gives, within rounding.
    g = jaxremat.remat(f, policy)
    numbers = tuple(range(INPUTS))
    theirs = jax.value_and_grad(f, numbers, has_aux=True)(*args)
    ours = jax.value_and_grad(g, numbers, has_aux=True)(*args)
    assert np.isfinite(theirs[0][0])
    same(jnp.stack(ours[1]), jnp.stack(theirs[1]), rtol=2e-5)  # of the largest: zeros may come of cancellation
    same((ours[0][0], ours[0][1][1]), (theirs[0][0], theirs[0][1][1]), rtol=2e-5)


@settings(max_examples=60)
@given(recipe=st.lists(steps, min_size=2, max_size=9), seed=st.integers(0, 2**32 - 1))
def test_random_stored_sets(recipe, seed):
    f = program_of(recipe)
    count = len(cut_of(f, "values:0", inputs())[1].choice.graph.values)
    rng = np.random.default_rng(seed)
    chosen = np.flatnonzero(rng.random(count) < rng.random())
    check(f, "values:" + ",".join(map(str, chosen if len(chosen) else [int(rng.integers(count))])))


@settings(max_examples=55)
@given(recipe=st.lists(steps, min_size=2, max_size=9), policy=st.sampled_from(policies))
def test_random_policies(recipe, policy):
    f = program_of(recipe)
    refusal = ""
    try:
        check(f, policy)
    except PolicyError as error:
        refusal = str(error)
    # A program without an operation or a tag that the policy names says which.
    words = [f"{word}' matches no value" for word in ("relu", "dot", "tag")]
    assert not refusal or any(word in refusal for word in words)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation(operation):
    """Twice in a row, so that the second is run again from what the first gives."""
    check(program_of([("dot", 0, 1), (operation, 3, 2), ("sin", 4, 0), (operation, 5, 1), ("sin", 6, 0)]), "nothing")
