"""Normalizations over a row: they keep their input alone, where JAX keeps three to five arrays.

Bytes kept per float32 element: 4, the input itself, which is shared with whoever else keeps it. Values are those of
`flax.linen`, bit for bit, when both are compiled.
"""

from typing import Any

import jax

from jaxremat.ops import checks
from jaxremat.ops.normalize import Axes, Options, normalize, output_dtype, parameter, ranked
from jaxremat.ops.rules import named


def _only_output(o: Options, x: jax.Array, scale: Any, bias: Any) -> jax.Array:
    return normalize(o, x, scale, bias)[0]


_LAYER_NORM = named("layer_norm", _only_output)
_RMS_NORM = named("rms_norm", _only_output)
_GROUP_NORM = named("group_norm", _only_output)


def layer_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    epsilon: float = 1e-6,
    reduction_axes: Axes = -1,
    feature_axes: Axes = -1,
    dtype: Any = None,
    use_fast_variance: bool = True,
) -> jax.Array:
    """Returns (x - mean) / sqrt(variance + epsilon) · scale + bias, as `flax.linen.LayerNorm`; keeps x alone.

    Args:
        x: floating-point numbers, of one dimension or more.
        scale: of the shape of the feature axes, or `None` for 1.
        bias: of the shape of the feature axes, or `None` for 0.
        epsilon: added to the variance.
        reduction_axes: what mean and variance are taken over.
        feature_axes: the axes of scale and bias.
        dtype: of the output; `None` for the common type of x, scale and bias.
        use_fast_variance: E[x²] - E[x]², one pass over x; `False` for E[(x - E[x])²].

    Returns:
        An array of the shape of x.

    Raises:
        TypeError: not floating-point.
        ValueError: a parameter of another shape, an axis out of range, or x without dimensions.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxremat import ops
        >>> ops.layer_norm(jnp.array([1.0, 3.0]), epsilon=0.0)
        Array([-1.,  1.], dtype=float32)

    References:
        Ba et al., https://arxiv.org/abs/1607.06450.
    """
    op = "layer_norm"
    x = ranked(op, x, 1)
    features = checks.axes(op, feature_axes, x.ndim, "feature_axes")
    o = Options(
        checks.axes(op, reduction_axes, x.ndim, "reduction_axes"),
        checks.number(op, "epsilon", epsilon),
        output_dtype(op, dtype),
        fast=checks.flag(op, "use_fast_variance", use_fast_variance),
    )
    return _LAYER_NORM(o, x, parameter(op, "scale", scale, x, features), parameter(op, "bias", bias, x, features))


def rms_norm(
    x: Any,
    scale: Any = None,
    *,
    epsilon: float = 1e-6,
    reduction_axes: Axes = -1,
    feature_axes: Axes = -1,
    dtype: Any = None,
) -> jax.Array:
    """Returns x / sqrt(E[x²] + epsilon) · scale, as `flax.linen.RMSNorm`; keeps x alone.

    Args:
        x: floating-point numbers, of one dimension or more.
        scale: of the shape of the feature axes, or `None` for 1.
        epsilon: added to the mean square.
        reduction_axes: what the mean square is taken over.
        feature_axes: the axes of scale.
        dtype: of the output; `None` for the common type of x and scale.

    Returns:
        An array of the shape of x.

    Raises:
        TypeError: not floating-point.
        ValueError: a scale of another shape, an axis out of range, or x without dimensions.

    References:
        Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
    """
    op = "rms_norm"
    x = ranked(op, x, 1)
    features = checks.axes(op, feature_axes, x.ndim, "feature_axes")
    reduced = checks.axes(op, reduction_axes, x.ndim, "reduction_axes")
    o = Options(reduced, checks.number(op, "epsilon", epsilon), output_dtype(op, dtype), centred=False)
    return _RMS_NORM(o, x, parameter(op, "scale", scale, x, features), None)


def group_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    num_groups: int | None = 32,
    group_size: int | None = None,
    epsilon: float = 1e-6,
    dtype: Any = None,
    use_fast_variance: bool = True,
) -> jax.Array:
    """Returns x normalized over groups of channels and all positions, as `flax.linen.GroupNorm`; keeps x alone.

    Args:
        x: floating-point numbers; the first axis is the batch, the last the channels, those between positions.
        scale: one number a channel, or `None` for 1.
        bias: one number a channel, or `None` for 0.
        num_groups: how many groups the channels form; `None` if `group_size` is given.
        group_size: channels a group; `None` if `num_groups` is given.
        epsilon: added to the variance.
        dtype: of the output; `None` for the common type of x, scale and bias.
        use_fast_variance: E[x²] - E[x]², one pass over x; `False` for E[(x - E[x])²].

    Returns:
        An array of the shape of x.

    Raises:
        TypeError: not floating-point.
        ValueError: a parameter of another shape, fewer than two dimensions, both or neither of `num_groups` and
            `group_size`, or groups that do not divide the channels.

    References:
        Wu and He, https://arxiv.org/abs/1803.08494.
    """
    op = "group_norm"
    x = ranked(op, x, 2)
    channels = x.shape[-1]
    if (num_groups is None) == (group_size is None):
        raise ValueError(
            f"{op}: give either num_groups or group_size and set the other to None; "
            f"got num_groups={num_groups}, group_size={group_size}."
        )
    argument, count = ("num_groups", num_groups) if group_size is None else ("group_size", group_size)
    if isinstance(count, bool) or not isinstance(count, int) or count <= 0 or channels % count:
        raise ValueError(
            f"{op}: {argument} must be a positive integer that divides the {channels} channels; got {count}."
        )
    o = Options(
        (*range(1, x.ndim - 1), x.ndim),  # the channels of a group come last once they are split
        checks.number(op, "epsilon", epsilon),
        output_dtype(op, dtype),
        fast=checks.flag(op, "use_fast_variance", use_fast_variance),
        group_size=channels // count if group_size is None else count,
    )
    last = (x.ndim - 1,)
    return _GROUP_NORM(o, x, parameter(op, "scale", scale, x, last), parameter(op, "bias", bias, x, last))
