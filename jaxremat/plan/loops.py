"""`LoopSearch`: a function with scans, each variant of what is stored inside of their bodies searched like a plain function.

What a body stores is stored once for every step. So its minimum cuts are solved for one step, at prices of a byte that
hold for all scans at once; where that is not enough, scans are cut into runs of steps, of which only the carries are
stored (Chen et al. 2016, section 4.3). Between two such variants, one too large for a limit and one that fits, the scan is
split: its first steps store what the lean one does, the others, whose backward pass comes first, what the rich one does.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxremat import policy as p
from jaxremat.choice import Mark, choose, small_and_marked
from jaxremat.compat import Var
from jaxremat.flops import FlopCount
from jaxremat.graph import Graph, size_bytes
from jaxremat.inline import inline
from jaxremat.plan.candidate import Candidate, best_of, ranked
from jaxremat.plan.cut import StoredSet, lower_bound, stored_sets
from jaxremat.plan.exhaustive import MOST_VALUES, ExhaustiveSearch
from jaxremat.plan.objective import Link
from jaxremat.plan.operations import Operation
from jaxremat.plan.search import TILE_BYTES, Bodies, Search, exactly
from jaxremat.plan.subject import Picture, Subject

_MOST_RUNS = 4
# So many pairs of variants are mixed, each at so many places of the split.
_PAIRS, _PLACES = 3, 5
# Tiles may pad what a scan stacks to so many times its size.
_PADDING = 2


@dataclass(frozen=True, eq=False)
class Scan:
    """One scan: how many steps it has, how many values its carry has and slices each step, and its body, which stores nothing."""

    times: int
    carries: int
    slices: int
    picture: Picture

    @property
    def carried(self) -> Sequence[Var]:
        """The carry among the body's inputs, of which it is the last but for the slices."""
        return self.moving[: self.carries]

    @property
    def moving(self) -> Sequence[Var]:
        """What changes from step to step among the body's inputs: the carry and the slices."""
        graph = self.picture.graph
        inputs = graph.inputs[: len(graph.inputs) - len(graph.constants)]
        return inputs[len(inputs) - self.slices - self.carries :]


@dataclass(frozen=True)
class Body:
    """What is stored inside of one scan, and the least that it leads to.

    Attributes:
        parts: as in `policy.Loops`.
        stored_bytes: what all steps keep in device memory until the backward pass begins, at least; their carries, too.
        floor: what comes first in `Candidate.order`, at least: the contractions that run again, with what goes to the host counted
            as such, and the cost of it all, or the other way round.
    """

    parts: tuple[p.Part, ...]
    stored_bytes: int = 0
    floor: tuple[float, float] = (0, 0.0)

    @property
    def run(self) -> int:
        """The steps of a run of the first part, 0 where that is not cut into runs."""
        return self.parts[0].run

    def followed_by(self, other: "Body", steps: int, length: int) -> "Body":
        """Returns this for the first steps of a scan of some length, and another one for the others."""
        (first,), (last,) = self.parts, other.parts
        part = steps / length
        floor = tuple(part * a + (1 - part) * b for a, b in zip(self.floor, other.floor, strict=True))
        stored = int(part * self.stored_bytes + (1 - part) * other.stored_bytes)
        return Body((replace(first, steps=steps), last), stored, (floor[0], floor[1]))


@dataclass(frozen=True)
class Variant:
    """A `Body` for each scan."""

    bodies: tuple[Body, ...]

    @property
    def policies(self) -> Bodies:
        """As `policy.Loops` has them."""
        return tuple(body.parts for body in self.bodies)

    @property
    def stored_bytes(self) -> int:
        """What is kept at the turn from the forward to the backward pass where no scan is computed again as a whole."""
        return sum(body.stored_bytes for body in self.bodies)

    @property
    def least_bytes(self) -> int:
        """What is in use at some time, at least: a scan that is computed again is there alone."""
        return max(body.stored_bytes for body in self.bodies)

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
        by_cost: bool = False,
    ) -> None:
        super().__init__(subject, cost, platform, (), chips, link, by_cost)
        probe = subject.cut(p.Loops(p.Nothing(), ((p.Part(p.Nothing()),),) * subject.scans))
        self._scans = [
            None
            if (cut := program.last_cut) is None
            else Scan(program.times, *carries, Picture(cut, cost, platform, link))
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
            return Body((p.Part(p.Nothing()),))
        times, picture, graph = scan.times, scan.picture, scan.picture.graph
        run = run if run and times % run == 0 and run < times else 0
        loops = {eqn.primitive.name for eqn in inline(graph.forward, {})[0]} & {"scan", "cond", "while"}
        if loops:  # its values are counted otherwise when something is decided inside of them
            return Body((p.Part(p.Dots() if chosen.stored else p.Nothing(), run),))
        if scan is self._main:
            stored = chosen.stored
        else:
            price = chosen.bound[0]
            sets = self._sets(picture)
            stored = min(sets, key=lambda s: s.recomputed_cost + price * s.stored_bytes).stored if chosen.stored else ()
        marks = {picture.operations.variables[n]: Mark("plan") for n in stored}
        policy = (
            exactly(graph, small_and_marked(graph, marks), marks if host else ()) if small else _bare(graph, [*marks])
        )
        choice = choose(graph, policy)
        contractions, cost = _contractions(picture.recomputed(choice)), picture.cost(choice)
        if run:  # it is computed again as a whole, to its last carry, and what it does not keep once more
            steps = graph.primal & graph.ancestors([v for v in graph.outputs[: scan.carries] if isinstance(v, Var)])
            contractions += sum(picture.operations.forward[i].contraction_flops for i in steps)
            cost += sum(self._cost(picture.operations.forward[i]) for i in steps)
        on_host = picture.host_bytes(choice)
        if self.link is not None:
            contractions += on_host * self.link.flops
        carried = sum(size_bytes(v.aval) for v in scan.carried if v in choice.inputs_read)
        stored_bytes = (run or times) * (choice.stored_bytes - on_host + carried) + (
            times // run * carried if run else 0
        )
        return Body((p.Part(policy, run),), stored_bytes, ranked(times * contractions, times * cost, self._by_cost))

    def _search(self, variant: Variant) -> Search:
        if variant.policies not in self._searches:
            self._searches[variant.policies] = Search(
                self.subject, self._cost, self._platform, variant.policies, self._chips, self.link, self._by_cost
            )
        return self._searches[variant.policies]

    def best(self, limit_bytes: int) -> Candidate | None:
        """Returns the cheapest candidate that is expected to stay within a limit; None where there is none."""
        found = super().best(limit_bytes)
        for variant in self.variants:
            if found is not None and variant.floor > found.order[:2]:
                break  # as are all that follow
            if self._room(variant, limit_bytes) >= 0:
                found = best_of((found, self._search(variant).best(limit_bytes)))
        return None if found is None else self._split(found, limit_bytes)

    def _room(self, variant: Variant, limit_bytes: int) -> int:
        """What a limit leaves beside the inputs and what a variant needs at least, on all chips."""
        return self._beside_inputs(limit_bytes) - variant.least_bytes

    def _split(self, found: Candidate, limit_bytes: int) -> Candidate:
        """Returns what is best where the last steps of the main scan store more than the first; `found` where nothing is better."""

        def expected(pair: tuple[Variant, Variant]) -> tuple[float, float]:
            lean, rich = pair
            part = min(1.0, self._room(lean, limit_bytes) / (rich.stored_bytes - lean.stored_bytes))
            return (
                part * rich.floor[0] + (1 - part) * lean.floor[0],
                part * rich.floor[1] + (1 - part) * lean.floor[1],
            )

        pairs = [
            (lean, rich)
            for rich, lean in itertools.combinations(self.variants, 2)
            if lean.stored_bytes < rich.stored_bytes and self._room(lean, limit_bytes) > 0
        ]
        for lean, rich in sorted(pairs, key=expected)[:_PAIRS]:
            if expected((lean, rich)) >= found.order[:2]:
                break
            least = self._search(lean).best(limit_bytes)
            if least is None:
                continue
            found = min(found, least, key=lambda c: c.order)
            own = (rich.stored_bytes - lean.stored_bytes) / self._steps  # what each of its steps stores more
            spare = (limit_bytes - least.predicted_bytes) * self._chips
            low, high = 0, int(min(self._steps - 1, self._room(lean, limit_bytes) / own))  # so many steps may be rich
            for place in range(_PLACES):
                steps = high if not place else int(spare / own) if place == 1 else (low + high) // 2
                variant = self._mixed(lean, rich, steps)
                if variant is None or not low < steps <= high:
                    continue
                candidate = self._search(variant).best(limit_bytes)
                if candidate is not None and candidate.order < found.order:
                    found, low = candidate, steps
                else:
                    high = steps - 1
        return found

    @property
    def _steps(self) -> int:
        """Of the main scan."""
        return 1 if self._main is None else self._main.times

    def _mixed(self, lean: Variant, rich: Variant, steps: int) -> Variant | None:
        """Returns a variant whose main scan is rich in its last so many steps, or somewhat fewer; None where that cannot be."""
        number = self._scans.index(self._main)
        first, last = lean.bodies[number], rich.bodies[number]
        steps -= steps % math.lcm(first.run or 1, last.run or 1)
        others = self._steps - steps
        if first.parts == last.parts or steps < max(1, 2 * last.run) or others < max(1, 2 * first.run):
            return None
        body = first.followed_by(last, others, self._steps)
        return Variant((*lean.bodies[:number], body, *lean.bodies[number + 1 :]))

    def without_small(self, candidate: Candidate) -> tuple[Candidate, int]:
        """Returns a candidate whose scans stack the same but for small values, and how many bytes those take at most.

        What is stored outside of the scans stays. So does all of a plan for them, of which there is one without small values
        among `variants`; and all where a scan is split.
        """
        policy = candidate.policy
        if not isinstance(policy, p.Loops) or isinstance(policy.outer, p.Values):
            return candidate, 0
        if any(part.steps for body in policy.bodies for part in body):
            return candidate, 0
        parts, most_bytes = list[p.Part](), 0
        for program, (part,) in zip(self.subject.cut(policy).inner, policy.bodies, strict=True):
            cut = program.last_cut
            if cut is not None and part.run:  # the body of a scan over runs is a scan over the steps of one
                (program,) = cut.inner
                cut = program.last_cut
            if cut is not None and program.times > 1 and not cut.inner:
                graph = cut.choice.graph
                large = cut.choice.large
                small = (graph.value_of[v].size_bytes for v in cut.choice.kept.keys() - large.keys())
                most_bytes += program.times * sum(max(_PADDING * size, TILE_BYTES) for size in small)
                part = replace(part, policy=_bare(graph, [*large], [v for v, mark in large.items() if mark.host]))
            parts.append(part)
        if not most_bytes:
            return candidate, 0
        return self.of_policy(p.Loops(policy.outer, tuple((part,) for part in parts))), most_bytes

    def leanest(self) -> Candidate:
        """Returns the candidate that is expected to need the least."""
        found = super().leanest()
        for variant in sorted(self.variants, key=lambda variant: variant.least_bytes):
            if self._room(variant, found.predicted_bytes) > 0:
                found = min(found, self._search(variant).leanest(), key=lambda c: (c.predicted_bytes, c.order))
        return found

    def bound(self, limit_bytes: int) -> float:
        """Returns the recomputation that no schedule within a limit can avoid in the scan that keeps most.

        What is the same in every step of it is there once, if a compiler sees that.
        """
        if self._main is None:
            return super().bound(limit_bytes)
        kept = max(0, self._beside_inputs(limit_bytes))
        times, operations = self._main.times, self._main.picture.operations
        free = operations.repeated_bytes + operations.unmoved_bytes(self._main.moving)
        return times * lower_bound(self._main_sets, kept / times + free, self._host_price)


def _bare(graph: Graph, large: Sequence[Var], host: Collection[Var] = ()) -> p.Policy:
    """Returns the policy that stores these values of a graph and no small ones.

    Where there are none it names one that the backward pass has no use for, which is then not stored; or the smallest.
    """
    if large:
        return exactly(graph, large, host)
    used = graph.ancestors(graph.read_backward)
    return exactly(graph, [min(graph.values, key=lambda value: (value.index in used, value.size_bytes)).var])


def _contractions(count: FlopCount) -> int:
    return count.dot_flops + count.conv_flops


def make_search(
    subject: Subject,
    cost: Callable[[Operation], float],
    platform: str,
    chips: int = 1,
    link: Link | None = None,
    by_cost: bool = False,
) -> Search:
    """Returns the search for a function: with scans, of few values, or of many."""
    if subject.scans:
        return LoopSearch(subject, cost, platform, chips, link, by_cost)
    search = Search(subject, cost, platform, chips=chips, link=link, by_cost=by_cost)
    if search.operations.forward_values <= MOST_VALUES:
        return ExhaustiveSearch(subject, cost, platform, chips=chips, link=link, by_cost=by_cost)
    return search
