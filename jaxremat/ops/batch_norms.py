"""Batch normalization in training mode, as functions: the input and two statistics a channel are kept, nothing else.

Bytes kept per float32 element: `batch_norm` 4, the input; `batch_norm_relu` 4 for the pair, since the sign that the
ReLU's derivative needs is computed again from the input. JAX keeps three arrays for the one, and a byte mask more for
the pair.

In-Place Activated BatchNorm (Rota Bulò et al., CVPR 2018, https://arxiv.org/abs/1712.02616) keeps the output instead and
inverts it; that needs an invertible activation and a scale away from zero, and saves nothing where the convolution's
output is stored anyway.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxremat.ops import checks
from jaxremat.ops.normalize import Axes, Options, clip, normalize, output_dtype, parameter, ranked
from jaxremat.ops.rules import named


def _with_statistics(o: Options, x: jax.Array, scale: Any, bias: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    y, mean, raw = normalize(o, x, scale, bias)
    return y, *squeezed(o, mean, raw)


def squeezed(o: Options, mean: jax.Array, raw: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance, one number a feature."""
    return jnp.squeeze(mean, o.reduced), jnp.squeeze(clip(o, raw), o.reduced)


_BATCH_NORM = named("batch_norm", _with_statistics)
_BATCH_NORM_RELU = named("batch_norm_relu", _with_statistics)


def checked(
    op: str,
    x: Any,
    scale: Any,
    bias: Any,
    axis: Axes,
    epsilon: float,
    dtype: Any,
    use_fast_variance: bool,
    axis_name: str | tuple[str, ...] | None,
    gated: bool,
) -> tuple[Options, jax.Array, jax.Array | None, jax.Array | None]:
    """Returns the options of a batch norm and its arrays, parameters shaped to broadcast."""
    x = ranked(op, x, 2)
    features = checks.axes(op, axis, x.ndim)
    o = Options(
        tuple(a for a in range(x.ndim) if a not in features),
        checks.number(op, "epsilon", epsilon),
        output_dtype(op, dtype),
        fast=checks.flag(op, "use_fast_variance", use_fast_variance),
        gated=gated,
        axis_name=axis_name,
    )
    return o, x, parameter(op, "scale", scale, x, features), parameter(op, "bias", bias, x, features)


def batch_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: Axes = -1,
    epsilon: float = 1e-5,
    dtype: Any = None,
    use_fast_variance: bool = True,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x normalized by the batch's own statistics, as `flax.linen.BatchNorm` in training; keeps x alone.

    Args:
        x: floating-point numbers, of two dimensions or more.
        scale: of the shape of the feature axes, or `None` for 1.
        bias: of the shape of the feature axes, or `None` for 0.
        axis: the feature axis or axes; statistics are taken over all others.
        epsilon: added to the variance.
        dtype: of the output; `None` for the common type of x, scale and bias.
        use_fast_variance: E[x²] - E[x]², one pass over x; `False` for E[(x - E[x])²].
        axis_name: the mapped axis or axes (of `shard_map` or `vmap`) over which statistics are averaged too.

    Returns:
        The output, of the shape of x; the mean and the biased variance, of the shape of the feature axes and in at
        least float32, from which the caller updates running statistics.

    Raises:
        TypeError: not floating-point.
        ValueError: a parameter of another shape, an axis out of range, or fewer than two dimensions.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxremat import ops
        >>> y, mean, variance = ops.batch_norm(jnp.array([[1.0], [3.0]]), epsilon=0.0)
        >>> y.ravel(), mean, variance
        (Array([-1.,  1.], dtype=float32), Array([2.], dtype=float32), Array([1.], dtype=float32))

    References:
        Ioffe and Szegedy, https://arxiv.org/abs/1502.03167.
    """
    return _BATCH_NORM(
        *checked("batch_norm", x, scale, bias, axis, epsilon, dtype, use_fast_variance, axis_name, gated=False)
    )


def batch_norm_relu(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: Axes = -1,
    epsilon: float = 1e-5,
    dtype: Any = None,
    use_fast_variance: bool = True,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns max(batch_norm(x), 0) and the statistics; keeps x alone for the pair.

    The sign of the normalized value is computed again in the backward pass. Where the compiler rounds differently there,
    the derivative of a value within one rounding of the kink can fall on its other side.

    Args:
        x: floating-point numbers, of two dimensions or more.
        scale: of the shape of the feature axes, or `None` for 1.
        bias: of the shape of the feature axes, or `None` for 0.
        axis: the feature axis or axes; statistics are taken over all others.
        epsilon: added to the variance.
        dtype: of the output; `None` for the common type of x, scale and bias.
        use_fast_variance: E[x²] - E[x]², one pass over x; `False` for E[(x - E[x])²].
        axis_name: the mapped axis or axes (of `shard_map` or `vmap`) over which statistics are averaged too.

    Returns:
        The output, the mean and the biased variance, as `batch_norm`.

    Raises:
        TypeError: not floating-point.
        ValueError: a parameter of another shape, an axis out of range, or fewer than two dimensions.
    """
    return _BATCH_NORM_RELU(
        *checked("batch_norm_relu", x, scale, bias, axis, epsilon, dtype, use_fast_variance, axis_name, gated=True)
    )
