"""The largest batch that fits, found with few compilations.

A step's memory grows almost linearly with its batch, so a line through two sizes mostly says where it crosses the chip's
memory (regula falsi). It has jumps, where a compiler turns to another layout: when the interval does not shrink, it is
halved, on a logarithmic scale.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

MOST_PROBES = 12
_STEPS_PER_DOUBLING = 32


@dataclass(frozen=True)
class Probe:
    """What compiling with a batch gave: whether it fits, and the bytes that it wants, None where nobody says."""

    fits: bool
    wanted_bytes: int | None


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        batch_size: the largest that fits; 0 where none does.
        is_limit: it is the largest that was allowed, so that a larger one might fit.
        probes: how many batches were compiled for it.
    """

    batch_size: int
    is_limit: bool
    probes: int


def find_largest_batch(
    probe: Callable[[int], Probe],
    *,
    start: int,
    unit: int,
    limit: int,
    memory_bytes: int,
    most_probes: int = MOST_PROBES,
) -> Found:
    """Returns the largest batch that fits, to about 3 %: 32 sizes are told apart between a batch and its double.

    Args:
        probe: compiles with a batch; asked at most once for each.
        start: the batch to begin with, a multiple of `unit`.
        unit: batches are multiples of it, as they are divided over so many chips.
        limit: no batch is larger.
        memory_bytes: of one chip: what "fits" means.
        most_probes: after so many the search ends with the largest batch known to fit, however far the next.

    Raises:
        ValueError: `start` is no multiple of `unit`, or not from `unit` to `limit`.

    Example:
        >>> from experiments.largest_batch import Probe, find_largest_batch
        >>> def probe(batch):
        ...     return Probe(100 + 7 * batch <= 8000, 100 + 7 * batch)
        >>> find_largest_batch(probe, start=64, unit=1, limit=50_000, memory_bytes=8000)
        Found(batch_size=1120, is_limit=False, probes=5)
    """
    if start % unit or not unit <= start <= limit:
        raise ValueError(f"start must be a multiple of {unit}, from {unit} to {limit}; got {start}.")
    highest = limit - limit % unit
    fitting, failing = 0, highest + unit
    wanted = dict[int, int | None]()
    batch = start
    stalls = 0
    while True:
        answer = probe(batch)
        before = _octaves(fitting, failing, unit)
        wanted[batch] = answer.wanted_bytes
        if answer.fits:
            fitting = batch
        else:
            failing = batch
        stalls = stalls + 1 if _octaves(fitting, failing, unit) > before / 2 else 0
        if fitting == highest or failing - fitting <= _step(fitting, unit) or len(wanted) == most_probes:
            return Found(fitting, fitting == highest, len(wanted))
        crossing = None if stalls > 2 else _crossing(wanted, fitting, failing, memory_bytes)
        if crossing is None:
            crossing = math.sqrt(max(fitting, unit) * failing)
            stalls = 0
        batch = highest if failing > highest and crossing >= highest else _beside(crossing, fitting, failing, unit)


def _octaves(fitting: int, failing: int, unit: int) -> float:
    return math.log2(failing / max(fitting, unit))


def _step(batch: int, unit: int) -> int:
    """Returns the distance of the sizes that are told apart from `batch` on: a power of two times `unit`."""
    return unit * max(1, 2 ** ((max(batch, 1) // unit).bit_length() - 1) // _STEPS_PER_DOUBLING)


def _crossing(wanted: dict[int, int | None], fitting: int, failing: int, memory_bytes: int) -> float | None:
    """Returns where a line through the sizes on both sides crosses the memory; or through one size and the origin."""
    low, high = wanted.get(fitting), wanted.get(failing)
    if low and high:
        return fitting + (memory_bytes - low) * (failing - fitting) / (high - low) if high > low else None
    if low:
        return fitting * memory_bytes / low
    return failing * memory_bytes / high if high else None


def _beside(crossing: float, fitting: int, failing: int, unit: int) -> int:
    """Returns a batch between the two, just below the crossing, or just above it where that is known to fit."""
    step = _step(round(crossing), unit)
    below = int(crossing // step) * step
    choice = below if below > fitting else below + step if below == fitting else fitting + _step(fitting, unit)
    if choice >= failing:
        step = _step(max(failing - 1, unit), unit)
        choice = (failing - 1) // step * step
    if not fitting < choice < failing:
        choice = (fitting + failing) // 2 // unit * unit
    return max(choice, fitting + unit)
