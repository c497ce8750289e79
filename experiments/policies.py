"""Applying a policy to a model: round the whole loss function, or to each of the model's blocks."""

from collections.abc import Callable
from typing import Any, Literal

from flax import linen as nn

import jaxremat
import jaxremat.flax
from experiments.models import WrapBlock, as_it_is
from jaxremat.policy import Nothing

Regions = Literal["net", "block"]

# What begins a policy, in a list of them. A test holds that these are all that the grammar knows.
KINDS = ("names", "ops", "paths", "segments", "values", "loops", "offload", "budget")
# Those whose argument is itself a list.
_LISTS = ("names", "ops", "paths", "values", "loops")


def split_policies(text: str) -> list[jaxremat.Policy]:
    """Returns the policies of a list such as `dots,names:a,b,segments:sqrt`, each once.

    A comma ends a policy only where the next item begins one: with a kind and a colon, or as a policy without argument.
    Another item belongs to the list before it, if there is one. So a tag that is spelt like a policy (`dots`) must come
    first in its list.

    Raises:
        PolicyError: an item is no policy and no part of one.

    Example:
        >>> from experiments.policies import split_policies
        >>> [str(policy) for policy in split_policies("dots,names:a,b,segments:sqrt")]
        ['dots', 'names:a,b', 'segments:sqrt']
    """
    spellings = list[str]()
    for item in text.split(","):
        if spellings and not _begins_a_policy(item) and _takes_more(spellings[-1]):
            spellings[-1] += f",{item}"
        else:
            spellings.append(item)
    return list(dict.fromkeys(map(jaxremat.parse, spellings)))


def _begins_a_policy(item: str) -> bool:
    first = item.partition("+")[0].strip()
    kind, colon, _ = first.partition(":")
    if colon:
        return kind in KINDS
    try:
        return bool(jaxremat.parse(first))
    except jaxremat.PolicyError:
        return False


def _takes_more(spelling: str) -> bool:
    last = spelling.rpartition("+")[2].strip()
    return last.removeprefix("offload:").partition(":")[0] in _LISTS


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
