"""The layers of the PyTorch networks, where PyTorch's own do otherwise than Flax or cannot be tagged.

A stride-2 3x3 convolution with "SAME" padding pads at the far edge only; BatchNorm keeps the *biased* variance in its
running statistics, and they change once per step, when `commit_statistics` is called, however often the forward pass was
computed again in between.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from experiments.torch_relu import Keep, relu

BATCH_NORM_MOMENTUM = 0.9
BATCH_NORM_EPSILON = 1e-5


def tagged(module: nn.Module, name: str) -> Any:
    """Returns `module`, its result tagged `name` for `names:` policies."""
    module.remat_name = name  # pyright: ignore[reportArgumentType]
    return module


class ReLU(nn.Module):
    """ReLU that keeps what it was told to keep."""

    def __init__(self, keep: Keep):
        super().__init__()
        self.keep: Keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the positive part."""
        return relu(x, self.keep)


class Add(nn.Module):
    """A sum as a module, so that it can be tagged."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the sum."""
        return x + y


class MatMul(nn.Module):
    """A product of stacks of matrices as a module."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the product over the last two axes."""
        return x @ y


class Mean(nn.Module):
    """A mean over axes as a module."""

    def __init__(self, axes: tuple[int, ...]):
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mean."""
        return x.mean(self.axes)


class Conv(nn.Conv2d):
    """Convolution with Flax's "SAME" padding: at stride 2 a 3x3 window takes its one row of zeros from the far edge."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1):
        self.far_edge = size == 3 and stride == 2
        super().__init__(inputs, outputs, size, stride, 0 if self.far_edge else size // 2, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns shape (batch, outputs, height / stride, width / stride)."""
        return super().forward(functional.pad(input, (0, 1, 0, 1)) if self.far_edge else input)


class BatchNorm(nn.Module):
    """BatchNorm over (batch, height, width) with Flax's running statistics.

    The forward pass only puts the batch's statistics aside; `commit_statistics` takes them over. Recomputation under
    `torch.utils.checkpoint` puts the same ones aside again, which changes nothing, whereas `nn.BatchNorm2d` would count
    the batch twice.
    """

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self, features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))
        self.batch_mean: torch.Tensor | None = None
        self.batch_inverse_std: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x`, normalised by the batch's statistics in training and by the running ones in evaluation."""
        if not self.training:
            return functional.batch_norm(x, self.mean, self.var, self.weight, self.bias, eps=BATCH_NORM_EPSILON)
        y, mean, inverse_std = torch.native_batch_norm(
            x, self.weight, self.bias, None, None, True, 0.0, BATCH_NORM_EPSILON
        )
        self.batch_mean, self.batch_inverse_std = mean.detach(), inverse_std.detach()
        return y

    @torch.no_grad()
    def commit(self) -> None:
        """Takes the statistics of the last batch into the running ones, and forgets them."""
        if self.batch_mean is None or self.batch_inverse_std is None:
            return
        # What was kept is 1 / sqrt(var + epsilon), of the biased variance: the one that Flax keeps.
        variance = (self.batch_inverse_std.double().pow(-2) - BATCH_NORM_EPSILON).clamp_min(0).to(self.var.dtype)
        self.mean.lerp_(self.batch_mean, 1 - BATCH_NORM_MOMENTUM)
        self.var.lerp_(variance, 1 - BATCH_NORM_MOMENTUM)
        self.batch_mean = self.batch_inverse_std = None


def commit_statistics(network: nn.Module) -> None:
    """Updates the running statistics of every `BatchNorm`: once per step, after its backward pass."""
    for module in network.modules():
        if isinstance(module, BatchNorm):
            module.commit()
