"""`cheapest`: which stretches, and which option for each, so that the bytes in use never exceed a limit.

A multiple-choice knapsack over prefixes: while a stretch is in its backward pass, what all earlier stretches store is still
there, and what later ones stored is gone. The programme runs over (waist, bytes stored so far).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxremat.plan.segments import Option, Stretch

_SLOTS = 2048


@dataclass(frozen=True)
class Solution:
    """The chosen stretches in order, their options, and the cost of what runs again."""

    chosen: Sequence[tuple[Stretch, Option]]
    cost: float

    @property
    def stored(self) -> frozenset[int]:
        """The numbers of all stored values."""
        return frozenset[int]().union(*(option.stored for _, option in self.chosen))


def cheapest(stretches: Sequence[Stretch], waists: int, limit_bytes: int) -> Solution | None:
    """Returns the cheapest solution under a limit, or None where there is none.

    Args:
        stretches: all of them, ordered by their end.
        waists: the number of waists, both ends included.
        limit_bytes: of what is in use beside the inputs.
    """
    if limit_bytes <= 0:
        return None
    slot = _slot(stretches, limit_bytes)
    slots = limit_bytes // slot + 1
    best = np.full((waists, slots), np.inf)
    best[0, 0] = 0.0
    came = np.full((waists, slots), -1, np.int64)  # index of the move
    before = np.zeros((waists, slots), np.int64)
    moves = list[tuple[Stretch, Option]]()
    for stretch in stretches:
        for option in stretch.options:
            # What earlier stretches store, at most.
            room = (limit_bytes - max(option.most_bytes, stretch.forward_bytes)) // slot
            step = -(-option.stored_bytes // slot)
            count = min(room, slots - 1 - step) + 1
            if count <= 0:
                continue
            costs = best[stretch.start, :count] + option.cost
            target = best[stretch.end, step : step + count]
            better = costs < target
            if better.any():
                target[better] = costs[better]
                came[stretch.end, step : step + count][better] = len(moves)
                before[stretch.end, step : step + count][better] = np.arange(count)[better]
                moves.append((stretch, option))
    waist = waists - 1
    if not np.isfinite(best[waist]).any():
        return None
    place = int(np.argmin(best[waist]))
    cost = float(best[waist, place])
    chosen = list[tuple[Stretch, Option]]()
    while waist:
        stretch, option = moves[came[waist, place]]
        chosen.append((stretch, option))
        waist, place = stretch.start, int(before[waist, place])
    return Solution(chosen[::-1], cost)


def _slot(stretches: Sequence[Stretch], limit_bytes: int) -> int:
    """The bytes that are told apart: exact where sizes have a large common divisor."""
    common = math.gcd(*(option.stored_bytes for stretch in stretches for option in stretch.options))
    finest = max(1, limit_bytes // _SLOTS)
    return common if common >= finest else finest
