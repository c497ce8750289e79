"""Dropout that keeps one bit an element, or its key alone and draws the mask a second time. JAX keeps a byte an element."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxremat.ops import checks
from jaxremat.ops.bits import pack_bits, unpack_bits
from jaxremat.ops.rules import as_kept, lean, named


class _Options(NamedTuple):
    rate: float
    shared: tuple[int, ...]


def _mask(o: _Options, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    drawn = [1 if axis in o.shared else size for axis, size in enumerate(shape)]
    return jax.random.bernoulli(key, 1.0 - o.rate, drawn)


def _drop(o: _Options, x: jax.Array, mask: jax.Array) -> jax.Array:
    return lax.select(jnp.broadcast_to(mask, x.shape), x / (1.0 - o.rate), jnp.zeros_like(x))


def _bits_tangent(o: _Options, bits: jax.Array, t: jax.Array, _: None) -> jax.Array:
    drawn = tuple(1 if axis in o.shared else size for axis, size in enumerate(t.shape))
    return _drop(o, t, unpack_bits(as_kept(bits), drawn))


_drop_bits = lean("dropout", _drop, lambda o, out, x, mask: pack_bits(mask), _bits_tangent)
_drop_key = lean(
    "dropout",
    lambda o, x, key: _drop(o, x, _mask(o, key, x.shape)),
    lambda o, out, x, key: key,
    lambda o, key, t, _: _drop(o, t, _mask(o, as_kept(key), t.shape)),
)
_DROPOUT = {
    "bits": named("dropout", lambda o, x, key: _drop_bits(o, x, _mask(o, key, x.shape))),
    "key": named("dropout", _drop_key),
}


def dropout(
    x: Any,
    rate: float,
    key: jax.Array | None,
    *,
    broadcast_dims: Sequence[int] = (),
    deterministic: bool = False,
    keep: str = "bits",
) -> jax.Array:
    """Returns x with elements set to 0 at `rate`, the others divided by 1 - `rate`, as `flax.linen.Dropout`.

    Args:
        x: floating-point numbers, of any shape.
        rate: the probability of 0, in [0, 1], a plain number.
        key: a random key; not used, and may be `None`, if nothing or everything is dropped.
        broadcast_dims: axes along which all elements share their fate.
        deterministic: `True` returns x.
        keep: `"bits"`, an eighth of a byte an element; or `"key"`, nothing beyond the key: the mask is drawn again in the
            backward pass, which costs the generator's time twice.

    Returns:
        An array like x.

    Raises:
        TypeError: x is not floating-point, `rate` no plain number, or `key` no single key where one is needed.
        ValueError: a rate outside [0, 1], an axis out of range, or an unknown word for `keep`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxremat import ops
        >>> sorted(set(ops.dropout(jnp.ones(100), 0.5, jax.random.key(0)).tolist()))
        [0.0, 2.0]
    """
    x = checks.floating("dropout", x)
    rate = checks.number("dropout", "rate", rate)
    keep = checks.choice("dropout", "keep", keep, tuple(_DROPOUT))
    shared = checks.axes("dropout", broadcast_dims, x.ndim, "broadcast_dims")
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"dropout: rate must be in [0, 1], the probability of 0; got {rate}.")
    if checks.flag("dropout", "deterministic", deterministic) or rate == 0.0:
        return x
    if rate == 1.0:
        return jnp.zeros_like(x)
    return _DROPOUT[keep](_Options(rate, shared), x, _single_key(key))


def _single_key(key: Any) -> jax.Array:
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if typed and key.shape == ():
        return key
    raw = hasattr(key, "dtype") and key.dtype == jnp.uint32 and key.ndim == 1
    if not raw:
        got = f"{key.dtype} of shape {key.shape}" if hasattr(key, "dtype") else type(key).__name__
        raise TypeError(f"dropout: key must be one random key, as jax.random.key(0); got {got}.")
    return jax.random.wrap_key_data(jnp.asarray(key))
