"""`ExhaustiveSearch`: a function of few values, every stored set of which is weighed.

Waists, minimum cuts and their mixtures pass by sets that no price of a byte singles out. In a large network that costs
little; in a function of a dozen values it can be half of the recomputation. There all sets can be tried: those that differ
in values which nobody would read are one, and at most 2^12 are left.
"""

from collections.abc import Iterator
from functools import cached_property

from jaxremat.plan.candidate import Candidate, best_of, ranked
from jaxremat.plan.search import Search

MOST_VALUES = 12


class ExhaustiveSearch(Search):
    """Finds the best stored set, exactly; arguments as for `Search`."""

    @cached_property
    def _curve(self) -> list[Candidate]:
        """The candidates that no other one beats in both predicted peak and recomputation, by rising peak."""
        weighed = list[tuple[int, tuple[float, float], frozenset[int]]]()
        for stored, again in self._sets():
            operations = [self.operations.forward[position] for position in again]
            contractions = sum(operation.contraction_flops for operation in operations)
            cost = sum(map(self._cost, operations))
            order = ranked(contractions, cost, self._by_cost)
            weighed.append((self.lifetimes.peak_bytes(stored), order, stored))
        curve = list[Candidate]()
        least = (float("inf"), float("inf"))
        for _, order, stored in sorted(weighed, key=lambda w: w[:2]):
            if order < least:
                least = order
                curve.append(self.of_stored(stored))
        return curve

    def _sets(self) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """Yields every stored set whose values are all read, with the positions of the operations that run again."""
        maker, forward = self.operations.maker, self.operations.forward
        todo = [(frozenset(self.operations.read_backward), frozenset[int](), frozenset[int]())]
        while todo:
            needed, stored, again = todo.pop()
            if not needed:
                yield stored, again
                continue
            number = max(needed)  # whatever reads it is decided
            rest = needed - {number}
            todo.append((rest, stored | {number}, again))
            position = maker[number]
            todo.append((rest | (set(forward[position].reads) - stored), stored, again | {position}))

    def best(self, limit_bytes: int) -> Candidate | None:
        """Returns the cheapest candidate that is expected to stay within a limit; None where there is none."""
        found = [super().best(limit_bytes), *(c for c in self._curve if c.predicted_bytes <= limit_bytes)]
        return best_of(found)

    def leanest(self) -> Candidate:
        """Returns the candidate that is expected to need the least."""
        return min((super().leanest(), *self._curve[:1]), key=lambda c: (c.predicted_bytes, c.order))
