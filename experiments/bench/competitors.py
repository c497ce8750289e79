"""What a plan has to beat: every way in which `jax.checkpoint` alone is commonly put round a network.

    name                            where                                            stored beside the inputs of regions
    no remat                        nowhere
    per block: nothing              round each block; in a loop, round its step      nothing
    per block: dots, dots_no_batch  likewise                                         products; those without batch axes
    whole net: dots                 round the loss                                   matrix products and convolutions
    whole net: block outputs        round the loss                                   what blocks tag `block_out`
    segments of k                   round runs of k blocks                           nothing
    nested loop of k                round the step of a loop and round runs of k     nothing

Segments leave the last run alone, as `torch.utils.checkpoint.checkpoint_sequential` does: its backward pass follows at once.
Nested loops are those of Haliax (`ScanCheckpointPolicy(nested=True)`): with runs of about the square root of the depth they
need the memory of two square roots (Chen et al. 2016, arXiv:1604.06174, section 4.3).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from experiments.bench.nets import Loop, Net
from experiments.errors import ExperimentError

MOST_LENGTHS = 8


@dataclass(frozen=True, eq=False)
class Competitor:
    """A loss under somebody's rematerialization.

    Attributes:
        name: as in the table above.
        loss: of the arguments and with the values of the network's own loss.
    """

    name: str
    loss: Callable[..., Any]


def competitors(net: Net) -> tuple[Competitor, ...]:
    """Returns the losses of `net` under each use of `jax.checkpoint`, no remat first. Nothing is traced."""
    policies = jax.checkpoint_policies
    losses: dict[str, Callable[..., Any]] = {"no remat": net.loss}
    for name, policy in (
        ("nothing", policies.nothing_saveable),
        ("dots", policies.dots_saveable),
        ("dots_no_batch", policies.dots_with_no_batch_dims_saveable),
    ):
        losses[f"per block: {name}"] = net.build(wrap_block=_checkpoint(net, policy))
    outputs = policies.save_only_these_names("block_out")
    losses["whole net: dots"] = jax.checkpoint(net.loss, policy=policies.dots_saveable)
    losses["whole net: block outputs"] = jax.checkpoint(net.loss, policy=outputs)
    wrap, looped = _checkpoint(net, policies.nothing_saveable), isinstance(net.body, Loop)
    for length in segment_lengths(net):
        losses[f"segments of {length}"] = net.build(group=length, wrap_group=wrap, wrap_last=looped)
    if looped:
        for length in segment_lengths(net):
            losses[f"nested loop of {length}"] = net.build(wrap_block=wrap, group=length, wrap_group=wrap)
    return tuple(Competitor(name, loss) for name, loss in losses.items())


def segment_lengths(net: Net) -> tuple[int, ...]:
    """Returns the lengths of runs that are worth a try, at most `MOST_LENGTHS`: that nearest to the root of the depth among them.

    Runs longer than half the network recompute more than two halves do and hold more at once. In a loop runs are
    divisors of its length; a run of one step would be the step itself.
    """
    if isinstance(net.body, Loop):
        lengths = [k for k in range(2, net.depth // 2 + 1) if net.depth % k == 0]
    else:
        lengths = [k for k in range(1, math.ceil(net.depth / 2) + 1) if k < net.depth]
    if len(lengths) <= MOST_LENGTHS:
        return tuple(lengths)
    root = min(lengths, key=lambda k: abs(math.log(k * k / net.depth)))
    return tuple(sorted({*thinned(lengths, MOST_LENGTHS - 1), root}))


def thinned(numbers: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns at most `most` of the positive, ascending `numbers`, in about equal ratios, the first and the last included.

    Raises:
        ExperimentError: `most` is less than 2.

    Example:
        >>> thinned(range(1, 33), 6)
        (1, 2, 4, 8, 16, 32)
    """
    if most < 2:
        raise ExperimentError(f"The first and the last number stay, so at least 2 must be allowed; got {most}.")
    if len(numbers) <= most:
        return tuple(numbers)
    left, chosen = list(numbers), list[int]()
    ratio = numbers[-1] / numbers[0]
    for i in range(most):
        target = numbers[0] * ratio ** (i / (most - 1))
        nearest = min(left, key=lambda k: abs(math.log(k / target)))
        left.remove(nearest)
        chosen.append(nearest)
    return tuple(sorted(chosen))


def _checkpoint(net: Net, policy: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    # Inside a loop no common subexpressions are in reach, and JAX's documentation advises to say so: the barriers that
    # prevent their elimination only hinder fusion there.
    return partial(jax.checkpoint, policy=policy, prevent_cse=not isinstance(net.body, Loop))
