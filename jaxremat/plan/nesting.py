"""`Nesting`: several levels of recomputation, where one level cannot meet the limit.

A stretch that stores nothing but its border may be too long to be recomputed at once. Then it is run again as the function
itself was run: some of what is recomputed is kept, and starts the recomputation of what lies behind it. The dynamic programme
is that of Rotor (Beaumont et al. 2019, arXiv:1911.13214) with several options for every stretch:

    Opt(m, a, b) = min over the first waist j of
        an option of a..j:  its cost + Opt(m - stored, j, b)
        a..j run again:     Again(m, a, j) + Opt(m - border, j, b)

where `Again` is one level deeper, and is charged for the forward pass up to each waist that it keeps something at; up to its
end the last of its stretches recomputes. It has all the room: what lies behind j is done by then, and its border is gone but
for what the backward pass of a..j reads itself. On a chain of equal stretches this is Revolve's optimum (Griewank and Walther
2000), as far as its levels go.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxremat.plan.operations import Operation
from jaxremat.plan.segments import Option, Segments, Stretch, slot_of

LEVELS = 3
_Table = dict[tuple[int, int], np.ndarray]
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
        count = len(segments.waists)
        chosen = sorted({round(i * (count - 1) / (_MOST_WAISTS - 1)) for i in range(_MOST_WAISTS)})
        self._waists = chosen if count > _MOST_WAISTS else list(range(count))
        ends = set(self._waists)
        self._stretches = {
            (s.start, s.end): segments.in_full(s) for s in segments.stretches if {s.start, s.end} <= ends
        }
        self._slot = slot_of(self._stretches.values(), -(-most_bytes // _SLOTS))
        operations, primal = segments.operations, segments.operations.graph.primal
        steps = [cost(op) if i in primal else 0.0 for i, op in enumerate(operations.forward)]
        self._run = np.concatenate([[0.0], np.cumsum(steps)])
        self._again = list[_Table]()
        for depth in range(LEVELS - 1):
            self._again.append(self._solve(depth, self._waists[1:], is_again=True))
        self._first = [self._solve(depth, self._waists[-1:], is_again=False) for depth in range(LEVELS)]

    def best(self, limit_bytes: int) -> list[frozenset[int]] | None:
        """Returns what is stored on each level, the first being the forward pass' own; None where nothing fits."""
        room = min(limit_bytes // self._slot, _SLOTS)
        root = (self._waists[0], self._waists[-1])
        depth = min(range(LEVELS), key=lambda d: (self._first[d][root][room] if room >= 0 else np.inf, d))
        if room < 0 or not np.isfinite(self._first[depth][root][room]):
            return None
        levels = [set[int]() for _ in range(LEVELS)]
        self._collect(*root, room, depth, levels, is_again=False)
        # The border at the end of what runs again is kept on the level above.
        return [frozenset(level.difference(*levels[:number])) for number, level in enumerate(levels)]

    def _parts(self, a: int, b: int, depth: int, is_again: bool) -> list[_Part]:
        """The ways to treat the first stretch of a..b."""
        parts = list[_Part]()
        # What is at the end of a..b while it runs again.
        waiting = self._stretches[a, b].border_bytes if is_again and (a, b) in self._stretches else 0
        for j in self._waists[self._waists.index(a) + 1 : self._waists.index(b) + 1]:
            if (a, j) not in self._stretches:
                break
            stretch = self._stretches[a, j]
            border = self._slots(_border(stretch).stored_bytes)
            run = self._forward(a, j) if is_again and j != b else 0.0
            forward = stretch.forward_bytes + waiting
            is_end = is_again and j == b  # what is at its end is counted by whoever runs it again
            for option in _on_device(stretch):
                needed = max(option.needed_bytes, option.forward_bytes + waiting, forward)
                parts.append(
                    _Part(
                        j,
                        option,
                        self._slots(option.stored_bytes),
                        self._slots(option.most_bytes if is_end else needed),
                        option.cost + run,
                    )
                )
            if depth and j != b and self._waists.index(j) - self._waists.index(a) > 1:
                parts.append(_Part(j, None, border, max(border, self._slots(forward)), run))
        return parts

    def _forward(self, a: int, b: int) -> float:
        """The cost of the forward pass between two waists."""
        waists = self._segments.waists
        return float(self._run[waists[b] + 1] - self._run[waists[a] + 1])

    def _slots(self, size_bytes: int) -> int:
        return -(-size_bytes // self._slot)

    def _solve(self, depth: int, ends: Sequence[int], is_again: bool) -> _Table:
        table: _Table = {}
        waists = self._waists
        for i in range(len(waists) - 2, -1, -1):
            for b in (b for b in ends if b > waists[i]):
                best = np.full(_SLOTS + 1, np.inf)
                for part in self._parts(waists[i], b, depth, is_again):
                    costs = self._costs(table, waists[i], b, part, depth)
                    np.minimum(best[part.needed :], costs[part.needed :], out=best[part.needed :])
                table[waists[i], b] = best
        return table

    def _costs(self, table: _Table, a: int, b: int, part: _Part, depth: int) -> np.ndarray:
        """The cost of a part and of what follows it, for every room."""
        costs = np.full(_SLOTS + 1, float(part.cost))
        if part.option is None:
            costs += self._again[depth - 1][a, part.end]
        if part.end != b:
            costs += _shifted(table[part.end, b], part.stored)
        return costs

    def _collect(self, a: int, b: int, room: int, depth: int, levels: Sequence[set[int]], is_again: bool) -> None:
        """Adds what is stored from a to b, on the first of some levels, and what is kept on the others when it runs again."""
        while a != b:
            table = (self._again if is_again else self._first)[depth]
            parts = [part for part in self._parts(a, b, depth, is_again) if part.needed <= room]
            part = min(parts, key=lambda q: self._costs(table, a, b, q, depth)[room])
            if part.option is None:
                levels[0].update(_border(self._stretches[a, part.end]).stored)
                self._collect(a, part.end, room, depth - 1, levels[1:], is_again=True)
            else:
                levels[0].update(part.option.stored)
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
