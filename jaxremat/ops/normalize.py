"""The derivative rule of all normalizations: it keeps the input and two statistics a row, channel or group.

Formulas, defaults and dtypes are those of `flax.linen`: statistics in at least float32, the variance as
max(0, E[x²] - E[x]²) unless `fast` is off.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxremat.ops import checks
from jaxremat.ops.rules import lean

Axes = int | tuple[int, ...]


class Options(NamedTuple):
    """What a normalization is, beside its arrays.

    `reduced` are axes of x, after its last axis is split where there is a `group_size`. `gated` is a ReLU behind it;
    `axis_name` joins the statistics of several devices.
    """

    reduced: tuple[int, ...]
    epsilon: float
    dtype: Any
    centred: bool = True
    fast: bool = True
    gated: bool = False
    axis_name: str | tuple[str, ...] | None = None
    group_size: int | None = None


def _split(o: Options, x: jax.Array) -> jax.Array:
    return x if o.group_size is None else x.reshape(*x.shape[:-1], x.shape[-1] // o.group_size, o.group_size)


def _spread(o: Options, mean: jax.Array) -> jax.Array:
    """Returns a group's number once for each of its channels; other numbers as they are."""
    return mean if o.group_size is None else jnp.repeat(mean.squeeze(-1), o.group_size, axis=-1)


def _mean(o: Options, *xs: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the means of arrays whose channels are split into groups, where there are any."""
    means = tuple(jnp.mean(x, o.reduced, keepdims=True) for x in xs)
    return means if o.axis_name is None else lax.pmean(means, o.axis_name)


def _mean_of_tangent(o: Options, t: jax.Array) -> jax.Array:
    """Returns the mean; over a group pixels first, so that its transpose spreads one number a channel, not a group's."""
    if o.group_size is not None:
        t = jnp.mean(t, o.reduced[:-1], keepdims=True)
    return _spread(o, _mean(o, _split(o, t))[0])


def _wide(o: Options, x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(o.dtype or x.dtype, jnp.float32))


def _statistics(o: Options, x: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """Returns the mean and the variance before it is clipped at zero, with the reduced axes kept as 1."""
    x = _split(
        o, _wide(o, x)
    )  # first of all: XLA's CPU compiler takes longer over a sum that splits its operand itself
    if not o.centred:
        (raw,) = _mean(o, jnp.square(x))
        return None, _spread(o, raw)
    if o.fast:
        mean, square = _mean(o, x, jnp.square(x))
        raw = square - jnp.square(mean)
    else:
        (mean,) = _mean(o, x)
        (raw,) = _mean(o, jnp.square(x - mean))
    return _spread(o, mean), _spread(o, raw)


def clip(o: Options, raw: jax.Array) -> jax.Array:
    """Returns the variance, clipped at zero where rounding can make it negative."""
    return jnp.maximum(0.0, raw) if o.centred and o.fast else raw


def _factor(o: Options, raw: jax.Array, scale: jax.Array | None) -> jax.Array:
    factor = lax.rsqrt(clip(o, raw) + o.epsilon)
    return factor if scale is None else factor * scale


def _centre(o: Options, x: jax.Array, mean: jax.Array | None) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, _wide(o, x).dtype)) if mean is None else x - mean


def _out_dtype(o: Options, *given: jax.Array | None) -> Any:
    return o.dtype or jnp.result_type(*(a for a in given if a is not None))


def affine(
    o: Options, x: jax.Array, mean: jax.Array | None, raw: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    """Returns x normalized by these statistics, then scaled and shifted."""
    y = _centre(o, x, mean) * _factor(o, raw, scale)
    return (y if bias is None else y + bias).astype(_out_dtype(o, x, scale, bias))


def _value(o: Options, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> tuple[Any, ...]:
    mean, raw = _statistics(o, x)
    y = affine(o, x, mean, raw, scale, bias)
    return (jnp.maximum(y, 0) if o.gated else y), mean, raw


def _keep(o: Options, out: tuple[jax.Array, ...], x: jax.Array, scale: Any, bias: Any) -> tuple[Any, ...]:
    return x, out[1], out[2], scale, bias


def _tangent_of_statistics(
    o: Options, x: jax.Array, mean: jax.Array | None, tx: jax.Array
) -> tuple[jax.Array | None, jax.Array]:
    """Returns the tangents of mean and raw variance, each by the formula that the value has."""
    if mean is None:
        return None, 2 * _mean_of_tangent(o, _wide(o, x) * tx)
    t_mean = _mean_of_tangent(o, tx)
    if o.fast:
        return t_mean, 2 * (_mean_of_tangent(o, x * tx) - mean * t_mean)
    return t_mean, 2 * _mean_of_tangent(o, (x - mean) * tx)  # Σ (x - mean) = 0, so the mean's own tangent drops out


def _tangent(o: Options, kept: tuple[Any, ...], tx: jax.Array, t_scale: Any, t_bias: Any) -> tuple[Any, ...]:
    x, mean, raw, scale, bias = kept
    tx = _wide(o, tx)
    centred = _centre(o, x, mean)
    t_mean, t_raw = _tangent_of_statistics(o, x, mean, tx)
    if scale is None:
        factor, t_factor = jax.jvp(lambda v: _factor(o, v, None), (raw,), (t_raw,))
    else:
        factor, t_factor = jax.jvp(lambda v, s: _factor(o, v, s), (raw, scale), (t_raw, t_scale))
    shift_shapes = [a.shape for a in (factor, t_mean, t_bias) if a is not None]
    if t_mean is not None and jnp.broadcast_shapes(*shift_shapes) == t_mean.shape:
        # Mean and bias shift whole channels. Added up first, they need one sum over the cotangent instead of two.
        shift = -t_mean * factor
        t = tx * factor + centred * t_factor + (shift if t_bias is None else shift + t_bias)
    else:
        t = (tx if t_mean is None else tx - t_mean) * factor + centred * t_factor
        t = t if t_bias is None else t + t_bias
    t = t.astype(_out_dtype(o, x, scale, bias))
    if o.gated:
        t = lax.select(affine(o, x, mean, raw, scale, bias) > 0, t, jnp.zeros_like(t))
    return t, t_mean, t_raw


normalize = lean("normalize", _value, _keep, _tangent)
# The mean and the variance before it is clipped, alone: for an operation that normalizes by itself.
statistics = lean(
    "statistics",
    _statistics,
    lambda o, out, x: (x, out[0]),
    lambda o, kept, tx: _tangent_of_statistics(o, kept[0], kept[1], _wide(o, tx)),
)


def parameter(op: str, argument: str, p: Any, x: jax.Array, features: tuple[int, ...]) -> jax.Array | None:
    """Returns a scale or bias, shaped to broadcast against `x`."""
    if p is None:
        return None
    p = checks.floating(op, p, argument)
    expected = tuple(x.shape[a] for a in features)
    if p.shape != expected:
        raise ValueError(f"{op}: {argument} must have the shape {expected} of the feature axes; got {p.shape}.")
    return p.reshape([x.shape[a] if a in features else 1 for a in range(x.ndim)])


def ranked(op: str, x: Any, least: int) -> jax.Array:
    """Returns `x`, checked to be floating-point and of at least `least` dimensions."""
    x = checks.floating(op, x)
    if x.ndim < least:
        raise ValueError(f"{op}: x must have at least {least} dimension{'s'[: least - 1]}; got shape {x.shape}.")
    return x


def output_dtype(op: str, dtype: Any) -> Any:
    """Returns `dtype`, checked to be floating-point or `None`."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{op}: dtype must be a floating-point type or None; got {dtype!r}.")
    return None if dtype is None else jnp.dtype(dtype)
