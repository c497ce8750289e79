"""`Search`: one function's graph, ready to be asked for the cheapest stored set under any limit, without a compiler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from jaxremat import policy as p
from jaxremat.choice import Choice, Mark, choose, small_and_marked
from jaxremat.flops import FlopCount, count_equation
from jaxremat.graph import Graph
from jaxremat.plan.cut import lower_bound, stored_sets
from jaxremat.plan.knapsack import cheapest
from jaxremat.plan.lifetimes import Lifetimes
from jaxremat.plan.operations import Operation, Operations
from jaxremat.plan.segments import Segments

# A limit is lowered by so many steps of this part.
_STEPS, _STEP = 24, 80


@dataclass(frozen=True)
class Candidate:
    """A stored set, and what the planner expects of it.

    Attributes:
        policy: what to store.
        predicted_bytes: the most in use at any time, inputs included, as `Lifetimes` pictures it.
        recomputed: what the backward pass computes again.
        cost: of that, in the planner's objective.
    """

    policy: p.Policy
    predicted_bytes: int
    recomputed: FlopCount
    cost: float

    @property
    def order(self) -> tuple[float, ...]:
        """What makes one candidate better than another: contractions run again, then all else, then memory."""
        contractions = self.recomputed.dot_flops + self.recomputed.conv_flops
        return (contractions, self.cost, self.predicted_bytes)


class Search:
    """Finds stored sets of one graph.

    Args:
        graph: a function's forward and backward pass.
        cost: what it costs to run an operation again.
        platform: of the compiler, as JAX names it: "cpu", "gpu", "tpu".
    """

    def __init__(self, graph: Graph, cost: Callable[[Operation], float], platform: str = "gpu") -> None:
        self.graph, self.cost = graph, cost
        self.operations = Operations(graph, fuses_reductions=platform != "cpu")
        self.lifetimes = Lifetimes(self.operations)
        self.sets = stored_sets(self.operations, cost)
        self._known = dict[frozenset[int], Candidate]()

    @cached_property
    def segments(self) -> Segments:
        """The function cut at its waists; made when first asked for."""
        return Segments(self.lifetimes, self.sets, self.cost)

    @cached_property
    def everything(self) -> Candidate:
        """No rematerialization."""
        return Candidate(p.Everything(), self.lifetimes.without_remat(), FlopCount(), 0.0)

    @cached_property
    def forward_cost(self) -> float:
        """The cost of the forward pass."""
        return sum(self.cost(self.operations.forward[position]) for position in self.graph.primal)

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
        solution = cheapest(stretches, waists, limit_bytes - self.lifetimes.input_bytes)
        if solution is None:
            return None
        if solution.stored not in self._known:
            self._known[solution.stored] = self.of_stored(solution.stored)
        return self._known[solution.stored]

    def of_stored(self, numbers: Iterable[int]) -> Candidate:
        """Returns the candidate that stores these values, and the small ones that are worth it."""
        marks = {self.operations.variables[n]: Mark("plan") for n in numbers}
        kept = small_and_marked(self.graph, marks)
        positions = tuple(self.graph.value_of[var].position for var in kept)
        policy = p.Values(positions, self.graph.fingerprint) if positions else p.Nothing()
        return self.of_policy(policy)

    def of_policy(self, policy: p.Policy) -> Candidate:
        """Returns a policy as a candidate."""
        if isinstance(policy, p.Everything):
            return self.everything
        choice = choose(self.graph, policy)
        numbers = {n for var in choice.kept if (n := self.operations.number(var)) is not None}
        again = [self.operations.forward[i] for i in choice.recomputed]
        return Candidate(
            policy, self.lifetimes.peak_bytes(numbers), recomputed_count(choice), sum(self.cost(op) for op in again)
        )

    def bound(self, limit_bytes: int) -> float:
        """Returns the recomputation that no schedule within a limit can avoid, in the planner's objective.

        All values that stand between the two passes are in use at the same time as the inputs.
        """
        return lower_bound(self.sets, max(0, limit_bytes - self.lifetimes.input_bytes))


def recomputed_count(choice: Choice) -> FlopCount:
    """Returns what the backward pass computes again under a choice."""
    total = FlopCount()
    for index in choice.recomputed:
        total += count_equation(choice.graph.forward[index])
    return total
