"""Applying a policy to a model: round the whole loss function, or to each of the model's blocks."""

from collections.abc import Callable
from typing import Any, Literal

from flax import linen as nn

import jaxremat
import jaxremat.flax
from experiments.models import WrapBlock, as_it_is
from jaxremat.policy import Nothing

Regions = Literal["net", "block"]


def resolve_regions(policy: jaxremat.Policy, asked: Literal["auto", "net", "block"]) -> Regions:
    """Returns where to apply `policy`.

    `nothing` goes to each block: over the whole network it would recompute everything at once and save no memory. Every
    other policy sees the whole loss function, so that it can choose among all values.

    Example:
        >>> import jaxremat
        >>> from experiments.policies import resolve_regions
        >>> resolve_regions(jaxremat.parse("nothing"), "auto"), resolve_regions(jaxremat.parse("dots"), "auto")
        ('block', 'net')
    """
    if asked != "auto":
        return asked
    return "block" if policy == Nothing() else "net"


def block_wrapper(policy: jaxremat.Policy, regions: Regions) -> WrapBlock:
    """Returns the `wrap_block` for `experiments.models.build`: it applies `policy` to a block's class, or does nothing."""
    if regions == "net":
        return as_it_is

    def wrap(block: type[nn.Module]) -> type[nn.Module]:
        return jaxremat.flax.remat(block, policy)

    return wrap


def wrap_loss(loss: Callable[..., Any], policy: jaxremat.Policy, regions: Regions) -> Callable[..., Any]:
    """Returns `loss` under `policy`, or `loss` itself where the policy was given to the blocks."""
    return jaxremat.remat(loss, policy) if regions == "net" else loss
