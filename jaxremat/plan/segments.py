"""`Segments`: a function cut at its waists, and for every stretch between two of them what storing and recomputing cost.

A *waist* is a place between two forward operations that fewer bytes cross than the places beside it. Stretches between
any two waists are weighed with several *options*: to store what the minimum cut at some price of a byte stores, and to
recompute the rest from the border before. What an option needs at most while its stretch is in its backward pass is found
by `Lifetimes`; that is its own affair alone, so that the best combination can be found by dynamic programming.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import neg

from jaxremat.plan.cut import StoredSet
from jaxremat.plan.lifetimes import Lifetimes
from jaxremat.plan.operations import Operation

# So much is simulated in one search, in operations; the length of the longest stretch follows from it.
_WORK = 6_000_000
_SHORTEST = 6
_FEWEST_WAISTS, _MOST_WAISTS, _WAISTS_OF_LONGEST = 24, 128, 5


@dataclass(frozen=True)
class Option:
    """One way to treat a stretch.

    Attributes:
        stored: the numbers of the values that it stores, the border at its end included.
        stored_bytes: their bytes in device memory.
        cost: of what runs again, and of what goes to the host and back.
        most_bytes: the most in use during its backward pass, but inputs and what earlier stretches store.
        host: those of the stored values that are kept in host memory.
        forward_bytes: the most in use during its forward pass, but inputs and what earlier stretches store.
    """

    stored: frozenset[int]
    stored_bytes: int
    cost: float
    most_bytes: int
    host: frozenset[int] = frozenset()
    forward_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """The most in use in either pass."""
        return max(self.stored_bytes, self.most_bytes, self.forward_bytes)


@dataclass(frozen=True)
class Stretch:
    """The forward operations behind waist `start` up to waist `end`, and the ways to treat them.

    Attributes:
        start, end: the waists.
        forward_bytes: the most in use in its forward pass, but inputs and what is stored before it, if it keeps nothing.
        options: the ways.
        border_bytes: of the values at its end, those that its own backward pass reads, and that are there until then.
    """

    start: int
    end: int
    forward_bytes: int
    options: Sequence[Option]
    border_bytes: int = 0


class Segments:
    """All stretches of one graph; `host_price` is what a byte in host memory costs, where values may be kept there.

    Attributes:
        waists: positions of forward operations behind which the function may be cut; the first is -1, the last the end.
        stretches: for every pair of waists the ways to treat what lies between, but for those that two shorter stretches
            come to.
    """

    def __init__(
        self,
        lifetimes: Lifetimes,
        sets: Sequence[StoredSet],
        cost: Callable[[Operation], float],
        host_price: float | None = None,
    ) -> None:
        self.lifetimes, self.cost, self.host_price = lifetimes, cost, host_price
        self.operations = lifetimes.operations
        self.sets = [s.stored for s in sets]
        self.windows = self._windows()
        self._by_place = sorted(range(self.operations.forward_values), key=self.operations.place.__getitem__)
        self.waists = self._waists()
        self._passing = {waist: self._passed(waist) for waist in self.waists[1:-1]}
        last = len(self.waists) - 1
        longest = self._longest()
        self.stretches = [self._stretch(a, b) for b in range(1, last + 1) for a in range(max(0, b - longest), b)]

    def _waists(self) -> list[int]:
        """Places where few bytes cross, for their surroundings; the narrowest where there are more than can be weighed."""
        operations = self.operations
        places = operations.crossing
        wholes = {n for op in operations.forward if op.needs_whole for n in op.reads}
        found = list[int]()
        seen = set[tuple[int, ...]]()
        for position, place in enumerate(places):
            if place and place not in seen:
                seen.add(place)
                newest = place[-1]
                # What is fused is stored in place of what it is made from only where it is written anyway.
                maker = operations.forward[operations.maker[newest]]
                if newest in wholes or maker.is_sum or not maker.is_fused:
                    found.append(position)
        most = min(_MOST_WAISTS, max(_FEWEST_WAISTS, _WAISTS_OF_LONGEST * self._longest()))
        # Of neighbours that with more values goes first, such as one inside of a residual block, then the wider, so that waists
        # stay spread over the function.
        while len(found) > most:
            found.pop(max(range(len(found)), key=lambda i: self._dispensable(found, i)))
        return [-1, *found, len(places) - 1]

    def _dispensable(self, waists: Sequence[int], i: int) -> tuple[bool, float, int]:
        """What makes one waist less worth keeping than another."""
        places, size = self.operations.crossing, self.operations.sizes
        near = waists[max(0, i - 1) : i + 2]
        counts = [len(places[q]) for q in near]
        widths = [sum(size[n] for n in places[q]) for q in near]
        own = min(i, 1)
        edges = [-1, *waists, len(places)]
        return counts[own] > min(counts), widths[own] / max(1, min(widths)), edges[i] - edges[i + 2]

    def _longest(self) -> int:
        """How many units between neighbouring waists a stretch may have.

        Longer ones recompute much at once and are rarely worth their work; those that store much are as well put together
        from shorter ones. The work of all up to a length grows with its square, whatever the number of waists.
        """
        size = len(self.operations.forward) + len(self.operations.backward)
        options = (len(self.sets) + 1) * (1 if self.host_price is None else 3)
        return max(_SHORTEST, int((2 * _WORK / (size * options)) ** 0.5))

    def _windows(self) -> list[int]:
        """For every backward operation the newest forward operation that it or a later one reads from: never rising."""
        operations = self.operations
        first, place = operations.forward_values, operations.place
        newest = 0
        windows = list[int]()
        for operation in reversed(operations.backward):
            newest = max(newest, *(place[n] for n in operation.reads if n < first), 0)
            windows.append(newest)
        return windows[::-1]

    def _passed(self, waist: int) -> frozenset[int]:
        """The values made up to a waist that are read behind it, or by the backward pass of what lies behind it."""
        operations = self.operations
        late = (operations.backward[t].reads for t, newest in enumerate(self.windows) if newest > waist)
        wanted = {n for reads in late for n in reads if n < operations.forward_values}
        return frozenset(n for n in wanted.union(operations.crossing[waist]) if operations.place[n] <= waist)

    def in_full(self, stretch: Stretch) -> Stretch:
        """Returns a stretch with those ways, too, that are as well put together from shorter ones, if these run once."""
        return self._stretch(stretch.start, stretch.end, is_full=True)

    def _stretch(self, a: int, b: int, is_full: bool = False) -> Stretch:
        operations = self.operations
        start, end = self.waists[a], self.waists[b]
        is_last = b == len(self.waists) - 1
        first, last = (bisect_right(self._by_place, place, key=operations.place.__getitem__) for place in (start, end))
        given, inside = set(self._by_place[:first]), set(self._by_place[first:last])
        border = frozenset() if is_last else frozenset(operations.crossing[end]) - given
        until = bisect_left(self.windows, -start, key=neg)
        window = range(0 if is_last else bisect_left(self.windows, -end, key=neg), until)
        between = [self._passing[w] - given for w in self.waists[a + 1 : b] if not is_full]
        options = dict[tuple[frozenset[int], frozenset[int]], Option]()
        for stored in [*self.sets, frozenset[int]()]:
            kept = border | (stored & inside)
            if kept != border and any(passing <= kept for passing in between):
                continue  # two shorter stretches come to the same, but that they keep the border between them longer
            for host in (frozenset[int](),) if self.host_price is None else (frozenset[int](), kept - border, kept):
                if (kept, host) in options:
                    continue
                profile = self.lifetimes.backward(kept, given, window, host=host)
                options[kept, host] = Option(
                    kept,
                    self._bytes(kept - host, profile.narrow),
                    sum(self.cost(operations.forward[e]) for e in profile.recomputed)
                    + (self.host_price or 0.0) * sum(operations.sizes[n] for n in host),
                    profile.most_bytes,
                    host,
                    self._forward_bytes(kept - host, start, end, profile.narrow),
                )
        wanted = {n for t in window for n in operations.backward[t].reads}
        return Stretch(
            a,
            b,
            self._forward_bytes((), start, end),
            _undominated(options.values()),
            sum(operations.sizes[n] for n in border & wanted),
        )

    def _bytes(self, numbers: Iterable[int], narrow: Collection[int]) -> int:
        sizes = self.operations.sizes
        return sum(sizes[n] // 2 if n in narrow else sizes[n] for n in numbers)

    def _forward_bytes(self, kept: Iterable[int], start: int, end: int, narrow: Collection[int] = ()) -> int:
        """The most in use while the operations of a stretch run, if some of its values are kept beyond their last use.

        What crosses its start is stored before it, and does not count.
        """
        ends = self.lifetimes.forward_ends
        live = self.lifetimes.forward_bytes[start + 1 : end + 1].copy()
        for number in self.operations.crossing[start] if start >= 0 else ():
            if number in ends:
                live[: max(0, ends[number] - start)] -= self.operations.least_sizes[number]
        for number in kept:
            after = ends[number] + 1 if number in ends else self.operations.place[number]
            live[max(0, after - start - 1) :] += self._bytes((number,), narrow)
        return int(live.max(initial=0))


def slot_of(stretches: Iterable[Stretch], least_bytes: int) -> int:
    """Returns the unit to count bytes in: at least so many, and what all stored sizes share if that is not far more.

    Then nothing is rounded but what is needed beside them.
    """
    common = math.gcd(*(option.stored_bytes for stretch in stretches for option in stretch.options)) or 1
    least_bytes = max(1, least_bytes)
    return common if least_bytes <= common <= 64 * least_bytes else least_bytes


def _undominated(options: Iterable[Option]) -> list[Option]:
    kept = list[Option]()
    for option in sorted(options, key=lambda o: (o.cost, o.stored_bytes, o.most_bytes)):
        if not any(
            k.stored_bytes <= option.stored_bytes
            and k.most_bytes <= option.most_bytes
            and k.forward_bytes <= option.forward_bytes
            for k in kept
        ):
            kept.append(option)
    return kept
