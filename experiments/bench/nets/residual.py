"""Residual networks: ResNet-18 and WRN-16-4 for CIFAR-10 from `experiments.models`, and ResNet-50 for ImageNet."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.bench.nets.modules import image_classifier, module_block
from experiments.bench.nets.net import Net
from experiments.bench.nets.sizes import positive
from experiments.models import BasicBlock, PreActivationBlock, Stem, global_pool
from experiments.operations import STANDARD
from jaxremat import name

_HE_NORMAL = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
_TRAIN = True


def resnet18(batch_size: int = 512, size: int = 32, classes: int = 10) -> Net:
    """Returns the `resnet18` of `experiments.models` for images of shape (batch_size, size, size, 3)."""
    positive("resnet18", batch_size=batch_size, size=size, classes=classes)
    blocks = [module_block(Stem(64, jnp.float32, STANDARD, name="stem"), _TRAIN)]
    for stage, features in enumerate((64, 128, 256, 512), start=1):
        for i, stride in enumerate((1 if stage == 1 else 2, 1), start=1):
            block = BasicBlock(features, stride, jnp.float32, STANDARD, name=f"stage{stage}_block{i}")
            blocks.append(module_block(block, _TRAIN))
    head = module_block(PooledHead(classes, name="head"))
    return image_classifier(f"resnet18, batch {batch_size}", blocks, head, (batch_size, size, size, 3), classes)


def wrn16_4(batch_size: int = 512, size: int = 32, classes: int = 10) -> Net:
    """Returns the `wrn16_4` of `experiments.models` for images of shape (batch_size, size, size, 3)."""
    positive("wrn16_4", batch_size=batch_size, size=size, classes=classes)
    conv1 = nn.Conv(16, (3, 3), use_bias=False, kernel_init=_HE_NORMAL, name="conv1")
    blocks = [module_block(conv1)]
    for stage, features in enumerate((64, 128, 256), start=1):
        for i, stride in enumerate((1 if stage == 1 else 2, 1), start=1):
            block = PreActivationBlock(features, stride, jnp.float32, STANDARD, name=f"stage{stage}_block{i}")
            blocks.append(module_block(block, _TRAIN))
    head = module_block(PooledHead(classes, normalise=True, name="head"))
    return image_classifier(f"wrn16_4, batch {batch_size}", blocks, head, (batch_size, size, size, 3), classes)


def resnet50(
    batch_size: int = 184,
    size: int = 224,
    classes: int = 1000,
    stages: tuple[int, ...] = (3, 4, 6, 3),
    width: int = 64,
) -> Net:
    """Returns ResNet-50 (He et al. 2016, arXiv:1512.03385) for images of shape (batch_size, size, size, 3).

    As everywhere today the 3x3 convolution of a bottleneck has its stride, not the first 1x1. `stages` are the numbers of
    blocks, `width` the channels of the first stage.
    """
    positive("resnet50", batch_size=batch_size, size=size, classes=classes, width=width)
    positive("resnet50", **{f"stages[{i}]": depth for i, depth in enumerate(stages)})
    blocks = [module_block(ImageStem(width, name="stem"))]
    for stage, depth in enumerate(stages, start=1):
        for i in range(1, depth + 1):
            stride = 2 if stage > 1 and i == 1 else 1
            block = Bottleneck(width * 2 ** (stage - 1), stride, name=f"stage{stage}_block{i}")
            blocks.append(module_block(block))
    head = module_block(PooledHead(classes, name="head"))
    title = f"resnet{2 + 3 * sum(stages)}, batch {batch_size}"
    return image_classifier(title, blocks, head, (batch_size, size, size, 3), classes)


def _conv(features: int, size: int, stride: int, name: str) -> nn.Conv:
    # Half the kernel on either side, as in the original; "SAME" pads otherwise at stride 2.
    padding = [(size // 2, size // 2)] * 2
    return nn.Conv(features, (size, size), (stride, stride), padding, use_bias=False, kernel_init=_HE_NORMAL, name=name)


def _batch_norm(name: str) -> nn.BatchNorm:
    return nn.BatchNorm(use_running_average=False, momentum=0.9, name=name)


class ImageStem(nn.Module):
    """7x7 convolution of stride 2, batch norm, ReLU, 3x3 max pooling of stride 2."""

    features: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns features of shape (batch, height / 4, width / 4, features)."""
        x = nn.relu(_batch_norm("bn1")(_conv(self.features, 7, 2, "conv1")(images)))
        padding: Any = [(1, 1), (1, 1)]  # pairs are documented, Flax annotates a string
        return name(nn.max_pool(x, (3, 3), (2, 2), padding), "block_out")


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution, each with batch norm, round a shortcut; a 1x1 projection where the shape changes."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, height / stride, width / stride, 4 * features)."""
        y = nn.relu(_batch_norm("bn1")(_conv(self.features, 1, 1, "conv1")(x)))
        y = nn.relu(_batch_norm("bn2")(_conv(self.features, 3, self.stride, "conv2")(y)))
        y = _batch_norm("bn3")(_conv(4 * self.features, 1, 1, "conv3")(y))
        if x.shape != y.shape:
            x = _batch_norm("bn_shortcut")(_conv(4 * self.features, 1, self.stride, "conv_shortcut")(x))
        return name(nn.relu(x + y), "block_out")


class PooledHead(nn.Module):
    """Mean over all positions and a dense layer, after batch norm and ReLU where the network is pre-activated."""

    classes: int
    normalise: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, classes)."""
        if self.normalise:
            x = nn.relu(_batch_norm("bn")(x))
        return nn.Dense(self.classes, name="fc")(global_pool(x))
