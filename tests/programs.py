"""What the tests of the engine share: a small network with every kind of label, and the comparisons of two functions."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxremat

# One of each kind of policy; all fit `network`.
POLICIES = [
    "everything",
    "nothing",
    "dots",
    "dots_no_batch",
    "names:h*",
    "ops:dot=store,relu=recompute,*=recompute",
    "ops:relu=store",
    "segments:2",
    "segments:sqrt",
    "values:2,3",
    "offload:names:h1",
    "offload:dots+names:h0",
]


def weights(count: int = 3, size: int = 4) -> list[jax.Array]:
    """Returns square matrices, fixed by a seed."""
    return [jax.random.normal(jax.random.key(i), (size, size)) / size**0.5 for i in range(count)]


def data(rows: int = 5, size: int = 4) -> jax.Array:
    """Returns an input of shape (rows, size), fixed by a seed."""
    return jax.random.normal(jax.random.key(99), (rows, size))


def network(ws: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Returns a scalar: layers of a matrix product, tagged `h0`, `h1`, ..., a normalisation and a ReLU."""
    for i, w in enumerate(ws):
        h = jaxremat.name(x @ w, f"h{i}")
        x = jax.nn.relu(h - h.mean(0)) * jax.lax.rsqrt(h.var() + 1.0)
    return (x**2).mean()


def transformations(argnums: Any) -> dict[str, Callable[..., Any]]:
    """Returns what is done to a loss of weights and data, by name: derivatives with respect to `argnums`, and orders of them.

    Those that map over data take a batch of them.
    """

    def squares(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ws, x: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(f, argnums)(ws, x)))

    return {
        "vmap of grad": lambda f: jax.vmap(jax.grad(f, argnums), (None, 0)),
        "grad of vmap": lambda f: jax.grad(lambda ws, xs: jax.vmap(f, (None, 0))(ws, xs).sum()),
        "grad of grad": lambda f: jax.grad(squares(f)),
        "jvp of grad": lambda f: lambda ws, x: jax.jvp(lambda ws: jax.grad(f)(ws, x), (ws,), (ws,)),
    }


def same(actual: Any, expected: Any, rtol: float = 0.0) -> None:
    """Asserts equal structures and leaves: bit for bit, or within `rtol` of the largest element of each leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        if a.dtype == jax.dtypes.float0:
            continue
        exact = not rtol or not jnp.issubdtype(a.dtype, jnp.inexact)
        a, e = (np.asarray(v, np.float32) if v.dtype == jnp.bfloat16 else np.asarray(v) for v in (a, e))
        if not exact:
            np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * np.abs(e).max(initial=1e-6))
        else:
            np.testing.assert_array_equal(a, e)


def equations(jaxpr: Any) -> list[Any]:
    """Returns all equations of a jaxpr, those of its calls, loops and branches included (each body once)."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    found = list[Any]()
    for eqn in jaxpr.eqns:
        found.append(eqn)
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    found += equations(inner)
    return found


def counts(f: Callable[..., Any], *args: Any) -> Counter[str]:
    """Returns how often each primitive occurs in the jaxpr of `f`, bodies included."""
    return Counter(eqn.primitive.name for eqn in equations(jax.make_jaxpr(f)(*args)))


def kept(f: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the arrays that the vjp of `f` holds, without those that are arguments themselves."""
    given = {id(leaf) for leaf in jax.tree.leaves(args)}
    leaves = jax.tree.leaves(jax.vjp(f, *args)[1])
    return [leaf for leaf in leaves if id(leaf) not in given]
