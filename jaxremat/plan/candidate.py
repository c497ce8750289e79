"""`Candidate`: a policy that is weighed, and what the planner expects of it."""

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
        choices: what is stored and recomputed, in the function and in the bodies of its scans, with how often each runs.
    """

    policy: p.Policy
    predicted_bytes: int
    recomputed: FlopCount
    cost: float
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
        """What makes one candidate better than another: contractions run again, then all else, then memory."""
        return (self.contraction_flops, self.cost, self.predicted_bytes)
