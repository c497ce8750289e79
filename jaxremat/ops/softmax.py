"""The softmax family: the output of a softmax, the input of a log-sum-exp, and never a second array of that size.

Bytes kept per float32 element: `softmax` 0 beyond the output; `log_softmax` 4, or 0 beyond its output; `logsumexp` and the cross-entropy 4, the
input itself, and for each row its maximum and its sum. JAX keeps two to four arrays of the input's size.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxremat.ops import checks
from jaxremat.ops.rules import lean, named

Axes = tuple[int, ...]


def _softmax_tangent(axis: Axes, kept: tuple[jax.Array, jax.Array | None], t: jax.Array, _: None) -> jax.Array:
    y, where = kept
    # Written so that the transpose is y · (ct - Σ y ct): y ct - y Σ y ct would cancel where a probability is near 1.
    weighted = y * t
    return weighted + y * -jnp.sum(weighted, axis, where=where, keepdims=True)


def _log_softmax_tangent(axis: Axes, kept: tuple[jax.Array, jax.Array | None], t: jax.Array, _: None) -> jax.Array:
    y, where = kept
    t_out = t + -jnp.sum(jnp.exp(y) * t, axis, where=where, keepdims=True)  # the sign is cheaper on the sum
    return t_out if where is None else jnp.where(where, t_out, 0)


_SOFTMAX = named(
    "softmax",
    lean(
        "softmax",
        lambda axis, x, where: jax.nn.softmax(x, axis, where),
        lambda axis, y, x, where: (y, where),
        _softmax_tangent,
    ),
)


def _log_softmax_value(axis: Axes, x: jax.Array, where: jax.Array | None) -> jax.Array:
    return jax.nn.log_softmax(x, axis, where)


_LOG_SOFTMAX = {
    # JAX's own derivative keeps exactly the exponentials, and each row's sum.
    "exponentials": named("log_softmax", _log_softmax_value),
    "output": named(
        "log_softmax",
        lean("log_softmax", _log_softmax_value, lambda axis, y, x, where: (y, where), _log_softmax_tangent),
    ),
}


def _sum_exp_value(axis: Axes, x: jax.Array, where: jax.Array | None, top: jax.Array) -> jax.Array:
    x = x if where is None else jnp.where(where, x, 0)
    return jnp.sum(jnp.exp(x - top), axis, keepdims=True, where=where)


def _sum_exp_tangent(axis: Axes, kept: tuple[jax.Array, ...], t: jax.Array, *_: Any) -> jax.Array:
    x, where, top = kept
    if where is not None:
        x, t = jnp.where(where, x, 0), jnp.where(where, t, 0)
    return jnp.sum(jnp.exp(x - top) * t, axis, keepdims=True, where=where)


# `top` only shifts: whatever depends on it is undone outside, so its tangent is left out.
_sum_exp = lean("sum_exp", _sum_exp_value, lambda axis, out, *args: args, _sum_exp_tangent)


def _logsumexp(options: tuple[Axes, bool], x: jax.Array, where: jax.Array | None) -> jax.Array:
    axis, keepdims = options
    top = jnp.max(lax.stop_gradient(x), axis, keepdims=True, where=where, initial=-jnp.inf)
    top = jnp.where(jnp.isfinite(top), top, jnp.zeros_like(top))
    out = jnp.log(_sum_exp(axis, x, where, top)) + top
    return out if keepdims else jnp.squeeze(out, axis)


def _at_label_value(axis: int, x: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, jnp.expand_dims(labels, axis), axis=axis).take(0, axis=axis)


def _at_label_tangent(axis: int, labels: jax.Array, t: jax.Array, _: None) -> jax.Array:
    # A comparison instead of a gather: its transpose fuses, where a scatter needs an array of zeros of its own.
    labels = jnp.expand_dims(labels, axis)
    labels = jnp.where(labels < 0, labels + t.shape[axis], labels)
    here = labels == lax.broadcasted_iota(labels.dtype, t.shape, axis)
    return jnp.sum(jnp.where(here, t, 0), axis)


_at_label = lean("at_label", _at_label_value, lambda axis, out, x, labels: labels, _at_label_tangent)


def _cross_entropy(axis: int, logits: jax.Array, labels: jax.Array, where: jax.Array | None) -> jax.Array:
    out = _logsumexp(((axis,), False), logits, where) - _at_label(axis, logits, labels)
    return out if where is None else jnp.where(jnp.any(where, axis), out, 0.0)


_LOGSUMEXP = named("logsumexp", _logsumexp)
_CROSS_ENTROPY = named("softmax_cross_entropy_with_integer_labels", _cross_entropy)


def softmax(x: Any, axis: int | Axes | None = -1, where: Any = None) -> jax.Array:
    """Returns exp(x) / Σ exp(x) along `axis`, as `jax.nn.softmax`; keeps its output alone.

    Args:
        x: floating-point numbers, of any shape.
        axis: the axis or axes that sum to 1; `None` for all.
        where: a boolean mask that broadcasts to `x`; masked elements are 0 in the output.

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating-point, `axis` no integer, or `where` not boolean.
        ValueError: an axis out of range, or a mask that does not broadcast.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxremat import ops
        >>> ops.softmax(jnp.zeros(4))
        Array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """
    x = checks.floating("softmax", x)
    return _SOFTMAX(checks.axes("softmax", axis, x.ndim), x, checks.mask("softmax", where, x.shape))


def log_softmax(x: Any, axis: int | Axes | None = -1, where: Any = None, *, keep: str = "exponentials") -> jax.Array:
    """Returns the logarithm of the softmax along `axis`, as `jax.nn.log_softmax`; keeps its output alone.

    Args:
        x: floating-point numbers, of any shape.
        axis: the axis or axes whose exponentials sum to 1; `None` for all.
        where: a boolean mask that broadcasts to `x`; masked elements are -inf in the output.
        keep: `"exponentials"`, one array of the size of `x`, as JAX; or `"output"`, free where the output is kept anyway, for
            a second exponential of each element in the backward pass, a tenth of the time on CPU.

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating-point, `axis` no integer, or `where` not boolean.
        ValueError: an axis out of range, a mask that does not broadcast, or an unknown word for `keep`.
    """
    x = checks.floating("log_softmax", x)
    keep = checks.choice("log_softmax", "keep", keep, tuple(_LOG_SOFTMAX))
    return _LOG_SOFTMAX[keep](checks.axes("log_softmax", axis, x.ndim), x, checks.mask("log_softmax", where, x.shape))


def logsumexp(x: Any, axis: int | Axes | None = None, *, keepdims: bool = False, where: Any = None) -> jax.Array:
    """Returns log Σ exp(x) along `axis`, as `jax.nn.logsumexp`; keeps its input alone.

    The counterpart's weights `b` and `return_sign` are not offered.

    Args:
        x: floating-point numbers, of any shape.
        axis: the axis or axes to sum over; `None` for all.
        keepdims: whether summed axes stay, with size 1.
        where: a boolean mask that broadcasts to `x`; masked elements are left out.

    Returns:
        An array without the summed axes.

    Raises:
        TypeError: `x` is not floating-point, `axis` no integer, `keepdims` no boolean, or `where` not boolean.
        ValueError: an axis out of range, or a mask that does not broadcast.
    """
    x = checks.floating("logsumexp", x)
    options = (checks.axes("logsumexp", axis, x.ndim), checks.flag("logsumexp", "keepdims", keepdims))
    return _LOGSUMEXP(options, x, checks.mask("logsumexp", where, x.shape))


def softmax_cross_entropy_with_integer_labels(
    logits: Any, labels: Any, axis: int | Axes = -1, where: Any = None
) -> jax.Array:
    """Returns -log softmax(logits)[label], as `optax.losses.softmax_cross_entropy_with_integer_labels`.

    Keeps the logits and the labels alone, and two numbers a row. With several axes the logits are first brought into
    rows; where that moves them, the copy is kept in their place.

    Args:
        logits: floating-point numbers; `axis` runs over the classes.
        labels: integers, of the shape of `logits` without `axis`. A label beyond the last class gives NaN.
        axis: the axis of the classes, or several: a label is then an index into them flattened, in the order given.
        where: a boolean mask of the shape of `labels` or of `logits`.

    Returns:
        The loss of each label, of the shape of `labels`.

    Raises:
        TypeError: `logits` are not floating-point, `labels` not integers, or `where` not boolean.
        ValueError: shapes that do not fit, or an axis out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxremat import ops
        >>> float(ops.softmax_cross_entropy_with_integer_labels(jnp.zeros(1), jnp.array(0)))
        0.0
    """
    op = "softmax_cross_entropy_with_integer_labels"
    logits = checks.floating(op, logits, "logits")
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{op}: labels must be integers, one class index each; got {labels.dtype}.")
    if axis is None:
        raise TypeError(f"{op}: axis must be an integer or a tuple of integers; got None.")
    classes = checks.axes(op, axis, logits.ndim)
    rows = tuple(a for a in range(logits.ndim) if a not in classes)
    if labels.shape != tuple(logits.shape[a] for a in rows):
        raise ValueError(
            f"{op}: labels must have the shape of logits without axis {axis}, "
            f"{tuple(logits.shape[a] for a in rows)}; got {labels.shape}."
        )
    if where is not None and jnp.ndim(where) != logits.ndim:
        where = jnp.expand_dims(jnp.asarray(where), classes)
    where = checks.mask(op, where, logits.shape)
    if not isinstance(axis, tuple):
        return _CROSS_ENTROPY(classes[0], logits, labels, where)
    order = (*rows, *(a % logits.ndim for a in axis))
    shape = (*labels.shape, -1)
    if where is not None:
        where = jnp.broadcast_to(where, logits.shape).transpose(order).reshape(shape)
    return _CROSS_ENTROPY(len(rows), logits.transpose(order).reshape(shape), labels, where)
