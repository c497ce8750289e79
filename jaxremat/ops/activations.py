"""Activations that keep their output, one bit an element, or their input; never a byte mask beside them.

Bytes kept per float32 element, beyond the output (which the next matrix product or convolution keeps anyway):

    relu, relu6               0    the output tells where the derivative is 1 (as in Gist's and PyTorch's ReLU)
    ... with keep="bits"      1/8
    leaky_relu, hard_tanh     1/8  ... keep="output" of leaky_relu: 0
    tanh, sigmoid             0    their derivatives are functions of the output
    gelu, silu                4    the input alone: their derivatives are not functions of the output

Values are those of `jax.nn`, bit for bit, when both are compiled; derivatives follow the same formulas.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxremat.ops import checks
from jaxremat.ops.bits import pack_bits, unpack_bits
from jaxremat.ops.rules import as_kept, lean, named


def _gate(mask: jax.Array, t: jax.Array, slope: float | None = None) -> jax.Array:
    return lax.select(mask, t, jnp.zeros_like(t) if slope is None else slope * t)


def _by_output(name: str, value: Callable[..., Any], slopes: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the operation whose tangent is `slopes(options, out, t)`."""
    return lean(name, value, lambda options, out, *args: out, slopes)


def _by_bits(
    name: str, value: Callable[..., Any], mask: Callable[..., Any], off: Callable[[Any], float | None]
) -> Callable[..., Any]:
    """Returns the operation whose slope is 1 where `mask(x)` holds and `off(options)` (`None`: 0) elsewhere."""

    def tangent(options: Any, bits: jax.Array, t: jax.Array) -> jax.Array:
        return _gate(unpack_bits(as_kept(bits), t.shape), t, off(options))

    return lean(name, value, lambda options, out, x: pack_bits(mask(x)), tangent)


def _by_input(name: str, value: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the operation whose tangent is JAX's own, computed again from the input."""

    def tangent(options: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        return jax.jvp(partial(value, options), (x,), (t,))[1]

    return lean(name, value, lambda options, out, x: x, tangent)


def _relu_value(options: None, x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


def _relu6_value(options: None, x: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.maximum(x, 0), 6.0)


_RELU = {
    "output": named("relu", _by_output("relu", _relu_value, lambda options, y, t: _gate(y > 0, t))),
    "bits": named("relu", _by_bits("relu", _relu_value, lambda x: x > 0, lambda options: None)),
}
_RELU6 = {
    "output": named("relu6", _by_output("relu6", _relu6_value, lambda options, y, t: _gate((y > 0) & (y < 6), t))),
    "bits": named("relu6", _by_bits("relu6", _relu6_value, lambda x: (x > 0) & (x < 6), lambda options: None)),
}


def _leaky_value(slope: float, x: jax.Array) -> jax.Array:
    return jax.nn.leaky_relu(x, slope)


_LEAKY_RELU = {
    "output": named("leaky_relu", _by_output("leaky_relu", _leaky_value, lambda slope, y, t: _gate(y >= 0, t, slope))),
    "bits": named("leaky_relu", _by_bits("leaky_relu", _leaky_value, lambda x: x >= 0, lambda slope: slope)),
}
_HARD_TANH = named(
    "hard_tanh",
    _by_bits(
        "hard_tanh", lambda options, x: jax.nn.hard_tanh(x), lambda x: ~((x > 1) | (x < -1)), lambda options: None
    ),
)


def _tanh_tangent(options: None, y: jax.Array, t: jax.Array) -> jax.Array:
    half = t * (1 - y)  # 1 - y² = (1 - y)(1 + y) without its cancellation, as JAX writes it
    return half + half * y


_TANH = named("tanh", _by_output("tanh", lambda options, x: jnp.tanh(x), _tanh_tangent))
_SIGMOID = named(
    "sigmoid", _by_output("sigmoid", lambda options, x: lax.logistic(x), lambda options, y, t: t * (y * (1 - y)))
)
_GELU = named("gelu", _by_input("gelu", lambda approximate, x: jax.nn.gelu(x, approximate)))
_SILU = named("silu", _by_input("silu", lambda options, x: jax.nn.silu(x)))


def relu(x: Any, *, keep: str = "output") -> jax.Array:
    """Returns max(x, 0), as `jax.nn.relu`, whose byte mask costs a byte an element.

    The derivative at 0, and where x is NaN, is 0.

    Args:
        x: floating-point numbers, of any shape.
        keep: `"output"`, free where the next operation keeps its input (a matrix product, a convolution); or `"bits"`,
            an eighth of a byte an element, where nobody else keeps the output (before a sum, a pooling, an addition).

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating-point.
        ValueError: an unknown word for `keep`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxremat import ops
        >>> jax.grad(lambda x: ops.relu(x).sum())(jnp.array([-1.0, 0.0, 2.0]))
        Array([0., 0., 1.], dtype=float32)

    References:
        Jain et al., Gist, ISCA 2018 (binarize).
    """
    keep = checks.choice("relu", "keep", keep, tuple(_RELU))
    return _RELU[keep](None, checks.floating("relu", x))


def relu6(x: Any, *, keep: str = "output") -> jax.Array:
    """Returns min(max(x, 0), 6), as `jax.nn.relu6`. The derivative at 0 and at 6 is 0.

    Args:
        x: floating-point numbers, of any shape.
        keep: `"output"` or `"bits"`, as in `relu`.

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating-point.
        ValueError: an unknown word for `keep`.
    """
    keep = checks.choice("relu6", "keep", keep, tuple(_RELU6))
    return _RELU6[keep](None, checks.floating("relu6", x))


def leaky_relu(x: Any, negative_slope: float = 1e-2, *, keep: str = "bits") -> jax.Array:
    """Returns x where x ≥ 0 and `negative_slope` · x elsewhere, as `jax.nn.leaky_relu`.

    Args:
        x: floating-point numbers, of any shape.
        negative_slope: a plain number. For a learned slope use `jax.nn.leaky_relu`: its derivative needs the input.
        keep: `"bits"`, an eighth of a byte an element; or `"output"` (the slope must be positive), nothing beyond the
            output. From the output the slope of an input whose product underflows to zero (|x| < 1e-36 for float32)
            reads as 1.

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating-point, or `negative_slope` is not a plain number.
        ValueError: an unknown word for `keep`, or `"output"` with a slope that hides the sign of the input.

    References:
        Rota Bulò et al., In-Place Activated BatchNorm, CVPR 2018 (the activation is undone from its output).
    """
    keep = checks.choice("leaky_relu", "keep", keep, tuple(_LEAKY_RELU))
    slope = checks.number("leaky_relu", "negative_slope", negative_slope)
    if keep == "output" and not slope > 0:
        raise ValueError(
            f"leaky_relu: keep='output' reads the sign of the input from the output, which needs negative_slope > 0; "
            f"got {slope}. Use keep='bits'."
        )
    return _LEAKY_RELU[keep](slope, checks.floating("leaky_relu", x))


def hard_tanh(x: Any) -> jax.Array:
    """Returns x clipped to [-1, 1], as `jax.nn.hard_tanh`; keeps one bit an element.

    The output cannot tell x = 1, where the derivative is 1, from x > 1, where it is 0.

    Args:
        x: floating-point numbers, of any shape.

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating-point.
    """
    return _HARD_TANH(None, checks.floating("hard_tanh", x))


def tanh(x: Any) -> jax.Array:
    """Returns the hyperbolic tangent, as `jnp.tanh`; keeps its output alone, where JAX keeps two arrays.

    Args:
        x: floating-point numbers, of any shape.

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating-point.
    """
    return _TANH(None, checks.floating("tanh", x))


def sigmoid(x: Any) -> jax.Array:
    """Returns 1 / (1 + exp(-x)), as `jax.nn.sigmoid`; keeps its output alone.

    Args:
        x: floating-point numbers, of any shape.

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating-point.
    """
    return _SIGMOID(None, checks.floating("sigmoid", x))


def gelu(x: Any, approximate: bool = True) -> jax.Array:
    """Returns the Gaussian error linear unit, as `jax.nn.gelu`; keeps its input alone, where JAX keeps five arrays.

    Args:
        x: floating-point numbers, of any shape.
        approximate: `True` for the tanh form, `False` for the one with the error function.

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating-point, or `approximate` is not `True` or `False`.

    Example:
        >>> import jax
        >>> from jaxremat import ops
        >>> float(jax.grad(ops.gelu)(0.0))
        0.5

    References:
        Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415.
    """
    return _GELU(checks.flag("gelu", "approximate", approximate), checks.floating("gelu", x))


def silu(x: Any) -> jax.Array:
    """Returns x · sigmoid(x), as `jax.nn.silu`; keeps its input alone, where JAX keeps three arrays.

    Args:
        x: floating-point numbers, of any shape.

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating-point.
    """
    return _SILU(None, checks.floating("silu", x))
