"""The engine's chain of equal convolutional blocks (`experiments.chain`), as a `Net`."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxremat
from experiments import chain as plain
from experiments.bench.nets.net import Block, Net
from experiments.bench.nets.sizes import positive


def chain(
    depth: int = 16, batch_size: int = plain.BATCH, size: int = plain.SIZE, channels: int = plain.CHANNELS
) -> Net:
    """Returns `depth` x [3x3 convolution, batch norm without scale and shift, ReLU] under the mean square of the output.

    Its input has shape (batch_size, size, size, channels) in float32, and so has every activation.
    """
    positive("chain", depth=depth, batch_size=batch_size, size=size, channels=channels)
    blocks = tuple(_block(f"block{i:02}", channels) for i in range(1, depth + 1))

    def init(key: jax.Array) -> Any:
        return {block.name: block.init(k, None) for block, k in zip(blocks, jax.random.split(key, depth))}

    x = jax.ShapeDtypeStruct((batch_size, size, size, channels), jnp.float32)
    return Net(
        f"chain, {depth} blocks",
        (jax.eval_shape(init, jax.random.key(0)), x),
        init,
        lambda params, x: x,
        blocks,
        lambda params, state, x: jnp.mean(state**2),
        classes=0,
    )


def _block(name: str, channels: int) -> Block:
    def function(kernel: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope(name):
            return jaxremat.name(plain.block(kernel, x), "block_out")

    def init(key: jax.Array, state: None) -> jax.Array:
        return (2 / (9 * channels)) ** 0.5 * jax.random.normal(key, (3, 3, channels, channels))

    return Block(name, function, init)
