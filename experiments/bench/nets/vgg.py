"""VGG-16: a plain stack of convolutions, whose dense layers hold nine tenths of the parameters."""

import jax
from flax import linen as nn

from experiments.bench.nets.modules import image_classifier, module_block
from experiments.bench.nets.net import Net
from experiments.bench.nets.sizes import multiple, positive
from jaxremat import name

# Convolutions per stage and the width of each, as multiples of the first.
_STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))


def vgg16(batch_size: int = 176, size: int = 224, classes: int = 1000, width: int = 64, hidden: int = 4096) -> Net:
    """Returns VGG-16 (Simonyan and Zisserman 2015, arXiv:1409.1556, column D) for images (batch_size, size, size, 3).

    Without batch norm, as in the original, and without the dropout between its dense layers, whose activations are small.
    """
    positive("vgg16", batch_size=batch_size, classes=classes, width=width, hidden=hidden)
    multiple("vgg16", 32, "five poolings halve the size", size=size)
    blocks = [
        module_block(ConvBlock(depth, factor * width, i, name=f"stage{stage}_conv{i}"))
        for stage, (depth, factor) in enumerate(_STAGES, start=1)
        for i in range(1, depth + 1)
    ]
    head = module_block(DenseHead((hidden, hidden, classes), name="head"))
    return image_classifier(f"vgg16, batch {batch_size}", blocks, head, (batch_size, size, size, 3), classes)


class ConvBlock(nn.Module):
    """3x3 convolution and ReLU; 2x2 max pooling after the last of its stage."""

    depth: int
    features: int
    position: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, height, width, features), half as high and wide after the last of a stage."""
        x = nn.relu(nn.Conv(self.features, (3, 3), name="conv")(x))
        if self.position == self.depth:
            x = nn.max_pool(x, (2, 2), (2, 2))
        return name(x, "block_out")


class DenseHead(nn.Module):
    """Dense layers with ReLU between them."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, widths[-1])."""
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.widths, start=1):
            x = nn.Dense(width, name=f"fc{i}")(x if i == 1 else nn.relu(x))
        return x
