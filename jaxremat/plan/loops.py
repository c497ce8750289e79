"""`LoopSearch`: a function with scans, each variant of what is stored inside of their bodies searched like a plain function.

What a body stores is stored once for every step. So its minimum cuts are solved for one step, at prices of a byte that
hold for all scans at once; and where that is not enough, scans are cut into runs of steps, of which only the carries are
stored (Chen et al. 2016, section 4.3).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from jaxremat import policy as p
from jaxremat.choice import Mark, choose, small_and_marked
from jaxremat.compat import Var
from jaxremat.flops import FlopCount
from jaxremat.inline import inline
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.cut import StoredSet, lower_bound, stored_sets
from jaxremat.plan.exhaustive import MOST_VALUES, ExhaustiveSearch
from jaxremat.plan.objective import Link
from jaxremat.plan.operations import Operation
from jaxremat.plan.search import Bodies, Search, exactly
from jaxremat.plan.subject import Picture, Subject

_MOST_RUNS = 4


@dataclass(frozen=True, eq=False)
class Scan:
    """One scan: how many steps it has, how many values its carry has, and its body, of which nothing is stored."""

    times: int
    carries: int
    picture: Picture


@dataclass(frozen=True)
class Body:
    """What is stored inside of one scan, and the least that it leads to.

    Attributes:
        run, policy: as in `policy.Loops`.
        stored_bytes: what all steps keep in device memory until the backward pass begins, at least.
        floor: the contractions that run again, with what goes to the host counted as such, and the cost of it all, at least.
    """

    run: int
    policy: p.Policy
    stored_bytes: int = 0
    floor: tuple[float, float] = (0, 0.0)


@dataclass(frozen=True)
class Variant:
    """A `Body` for each scan."""

    bodies: tuple[Body, ...]

    @property
    def policies(self) -> Bodies:
        """As `policy.Loops` has them."""
        return tuple((body.run, body.policy) for body in self.bodies)

    @property
    def stored_bytes(self) -> int:
        """What is kept at the turn from the forward to the backward pass, at least."""
        return sum(body.stored_bytes for body in self.bodies)

    @property
    def floor(self) -> tuple[float, float]:
        """What no candidate with these bodies stays below, as the first of `Candidate.order`."""
        return sum(body.floor[0] for body in self.bodies), sum(body.floor[1] for body in self.bodies)


class LoopSearch(Search):
    """Finds stored sets of a function and of the bodies of its scans; arguments as for `Search`."""

    def __init__(
        self,
        subject: Subject,
        cost: Callable[[Operation], float],
        platform: str,
        chips: int = 1,
        link: Link | None = None,
    ) -> None:
        super().__init__(subject, cost, platform, (), chips, link)
        probe = subject.cut(p.Loops(p.Nothing(), ((0, p.Nothing()),) * subject.scans))
        self._scans = [
            Scan(program.times, carries, Picture(list(program.cuts.values())[-1], cost, platform, link))
            if program.cuts
            else None
            for program, carries in zip(probe.inner, subject.carries, strict=True)
        ]
        self._searches = dict[Bodies, Search]()

    @cached_property
    def _main(self) -> Scan | None:
        """The scan that keeps most."""

        def kept(scan: Scan) -> int:
            operations = scan.picture.operations
            return scan.times * sum(operations.sizes[n] for n in operations.read_backward)

        return max((scan for scan in self._scans if scan is not None), key=kept, default=None)

    @cached_property
    def _main_sets(self) -> list[StoredSet]:
        return [] if self._main is None else self._sets(self._main.picture)

    def _sets(self, picture: Picture) -> list[StoredSet]:
        return stored_sets(picture.operations, self._cost, self._host_price)

    @cached_property
    def runs(self) -> list[int]:
        """Into runs of how many steps the main scan may be cut: the numbers nearest to the root of its length."""
        length = 1 if self._main is None else self._main.times
        found = (n for n in range(2, length) if length % n == 0)
        return sorted(found, key=lambda n: abs(math.log(n * n / length)))[:_MOST_RUNS]

    @cached_property
    def _between(self) -> list[StoredSet]:
        """Sets that no price singles out: each of those that one does, but for one value."""
        return [replace(chosen, stored=chosen.stored - {n}) for chosen in self._main_sets for n in chosen.stored]

    @cached_property
    def variants(self) -> list[Variant]:
        """What may be stored inside of the scans, the least recomputation first."""
        found = {variant.policies: variant for variant in self._variants()}
        ordered = sorted(found.values(), key=lambda variant: (variant.floor, variant.stored_bytes))
        least = dict[tuple[int, ...], int]()  # for each way to cut into runs, what the variants so far store at least
        kept = list[Variant]()
        for variant in ordered:
            runs = tuple(body.run for body in variant.bodies)
            if variant.stored_bytes < least.get(runs, variant.stored_bytes + 1):
                least[runs] = variant.stored_bytes
                kept.append(variant)
        return kept

    def _variants(self) -> Iterator[Variant]:
        if self._main is None:
            return
        for run in (0, *self.runs):
            for chosen in self._main_sets if run else (*self._main_sets, *self._between):
                for small in (True,) if run else (True, False):
                    yield Variant(tuple(self._body(scan, run, chosen, small) for scan in self._scans))
                if self.link is not None and not run:
                    yield Variant(tuple(self._body(scan, 0, chosen, True, True) for scan in self._scans))

    def _body(self, scan: Scan | None, run: int, chosen: StoredSet, small: bool, host: bool = False) -> Body:
        """What one scan stores beside what a minimum cut chose for the main one.

        Args:
            scan: the scan; None where nothing is differentiated through it.
            run: steps in a run, 0 for all in one.
            chosen: what the main one stores.
            small: whether small values are stored as well: a long scan stacks many of them.
            host: whether all but these goes to the host.
        """
        if scan is None or scan.times == 1:
            return Body(0, p.Nothing())
        times, picture, graph = scan.times, scan.picture, scan.picture.graph
        run = run if run and times % run == 0 and run < times else 0
        loops = {eqn.primitive.name for eqn in inline(graph.forward, {})[0]} & {"scan", "cond", "while"}
        if loops:  # its values are counted otherwise when something is decided inside of them
            return Body(run, p.Dots() if chosen.stored else p.Nothing())
        if scan is self._main:
            stored = chosen.stored
        else:
            price = chosen.bound[0]
            sets = self._sets(picture)
            stored = min(sets, key=lambda s: s.recomputed_cost + price * s.stored_bytes).stored if chosen.stored else ()
        marks = {picture.operations.variables[n]: Mark("plan") for n in stored}
        if small:
            policy = exactly(graph, small_and_marked(graph, marks), marks if host else ())
        else:  # what nothing reads is not stored
            policy = exactly(graph, [*marks] or [min(graph.values, key=lambda value: value.size_bytes).var])
        choice = choose(graph, policy)
        contractions, cost = _contractions(picture.recomputed(choice)), picture.cost(choice)
        if run:  # it is computed again as a whole, to its last carry, and what it does not keep once more
            steps = graph.primal & graph.ancestors([v for v in graph.outputs[: scan.carries] if isinstance(v, Var)])
            contractions += sum(picture.operations.forward[i].contraction_flops for i in steps)
            cost += sum(self._cost(picture.operations.forward[i]) for i in steps)
        on_host = picture.host_bytes(choice)
        if self.link is not None:
            contractions += on_host * self.link.flops
        return Body(run, policy, (run or times) * (choice.stored_bytes - on_host), (times * contractions, times * cost))

    def _search(self, variant: Variant) -> Search:
        if variant.policies not in self._searches:
            self._searches[variant.policies] = Search(
                self.subject, self._cost, self._platform, variant.policies, self._chips, self.link
            )
        return self._searches[variant.policies]

    def best(self, limit_bytes: int) -> Candidate | None:
        """Returns the cheapest candidate that is expected to stay within a limit; None where there is none."""
        found = super().best(limit_bytes)
        for variant in self.variants:
            if found is not None and variant.floor > found.order[:2]:
                break  # as are all that follow
            if self.input_bytes + variant.stored_bytes // self._chips <= limit_bytes:
                candidate = self._search(variant).best(limit_bytes)
                if candidate is not None and (found is None or candidate.order < found.order):
                    found = candidate
        return found

    def leanest(self) -> Candidate:
        """Returns the candidate that is expected to need the least."""
        found = super().leanest()
        for variant in sorted(self.variants, key=lambda variant: variant.stored_bytes):
            if self.input_bytes + variant.stored_bytes // self._chips < found.predicted_bytes:
                found = min(found, self._search(variant).leanest(), key=lambda c: (c.predicted_bytes, c.order))
        return found

    def bound(self, limit_bytes: int) -> float:
        """Returns the recomputation that no schedule within a limit can avoid in the scan that keeps most."""
        if self._main is None:
            return super().bound(limit_bytes)
        kept = max(0, limit_bytes * self._chips - self.lifetimes.input_bytes)
        times = self._main.times
        return times * lower_bound(self._main_sets, kept / times, self._host_price)


def _contractions(count: FlopCount) -> int:
    return count.dot_flops + count.conv_flops


def make_search(
    subject: Subject,
    cost: Callable[[Operation], float],
    platform: str,
    chips: int = 1,
    link: Link | None = None,
) -> Search:
    """Returns the search for a function: with scans, of few values, or of many."""
    if subject.scans:
        return LoopSearch(subject, cost, platform, chips, link)
    search = Search(subject, cost, platform, chips=chips, link=link)
    if search.operations.forward_values <= MOST_VALUES:
        return ExhaustiveSearch(subject, cost, platform, chips=chips, link=link)
    return search
