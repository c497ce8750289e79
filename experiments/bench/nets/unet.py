"""U-Net: an encoder whose features wait, level by level, for the decoder that reads them last in first out."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.bench.nets.modules import image_classifier, module_block
from experiments.bench.nets.net import Net
from experiments.bench.nets.sizes import multiple, positive
from jaxremat import name

State = tuple[jax.Array, ...]


def unet(
    batch_size: int = 11, size: int = 256, levels: int = 4, width: int = 64, channels: int = 3, classes: int = 2
) -> Net:
    """Returns U-Net (Ronneberger et al. 2015, arXiv:1505.04597) for images of shape (batch_size, size, size, channels).

    The form in common use: batch norm after every 3x3 convolution, and padding, so that labels have the size of the images.
    A state is the current features and, before it, those that wait for the decoder.

    Raises:
        ExperimentError: `size` cannot be halved `levels` times.
    """
    positive("unet", batch_size=batch_size, levels=levels, width=width, channels=channels, classes=classes)
    multiple("unet", 2**levels, f"{levels} levels halve the size", size=size)
    blocks = [module_block(Entry(width, name="entry"))]
    for level in range(1, levels + 1):
        blocks.append(module_block(Down(width * 2**level, name=f"down{level}")))
    for level in reversed(range(levels)):
        blocks.append(module_block(Up(width * 2**level, name=f"up{level}")))
    head = module_block(PixelHead(classes, name="head"))
    title = f"unet {size}, batch {batch_size}"
    return image_classifier(title, blocks, head, (batch_size, size, size, channels), classes)


class TwoConvolutions(nn.Module):
    """3x3 convolution, batch norm and ReLU, twice."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, height, width, features)."""
        for i in (1, 2):
            x = nn.Conv(self.features, (3, 3), use_bias=False, name=f"conv{i}")(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, name=f"bn{i}")(x))
        return name(x, "block_out")


class Entry(nn.Module):
    """The first two convolutions, at full size."""

    features: int

    @nn.compact
    def __call__(self, images: jax.Array) -> State:
        """Returns a state of the features alone."""
        return (TwoConvolutions(self.features, name="convs")(images),)


class Down(nn.Module):
    """2x2 max pooling and two convolutions; what was pooled stays in the state."""

    features: int

    @nn.compact
    def __call__(self, state: State) -> State:
        """Returns a state one longer."""
        return *state, TwoConvolutions(self.features, name="convs")(nn.max_pool(state[-1], (2, 2), (2, 2)))


class Up(nn.Module):
    """2x2 transposed convolution, and two convolutions of it beside the features of the same size that have waited."""

    features: int

    @nn.compact
    def __call__(self, state: State) -> State:
        """Returns a state one shorter."""
        *waiting, skipped, x = state
        x = nn.ConvTranspose(self.features, (2, 2), (2, 2), name="up")(x)
        x = jnp.concatenate([skipped, x], axis=-1)
        return *waiting, TwoConvolutions(self.features, name="convs")(x)


class PixelHead(nn.Module):
    """1x1 convolution to the classes."""

    classes: int

    @nn.compact
    def __call__(self, state: State) -> jax.Array:
        """Returns logits of shape (batch, height, width, classes)."""
        return nn.Conv(self.classes, (1, 1), name="conv")(state[-1])
