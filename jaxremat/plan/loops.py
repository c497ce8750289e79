"""`LoopSearch`: a function with scans, each variant of what is stored inside of their bodies searched like a plain function.

What a body stores is stored once for every step. So its minimum cuts are solved for one step, at prices of a byte that
hold for all scans at once; and where that is not enough, scans are cut into runs of steps, of which only the carries are
stored (Chen et al. 2016, section 4.3).
"""

import math
from collections.abc import Callable
from functools import cached_property

from jaxremat import policy as p
from jaxremat.choice import Mark, small_and_marked
from jaxremat.inline import inline
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.cut import StoredSet, stored_sets
from jaxremat.plan.exhaustive import MOST_VALUES, ExhaustiveSearch
from jaxremat.plan.operations import Operation
from jaxremat.plan.search import Bodies, Search, exactly
from jaxremat.plan.subject import Picture, Subject

_MOST_RUNS = 3
_MOST_SETS_OF_RUNS = 4


class LoopSearch(Search):
    """Finds stored sets of a function and of the bodies of its scans; arguments as for `Search`."""

    def __init__(self, subject: Subject, cost: Callable[[Operation], float], platform: str, chips: int = 1) -> None:
        super().__init__(subject, cost, platform, (), chips)
        probe = subject.cut(p.Loops(p.Nothing(), ((0, p.Nothing()),) * subject.scans))
        self._scans = [
            (program.times, Picture(list(program.cuts.values())[-1], cost, platform) if program.cuts else None)
            for program in probe.inner
        ]
        self._variants = dict[Bodies, Search]()

    @cached_property
    def _main(self) -> tuple[int, Picture] | None:
        """The scan that keeps most."""
        found = [(times, picture) for times, picture in self._scans if picture is not None]

        def kept(scan: tuple[int, Picture]) -> int:
            times, picture = scan
            return times * sum(picture.operations.sizes[n] for n in picture.operations.read_backward)

        return max(found, key=kept, default=None)

    @cached_property
    def _main_sets(self) -> list[StoredSet]:
        return [] if self._main is None else stored_sets(self._main[1].operations, self._cost)

    @cached_property
    def bodies(self) -> list[Bodies]:
        """What may be stored inside of the scans, the least recomputation first."""
        if self._main is None:
            return []
        length = self._main[0]
        runs = sorted((n for n in range(2, length) if length % n == 0), key=lambda n: abs(math.log(n * n / length)))
        found = dict[Bodies, None]()
        for run in (0, *runs[:_MOST_RUNS]):
            # Cutting into runs pays where little is stored in a step.
            for chosen in self._main_sets[-_MOST_SETS_OF_RUNS:] if run else self._main_sets:
                found[tuple(self._body(times, picture, run, chosen) for times, picture in self._scans)] = None
        return list(found)

    def _body(self, times: int, picture: Picture | None, run: int, chosen: StoredSet) -> tuple[int, p.Policy]:
        if picture is None or times == 1:
            return 0, p.Nothing()
        run = run if run and times % run == 0 and run < times else 0
        loops = {eqn.primitive.name for eqn in inline(picture.graph.forward, {})[0]} & {"scan", "cond", "while"}
        if loops:  # its values are counted otherwise when something is decided inside of them
            return run, p.Dots() if chosen.stored else p.Nothing()
        if self._main is not None and picture is self._main[1]:
            stored = chosen.stored
        else:
            price = chosen.bound[0]
            sets = stored_sets(picture.operations, self._cost)
            stored = min(sets, key=lambda s: s.recomputed_cost + price * s.stored_bytes).stored if chosen.stored else ()
        marks = {picture.operations.variables[n]: Mark("plan") for n in stored}
        return run, exactly(picture.graph, small_and_marked(picture.graph, marks))

    def _variant(self, bodies: Bodies) -> Search:
        if bodies not in self._variants:
            self._variants[bodies] = Search(self.subject, self._cost, self._platform, bodies, self._chips)
        return self._variants[bodies]

    def best(self, limit_bytes: int) -> Candidate | None:
        """Returns the cheapest candidate that is expected to stay within a limit; None where there is none."""
        found = [super().best(limit_bytes), *(self._variant(bodies).best(limit_bytes) for bodies in self.bodies)]
        return min((c for c in found if c is not None), key=lambda c: c.order, default=None)

    def leanest(self) -> Candidate:
        """Returns the candidate that is expected to need the least."""
        found = [super().leanest(), *(self._variant(bodies).leanest() for bodies in self.bodies)]
        return min(found, key=lambda c: (c.predicted_bytes, c.order))

    def bound(self, limit_bytes: int) -> float:
        """Returns the recomputation that no schedule within a limit can avoid in the scan that keeps most."""
        if self._main is None:
            return super().bound(limit_bytes)
        kept = max(0, limit_bytes * self._chips - self.lifetimes.input_bytes)
        times = self._main[0]
        return max(0.0, *(times * cut - price * kept for price, cut in (s.bound for s in self._main_sets)))


def make_search(subject: Subject, cost: Callable[[Operation], float], platform: str, chips: int = 1) -> Search:
    """Returns the search for a function: with scans, of few values, or of many."""
    if subject.scans:
        return LoopSearch(subject, cost, platform, chips)
    search = Search(subject, cost, platform, chips=chips)
    if search.operations.forward_values <= MOST_VALUES:
        return ExhaustiveSearch(subject, cost, platform, chips=chips)
    return search
