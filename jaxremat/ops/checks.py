"""What the operations require of their arguments; each error says what was required, what arrived and what to do."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxremat.errors import did_you_mean


def floating(op: str, x: Any, argument: str = "x") -> jax.Array:
    """Returns `x` as an array of real floating-point numbers.

    Raises:
        TypeError: `x` is no array or number, or its type is integer, boolean or complex.
    """
    if not isinstance(x, (jax.Array, np.ndarray, np.generic, float, int, complex)):
        raise TypeError(f"{op}: {argument} must be an array of floating-point numbers; got {type(x).__name__}.")
    dtype = x.dtype if isinstance(x, (jax.Array, np.ndarray, np.generic)) else jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{op}: {argument} must hold real floating-point numbers; got {dtype}. "
            f"Convert it first, as in {argument}.astype(jnp.float32)."
        )
    return jnp.asarray(x)


def mask(op: str, where: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns the mask `where` as a boolean array, or `None` as it is.

    Raises:
        TypeError: it is not boolean.
        ValueError: it does not broadcast to `shape`.
    """
    if where is None:
        return None
    where = jnp.asarray(where)
    if where.dtype != jnp.bool_:
        raise TypeError(f"{op}: where must be a boolean mask; got {where.dtype}. Compare first, as in where != 0.")
    try:
        fits = np.broadcast_shapes(where.shape, shape) == tuple(shape)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{op}: where must broadcast to the shape {tuple(shape)} of the input; got {where.shape}.")
    return where


def choice(op: str, argument: str, got: Any, known: Sequence[str]) -> str:
    """Returns `got` if it is one of the words `known`.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(got, str) or got not in known:
        hint = did_you_mean(got, known) if isinstance(got, str) else ""
        raise ValueError(f"{op}: {argument} must be one of {', '.join(map(repr, known))}; got {got!r}.{hint}")
    return got


def axes(op: str, got: Any, rank: int, argument: str = "axis") -> tuple[int, ...]:
    """Returns the axes that `got` (an integer, several, or `None` for all) names in an array of `rank`, sorted.

    Raises:
        TypeError: an axis is no integer.
        ValueError: an axis is out of range or named twice.
    """
    if got is None:
        return tuple(range(rank))
    listed = tuple(got) if isinstance(got, Iterable) and not isinstance(got, str) else (got,)
    found = []
    for axis in listed:
        if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
            raise TypeError(f"{op}: {argument} must be an integer or several; got {got!r}.")
        if not -rank <= axis < rank:
            raise ValueError(f"{op}: {argument} {axis} is out of range for an array of {rank} dimensions.")
        found.append(int(axis) % rank)
    if len(set(found)) != len(found):
        raise ValueError(f"{op}: {argument} {got!r} names an axis twice.")
    return tuple(sorted(found))


def number(op: str, argument: str, got: Any) -> float:
    """Returns `got` as a Python float.

    Raises:
        TypeError: it is not one plain real number; arrays and traced values are not.
    """
    if isinstance(got, bool) or not isinstance(got, (int, float, np.integer, np.floating)):
        raise TypeError(
            f"{op}: {argument} must be a plain number, known when the function is traced; got {type(got).__name__}."
        )
    return float(got)


def flag(op: str, argument: str, got: Any) -> bool:
    """Returns `got` if it is `True` or `False`.

    Raises:
        TypeError: it is something else, such as a traced value.
    """
    if not isinstance(got, (bool, np.bool_)):
        raise TypeError(f"{op}: {argument} must be True or False, known when the function is traced; got {got!r}.")
    return bool(got)
