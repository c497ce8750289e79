"""`Nesting`: several levels of recomputation, where one level cannot meet the limit.

A stretch that stores nothing but its border may be too long to be recomputed at once. Then it is run again as the function
itself was run: some of what is recomputed is kept, and starts the recomputation of what lies behind it. The dynamic programme
is that of Rotor (Beaumont et al. 2019, arXiv:1911.13214) with several options for every stretch:

    Opt(m, a, b) = min over the first waist j of
        an option of a..j:  cost + Opt(m - stored, j, b)
        a..j run again:     forward(a..j) + Opt(m - border, a, j) + Opt(m - border, j, b), one level deeper on the left

On a chain of equal stretches this is Revolve's optimum (Griewank and Walther 2000).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxremat.plan.operations import Operation
from jaxremat.plan.segments import Option, Segments, Stretch

LEVELS = 3
_SLOTS = 1024
_MOST_WAISTS = 22


@dataclass(frozen=True)
class _Part:
    """A stretch in slots; `option` is None where it is run again."""

    end: int
    option: Option | None
    stored: int
    needed: int
    cost: float


class Nesting:
    """Solves all limits up to one at once.

    Args:
        segments: the function's stretches.
        cost: of running an operation again.
        most_bytes: the largest limit, beside the inputs.
    """

    def __init__(self, segments: Segments, cost: Callable[[Operation], float], most_bytes: int) -> None:
        self._segments = segments
        self._slot = max(1, -(-most_bytes // _SLOTS))
        count = len(segments.waists)
        chosen = sorted({round(i * (count - 1) / (_MOST_WAISTS - 1)) for i in range(_MOST_WAISTS)})
        self._waists = chosen if count > _MOST_WAISTS else list(range(count))
        self._stretches = {(s.start, s.end): s for s in segments.stretches}
        operations, primal = segments.operations, segments.operations.graph.primal
        steps = [cost(op) if i in primal else 0.0 for i, op in enumerate(operations.forward)]
        self._run = np.concatenate([[0.0], np.cumsum(steps)])
        self._tables = list[dict[tuple[int, int], np.ndarray]]()
        for depth in range(LEVELS):
            self._tables.append(self._solve(depth))

    def best(self, limit_bytes: int) -> list[frozenset[int]] | None:
        """Returns what is stored on each level, the first being the forward pass' own; None where nothing fits."""
        room = min(limit_bytes // self._slot, _SLOTS)
        root = (self._waists[0], self._waists[-1])
        level = min(range(LEVELS), key=lambda d: (self._tables[d][root][room] if room >= 0 else np.inf, d))
        if room < 0 or not np.isfinite(self._tables[level][root][room]):
            return None
        levels = [set[int]() for _ in range(LEVELS)]
        self._collect(*root, room, level, 0, levels)
        # The border at the end of what runs again is kept on the level above.
        return [frozenset(level.difference(*levels[:number])) for number, level in enumerate(levels)]

    def _parts(self, a: int, b: int, depth: int) -> list[_Part]:
        """The ways to treat the first stretch of a..b."""
        parts = list[_Part]()
        slot = self._slot
        for j in self._waists[self._waists.index(a) + 1 : self._waists.index(b) + 1]:
            if (a, j) not in self._stretches:
                break
            stretch = self._stretches[a, j]
            border = _border(stretch).stored_bytes
            for option in _on_device(stretch):
                # The border at the very end is there already, or is none.
                known = border if j == b else 0
                needed = max(option.most_bytes - known, stretch.forward_bytes)
                parts.append(
                    _Part(j, option, -(-(option.stored_bytes - known) // slot), -(-needed // slot), option.cost)
                )
            if depth and j != b and self._waists.index(j) - self._waists.index(a) > 1:
                again = float(self._run[self._segments.waists[j] + 1] - self._run[self._segments.waists[a] + 1])
                needed = -(-(border + stretch.forward_bytes) // slot)
                parts.append(_Part(j, None, -(-border // slot), needed, again))
        return parts

    def _solve(self, depth: int) -> dict[tuple[int, int], np.ndarray]:
        table = dict[tuple[int, int], np.ndarray]()
        waists = self._waists
        for i in range(len(waists) - 2, -1, -1):
            for b in waists[i + 1 :]:
                best = np.full(_SLOTS + 1, np.inf)
                for part in self._parts(waists[i], b, depth):
                    costs = self._costs(table, waists[i], b, part, depth)
                    np.minimum(best[part.needed :], costs[part.needed :], out=best[part.needed :])
                table[waists[i], b] = best
        return table

    def _costs(self, table: dict[tuple[int, int], np.ndarray], a: int, b: int, part: _Part, depth: int) -> np.ndarray:
        """The cost of a part and of what follows it, for every room."""
        costs = np.full(_SLOTS + 1, float(part.cost))
        if part.option is None:
            costs += _shifted(self._tables[depth - 1][a, part.end], part.stored)
        if part.end != b:
            costs += _shifted(table[part.end, b], part.stored)
        return costs

    def _collect(self, a: int, b: int, room: int, depth: int, level: int, levels: Sequence[set[int]]) -> None:
        while a != b:
            table = self._tables[depth]
            parts = [part for part in self._parts(a, b, depth) if part.needed <= room]
            part = min(parts, key=lambda q: self._costs(table, a, b, q, depth)[room])
            if part.option is None:
                levels[level].update(_border(self._stretches[a, part.end]).stored)
                self._collect(a, part.end, room - part.stored, depth - 1, level + 1, levels)
            else:
                levels[level].update(part.option.stored)
            room -= part.stored
            a = part.end


def _border(stretch: Stretch) -> Option:
    """The option that stores no more than the border at the end of a stretch."""
    return min(_on_device(stretch), key=lambda option: option.stored_bytes)


def _on_device(stretch: Stretch) -> list[Option]:
    """The options that keep nothing in host memory: several levels are for the device alone."""
    return [option for option in stretch.options if not option.host]


def _shifted(costs: np.ndarray, slots: int) -> np.ndarray:
    """Costs for a room that is smaller by so many slots."""
    if slots <= 0:
        return costs
    shifted = np.full_like(costs, np.inf)
    if slots < len(costs):
        shifted[slots:] = costs[:-slots]
    return shifted
