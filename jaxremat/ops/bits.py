"""A mask in bits: eight truth values in a byte, where JAX spends a byte on each.

Gist (Jain et al., ISCA 2018, https://doi.org/10.1109/ISCA.2018.00070) calls this binarize. The bit planes lie along one
axis: bit k of byte i is element k·n/8 + i of that axis, so that a vector unit reads whole contiguous rows. Packing eight
neighbours instead is as fast on a CPU, but a TPU pads the axis of eight to 128 lanes and needs more memory than the
byte mask. An axis in the middle is the first choice, since batches are sharded along the first axis and lanes run along
the last.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_PLANES = 8


def _axis(shape: tuple[int, ...]) -> int | None:
    order = [*range(1, len(shape) - 1), *([len(shape) - 1] if shape else []), *([0] if len(shape) > 1 else [])]
    return next((axis for axis in order if shape[axis] % _PLANES == 0), None)


def pack_bits(mask: Any) -> jax.Array:
    """Returns a boolean array in an eighth of its bytes.

    Args:
        mask: booleans, of any shape.

    Returns:
        Bytes (`uint8`): ⌈n / 8⌉ for n booleans. If an axis is a multiple of 8 the shape is that of `mask` with this axis
        divided by 8; otherwise it is flat, padded with `False`.

    Raises:
        TypeError: `mask` is not boolean.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxremat.ops import pack_bits, unpack_bits
        >>> mask = jnp.arange(10) % 3 == 0
        >>> bits = pack_bits(mask)
        >>> bits.shape, bool((unpack_bits(bits, mask.shape) == mask).all())
        ((2,), True)
    """
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"pack_bits: the mask must be boolean; got {mask.dtype}. Compare first, as in x > 0.")
    axis = _axis(mask.shape)
    if axis is None:
        mask = jnp.pad(mask.reshape(-1), (0, -mask.size % _PLANES))
        axis = 0
    split = (*mask.shape[:axis], _PLANES, mask.shape[axis] // _PLANES, *mask.shape[axis + 1 :])
    plane = lax.broadcasted_iota(jnp.uint8, split, axis)
    # A reduction, because XLA's CPU compiler would fuse eight shifted slices into whoever reads the bits.
    return lax.reduce(
        lax.shift_left(mask.reshape(split).astype(jnp.uint8), plane), np.uint8(0), lax.bitwise_or, (axis,)
    )


def unpack_bits(bits: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the boolean array of `shape` that `pack_bits` packed.

    Args:
        bits: what `pack_bits` returned.
        shape: the shape of the mask.

    Returns:
        Booleans, of `shape`.

    Raises:
        ValueError: a mask of `shape` does not pack to an array like `bits`.
    """
    shape = tuple(shape)
    axis = _axis(shape)
    if axis is None:
        expected = (-(-math.prod(shape) // _PLANES),)
    else:
        expected = (*shape[:axis], shape[axis] // _PLANES, *shape[axis + 1 :])
    if bits.shape != expected or bits.dtype != jnp.uint8:
        raise ValueError(
            f"unpack_bits: a mask of shape {shape} packs to uint8 of shape {expected}; got {bits.dtype} of shape {bits.shape}."
        )
    at = axis or 0
    plane = lax.shift_left(jnp.uint8(1), lax.iota(jnp.uint8, _PLANES)).reshape(_PLANES, *[1] * (bits.ndim - at))
    spread = (jnp.expand_dims(bits, at) & plane) != 0
    if axis is None:
        return spread.reshape(-1)[: math.prod(shape)].reshape(shape)
    return spread.reshape(shape)
