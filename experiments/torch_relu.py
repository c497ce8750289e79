"""A ReLU for PyTorch that keeps one bit an element, or its output, for the backward pass.

`F.relu` keeps its output. Where the next operation keeps that same tensor as its input (a convolution, a linear layer,
max pooling) nothing is saved by keeping less, and a mask is 1/32 more. Only where nothing else keeps the output (before
a mean, or an addition) does a bit mask save 31/32 of it.
"""

from typing import Any, Literal, get_args

import torch
from torch.nn import functional

from experiments.errors import ExperimentError

Keep = Literal["native", "mask", "output"]


class SelectiveReLU(torch.autograd.Function):
    """ReLU that keeps a packed bit mask (`keep="mask"`) or its output (`keep="output"`); called through `relu`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: str) -> torch.Tensor:
        """Returns the positive part of `x`."""
        y = x.clamp_min(0)
        ctx.keep, ctx.shape = keep, x.shape
        ctx.save_for_backward(y if keep == "output" else pack_bits(x > 0))
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the cotangent where the output was positive."""
        (kept,) = ctx.saved_tensors
        positive = kept.detach() > 0 if ctx.keep == "output" else unpack_bits(kept, ctx.shape)
        return cotangents[0] * positive, None


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Returns booleans of any shape as uint8 of shape (elements / 8, rounded up), eight to a byte.

    Example:
        >>> import torch
        >>> from experiments.torch_relu import pack_bits, unpack_bits
        >>> mask = torch.tensor([True, False, True] * 3)
        >>> pack_bits(mask).tolist()
        [109, 1]
        >>> bool((unpack_bits(pack_bits(mask), mask.shape) == mask).all())
        True
    """
    flat = functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8)
    packed = torch.zeros(flat.shape[0], dtype=torch.uint8, device=mask.device)
    for bit in range(8):
        packed |= flat[:, bit].to(torch.uint8) << bit
    return packed


def unpack_bits(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns the booleans of `shape` that `pack_bits` packed."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> bits) & 1).bool().flatten()[: shape.numel()].view(shape)


def relu(x: torch.Tensor, keep: Keep = "native") -> torch.Tensor:
    """Returns the positive part of a tensor of any shape.

    Args:
        x: floating point.
        keep: what the backward pass finds: `native` is `F.relu`, `mask` one bit an element, `output` the result.

    Raises:
        ExperimentError: `keep` is none of the three.

    Example:
        >>> import torch
        >>> from experiments.torch_relu import relu
        >>> x = torch.tensor([-1.0, 2.0], requires_grad=True)
        >>> relu(x, "mask").sum().backward()
        >>> x.grad.tolist()
        [0.0, 1.0]
    """
    if keep not in get_args(Keep):
        raise ExperimentError(f"A ReLU keeps one of {', '.join(get_args(Keep))}; got {keep!r}.")
    if keep == "native":
        return functional.relu(x)
    result: Any = SelectiveReLU.apply(x, keep)
    return result
