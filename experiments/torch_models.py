"""The four networks of `experiments.models` in PyTorch: the same modules, tags and mathematics, so that weights carry over.

Modules bear the names of the Flax modules (`stage1_block1.conv1`), and every module that makes a tagged value carries
that tag in its attribute `remat_name`. Networks take images of shape (batch, 3, 32, 32) and return float32 logits of shape
(batch, classes). `parts` lists what a network is composed of, in order, with the blocks that checkpointing wraps.

`commit_statistics` must be called once per training step, see `torch_layers`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import nn

from experiments.errors import ExperimentError
from experiments.models import ModelName
from experiments.torch_layers import Add, BatchNorm, Conv, MatMul, Mean, ReLU, tagged
from experiments.torch_relu import Keep

LAYER_NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Part:
    """A piece of a network: tensor to tensor. `is_block` says whether it is one of the blocks of `experiments.models`."""

    name: str
    call: Callable[[torch.Tensor], torch.Tensor]
    is_block: bool


def as_logits(x: torch.Tensor) -> torch.Tensor:
    """Returns a network's last value as logits: float32, or float64 where that is computed in."""
    return x if x.dtype == torch.float64 else x.float()


class Network(nn.Module):
    """A chain of parts."""

    # Dense layers on flattened images, by path: the shape (channels, height, width) that Flax flattens channels last.
    flattened: dict[str, tuple[int, int, int]] = {}  # noqa: RUF012 - a constant of the class

    def parts(self) -> list[Part]:
        """Returns the parts in order; their composition is the network."""
        raise NotImplementedError

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits of shape (batch, classes)."""
        x = images
        for part in self.parts():
            x = part.call(x)
        return as_logits(x)


def build(model: ModelName, *, classes: int = 10, dropout: float = 0.1, keep_relu: Keep = "native") -> Network:
    """Returns the named network in PyTorch's own initialization; `torch_weights.load_flax` gives it that of Flax.

    Args:
        model: one of `net`, `resnet18`, `wrn16_4`, `vit`.
        classes: number of logits.
        dropout: of `vit`; the others have none. Masks differ between frameworks: compare gradients at 0.
        keep_relu: what each ReLU keeps, see `torch_relu`.

    Raises:
        ExperimentError: there is no such model.

    Example:
        >>> from experiments.torch_models import build
        >>> sum(p.numel() for p in build("net").parameters())
        62006
    """
    networks: dict[str, Callable[[], Network]] = {
        "net": lambda: Net(classes, keep_relu),
        "resnet18": lambda: ResNet18(classes, keep_relu),
        "wrn16_4": lambda: WideResNet16x4(classes, keep_relu),
        "vit": lambda: ViT(classes, dropout),
    }
    if model not in networks:
        raise ExperimentError(f"A model is one of {', '.join(get_args(ModelName))}; got {model!r}.")
    return networks[model]()


class ConvBlock(nn.Module):
    """5x5 convolution without padding, ReLU, 2x2 max pooling."""

    def __init__(self, inputs: int, outputs: int, keep: Keep):
        super().__init__()
        self.conv = tagged(nn.Conv2d(inputs, outputs, 5), "conv_out")
        self.relu = tagged(ReLU(keep), "relu_out")
        self.pool = tagged(nn.MaxPool2d(2), "pool_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns shape (batch, outputs, (height - 4) / 2, (width - 4) / 2)."""
        return self.pool(self.relu(self.conv(x)))


class DenseHead(nn.Module):
    """Three dense layers, 120 and 84 wide and then the logits, with ReLU between them."""

    def __init__(self, inputs: int, classes: int, keep: Keep):
        super().__init__()
        self.fc1, self.relu1 = tagged(nn.Linear(inputs, 120), "fc_out"), tagged(ReLU(keep), "relu_out")
        self.fc2, self.relu2 = tagged(nn.Linear(120, 84), "fc_out"), tagged(ReLU(keep), "relu_out")
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits."""
        return self.fc3(self.relu2(self.fc2(self.relu1(self.fc1(x.flatten(1))))))


class Net(Network):
    """LeNet for colour images."""

    flattened = {"head/fc1": (16, 5, 5)}  # noqa: RUF012 - a constant of the class

    def __init__(self, classes: int, keep: Keep):
        super().__init__()
        self.block1, self.block2 = ConvBlock(3, 6, keep), ConvBlock(6, 16, keep)
        self.head = DenseHead(400, classes, keep)

    def parts(self) -> list[Part]:
        """Two convolutional blocks and the dense head."""
        return [Part(name, self.get_submodule(name), True) for name in ("block1", "block2", "head")]


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions, each with batch norm; a 1x1 projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, keep: Keep):
        super().__init__()
        self.conv1 = tagged(Conv(inputs, outputs, 3, stride), "conv_out")
        self.bn1, self.relu1 = tagged(BatchNorm(outputs), "bn_out"), tagged(ReLU(keep), "relu_out")
        self.conv2, self.bn2 = tagged(Conv(outputs, outputs, 3), "conv_out"), tagged(BatchNorm(outputs), "bn_out")
        self.projects = inputs != outputs or stride != 1
        if self.projects:
            self.conv_shortcut = tagged(Conv(inputs, outputs, 1, stride), "conv_out")
            self.bn_shortcut = tagged(BatchNorm(outputs), "shortcut_out")
        self.add, self.relu2 = Add(), tagged(ReLU(keep), "block_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns shape (batch, outputs, height / stride, width / stride)."""
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        x = self.bn_shortcut(self.conv_shortcut(x)) if self.projects else x
        return self.relu2(self.add(x, y))


class Stem(nn.Module):
    """3x3 convolution, batch norm, ReLU."""

    def __init__(self, outputs: int, keep: Keep):
        super().__init__()
        self.conv1, self.bn1 = tagged(Conv(3, outputs, 3), "conv_out"), tagged(BatchNorm(outputs), "bn_out")
        self.relu1 = tagged(ReLU(keep), "block_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the first activations."""
        return self.relu1(self.bn1(self.conv1(x)))


def _stages(
    network: Network, block: Callable[..., nn.Module], inputs: int, widths: tuple[int, ...], keep: Keep
) -> list[str]:
    names = list[str]()
    for stage, width in enumerate(widths, start=1):
        for i, stride in enumerate((1 if stage == 1 else 2, 1), start=1):
            names.append(f"stage{stage}_block{i}")
            network.add_module(names[-1], block(inputs, width, stride, keep))
            inputs = width
    return names


class ResNet18(Network):
    """ResNet-18 in its form for CIFAR (He et al. 2016, arXiv:1512.03385)."""

    def __init__(self, classes: int, keep: Keep):
        super().__init__()
        self.stem = Stem(64, keep)
        self.blocks = ("stem", *_stages(self, BasicBlock, 64, (64, 128, 256, 512), keep))
        self.pool, self.fc = tagged(Mean((2, 3)), "pool_out"), nn.Linear(512, classes)

    def parts(self) -> list[Part]:
        """The stem, eight residual blocks, pooling with the dense layer."""
        blocks = [Part(name, self.get_submodule(name), True) for name in self.blocks]
        return [*blocks, Part("fc", lambda x: self.fc(self.pool(x)), False)]


class PreActivationBlock(nn.Module):
    """Batch norm and ReLU before each of two 3x3 convolutions; a 1x1 projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, keep: Keep):
        super().__init__()
        self.bn1, self.relu1 = tagged(BatchNorm(inputs), "bn_out"), tagged(ReLU(keep), "relu_out")
        self.projects = inputs != outputs or stride != 1
        if self.projects:
            self.conv_shortcut = tagged(Conv(inputs, outputs, 1, stride), "shortcut_out")
        self.conv1, self.bn2 = (
            tagged(Conv(inputs, outputs, 3, stride), "conv_out"),
            tagged(BatchNorm(outputs), "bn_out"),
        )
        self.relu2, self.conv2 = tagged(ReLU(keep), "relu_out"), tagged(Conv(outputs, outputs, 3), "conv_out")
        self.add = tagged(Add(), "block_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns shape (batch, outputs, height / stride, width / stride)."""
        y = self.relu1(self.bn1(x))
        x = self.conv_shortcut(y) if self.projects else x
        return self.add(x, self.conv2(self.relu2(self.bn2(self.conv1(y)))))


class WideResNet16x4(Network):
    """Wide residual network of 16 layers, 4 times as wide (Zagoruyko and Komodakis 2016, arXiv:1605.07146)."""

    def __init__(self, classes: int, keep: Keep):
        super().__init__()
        self.conv1 = tagged(Conv(3, 16, 3), "conv_out")
        self.blocks = tuple(_stages(self, PreActivationBlock, 16, (64, 128, 256), keep))
        self.bn, self.relu = tagged(BatchNorm(256), "bn_out"), tagged(ReLU(keep), "relu_out")
        self.pool, self.fc = tagged(Mean((2, 3)), "pool_out"), nn.Linear(256, classes)

    def parts(self) -> list[Part]:
        """A convolution, six residual blocks, and the end: norm, ReLU, pooling and the dense layer."""
        blocks = [Part(name, self.get_submodule(name), True) for name in self.blocks]
        end = Part("fc", lambda x: self.fc(self.pool(self.relu(self.bn(x)))), False)
        return [Part("conv1", self.conv1, False), *blocks, end]


class Attention(nn.Module):
    """Multi-head self-attention with dropout on the probabilities."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (tagged(nn.Linear(width, width), part) for part in "qkv")
        self.product, self.softmax = tagged(MatMul(), "scores"), tagged(nn.Softmax(-1), "probs")
        self.dropout, self.mix = nn.Dropout(dropout), tagged(MatMul(), "heads_out")
        self.out = tagged(nn.Linear(width, width), "attention_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mixed tokens, shape (batch, tokens, width)."""
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = self.product(q * q.shape[-1] ** -0.5, k.transpose(2, 3))
        mixed = self.mix(self.dropout(self.softmax(scores)), v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """Transformer encoder layer, norms first."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.ln1, self.ln2 = (tagged(nn.LayerNorm(width, LAYER_NORM_EPSILON), "ln_out") for _ in range(2))
        self.attention = Attention(width, heads, dropout)
        self.dropout1, self.add1, self.dropout2 = nn.Dropout(dropout), Add(), nn.Dropout(dropout)
        self.fc1, self.gelu = tagged(nn.Linear(width, 4 * width), "fc1_out"), tagged(nn.GELU("tanh"), "gelu_out")
        self.fc2, self.add2 = tagged(nn.Linear(4 * width, width), "fc2_out"), tagged(Add(), "block_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns tokens of the shape of `x`."""
        x = self.add1(x, self.dropout1(self.attention(self.ln1(x))))
        return self.add2(x, self.dropout2(self.fc2(self.gelu(self.fc1(self.ln2(x))))))


class ViT(Network):
    """Small vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929): 64 patches of 4x4, mean-pooled tokens."""

    def __init__(self, classes: int, dropout: float, patch: int = 4, width: int = 192, depth: int = 6, heads: int = 3):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (32 // patch) ** 2, width))
        self.add, self.dropout = tagged(Add(), "patch_out"), nn.Dropout(dropout)
        self.blocks = tuple(f"block{i}" for i in range(1, depth + 1))
        for name in self.blocks:
            self.add_module(name, EncoderBlock(width, heads, dropout))
        self.ln = tagged(nn.LayerNorm(width, LAYER_NORM_EPSILON), "ln_out")
        self.pool, self.head = tagged(Mean((1,)), "pool_out"), nn.Linear(width, classes)

    def _embed(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.dropout(self.add(tokens, self.positions))

    def parts(self) -> list[Part]:
        """Patches with positions, the encoder layers, and the end: norm, pooling and the dense layer."""
        blocks = [Part(name, self.get_submodule(name), True) for name in self.blocks]
        end = Part("head", lambda x: self.head(self.pool(self.ln(x))), False)
        return [Part("patches", self._embed, False), *blocks, end]
