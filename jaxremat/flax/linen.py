"""Linen modules of Flax's names, fields and parameters on `jaxremat.ops`: checkpoints interchange, less is kept.

Values are those of Flax's modules. Where an option has no counterpart among the operations (a mask, groups of devices, a
norm whose row is spread over devices, statistics in less than float32), and in evaluation, Flax's own computation runs,
which keeps more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax

from jaxremat import ops
from jaxremat.ops.convolution import Normalization, pending_batch_norm, relu_conv


def _plain(module: Any, mask: Any) -> bool:
    """Whether the module's own computation covers what is asked of it."""
    return mask is None and module.axis_index_groups is None and module.force_float32_reductions


def _scale(module: Any, shape: Sequence[int]) -> jax.Array | None:
    return module.param("scale", module.scale_init, shape, module.param_dtype) if module.use_scale else None


def _bias(module: Any, shape: Sequence[int]) -> jax.Array | None:
    return module.param("bias", module.bias_init, shape, module.param_dtype) if module.use_bias else None


def _features(x: jax.Array, axes: int | Sequence[int]) -> list[int]:
    return [x.shape[a] for a in sorted(a % x.ndim for a in ((axes,) if isinstance(axes, int) else axes))]


def axes_of(axes: int | Sequence[int]) -> int | tuple[int, ...]:
    """Returns axes as operations take them."""
    return axes if isinstance(axes, int) else tuple(axes)


class BatchNorm(nn.BatchNorm):
    """`flax.linen.BatchNorm` whose training mode keeps its input and two statistics a channel; see `ops.batch_norm`."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        operation: Callable[..., Any] = ops.batch_norm,
    ) -> jax.Array:
        """Returns x normalized by the batch's statistics, or by the running ones.

        `operation` takes the arguments of `ops.batch_norm`; what it returns beside the statistics is returned.
        """
        running = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        if running or not _plain(self, mask):
            return super().__call__(x, use_running_average, mask=mask)
        features = _features(x, self.axis)
        running_mean = self.variable("batch_stats", "mean", jax.numpy.zeros, features)
        running_variance = self.variable("batch_stats", "var", jax.numpy.ones, features)
        y, mean, variance = operation(
            x,
            _scale(self, features),
            _bias(self, features),
            axis=axes_of(self.axis),
            epsilon=self.epsilon,
            dtype=self.dtype,
            use_fast_variance=self.use_fast_variance,
            axis_name=None if self.is_initializing() else self.axis_name,
        )
        if not self.is_initializing():
            running_mean.value = self.momentum * running_mean.value + (1 - self.momentum) * mean
            running_variance.value = self.momentum * running_variance.value + (1 - self.momentum) * variance
        return y


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm` that keeps its input and two statistics a row; see `ops.layer_norm`."""

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Returns x normalized."""
        if self.axis_name is not None or not _plain(self, mask):
            return super().__call__(x, mask=mask)
        features = _features(x, self.feature_axes)
        return ops.layer_norm(
            x,
            _scale(self, features),
            _bias(self, features),
            epsilon=self.epsilon,
            reduction_axes=axes_of(self.reduction_axes),
            feature_axes=axes_of(self.feature_axes),
            dtype=self.dtype,
            use_fast_variance=self.use_fast_variance,
        )


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm` that keeps its input and a statistic a row; see `ops.rms_norm`."""

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Returns x normalized."""
        if self.axis_name is not None or not _plain(self, mask):
            return super().__call__(x, mask=mask)
        return ops.rms_norm(
            x,
            _scale(self, _features(x, self.feature_axes)),
            epsilon=self.epsilon,
            reduction_axes=axes_of(self.reduction_axes),
            feature_axes=axes_of(self.feature_axes),
            dtype=self.dtype,
        )


class GroupNorm(nn.GroupNorm):
    """`flax.linen.GroupNorm` that keeps its input and two statistics a channel; see `ops.group_norm`."""

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Returns x normalized."""
        if self.axis_name is not None or self.reduction_axes is not None or not _plain(self, mask):
            return super().__call__(x, mask=mask)
        features = _features(x, -1)
        return ops.group_norm(
            x,
            _scale(self, features),
            _bias(self, features),
            num_groups=self.num_groups,
            group_size=self.group_size,
            epsilon=self.epsilon,
            dtype=self.dtype,
            use_fast_variance=self.use_fast_variance,
        )


class Dropout(nn.Dropout):
    """`flax.linen.Dropout` that keeps one bit an element; see `ops.dropout`."""

    @nn.compact
    def __call__(self, inputs: jax.Array, deterministic: bool | None = None, rng: Any = None) -> jax.Array:
        """Returns the inputs with elements set to 0 at the rate, the others divided by its complement."""
        off = nn.merge_param("deterministic", self.deterministic, deterministic)
        if off or self.rate in (0.0, 1.0):
            return super().__call__(inputs, deterministic, rng)
        key = self.make_rng(self.rng_collection) if rng is None else rng
        return ops.dropout(inputs, self.rate, key, broadcast_dims=self.broadcast_dims)


def norm_relu_conv(norm: BatchNorm, conv: Callable[..., nn.Conv], x: jax.Array) -> jax.Array:
    """Returns `conv()(relu(norm(x)))`; in training x alone is kept for the three, see `ops.batch_norm_relu_conv`.

    Args:
        norm: a batch norm, made in the module that calls this.
        conv: makes the convolution's module there, as `functools.partial(nn.Conv, 64, (3, 3), name="conv2")`, with the
            field `conv_general_dilated` that it is given.
        x: images: one batch axis, spatial axes, features.

    Returns:
        What the convolution returns.

    Raises:
        ValueError: the convolution pads or reshapes its input before it convolves ("CIRCULAR", several batch axes).

    Example:
        >>> from functools import partial
        >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxremat.flax
        >>> class Net(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         norm = jaxremat.flax.BatchNorm(use_running_average=False)
        ...         return jaxremat.flax.norm_relu_conv(norm, partial(nn.Conv, 4, (3, 3)), x)
        >>> variables = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((2, 8, 8, 3)))
        >>> sorted(variables["params"])
        ['BatchNorm_0', 'Conv_0']
    """
    pending: Any = norm(x, operation=pending_batch_norm)
    if not isinstance(pending, Normalization):  # in evaluation
        return conv(conv_general_dilated=ops.conv_general_dilated)(jax.nn.relu(pending))

    def convolve(lhs: jax.Array, rhs: jax.Array, window_strides: Any, padding: Any, **rest: Any) -> jax.Array:
        if lhs.shape != x.shape:
            raise ValueError(
                f"norm_relu_conv: the convolution must take its input as it is: one batch axis and padding by zeros; "
                f"it made {lhs.shape} of {x.shape}. Call norm, relu and conv one by one."
            )
        return relu_conv(pending, rhs, window_strides, padding, **rest)

    return conv(conv_general_dilated=convolve)(x)
