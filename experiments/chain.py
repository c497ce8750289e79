"""The chain of blocks by which this project measures rematerialization; in plain JAX, so that anything can wrap it.

Each block is a 3×3 convolution of 32 to 32 channels without bias, a batch norm without scale and shift, and a ReLU. At
batch 64 and 32×32 in float32 one activation has 64 · 32 · 32 · 32 · 4 B = 8 MiB.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

CHANNELS = 32
BATCH = 64
SIZE = 32
ACTIVATION_BYTES = BATCH * SIZE * SIZE * CHANNELS * 4


def init(depth: int = 16, channels: int = CHANNELS) -> list[jax.Array]:
    """Returns `depth` kernels of shape (3, 3, channels, channels), scaled as He et al. (2015) do for ReLU."""
    keys = jax.random.split(jax.random.key(0), depth)
    scale = (2 / (9 * channels)) ** 0.5
    return [scale * jax.random.normal(key, (3, 3, channels, channels)) for key in keys]


def block(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """Returns relu(batch_norm(conv(x))) of x of shape (batch, height, width, channels)."""
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    mean, variance = jnp.mean(y, (0, 1, 2)), jnp.var(y, (0, 1, 2))
    return jax.nn.relu((y - mean) * jax.lax.rsqrt(variance + 1e-5))


def loss(kernels: list[jax.Array], x: jax.Array, remat_block: Callable[[Any], Any] | None = None) -> jax.Array:
    """Returns the mean square of the chain's output; `remat_block`, if given, wraps the function of each block."""
    for kernel in kernels:
        x = (block if remat_block is None else remat_block(block))(kernel, x)
    return jnp.mean(x**2)


def arguments(depth: int = 16, batch: int = BATCH, channels: int = CHANNELS) -> tuple[Any, Any]:
    """Returns the shapes of kernels and input, for whatever needs no data."""
    kernels = jax.eval_shape(lambda: init(depth, channels))
    return kernels, jax.ShapeDtypeStruct((batch, SIZE, SIZE, channels), jnp.float32)
