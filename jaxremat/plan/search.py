"""`Search`: one function, ready to be asked for the cheapest stored set under any limit, without a compiler."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from jaxremat import policy as p
from jaxremat.choice import Choice, Mark, choose, small_and_marked
from jaxremat.compat import Var
from jaxremat.flops import FlopCount
from jaxremat.fusion import CONTRACTIONS
from jaxremat.graph import Graph
from jaxremat.plan.candidate import Candidate, best_of
from jaxremat.plan.cut import lower_bound, more_stored, stored_sets
from jaxremat.plan.knapsack import Knapsack
from jaxremat.plan.nesting import Nesting
from jaxremat.plan.objective import Link
from jaxremat.plan.operations import Operation
from jaxremat.plan.segments import Segments
from jaxremat.plan.subject import Picture, Subject

# Limits are tried in steps of this part of the peak without rematerialization, from and to these parts of the limit.
_GRID, _FROM, _TO = 200, 0.8, 1.05

# A small value takes as much as a tile of a TPU's memory, 8 by 128 words, at most.
TILE_BYTES = 4096

# Where more than this part of the forward pass' contractions would run again or could meanwhile, several levels are tried.
_MUCH = 0.5

Bodies = tuple[tuple[p.Part, ...], ...]


class Search:
    """Finds stored sets of a function, the bodies of its scans decided.

    Args:
        subject: the function.
        cost: what it costs to run an operation again.
        platform: of the compiler, as JAX names it: "cpu", "gpu", "tpu".
        bodies: what is stored inside of its scans; nothing is decided there where there is none.
        chips: over how many the program is laid out; all sizes are divided by them.
        link: what keeping a byte in host memory costs; None where nothing is kept there.
        by_cost: as of `Candidate`.
    """

    def __init__(
        self,
        subject: Subject,
        cost: Callable[[Operation], float],
        platform: str,
        bodies: Bodies = (),
        chips: int = 1,
        link: Link | None = None,
        by_cost: bool = False,
    ) -> None:
        self._by_cost = by_cost
        self._cost, self._platform, self._bodies, self._chips, self.link = cost, platform, bodies, chips, link
        self._host_price = None if link is None else link.cost
        self.subject = subject
        base = p.Loops(p.Nothing(), bodies) if bodies else p.Values((0,))
        self.picture = Picture(subject.cut(base), cost, platform, link, by_cost)
        self.graph, self.operations = self.picture.graph, self.picture.operations
        self.lifetimes = self.picture.lifetimes
        self.sets = stored_sets(self.operations, cost, self._host_price)
        self._known_policies = dict[p.Policy, Candidate]()
        self._known = dict[tuple[frozenset[int], tuple[frozenset[int], ...], frozenset[int]], Candidate]()

    @cached_property
    def runs(self) -> list[int]:
        """Into runs of how many steps its scans may be cut."""
        return []

    @cached_property
    def segments(self) -> Segments:
        """The function cut at its waists; made when first asked for."""
        return Segments(self.lifetimes, self.sets, self._cost, self._host_price)

    @cached_property
    def knapsack(self) -> Knapsack:
        """The best mixtures of stretches; made when first asked for."""
        most = int(_TO * self.lifetimes.without_remat()) - self.lifetimes.fixed_bytes
        return Knapsack(self.segments.stretches, len(self.segments.waists), most)

    @cached_property
    def nesting(self) -> Nesting:
        """The stretches on several levels; made when first asked for."""
        return Nesting(self.segments, self._cost, self.lifetimes.without_remat() - self.lifetimes.fixed_bytes)

    @cached_property
    def has_names(self) -> bool:
        """Whether any value is tagged."""
        return any(labels.names for labels in self.graph.labels.values())

    @property
    def has_blocks(self) -> bool:
        """Whether what its blocks give is tagged, and these are no steps of a scan."""
        return self.has_names and not self.subject.scans

    @cached_property
    def forward_contractions(self) -> int:
        """The operations of the forward pass' convolutions and matrix products."""
        count = self.operations.forward_count
        return count.dot_flops + count.conv_flops

    @property
    def input_bytes(self) -> int:
        """The bytes of the function's inputs, on one chip."""
        return self.lifetimes.input_bytes // self._chips

    @property
    def near_bytes(self) -> int:
        """Of memory beside the main one, on one chip: how much of that is in use when most is, nobody knows beforehand."""
        return self.operations.compiler.near_bytes

    @cached_property
    def forward_cost(self) -> float:
        """The cost of the forward pass."""
        return sum(self._cost(self.operations.forward[position]) for position in self.graph.primal)

    @cached_property
    def everything(self) -> Candidate:
        """No rematerialization."""
        empty = choose(self.graph, p.Everything())
        peak = self.lifetimes.without_remat() // self._chips
        return Candidate(p.Everything(), peak, FlopCount(), 0.0, by_cost=self._by_cost, choices=((1, empty),))

    def best(self, limit_bytes: int) -> Candidate | None:
        """Returns the cheapest candidate that is expected to stay within a limit; None where there is none.

        The programmes over stretches know each of them by itself, so that what they find under a limit needs somewhat more
        or less when it is pictured as a whole: neighbouring limits are tried, too.
        """
        step = max(1, self.everything.predicted_bytes // _GRID)
        near = [step * i for i in range(int(_FROM * limit_bytes) // step, int(_TO * limit_bytes) // step + 2)]
        mixed = self._first_fitting(sorted((*near, limit_bytes), reverse=True), limit_bytes)
        whole = (c for c in self._unmixed if c.predicted_bytes <= limit_bytes)
        found = best_of((mixed, *whole))
        all_forward = self.forward_cost if self._by_cost else self.forward_contractions
        if found is not None and found.order[0] < _MUCH * all_forward:
            return found
        # So much is recomputed, or goes to the host, or nothing fits at all, that a second time may be cheaper.
        nested = (c for limit in near if (c := self._nested(limit)) is not None and c.predicted_bytes <= limit_bytes)
        return best_of((found, *nested))

    @cached_property
    def _unmixed(self) -> list[Candidate]:
        """What the minimum cuts store, each at one price for the whole function."""
        return [self.of_stored(s.stored) for s in self.sets]

    def leanest(self) -> Candidate:
        """Returns the candidate that is expected to need the least."""
        step = max(1, self.everything.predicted_bytes // _GRID)
        found = [find(step * i) for find in (self._mixture, self._nested) for i in range(_GRID + 1)]
        return min((c for c in (*found, *self._unmixed) if c is not None), key=lambda c: (c.predicted_bytes, c.order))

    def _first_fitting(self, falling_limits: Iterable[int], limit_bytes: int) -> Candidate | None:
        """Returns the first mixture that fits, or what costs as much in less memory: under smaller limits none is cheaper."""
        found = None
        for limit in falling_limits:
            candidate = self._mixture(limit)
            if candidate is None or (found is not None and candidate.order[:2] > found.order[:2]):
                break
            if candidate.predicted_bytes <= limit_bytes:
                found = best_of((found, candidate))
        return found

    def _mixture(self, limit_bytes: int) -> Candidate | None:
        """What the programme over stretches finds under a limit."""
        found = self.knapsack.best(limit_bytes * self._chips - self.lifetimes.fixed_bytes)
        return None if found is None else self.of_stored(found[0], (), found[1])

    def _nested(self, limit_bytes: int) -> Candidate | None:
        """What several levels find under a limit."""
        levels = self.nesting.best(limit_bytes * self._chips - self.lifetimes.fixed_bytes)
        return None if levels is None else self.of_stored(levels[0], levels[1:])

    def of_stored(
        self, numbers: Iterable[int], again: Sequence[Iterable[int]] = (), host: Iterable[int] = ()
    ) -> Candidate:
        """Returns the candidate that stores these values, and the small ones that are worth it.

        Args:
            numbers: the stored values.
            again: those that are kept when they were recomputed, level by level.
            host: those of the stored values that are kept in host memory.
        """
        key = frozenset(numbers), tuple(map(frozenset, again)), frozenset(host)
        if key not in self._known:
            self._known[key] = self._of_stored(*key)
        return self._known[key]

    def _of_stored(self, numbers: frozenset[int], again: tuple[frozenset[int], ...], host: frozenset[int]) -> Candidate:
        marks = {self.operations.variables[n]: Mark("plan") for n in numbers}
        outer = exactly(self.graph, small_and_marked(self.graph, marks), {self.operations.variables[n] for n in host})
        levels = [tuple(self.graph.value_of[self.operations.variables[n]].position for n in level) for level in again]
        if isinstance(outer, p.Values):
            outer = replace(outer, again=tuple(level for level in levels if level))
        policy = p.Loops(outer, self._bodies) if self._bodies else outer
        return self._on_one_chip(self.picture.candidate(choose(self.graph, policy), policy))

    def of_policy(self, policy: p.Policy) -> Candidate:
        """Returns a policy as a candidate.

        Raises:
            PolicyError: it cannot be applied to the function.
        """
        if isinstance(policy, p.Everything):
            return self.everything
        # Where there are scans, JAX differentiates the function once for each policy.
        if policy not in self._known_policies:
            self._known_policies[policy] = self._on_one_chip(self._of_policy(policy))
        return self._known_policies[policy]

    def _of_policy(self, policy: p.Policy) -> Candidate:
        if not self.subject.decides_inside(policy):
            return self.picture.candidate(choose(self.graph, policy), policy)
        picture = Picture(self.subject.cut(policy), self._cost, self._platform, self.link, self._by_cost)
        return picture.candidate(picture.choice, policy)

    def without_small(self, candidate: Candidate) -> tuple[Candidate, int]:
        """Returns a candidate that stores the same but for small values, and how many bytes those take at most.

        They are worth storing, but there are many of them, and a compiler may give each a tile of memory. What is made from
        the small result of a product stays: the loss of a classifier, for which the logits would have to be made again.
        """
        if isinstance(candidate.policy, p.Everything) or candidate.choices[0][1].graph is not self.graph:
            return candidate, 0
        choice = candidate.choices[0][1]
        bare = self._bare(choice)
        if not bare:  # the policy that stores nothing stores what is small
            return candidate, 0
        small = [self.graph.value_of[v].size_bytes for v in choice.kept.keys() - set(bare)]
        return self.with_kept(candidate, bare), sum(max(size, TILE_BYTES) for size in small)

    def with_kept(self, candidate: Candidate, kept: Sequence[Var]) -> Candidate:
        """Returns what a candidate stores, but of it these values alone; the same on the host, and the same once recomputed.

        Args:
            candidate: it decides nothing inside of scans or branches.
            kept: some of the values that it stores, in program order.
        """
        large = candidate.choices[0][1].large
        policy = exactly(self.graph, kept, {v for v, mark in large.items() if mark.host})
        if isinstance(policy, p.Values) and isinstance(candidate.policy, p.Values):
            policy = replace(policy, again=candidate.policy.again)
        return self.of_policy(policy)

    def _bare(self, choice: Choice) -> list[Var]:
        """Returns what a choice stores: of small values only those made from small results that would have to be made again.

        Small results of convolutions and products are meant, such as logits, and what is made from large ones is not.
        """
        graph = self.graph
        again = choose(graph, exactly(graph, [*choice.large])).run_twice - choice.run_twice
        made = set[Var]()
        for index in sorted(again):
            eqn = graph.forward[index]
            if eqn.primitive.name in CONTRACTIONS or not made.isdisjoint(v for v in eqn.invars if isinstance(v, Var)):
                made.update(v for v in eqn.outvars if graph.value_of[v].size_bytes <= graph.small_bytes)
        return [v for v in choice.kept if v in choice.large or v in made]

    def more_stored(self, stored: Collection[int], spare_bytes: int) -> frozenset[int]:
        """Returns what is best stored beside these values in so many bytes on a chip."""
        return more_stored(self.operations, self._cost, stored, spare_bytes * self._chips)

    def _on_one_chip(self, candidate: Candidate) -> Candidate:
        return replace(candidate, predicted_bytes=candidate.predicted_bytes // self._chips)

    def bound(self, limit_bytes: int) -> float:
        """Returns the recomputation that no schedule within a limit can avoid, in the planner's objective.

        All values that stand between the two passes are in use at the same time as the inputs; of equal ones a compiler
        makes one.
        """
        kept = max(0, self._beside_inputs(limit_bytes)) + self.operations.repeated_bytes
        return lower_bound(self.sets, kept, self._host_price)

    def _beside_inputs(self, limit_bytes: int) -> int:
        """What a limit leaves beside the inputs, on all chips; what a compiler can put elsewhere counts as left."""
        return (limit_bytes + self.near_bytes) * self._chips - self.lifetimes.input_bytes


def exactly(graph: Graph, kept: Sequence[Var], host: Collection[Var] = ()) -> p.Policy:
    """Returns the policy that stores these values of a graph and no others, some of them in host memory."""
    positions = tuple(graph.value_of[var].position for var in kept)
    there = tuple(graph.value_of[var].position for var in kept if var in host)
    return p.Values(positions, graph.fingerprint, host=there) if positions else p.Nothing()
