"""DenseNet-BC for CIFAR: every layer reads what all layers before it made, so that what is kept grows quadratically."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.bench.nets.modules import image_classifier, module_block
from experiments.bench.nets.net import Net
from experiments.bench.nets.residual import PooledHead
from experiments.bench.nets.sizes import multiple, positive
from jaxremat import name

_HE_NORMAL = nn.initializers.variance_scaling(2.0, "fan_in", "normal")


def densenet_bc(batch_size: int = 64, layers: int = 16, growth: int = 12, size: int = 32, classes: int = 10) -> Net:
    """Returns DenseNet-BC (Huang et al. 2017, arXiv:1608.06993) for images of shape (batch_size, size, size, 3).

    Three stages of `layers` dense layers, of two convolutions each, with halving transitions between them: the default is
    DenseNet-BC-100 with growth rate 12 (100 = 3 x 16 x 2 convolutions, the first one, two transitions, the head).
    """
    positive("densenet_bc", batch_size=batch_size, layers=layers, growth=growth, classes=classes)
    multiple("densenet_bc", 4, "two transitions halve the size", size=size)
    channels = 2 * growth
    first = nn.Conv(channels, (3, 3), use_bias=False, kernel_init=_HE_NORMAL, name="conv1")
    blocks = [module_block(first)]
    for stage in (1, 2, 3):
        for i in range(1, layers + 1):
            blocks.append(module_block(DenseLayer(growth, name=f"stage{stage}_layer{i:02}")))
        channels += layers * growth
        if stage < 3:
            channels //= 2
            blocks.append(module_block(Transition(channels, name=f"stage{stage}_transition")))
    head = module_block(PooledHead(classes, normalise=True, name="head"))
    title = f"densenet_bc{6 * layers + 4}, batch {batch_size}"
    return image_classifier(title, blocks, head, (batch_size, size, size, 3), classes)


def _conv(features: int, size: int, name: str) -> nn.Conv:
    return nn.Conv(features, (size, size), use_bias=False, kernel_init=_HE_NORMAL, name=name)


def _norm_relu(x: jax.Array, name: str) -> jax.Array:
    return nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, name=name)(x))


class DenseLayer(nn.Module):
    """Batch norm, ReLU and convolution, twice: 1x1 to a bottleneck of 4 * growth channels, 3x3 to growth channels."""

    growth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the input with `growth` further channels behind its own."""
        y = _conv(4 * self.growth, 1, "conv1")(_norm_relu(x, "bn1"))
        y = _conv(self.growth, 3, "conv2")(_norm_relu(y, "bn2"))
        return name(jnp.concatenate([x, y], axis=-1), "block_out")


class Transition(nn.Module):
    """Batch norm, ReLU, 1x1 convolution to fewer channels, 2x2 average pooling."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, height / 2, width / 2, features)."""
        x = _conv(self.features, 1, "conv")(_norm_relu(x, "bn"))
        return name(nn.avg_pool(x, (2, 2), (2, 2)), "block_out")
