"""`Candidate`: a policy that is weighed, and what the planner expects of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxremat import policy as p
from jaxremat.choice import Choice
from jaxremat.flops import FlopCount


@dataclass(frozen=True)
class Candidate:
    """A policy, and what the planner expects of it.

    Attributes:
        policy: what to store.
        predicted_bytes: the most in use at any time, inputs included, as `Lifetimes` pictures it.
        recomputed: what the backward pass computes again.
        cost: of that, in the planner's objective.
        host_bytes: what is kept in host memory.
        transfer_flops: the operations that the target could do while that goes there and back.
        by_cost: the objective decides between candidates; else contractions do, and the objective between equals.
        choices: what is stored and recomputed, in the function and in the bodies of its scans, with how often each runs.
    """

    policy: p.Policy
    predicted_bytes: int
    recomputed: FlopCount
    cost: float
    host_bytes: int = 0
    transfer_flops: float = 0.0
    by_cost: bool = False
    choices: tuple[tuple[int, Choice], ...] = field(default=(), repr=False, compare=False)

    @property
    def contraction_flops(self) -> int:
        """Of the convolutions and matrix products that run again."""
        return self.recomputed.dot_flops + self.recomputed.conv_flops

    @property
    def flops(self) -> int:
        """Of all that runs again."""
        return self.contraction_flops + self.recomputed.elementwise_flops

    @property
    def order(self) -> tuple[float, ...]:
        """What makes one candidate better than another: contractions run again, then all else, then memory.

        What goes to the host counts as the contractions that the time for it would do. Under objectives other than operations
        the cost comes first.
        """
        contractions = self.contraction_flops + self.transfer_flops
        return (*ranked(contractions, self.cost, self.by_cost), self.predicted_bytes)


def ranked(contractions: float, cost: float, by_cost: bool) -> tuple[float, float]:
    """Returns what comes first in `Candidate.order`."""
    return (cost, contractions) if by_cost else (contractions, cost)


def best_of(candidates: Iterable[Candidate | None]) -> Candidate | None:
    """Returns the best of some candidates, those that are None left out; None where there is no other."""
    return min((c for c in candidates if c is not None), key=lambda c: c.order, default=None)
