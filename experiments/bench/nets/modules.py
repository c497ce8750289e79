"""Blocks from Flax modules, and the networks that turn such blocks into a classifier of images."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from experiments.bench.nets.net import Block, Net, Tree
from experiments.errors import ExperimentError


def module_block(module: nn.Module, *flags: Any) -> Block:
    """Returns the block of a Flax module with a name, which is called with a state and `flags`."""
    if module.name is None:
        raise ExperimentError(f"A block is found by its name; give the {type(module).__name__} one.")
    return Block(module.name, partial(_apply, module, flags), partial(_init, module, flags))


def image_classifier(name: str, blocks: Sequence[Block], head: Block, images: tuple[int, ...], classes: int) -> Net:
    """Returns a network of blocks from float32 images to logits of shape (..., classes), under mean cross-entropy.

    Args:
        name: of the network.
        blocks: from the images to the features that the head reads.
        head: from the features to the logits: a label for each image, or for each of its positions.
        images: (batch, height, width, channels).
        classes: number of labels.

    Returns:
        The network, whose batch is images and int32 labels of the logits' shape without its last axis.
    """
    shape = jax.ShapeDtypeStruct(images, jnp.float32)

    def init(key: jax.Array) -> Tree:
        params, state = {}, jnp.zeros(shape.shape, shape.dtype)
        for block, block_key in zip([*blocks, head], jax.random.split(key, len(blocks) + 1)):
            params[block.name] = block.init(block_key, state)
            state = block.function(params[block.name], state)
        return params

    def loss(params: Tree, state: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(head.function(params[head.name], state), labels)

    def logits(params: Tree, state: Tree) -> jax.Array:
        for block in [*blocks, head]:
            state = block.function(params[block.name], state)
        return state

    params = jax.eval_shape(init, jax.random.key(0))
    labels = jax.ShapeDtypeStruct(jax.eval_shape(logits, params, shape).shape[:-1], jnp.int32)
    return Net(name, (params, shape, labels), init, _first, tuple(blocks), loss, classes)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of logits (..., classes) and integer labels (...)."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _apply(module: nn.Module, flags: tuple[Any, ...], params: Tree, state: Tree) -> Tree:
    return module.apply({"params": params}, state, *flags, mutable=["batch_stats"])[0]


def _init(module: nn.Module, flags: tuple[Any, ...], key: jax.Array, state: Tree) -> Tree:
    return module.init(key, state, *flags).get("params", {})


def _first(params: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    return images
