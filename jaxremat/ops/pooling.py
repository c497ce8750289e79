"""Pooling: the maximum keeps one byte an output, where JAX keeps the input; the average keeps nothing.

The byte is the position of the maximum within its window. Windows that do not overlap (stride = window) need a select an
element in the backward pass, where XLA's SelectAndScatter walks every window again. Ties, NaNs and infinities go where
that operation sends them: scanning the window in order, padding of -inf included, a new element takes over unless the
held one is ≥ it.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxremat.ops import checks
from jaxremat.ops.rules import as_kept, lean, named

_MOST = 256


class _Window(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @property
    def apart(self) -> bool:
        return self.shape == self.strides

    def outputs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            max(0, (n + low + high - w) // s + 1)
            for n, w, s, (low, high) in zip(shape, self.shape, self.strides, self.padding)
        )

    def offsets(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*map(range, self.shape)))


def _reduce(w: _Window, x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, w.shape, w.strides, w.padding)


def _span(w: _Window, x: jax.Array, fill: Any) -> jax.Array:
    """Returns x padded and cut to what the windows cover."""
    ends = [
        (low, (n - 1) * s + size - low - have)
        for n, s, size, (low, _), have in zip(w.outputs(x.shape), w.strides, w.shape, w.padding, x.shape)
    ]
    return lax.pad(x, jnp.asarray(fill, x.dtype), [(low, high, 0) for low, high in ends])


def _at(w: _Window, span: jax.Array, outputs: tuple[int, ...], offset: tuple[int, ...]) -> jax.Array:
    limit = [o + (n - 1) * s + 1 for o, n, s in zip(offset, outputs, w.strides)]
    return lax.slice(span, offset, limit, w.strides)


def _argmax(w: _Window, out: jax.Array, x: jax.Array) -> jax.Array:
    """Returns for each output which element of its window the derivative goes to, as a byte."""
    if 0 in out.shape:
        return jnp.zeros(out.shape, jnp.uint8)
    span = _span(w, x, -jnp.inf)
    first, *others = (_at(w, span, out.shape, offset) for offset in w.offsets())
    best, index = first, jnp.zeros(out.shape, jnp.uint8)
    for k, new in enumerate(others, 1):
        take = ~(best >= new)
        best, index = jnp.where(take, new, best), jnp.where(take, jnp.uint8(k), index)
    # A reduction, because XLA's CPU compiler would fuse the scan into each of those that read the index.
    return lax.reduce(jnp.stack([index, jnp.zeros_like(index)]), np.uint8(0), lax.bitwise_or, (0,))


def _pick(w: _Window, index: jax.Array, t: jax.Array) -> jax.Array:
    """Returns the element of each window of t that `index` names."""
    if 0 in index.shape:
        return jnp.zeros(index.shape, t.dtype)
    span, index = _span(w, t, 0), as_kept(index)
    if w.apart:
        # Axes: each windowed one becomes (output, position in the window); the others stay as they are.
        split, inner, ones = [], [], []
        for outputs, size in zip(index.shape, w.shape):
            split.append(outputs)
            ones.append(1)
            if size > 1:
                inner.append(len(split))
                split.append(size)
                ones.append(size)
        order = lax.iota(jnp.uint8, math.prod(w.shape)).reshape(ones)
        here = jnp.expand_dims(index, inner) == order
        return jnp.sum(jnp.where(here, span.reshape(split), 0), tuple(inner))
    picked = jnp.zeros(index.shape, t.dtype)
    for k, offset in enumerate(w.offsets()):
        picked += jnp.where(index == k, _at(w, span, index.shape, offset), 0)
    return picked


_BY_INDEX = named("max_pool", lean("max_pool", _reduce, _argmax, _pick))
_BY_INPUT = named(
    "max_pool",
    lean("max_pool", _reduce, lambda w, out, x: x, lambda w, x, t: jax.jvp(lambda x: _reduce(w, x), (x,), (t,))[1]),
)


def _average(options: tuple[_Window, bool], x: jax.Array) -> jax.Array:
    w, count_include_pad = options
    total = lax.reduce_window(x, 0.0, lax.add, w.shape, w.strides, w.padding)
    if count_include_pad:
        return total / math.prod(w.shape)
    one = jnp.ones([n if size > 1 or low or high else 1 for n, size, (low, high) in zip(x.shape, w.shape, w.padding)])
    return total / lax.reduce_window(
        one, 0.0, lax.add, w.shape, [s if n > 1 else 1 for s, n in zip(w.strides, one.shape)], w.padding
    )


_AVERAGE = named("avg_pool", _average)


def _window(op: str, x: jax.Array, window_shape: Any, strides: Any, padding: Any) -> _Window:
    """Returns the window over all axes of x, whose last axis is features and whose first ones are batches."""
    shape = _sizes(op, "window_shape", window_shape)
    steps = (1,) * len(shape) if strides is None else _sizes(op, "strides", strides)
    batches = x.ndim - len(shape) - 1
    if batches < 0:
        raise ValueError(
            f"{op}: x must have the {len(shape)} axes of window_shape {shape} and one of features; got shape {x.shape}."
        )
    if len(steps) != len(shape):
        raise ValueError(f"{op}: strides must be {len(shape)} numbers, as window_shape {shape}; got {steps}.")
    if isinstance(padding, str):
        checks.choice(op, "padding", padding, ("VALID", "SAME"))
        pads = lax.padtype_to_pads(x.shape[batches:-1], shape, steps, padding)
    else:
        listed = padding if isinstance(padding, Sequence) else ()
        pads = [tuple(pad) if isinstance(pad, Sequence) else pad for pad in listed]
        fits = len(pads) == len(shape) and all(
            isinstance(pad, tuple) and len(pad) == 2 and all(isinstance(n, (int, np.integer)) and n >= 0 for n in pad)
            for pad in pads
        )
        if not fits:
            raise ValueError(
                f"{op}: padding must be 'VALID', 'SAME' or {len(shape)} pairs of integers ≥ 0; got {padding!r}."
            )
    before = (1,) * batches
    return _Window(
        (*before, *shape, 1),
        (*before, *steps, 1),
        (((0, 0),) * batches + tuple((int(low), int(high)) for low, high in pads) + ((0, 0),)),
    )


def _sizes(op: str, argument: str, got: Any) -> tuple[int, ...]:
    listed = tuple(got) if isinstance(got, Sequence) and not isinstance(got, str) else ()
    if not listed or not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n > 0 for n in listed):
        raise ValueError(f"{op}: {argument} must be positive integers, one for each pooled axis; got {got!r}.")
    return tuple(int(n) for n in listed)


def max_pool(
    x: Any, window_shape: Sequence[int], strides: Sequence[int] | None = None, padding: Any = "VALID"
) -> jax.Array:
    """Returns the maximum of each window, as `flax.linen.max_pool`; keeps a byte an output.

    Windows of more than 256 elements keep the input, as the counterpart does.

    Args:
        x: floating-point numbers; first any batch axes, then the pooled ones, last the features.
        window_shape: the window's size along each pooled axis.
        strides: its step along each; `None` for 1, as in Flax.
        padding: `"VALID"`, `"SAME"`, or a pair (before, after) for each pooled axis.

    Returns:
        An array with the pooled axes shortened.

    Raises:
        TypeError: x is not floating-point.
        ValueError: too few axes, sizes that are not positive integers, or an unknown padding.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxremat import ops
        >>> ops.max_pool(jnp.arange(5.0).reshape(5, 1), (2,), (2,)).ravel()
        Array([1., 3.], dtype=float32)

    References:
        Gist (Jain et al., ISCA 2018) keeps the window's index too.
    """
    x = checks.floating("max_pool", x)
    w = _window("max_pool", x, window_shape, strides, padding)
    return (_BY_INDEX if math.prod(w.shape) <= _MOST else _BY_INPUT)(w, x)


def avg_pool(
    x: Any,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Any = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """Returns the mean of each window, as `flax.linen.avg_pool`; linear, so nothing is kept.

    Args:
        x: floating-point numbers; first any batch axes, then the pooled ones, last the features.
        window_shape: the window's size along each pooled axis.
        strides: its step along each; `None` for 1, as in Flax.
        padding: `"VALID"`, `"SAME"`, or a pair (before, after) for each pooled axis.
        count_include_pad: whether padded zeros count in the mean.

    Returns:
        An array with the pooled axes shortened.

    Raises:
        TypeError: x is not floating-point, or `count_include_pad` is not `True` or `False`.
        ValueError: too few axes, sizes that are not positive integers, or an unknown padding.
    """
    x = checks.floating("avg_pool", x)
    w = _window("avg_pool", x, window_shape, strides, padding)
    return _AVERAGE((w, checks.flag("avg_pool", "count_include_pad", count_include_pad)), x)
