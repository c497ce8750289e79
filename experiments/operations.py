"""The operations that the models are built from: those of JAX and Flax, or those of `jaxremat` that keep less.

Both give the same parameters, the same initial weights and the same values; what differs is what the backward pass finds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
from flax import linen as nn

import jaxremat.flax
import jaxremat.ops
from experiments.errors import ExperimentError
from jaxremat import name

OpsName = Literal["standard", "lean"]


@dataclass(frozen=True)
class Operations:
    """What a model calls.

    `relu_before_pool` is for a ReLU whose output nobody else keeps, and `norm_relu_conv(norm, conv, x)`, where `conv` makes
    a module, for a convolution that alone reads the ReLU of a batch norm.
    """

    relu: Callable[..., Any]
    relu_before_pool: Callable[..., Any]
    gelu: Callable[..., Any]
    softmax: Callable[..., Any]
    max_pool: Callable[..., Any]
    conv_general_dilated: Callable[..., Any]
    norm_relu_conv: Callable[[Any, Callable[..., nn.Conv], Any], Any]
    BatchNorm: type[nn.BatchNorm]
    LayerNorm: type[nn.LayerNorm]
    Dropout: type[nn.Dropout]


def _norm_relu_conv(norm: nn.BatchNorm, conv: Callable[..., nn.Conv], x: Any) -> Any:
    return conv()(name(nn.relu(name(norm(x), "bn_out")), "relu_out"))


STANDARD = Operations(
    nn.relu,
    nn.relu,
    nn.gelu,
    nn.softmax,
    nn.max_pool,
    jax.lax.conv_general_dilated,
    _norm_relu_conv,
    nn.BatchNorm,
    nn.LayerNorm,
    nn.Dropout,
)
LEAN = Operations(
    jaxremat.ops.relu,
    # The article's SelectiveReLU, which keeps what its derivative needs and no more: here one bit an element.
    partial(jaxremat.ops.relu, keep="bits"),
    jaxremat.ops.gelu,
    jaxremat.ops.softmax,
    jaxremat.ops.max_pool,
    jaxremat.ops.conv_general_dilated,
    jaxremat.flax.norm_relu_conv,
    jaxremat.flax.BatchNorm,
    jaxremat.flax.LayerNorm,
    jaxremat.flax.Dropout,
)


def operations(asked: OpsName) -> Operations:
    """Returns the operations of a name.

    Raises:
        ExperimentError: there are none of this name.
    """
    found = {"standard": STANDARD, "lean": LEAN}
    if asked not in found:
        raise ExperimentError(f"ops is one of {', '.join(get_args(OpsName))}; got {asked!r}.")
    return found[asked]
