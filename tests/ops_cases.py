"""Each operation beside its counterpart, and what plain reverse mode keeps for either: shared by the tests of the ops."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxremat import ops


class Case(NamedTuple):
    """`shapes` are those of the differentiable arguments."""

    op: Callable[..., Any]
    counterpart: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


KEY = jax.random.key(7)
QUICK = jax.random.key(7, impl="rbg")  # a generator that compiles in a tenth of the time
LABELS = np.random.default_rng(0).integers(0, 12, (6,))
WHERE = np.random.default_rng(1).random((6, 12)) < 0.7
WHERE[:, 0] = True


def _linen(module: nn.Module, *names: str) -> Callable[..., Any]:
    return lambda x, *parameters: module.apply({"params": dict(zip(names, parameters))} if names else {}, x)


def _linen_batch_norm(x: Any, scale: Any, bias: Any) -> tuple[Any, Any, Any]:
    old = {"mean": jnp.zeros_like(scale), "var": jnp.ones_like(scale)}
    y, new = nn.BatchNorm(momentum=0.0).apply(
        {"params": {"scale": scale, "bias": bias}, "batch_stats": old},
        x,
        use_running_average=False,
        mutable=["batch_stats"],
    )
    return y, new["batch_stats"]["mean"], new["batch_stats"]["var"]


def _linen_batch_norm_relu(x: Any, scale: Any, bias: Any) -> tuple[Any, Any, Any]:
    y, mean, variance = _linen_batch_norm(x, scale, bias)
    return jax.nn.relu(y), mean, variance


def _linen_dropout(rate: float, key: Any, broadcast_dims: tuple[int, ...] = ()) -> Callable[..., Any]:
    return lambda x: nn.Dropout(rate, broadcast_dims=broadcast_dims).apply({}, x, deterministic=False, rng=key)


_ROWS = ((6, 12),)
_IMAGE = ((3, 6, 6, 8),)
_GOLD = optax.losses.softmax_cross_entropy_with_integer_labels
_XENT = ops.softmax_cross_entropy_with_integer_labels

POINTWISE = {
    "relu": Case(ops.relu, jax.nn.relu, _ROWS),
    "relu-bits": Case(partial(ops.relu, keep="bits"), jax.nn.relu, _ROWS),
    "relu6": Case(ops.relu6, jax.nn.relu6, _ROWS),
    "relu6-bits": Case(partial(ops.relu6, keep="bits"), jax.nn.relu6, _ROWS),
    "leaky_relu": Case(ops.leaky_relu, jax.nn.leaky_relu, _ROWS),
    "leaky_relu-0.3": Case(lambda x: ops.leaky_relu(x, 0.3), lambda x: jax.nn.leaky_relu(x, 0.3), _ROWS),
    "hard_tanh": Case(ops.hard_tanh, jax.nn.hard_tanh, _ROWS),
    "tanh": Case(ops.tanh, jnp.tanh, _ROWS),
    "sigmoid": Case(ops.sigmoid, jax.nn.sigmoid, _ROWS),
    "gelu": Case(ops.gelu, jax.nn.gelu, _ROWS),
    "gelu-erf": Case(partial(ops.gelu, approximate=False), partial(jax.nn.gelu, approximate=False), _ROWS),
    "silu": Case(ops.silu, jax.nn.silu, _ROWS),
}
SOFTMAX = {
    "softmax": Case(ops.softmax, jax.nn.softmax, _ROWS),
    "softmax-where": Case(partial(ops.softmax, where=WHERE), partial(jax.nn.softmax, where=WHERE), _ROWS),
    "softmax-all": Case(partial(ops.softmax, axis=None), partial(jax.nn.softmax, axis=None), _ROWS),
    "log_softmax": Case(ops.log_softmax, jax.nn.log_softmax, _ROWS),
    "log_softmax-output": Case(partial(ops.log_softmax, keep="output"), jax.nn.log_softmax, _ROWS),
    "log_softmax-first": Case(
        partial(ops.log_softmax, axis=0, keep="output"), partial(jax.nn.log_softmax, axis=0), _ROWS
    ),
    "logsumexp": Case(partial(ops.logsumexp, axis=-1), partial(jax.nn.logsumexp, axis=-1), _ROWS),
    "logsumexp-all": Case(ops.logsumexp, jax.nn.logsumexp, _ROWS),
    "logsumexp-where": Case(
        partial(ops.logsumexp, axis=1, keepdims=True, where=WHERE),
        partial(jax.nn.logsumexp, axis=1, keepdims=True, where=WHERE),
        _ROWS,
    ),
    "cross_entropy": Case(lambda x: _XENT(x, LABELS), lambda x: _GOLD(x, LABELS), _ROWS),
    "cross_entropy-first": Case(lambda x: _XENT(x, LABELS, axis=0), lambda x: _GOLD(x, LABELS, axis=0), ((12, 6),)),
    "cross_entropy-two": Case(
        lambda x: _XENT(x, LABELS, axis=(2, 0)), lambda x: _GOLD(x, LABELS, axis=(2, 0)), ((3, 6, 4),)
    ),
    "cross_entropy-where": Case(
        lambda x: _XENT(x, LABELS, where=WHERE), lambda x: _GOLD(x, LABELS, where=WHERE), _ROWS
    ),
}
NORMS = {
    "layer_norm": Case(ops.layer_norm, _linen(nn.LayerNorm(), "scale", "bias"), (*_ROWS, (12,), (12,))),
    "layer_norm-bare": Case(ops.layer_norm, _linen(nn.LayerNorm(use_bias=False, use_scale=False)), _ROWS),
    "layer_norm-two": Case(
        partial(ops.layer_norm, reduction_axes=(1, 2), feature_axes=-1, use_fast_variance=False, epsilon=1e-3),
        _linen(
            nn.LayerNorm(reduction_axes=(1, 2), feature_axes=-1, use_fast_variance=False, epsilon=1e-3), "scale", "bias"
        ),
        ((3, 5, 4), (4,), (4,)),
    ),
    "rms_norm": Case(ops.rms_norm, _linen(nn.RMSNorm(), "scale"), (*_ROWS, (12,))),
    "group_norm": Case(
        partial(ops.group_norm, num_groups=4), _linen(nn.GroupNorm(4), "scale", "bias"), (*_IMAGE, (8,), (8,))
    ),
    "group_norm-size": Case(
        partial(ops.group_norm, num_groups=None, group_size=4),
        _linen(nn.GroupNorm(None, group_size=4), "scale", "bias"),
        (*_IMAGE, (8,), (8,)),
    ),
    "batch_norm": Case(ops.batch_norm, _linen_batch_norm, (*_IMAGE, (8,), (8,))),
    "batch_norm_relu": Case(ops.batch_norm_relu, _linen_batch_norm_relu, (*_IMAGE, (8,), (8,))),
}
DROPOUT = {
    "dropout": Case(lambda x: ops.dropout(x, 0.3, KEY), _linen_dropout(0.3, KEY), ((3, 5),)),
    "dropout-key": Case(lambda x: ops.dropout(x, 0.3, QUICK, keep="key"), _linen_dropout(0.3, QUICK), _IMAGE),
    "dropout-shared": Case(
        lambda x: ops.dropout(x, 0.3, QUICK, broadcast_dims=(1, -2)), _linen_dropout(0.3, QUICK, (1, -2)), _IMAGE
    ),
}


def _pools(name: str, *args: Any) -> Case:
    return Case(lambda x: getattr(ops, name)(x, *args), lambda x: getattr(nn, name)(x, *args), ((3, 7, 5, 4),))


POOLS = {
    "max_pool": _pools("max_pool", (2, 2), (2, 2)),
    "max_pool-same": _pools("max_pool", (2, 2), (2, 2), "SAME"),
    "max_pool-3": _pools("max_pool", (3, 3), (2, 2), "SAME"),
    "max_pool-pads": _pools("max_pool", (3, 2), (3, 2), ((2, 1), (0, 1))),
    "avg_pool": _pools("avg_pool", (2, 2), (2, 2)),
    "avg_pool-count": _pools("avg_pool", (3, 3), (2, 2), "SAME", False),
}
_NHWC = ("NHWC", "HWIO", "NHWC")


def _convolves(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda x, kernel: f(x, kernel, *args, dimension_numbers=_NHWC, **kwargs)


def _batch_norm_relu_conv(x: Any, scale: Any, bias: Any, kernel: Any) -> Any:
    numbers = {"window_strides": (2, 1), "padding": "SAME", "dimension_numbers": _NHWC}
    return ops.batch_norm_relu_conv(x, kernel, scale, bias, **numbers)


def _linen_batch_norm_relu_conv(x: Any, scale: Any, bias: Any, kernel: Any) -> Any:
    y, mean, variance = _linen_batch_norm_relu(x, scale, bias)
    return jax.lax.conv_general_dilated(y, kernel, (2, 1), "SAME", dimension_numbers=_NHWC), mean, variance


def _conv_case(shapes: tuple[tuple[int, ...], ...], *args: Any, **kwargs: Any) -> Case:
    pair = (ops.conv_general_dilated, jax.lax.conv_general_dilated)
    return Case(*(_convolves(f, *args, **kwargs) for f in pair), shapes)


CONVS = {
    "conv": _conv_case(((2, 5, 6, 3), (3, 3, 3, 4)), (2, 2), "SAME"),
    "conv-groups": _conv_case(
        ((2, 5, 6, 4), (3, 2, 2, 4)), (1, 2), [(1, 0), (2, 1)], (2, 1), (1, 2), feature_group_count=2
    ),
    "batch_norm_relu_conv": Case(
        _batch_norm_relu_conv, _linen_batch_norm_relu_conv, (*_IMAGE, (8,), (8,), (3, 3, 8, 4))
    ),
}
CASES = POINTWISE | SOFTMAX | NORMS | DROPOUT | POOLS | CONVS


def arguments(case: Case, seed: int, dtype: Any = np.float32, spread: float = 2.0) -> list[np.ndarray]:
    """Returns reproducible arguments: x of standard deviation `spread`, scales near 1, biases near 0."""
    rng = np.random.default_rng(seed)
    first, *parameters = case.shapes
    given = [rng.normal(0.3, spread, first), *(rng.normal(1 - i, 0.2, s) for i, s in enumerate(parameters))]
    return [np.asarray(a, dtype) for a in given]


def pullback(f: Callable[..., Any], cotangent_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a compiled function giving outputs and gradients, for the cotangents that `cotangent_of(outputs)` gives."""

    @jax.jit
    def both(*args: Any) -> Any:
        out, vjp = jax.vjp(f, *args)
        return out, vjp(cotangent_of(out))

    return both


def uneven(out: Any) -> Any:
    """Returns cotangents of no symmetry: cosines of the position."""
    return jax.tree.map(
        lambda y: jnp.cos(jnp.arange(y.size, dtype=jnp.float32) * 0.7).reshape(y.shape).astype(y.dtype), out
    )
