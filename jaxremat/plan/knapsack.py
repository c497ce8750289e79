"""`Knapsack`: which stretches, and which option for each, so that the bytes in use never exceed a limit; all limits at once.

A multiple-choice knapsack over prefixes: while a stretch is in its backward pass, what all earlier stretches store is still
there, and what later ones stored is gone. So with a room of m bytes left at waist a

    best(a, m) = min over stretches a..b and their options that need at most m:  cost + best(b, m - stored)
"""

from collections.abc import Sequence

import numpy as np

from jaxremat.plan.segments import Option, Stretch, slot_of

_SLOTS = 8192


class Knapsack:
    """The cheapest choice for every limit up to one.

    Args:
        stretches: all of them.
        waists: the number of waists, both ends included.
        most_bytes: the largest limit; beside the inputs, as all of them.
    """

    def __init__(self, stretches: Sequence[Stretch], waists: int, most_bytes: int) -> None:
        self._last = waists - 1
        self._slot = slot_of(stretches, most_bytes // _SLOTS)
        self._slots = most_bytes // self._slot + 1
        self._moves: list[list[tuple[Stretch, Option, int, int]]] = [[] for _ in range(waists)]
        for stretch in stretches:
            for option in stretch.options:
                stored = -(-option.stored_bytes // self._slot)
                needed = max(stored, -(-max(option.needed_bytes, stretch.forward_bytes) // self._slot))
                self._moves[stretch.start].append((stretch, option, stored, needed))
        self._best = np.full((waists, self._slots), np.inf)
        self._best[self._last] = 0.0
        for waist in range(self._last - 1, -1, -1):
            best = self._best[waist]
            for stretch, option, stored, needed in self._moves[waist]:
                if needed < self._slots:
                    costs = self._best[stretch.end, needed - stored : self._slots - stored] + option.cost
                    np.minimum(best[needed:], costs, out=best[needed:])

    def best(self, limit_bytes: int) -> tuple[frozenset[int], frozenset[int]] | None:
        """Returns the numbers of the values that are stored under a limit, and of those that are kept in host memory.

        None where nothing fits.
        """
        room = min(limit_bytes // self._slot, self._slots - 1)
        if room < 0 or not np.isfinite(self._best[0, room]):
            return None
        waist = 0
        found, host = set[int](), set[int]()
        while waist != self._last:
            stretch, option, stored, _ = min(
                (move for move in self._moves[waist] if move[3] <= room),
                key=lambda move: move[1].cost + self._best[move[0].end, room - move[2]],
            )
            found |= option.stored
            host |= option.host
            waist, room = stretch.end, room - stored
        return frozenset(found), frozenset(host)
