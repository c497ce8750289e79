"""The operations of `jaxremat.ops`, each with its counterpart and arguments of a million elements."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxremat import ops

IMAGES = (16, 32, 32, 64)
ROWS = (1024, 1024)
KERNEL = (3, 3, IMAGES[-1], IMAGES[-1])
_NHWC = ("NHWC", "HWIO", "NHWC")


class Case(NamedTuple):
    """`shapes` are those of x and, where there are any, scale, bias and kernel."""

    op: Callable[..., Any]
    counterpart: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def _pointwise(op: Callable[..., Any], counterpart: Callable[..., Any]) -> Case:
    return Case(op, counterpart, (IMAGES,))


def _norm(op: Callable[..., Any], module: nn.Module, shape: tuple[int, ...], *names: str) -> Case:
    def counterpart(x: jax.Array, *parameters: jax.Array) -> Any:
        return module.apply({"params": dict(zip(names, parameters, strict=True))}, x)

    return Case(op, counterpart, (shape, *((shape[-1],) for _ in names)))


def _batch_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
    statistics = {"mean": jnp.zeros_like(scale), "var": jnp.ones_like(scale)}
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": statistics}
    return nn.BatchNorm(use_running_average=False).apply(variables, x, mutable=["batch_stats"])[0]


def _key() -> jax.Array:
    return jax.random.key(1, impl="rbg")  # a threefry key that is a constant takes the compiler minutes


def _dropout(x: jax.Array) -> jax.Array:
    # In this precision the mask is the same when all else is float64.
    mask = jax.random.bernoulli(_key(), np.float32(0.5), x.shape)
    return jax.lax.select(mask, x / 0.5, jnp.zeros_like(x))


def _labels() -> np.ndarray:
    return np.random.default_rng(2).integers(0, ROWS[1], ROWS[0])


def _pool(name: str, window: tuple[int, int], padding: str) -> Case:
    def of(module: Any) -> Callable[..., Any]:
        return lambda x: getattr(module, name)(x, window, (2, 2), padding)

    return Case(of(ops), of(nn), (IMAGES,))


def _convolution(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *rest: f(x, *rest, window_strides=(1, 1), padding="SAME", dimension_numbers=_NHWC)


def _normalized_first(x: jax.Array, scale: jax.Array, bias: jax.Array, kernel: jax.Array) -> jax.Array:
    x = jax.nn.relu(_batch_norm(x, scale, bias))
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=_NHWC)


def cases() -> dict[str, Case]:
    """Returns all of them by name."""
    cross_entropy, gold = (m.softmax_cross_entropy_with_integer_labels for m in (ops, optax))
    features = (IMAGES, IMAGES[-1:], IMAGES[-1:])
    return {
        "relu": _pointwise(ops.relu, jax.nn.relu),
        "relu bits": _pointwise(partial(ops.relu, keep="bits"), jax.nn.relu),
        "relu6": _pointwise(ops.relu6, jax.nn.relu6),
        "leaky_relu": _pointwise(ops.leaky_relu, jax.nn.leaky_relu),
        "hard_tanh": _pointwise(ops.hard_tanh, jax.nn.hard_tanh),
        "tanh": _pointwise(ops.tanh, jnp.tanh),
        "sigmoid": _pointwise(ops.sigmoid, jax.nn.sigmoid),
        "gelu": _pointwise(ops.gelu, jax.nn.gelu),
        "gelu erf": _pointwise(partial(ops.gelu, approximate=False), partial(jax.nn.gelu, approximate=False)),
        "silu": _pointwise(ops.silu, jax.nn.silu),
        "softmax": Case(ops.softmax, jax.nn.softmax, (ROWS,)),
        "log_softmax": Case(ops.log_softmax, jax.nn.log_softmax, (ROWS,)),
        "logsumexp": Case(partial(ops.logsumexp, axis=-1), partial(jax.nn.logsumexp, axis=-1), (ROWS,)),
        "cross_entropy": Case(lambda x: cross_entropy(x, _labels()), lambda x: gold(x, _labels()), (ROWS,)),
        "layer_norm": _norm(ops.layer_norm, nn.LayerNorm(), ROWS, "scale", "bias"),
        "rms_norm": _norm(ops.rms_norm, nn.RMSNorm(), ROWS, "scale"),
        "group_norm": _norm(partial(ops.group_norm, num_groups=8), nn.GroupNorm(8), IMAGES, "scale", "bias"),
        "batch_norm": Case(lambda *a: ops.batch_norm(*a)[0], _batch_norm, features),
        "batch_norm_relu": Case(
            lambda *a: ops.batch_norm_relu(*a)[0], lambda *a: jax.nn.relu(_batch_norm(*a)), features
        ),
        "conv": Case(
            _convolution(ops.conv_general_dilated), _convolution(jax.lax.conv_general_dilated), (IMAGES, KERNEL)
        ),
        "batch_norm_relu_conv": Case(
            _convolution(
                lambda x, scale, bias, kernel, **kw: ops.batch_norm_relu_conv(x, kernel, scale, bias, **kw)[0]
            ),
            _normalized_first,
            (*features, KERNEL),
        ),
        "dropout": _pointwise(lambda x: ops.dropout(x, 0.5, _key()), _dropout),
        "dropout key": _pointwise(lambda x: ops.dropout(x, 0.5, _key(), keep="key"), _dropout),
        "max_pool 2x2": _pool("max_pool", (2, 2), "VALID"),
        "max_pool 3x3": _pool("max_pool", (3, 3), "SAME"),
        "avg_pool": _pool("avg_pool", (2, 2), "VALID"),
    }


def arguments(case: Case) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns reproducible arguments, x of standard deviation 2, and a cotangent."""
    rng = np.random.default_rng(0)
    first, *parameters = case.shapes
    given = [rng.normal(0.3, 2.0, first), *(rng.normal(1 - i, 0.2, shape) for i, shape in enumerate(parameters))]
    given = [np.asarray(a, np.float32) for a in given]
    return given, np.asarray(rng.normal(size=jax.eval_shape(case.op, *given).shape), np.float32)
