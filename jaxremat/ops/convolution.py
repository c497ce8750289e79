"""Convolutions that keep less: no copies beside their operands, or the input of the batch norm before them alone.

A compiler makes copies of a convolution's operands (padded, transposed) that its gradients can use again, and keeps
them. `conv_general_dilated` has them made again: ResNet-18 at batch 512 compiled for an H100 needs 258 MiB less by it alone.

`batch_norm_relu_conv` keeps, for normalization, ReLU and convolution together, the input: 4 bytes per float32 element,
where `batch_norm_relu` and a convolution keep 8, and JAX 13 or more. Normalization and ReLU run once more in the backward
pass, an elementwise operation; no convolution does. Pleiss et al. (https://arxiv.org/abs/1707.06990) train DenseNets so.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxremat.ops import checks
from jaxremat.ops.batch_norms import checked, squeezed
from jaxremat.ops.normalize import Axes, Options, affine, statistics
from jaxremat.ops.rules import lean, named

Padding = str | Sequence[tuple[int, int]]
Dilation = Sequence[int] | None


class _Window(NamedTuple):
    """The arguments of `lax.conv_general_dilated` beside its arrays, hashable."""

    strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...] | None
    rhs_dilation: tuple[int, ...] | None
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    precision: Any


def _window(
    op: str,
    lhs: jax.Array | jax.ShapeDtypeStruct,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Dilation,
    rhs_dilation: Dilation,
    dimension_numbers: Any,
    feature_group_count: int,
    precision: Any,
) -> _Window:
    if lhs.dtype != rhs.dtype:
        raise TypeError(f"{op}: input and kernel must be of one type; got {lhs.dtype} and {rhs.dtype}. Convert one.")
    return _Window(
        tuple(window_strides),
        padding if isinstance(padding, str) else tuple((low, high) for low, high in padding),
        None if lhs_dilation is None else tuple(lhs_dilation),
        None if rhs_dilation is None else tuple(rhs_dilation),
        lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers),
        feature_group_count,
        tuple(precision) if isinstance(precision, list) else precision,
    )


def _convolved(w: _Window, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, *w[:-2], feature_group_count=w.feature_group_count, precision=w.precision
    )


def _tangent(w: _Window, kept: tuple[jax.Array, jax.Array], tx: jax.Array, t_kernel: jax.Array) -> jax.Array:
    x, kernel = kept
    return _convolved(w, tx, kernel) + _convolved(w, x, t_kernel)


_CONV = lean("conv", _convolved, lambda w, out, x, kernel: (x, kernel), _tangent, late=True)


class Normalization(NamedTuple):
    """A batch norm that is still to be applied to `x`: by the convolution behind it."""

    options: Options
    x: jax.Array
    mean: jax.Array
    raw: jax.Array  # the variance before it is clipped at zero
    scale: jax.Array | None
    bias: jax.Array | None


def _active(o: Options, x: jax.Array, *parameters: Any) -> jax.Array:
    def batch_norm(*arrays: Any) -> jax.Array:
        return affine(o, *arrays)

    def relu(y: jax.Array) -> jax.Array:
        return jnp.maximum(y, 0)

    return relu(batch_norm(x, *parameters))  # by these names a policy knows them


def _fused_value(options: tuple[Options, _Window], kernel: jax.Array, *arrays: Any) -> jax.Array:
    o, w = options
    return _convolved(w, _active(o, *arrays).astype(kernel.dtype), kernel)


def _fused_tangent(options: tuple[Options, _Window], kept: tuple[Any, ...], t_kernel: Any, *tangents: Any) -> jax.Array:
    o, w = options
    kernel, *arrays = kept
    y, t = jax.jvp(partial(affine, o), tuple(arrays), tangents)
    active = jnp.maximum(y, 0).astype(kernel.dtype)
    t = lax.select(y > 0, t, jnp.zeros_like(t)).astype(kernel.dtype)
    return _tangent(w, (active, kernel), t, t_kernel)


_STATISTICS = named("batch_norm", statistics)
_FUSED = named(
    "batch_norm_relu_conv",
    lean("batch_norm_relu_conv", _fused_value, lambda options, out, *arrays: arrays, _fused_tangent, late=True),
)


def conv_general_dilated(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Dilation = None,
    rhs_dilation: Dilation = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
) -> jax.Array:
    """Returns the convolution, as `jax.lax.conv_general_dilated`; keeps its operands alone.

    What a compiler makes of them, such as a padded copy, it makes again for the gradients: a barrier there waits for the
    cotangent. For modules: `flax.linen.Conv(..., conv_general_dilated=jaxremat.ops.conv_general_dilated)`.

    Args:
        lhs: floating-point numbers: batch, features and spatial axes, in the order that `dimension_numbers` says.
        rhs: the kernel: output and input features and spatial axes, in the order that `dimension_numbers` says.
        window_strides: one step for each spatial axis.
        padding: `"SAME"`, `"VALID"`, or a pair (before, after) for each spatial axis.
        lhs_dilation: for each spatial axis, or `None` for 1.
        rhs_dilation: for each spatial axis, or `None` for 1.
        dimension_numbers: as for `jax.lax`; `None` for batch, features, space.
        feature_group_count: how many groups the features form.
        precision: as for `jax.lax`.

    Returns:
        An array of batch, features and spatial axes, in the order that `dimension_numbers` says.

    Raises:
        TypeError: not floating-point, or two types. `jax.lax` raises for shapes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxremat import ops
        >>> ops.conv_general_dilated(jnp.ones((1, 1, 3)), jnp.ones((1, 1, 3)), (1,), "SAME").ravel()
        Array([2., 3., 2.], dtype=float32)
    """
    op = "conv_general_dilated"
    lhs, rhs = checks.floating(op, lhs, "lhs"), checks.floating(op, rhs, "rhs")
    rest = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, precision)
    return _CONV(_window(op, lhs, rhs, *rest), lhs, rhs)


def pending_batch_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: Axes = -1,
    epsilon: float = 1e-5,
    dtype: Any = None,
    use_fast_variance: bool = True,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[Normalization, jax.Array, jax.Array]:
    """Returns, for the arguments of `batch_norm`, what is left to do once the statistics are taken; and these."""
    o, x, scale, bias = checked(
        "batch_norm_relu_conv", x, scale, bias, axis, epsilon, dtype, use_fast_variance, axis_name, gated=False
    )
    mean, raw = _STATISTICS(o, x)
    return Normalization(o, x, mean, raw, scale, bias), *squeezed(o, mean, raw)


def relu_conv(
    pending: Normalization,
    kernel: Any,
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Dilation = None,
    rhs_dilation: Dilation = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
) -> jax.Array:
    """Returns the convolution of the ReLU of a normalization; arguments as of `conv_general_dilated`."""
    op = "batch_norm_relu_conv"
    kernel = checks.floating(op, kernel, "kernel")
    o, *arrays = pending
    normalized = jax.ShapeDtypeStruct(pending.x.shape, kernel.dtype)  # converted there, as modules do
    rest = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, precision)
    return _FUSED((o, _window(op, normalized, kernel, *rest)), kernel, *arrays)


def batch_norm_relu_conv(
    x: Any,
    kernel: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    window_strides: Sequence[int],
    padding: Padding,
    dimension_numbers: Any,
    axis: Axes = -1,
    epsilon: float = 1e-5,
    dtype: Any = None,
    use_fast_variance: bool = True,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the convolution of max(batch_norm(x), 0), and the statistics; keeps x alone for the three.

    Normalization and ReLU run again in the backward pass; the convolution does not.

    Args:
        x: floating-point numbers: batch, features and spatial axes, in the order that `dimension_numbers` says.
        kernel: as of `conv_general_dilated`; what it is applied to is converted to its type.
        scale: of the shape of the feature axes, or `None` for 1.
        bias: of the shape of the feature axes, or `None` for 0.
        window_strides: one step for each spatial axis.
        padding: `"SAME"`, `"VALID"`, or a pair (before, after) for each spatial axis, of zeros after the ReLU.
        dimension_numbers: as for `jax.lax`, for example `("NHWC", "HWIO", "NHWC")`.
        axis: the feature axis or axes of x; statistics are taken over all others.
        epsilon: added to the variance.
        dtype: of the normalized values; `None` for the common type of x, scale and bias.
        use_fast_variance: E[x²] - E[x]², one pass over x; `False` for E[(x - E[x])²].
        axis_name: the mapped axis or axes (of `shard_map` or `vmap`) over which statistics are averaged too.

    Returns:
        The convolution's output; the mean and the biased variance, as `batch_norm`.

    Raises:
        TypeError: not floating-point.
        ValueError: a parameter of another shape, an axis out of range, or fewer than two dimensions.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxremat import ops
        >>> x, kernel = jnp.array([1.0, 3.0]).reshape(1, 2, 1), jnp.full((1, 1, 1), 2.0)
        >>> numbers = ("NWC", "WIO", "NWC")
        >>> y, mean, variance = ops.batch_norm_relu_conv(
        ...     x, kernel, epsilon=0.0, window_strides=(1,), padding="SAME", dimension_numbers=numbers
        ... )
        >>> y.ravel(), mean, variance
        (Array([0., 2.], dtype=float32), Array([2.], dtype=float32), Array([1.], dtype=float32))

    References:
        Pleiss et al., Memory-Efficient Implementation of DenseNets, https://arxiv.org/abs/1707.06990.
    """
    pending, mean, variance = pending_batch_norm(
        x,
        scale,
        bias,
        axis=axis,
        epsilon=epsilon,
        dtype=dtype,
        use_fast_variance=use_fast_variance,
        axis_name=axis_name,
    )
    return relu_conv(pending, kernel, window_strides, padding, dimension_numbers=dimension_numbers), mean, variance
