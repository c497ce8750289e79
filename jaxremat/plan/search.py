"""`Search`: one function, ready to be asked for the cheapest stored set under any limit, without a compiler."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

from jaxremat import policy as p
from jaxremat.choice import Mark, choose, small_and_marked
from jaxremat.compat import Var
from jaxremat.flops import FlopCount
from jaxremat.graph import Graph
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.cut import lower_bound, stored_sets
from jaxremat.plan.knapsack import cheapest
from jaxremat.plan.operations import Operation
from jaxremat.plan.segments import Segments
from jaxremat.plan.subject import Picture, Subject

# A limit is lowered by so many steps of this part.
_STEPS, _STEP = 24, 80

Bodies = tuple[tuple[int, p.Policy], ...]


class Search:
    """Finds stored sets of a function, the bodies of its scans decided.

    Args:
        subject: the function.
        cost: what it costs to run an operation again.
        platform: of the compiler, as JAX names it: "cpu", "gpu", "tpu".
        bodies: what is stored inside of its scans; nothing is decided there where there is none.
        chips: over how many the program is laid out; all sizes are divided by them.
    """

    def __init__(
        self, subject: Subject, cost: Callable[[Operation], float], platform: str, bodies: Bodies = (), chips: int = 1
    ) -> None:
        self._cost, self._platform, self._bodies, self._chips = cost, platform, bodies, chips
        self.subject = subject
        base = p.Loops(p.Nothing(), bodies) if bodies else p.Values((0,))
        self.picture = Picture(subject.cut(base), cost, platform)
        self.graph, self.operations = self.picture.graph, self.picture.operations
        self.lifetimes = self.picture.lifetimes
        self.sets = stored_sets(self.operations, cost)
        self._known = dict[frozenset[int], Candidate]()

    @cached_property
    def segments(self) -> Segments:
        """The function cut at its waists; made when first asked for."""
        return Segments(self.lifetimes, self.sets, self._cost)

    @property
    def input_bytes(self) -> int:
        """The bytes of the function's inputs, on one chip."""
        return self.lifetimes.input_bytes // self._chips

    @cached_property
    def forward_cost(self) -> float:
        """The cost of the forward pass."""
        return sum(self._cost(self.operations.forward[position]) for position in self.graph.primal)

    @cached_property
    def everything(self) -> Candidate:
        """No rematerialization."""
        empty = choose(self.graph, p.Everything())
        return Candidate(p.Everything(), self.lifetimes.without_remat() // self._chips, FlopCount(), 0.0, ((1, empty),))

    def best(self, limit_bytes: int) -> Candidate | None:
        """Returns the cheapest candidate that is expected to stay within a limit; None where there is none.

        The programme over stretches knows each of them by itself. Where they overlap, what it finds needs more than its
        limit when it is pictured as a whole: then the limit is lowered.
        """
        for step in range(_STEPS):
            candidate = self._mixture(limit_bytes - limit_bytes * step // _STEP)
            if candidate is None or candidate.predicted_bytes <= limit_bytes:
                return candidate
        return None

    def leanest(self) -> Candidate:
        """Returns the candidate that is expected to need the least."""
        high = self.everything.predicted_bytes
        while self._mixture(high) is None:
            high *= 2
        low = 0
        while high - low > max(1, high // _STEP):
            middle = (low + high) // 2
            low, high = (low, middle) if self._mixture(middle) else (middle, high)
        found = [self._mixture(high + high * step // _STEP) for step in range(_STEPS)]
        return min((c for c in found if c is not None), key=lambda c: (c.predicted_bytes, c.order))

    def _mixture(self, limit_bytes: int) -> Candidate | None:
        """What the programme over stretches finds under a limit."""
        stretches, waists = self.segments.stretches, len(self.segments.waists)
        solution = cheapest(stretches, waists, limit_bytes * self._chips - self.lifetimes.input_bytes)
        if solution is None:
            return None
        if solution.stored not in self._known:
            self._known[solution.stored] = self.of_stored(solution.stored)
        return self._known[solution.stored]

    def of_stored(self, numbers: Iterable[int]) -> Candidate:
        """Returns the candidate that stores these values, and the small ones that are worth it."""
        marks = {self.operations.variables[n]: Mark("plan") for n in numbers}
        outer = exactly(self.graph, small_and_marked(self.graph, marks))
        policy = p.Loops(outer, self._bodies) if self._bodies else outer
        return self._on_one_chip(self.picture.candidate(choose(self.graph, policy), policy))

    def of_policy(self, policy: p.Policy) -> Candidate:
        """Returns a policy as a candidate.

        Raises:
            PolicyError: it cannot be applied to the function.
        """
        if isinstance(policy, p.Everything):
            return self.everything
        if not self.subject.scans:
            return self._on_one_chip(self.picture.candidate(choose(self.graph, policy), policy))
        picture = Picture(self.subject.cut(policy), self._cost, self._platform)
        return self._on_one_chip(picture.candidate(picture.choice, policy))

    def _on_one_chip(self, candidate: Candidate) -> Candidate:
        return replace(candidate, predicted_bytes=candidate.predicted_bytes // self._chips)

    def bound(self, limit_bytes: int) -> float:
        """Returns the recomputation that no schedule within a limit can avoid, in the planner's objective.

        All values that stand between the two passes are in use at the same time as the inputs.
        """
        return lower_bound(self.sets, max(0, limit_bytes * self._chips - self.lifetimes.input_bytes))


def exactly(graph: Graph, kept: Iterable[Var]) -> p.Policy:
    """Returns the policy that stores these values of a graph and no others."""
    positions = tuple(graph.value_of[var].position for var in kept)
    return p.Values(positions, graph.fingerprint) if positions else p.Nothing()
