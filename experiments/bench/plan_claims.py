"""The planner's named claims, each at a budget of its own, and the budgets that one network is asked for on one target."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from experiments.bench.plan_cells import Figures, Step
from experiments.bench.plan_verdicts import FRACTIONS, NEAR, Suite, part_of

_MIB = 2**20


@dataclass(frozen=True)
class Situation:
    """Where a claim is measured: no remat's figures, the work of a step, and the competitors' figures by name."""

    without_remat: Figures
    step: Step
    competitors: dict[str, Figures]


@dataclass(frozen=True)
class Claim:
    """A figure that the plan for one network, target and budget should not exceed.

    Attributes:
        net: the network.
        target: the chip.
        title: the budget in words.
        is_aim: whether it is aimed at, and not promised.
        budget: the bytes; None where the competitors that it depends on are missing.
        measure: the figure, from the plan's.
        limit: what the figure may be.
        unit: of both.
    """

    net: str
    target: str
    title: str
    is_aim: bool
    budget: Callable[[Situation], int | None]
    measure: Callable[[Situation, Figures], float]
    limit: float
    unit: str

    def budget_bytes(self, suite: Suite, net: str, target: str) -> int | None:
        """Returns the budget for a network and target; None where the claim is not about these, or it cannot be known."""
        situation = situation_of(suite, net, target)
        if (net, target) != (self.net, self.target) or situation is None:
            return None
        return self.budget(situation)

    def measured(self, suite: Suite) -> float | None:
        """Returns the figure; None where there is no plan for the budget."""
        size, situation = self.budget_bytes(suite, self.net, self.target), situation_of(suite, self.net, self.target)
        if size is None or situation is None or (found := suite.planned(self.net, self.target, size)) is None:
            return None
        return self.measure(situation, found[0])

    def is_asked(self, suite: Suite) -> bool:
        """Returns whether the planner was asked, with whatever result."""
        size = self.budget_bytes(suite, self.net, self.target)
        return size is not None and suite.plan(self.net, self.target, size) is not None

    def holds(self, suite: Suite) -> bool:
        """Returns whether the figure is known and within its limit."""
        figure = self.measured(suite)
        return figure is not None and figure <= self.limit


def situation_of(suite: Suite, net: str, target: str) -> Situation | None:
    """Returns where claims about a network and target are measured; None where no remat is not known."""
    base = suite.without_remat(net, target)
    if base is None:
        return None
    found = {str(r.cell.asked): r.figures for r in suite.competitors(net, target) if r.figures is not None}
    return Situation(*base, found)


def _temporaries(size_bytes: int) -> Callable[[Situation], int | None]:
    """The budget under which temporary values have so many bytes, beside all that no remat has in use."""

    def budget(situation: Situation) -> int | None:
        base = situation.without_remat
        return None if base.temp_bytes is None else base.peak_bytes - base.temp_bytes + size_bytes

    return budget


def _temporaries_divided(divisor: int) -> Callable[[Situation], int | None]:
    def budget(situation: Situation) -> int | None:
        temp = situation.without_remat.temp_bytes
        return None if temp is None else _temporaries(temp // divisor)(situation)

    return budget


def _best_segments(situation: Situation) -> int | None:
    peaks = [f.peak_bytes for name, f in situation.competitors.items() if name.startswith("segments of ")]
    return min(peaks, default=None)


def _per_block(situation: Situation) -> int | None:
    found = situation.competitors.get("per block: nothing")
    return None if found is None else found.peak_bytes


def _of_per_block(situation: Situation, plan: Figures) -> float:
    return 100 * plan.recomputed_flops / situation.competitors["per block: nothing"].recomputed_flops


def _recomputed(situation: Situation, plan: Figures) -> float:
    return plan.recomputed_flops / 1e9


def _part(part: float) -> Callable[[Situation], int | None]:
    return lambda situation: int(situation.without_remat.peak_bytes * part)


def _kept_without_recomputing(situation: Situation, plan: Figures) -> float:
    """The part of what autodiff keeps; infinite where a convolution or product runs again, or it is not known."""
    before, after = situation.without_remat.kept_bytes, plan.kept_bytes
    return float("inf") if plan.recomputed_flops or not before or after is None else 100 * after / before


def _extra(situation: Situation, plan: Figures) -> float:
    return 100 * plan.recomputed_flops / situation.step.contraction_flops


# The chain's: a step of 66 GFLOP where no remat's has 55.5, by the count of XLA; best segments have 74.2.
CLAIMS = (
    Claim("chain16", "local", "the peak of the best segments", False, _best_segments, _recomputed, 10.5, "GFLOP recomputed"),
    Claim(
        "chain16", "local", "176 MiB of temporaries", False, _temporaries(176 * _MIB), _recomputed, 0.0, "GFLOP recomputed"
    ),
    Claim(
        "resnet18", "h100", "the peak of `per block: nothing`", True, _per_block, _of_per_block, 60.0,
        "% of what that recomputes",
    ),
    Claim("resnet50", "h100", "a third of the temporaries", True, _temporaries_divided(3), _extra, 12.0, "% of a step"),
    Claim(
        "gpt2", "h100", "65 % of no remat's peak, no product recomputed", True, _part(0.65), _kept_without_recomputing, 50.0,
        "% of the activation bytes that autodiff keeps",
    ),
    Claim("gpt2", "h100", "half the temporaries", True, _temporaries_divided(2), _recomputed, 0.0, "GFLOP recomputed"),
)  # fmt: skip


def budgets(suite: Suite, net: str, target: str, competitors: Iterable[str]) -> Sequence[int]:
    """Returns the budgets to ask for, the smallest first: peaks of `competitors`, parts of that of no remat, those of claims."""
    base = suite.without_remat(net, target)
    if base is None:
        return ()
    peak, names = base[0].peak_bytes, set(competitors)
    theirs = [r.figures.peak_bytes for r in suite.competitors(net, target) if r.figures and r.cell.asked in names]
    claimed = [size for claim in CLAIMS if (size := claim.budget_bytes(suite, net, target)) is not None]
    kept = [0]
    for size in sorted((*theirs, *(part_of(peak, f) for f in FRACTIONS), *claimed)):
        if size < peak and size - size // NEAR > kept[-1]:
            kept.append(size)
    return kept[1:]
