"""An LSTM that reads an image pixel by pixel: one short step, scanned hundreds of times."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.bench.nets.modules import cross_entropy, module_block
from experiments.bench.nets.net import Loop, Net, Tree
from experiments.bench.nets.sizes import positive
from jaxremat import name


def lstm(batch_size: int = 128, steps: int = 784, units: int = 512, classes: int = 10) -> Net:
    """Returns an LSTM (Hochreiter and Schmidhuber 1997) with a dense layer on its last output.

    It reads sequences of shape (batch_size, steps, 1): the pixels of a digit, in the task of Le et al. 2015
    (arXiv:1504.00941), whose 784 steps are what plain backpropagation through time must keep.
    """
    positive("lstm", batch_size=batch_size, steps=steps, units=units, classes=classes)
    cell, head = nn.OptimizedLSTMCell(units, name="lstm"), module_block(nn.Dense(classes, name="head"))
    sequences = jax.ShapeDtypeStruct((batch_size, steps, 1), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)

    def init(key: jax.Array) -> Tree:
        key_cell, key_head = jax.random.split(key)
        return {
            "lstm": cell.init(key_cell, zeros(batch_size), jnp.zeros((batch_size, 1)))["params"],
            "head": head.init(key_head, jnp.zeros((batch_size, units))),
        }

    def zeros(batch_size: int) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((batch_size, units)), jnp.zeros((batch_size, units))

    def enter(params: Tree, x: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        return params, zeros(x.shape[0]), x.swapaxes(0, 1)

    def step(params: Tree, carry: Tree, x: jax.Array) -> tuple[Tree, None]:
        carry, _ = cell.apply({"params": params}, carry, x)
        return name(carry, "block_out"), None

    def after(params: Tree, x: jax.Array, sequences: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(head.function(params["head"], x), labels)

    loop = Loop("lstm", steps, enter, step, lambda carry, outputs: carry[1])
    shapes = jax.eval_shape(init, jax.random.key(0))
    return Net(
        f"lstm {steps} steps, batch {batch_size}",
        (shapes, sequences, labels),
        init,
        lambda params, sequences, labels: sequences,
        loop,
        after,
        classes,
    )
