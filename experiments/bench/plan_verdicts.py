"""What the cells of the planner's bench say: a verdict for each competitor, the named claims, the medians over the suite."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from experiments.bench.nets import RELU_NETS
from experiments.bench.plan_cells import NO_REMAT, Cell, Figures, Planned, Result, Step

Outcome = Literal["less", "same", "nothing", "more", "over budget", "no plan", "failed", "saves nothing", "not asked"]
MISSES: tuple[Outcome, ...] = ("more", "over budget", "no plan", "failed")
FRACTIONS = (0.75, 0.5)
# How far a gradient may be from that without rematerialization, as a part of a leaf's largest entry, where not bit by bit.
TOLERANCE = 2e-5
# Of budgets that differ by less than one part in so many, the smallest stands for all.
NEAR = 1000


@dataclass(frozen=True)
class Row:
    """A competitor, and the plan that was asked for its peak.

    Attributes:
        competitor: its result.
        plan: the planner's, or None where it was not asked.
        outcome: `less`: the plan recomputes less. `same`: as much, with no more memory. `nothing`: both recompute nothing.
            `more`, `over budget`, `no plan`: the planner's misses. `failed`: one of the two raised something else.
            `saves nothing`: the competitor needs no less than no remat does, so there is nothing to ask for. `not asked`:
            this cell has not been run.
    """

    competitor: Result
    plan: Result | None
    outcome: Outcome

    @property
    def is_miss(self) -> bool:
        """Whether the planner is at fault; a competitor that fails is nobody's miss."""
        return self.outcome in MISSES and self.competitor.figures is not None


class Suite:
    """All results, by cell.

    Args:
        results: of any networks and targets, in order.
    """

    def __init__(self, results: Mapping[Cell, Result]) -> None:
        self._results = results

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """The networks with their targets, in order of first appearance."""
        return tuple(dict.fromkeys((cell.net, cell.target) for cell in self._results))

    @property
    def results(self) -> Sequence[Result]:
        """All of them."""
        return tuple(self._results.values())

    def without_remat(self, net: str, target: str) -> tuple[Figures, Step] | None:
        """Returns the figures of no remat, and the work of a step; None where these are not known."""
        result = self._results.get(Cell("competitor", net, target, NO_REMAT))
        if result is None or result.figures is None or result.step is None:
            return None
        return result.figures, result.step

    def competitors(self, net: str, target: str) -> Sequence[Result]:
        """Returns the results of the competitors, no remat among them."""
        return self._of("competitor", net, target)

    def plans(self, net: str, target: str) -> Sequence[Result]:
        """Returns the results of the planner, the largest budget first."""
        return sorted(self._of("plan", net, target), key=lambda result: -int(result.cell.asked))

    def plan(self, net: str, target: str, budget_bytes: int) -> Result | None:
        """Returns the planner's result for a budget, or for the largest that is a little smaller; None where there is none."""
        least = budget_bytes - budget_bytes // NEAR
        near = (p for p in self.plans(net, target) if least <= int(p.cell.asked) <= budget_bytes)
        return next(near, None)

    def planned(self, net: str, target: str, budget_bytes: int) -> tuple[Figures, Planned] | None:
        """Returns what was found for a budget; None where nothing was, or it was not asked for."""
        result = self.plan(net, target, budget_bytes)
        if result is None or result.figures is None or result.planned is None:
            return None
        return result.figures, result.planned

    def is_least_fraction(self, cell: Cell) -> bool:
        """Returns whether a plan's budget is the least of the `FRACTIONS`, or stands for it."""
        base = self.without_remat(cell.net, cell.target)
        budget = part_of(base[0].peak_bytes, min(FRACTIONS)) if base else 0
        return budget - budget // NEAR <= int(cell.asked) <= budget

    def rows(self, net: str, target: str) -> Sequence[Row]:
        """Returns a row for each competitor, the largest peak first and failures last."""
        base = self.without_remat(net, target)
        rows = list[Row]()
        for result in self.competitors(net, target):
            if result.cell.asked == NO_REMAT:
                continue
            plan = None
            if result.figures is not None:
                plan = self.plan(net, target, result.figures.peak_bytes)
            rows.append(Row(result, plan, outcome(result, plan, base[0] if base else None)))
        return sorted(rows, key=lambda row: -(row.competitor.figures.peak_bytes if row.competitor.figures else 0))

    def unordered(self, net: str, target: str) -> Sequence[tuple[Result, Result]]:
        """Returns neighbouring plans of which the one with less budget recomputes less or needs more: none should."""
        plans = [plan for plan in self.plans(net, target) if plan.figures is not None]
        return [
            (more, less)
            for more, less in pairwise(plans)
            if more.figures is not None
            and less.figures is not None
            and (
                less.figures.recomputed_flops < more.figures.recomputed_flops
                or less.figures.peak_bytes > more.figures.peak_bytes
            )
        ]

    def _of(self, kind: str, net: str, target: str) -> list[Result]:
        return [r for cell, r in self._results.items() if (cell.kind, cell.net, cell.target) == (kind, net, target)]


def outcome(competitor: Result, plan: Result | None, without_remat: Figures | None) -> Outcome:
    """Returns what became of a competitor: see `Row`."""
    if competitor.figures is None or without_remat is None:
        return "failed"
    if competitor.figures.peak_bytes >= without_remat.peak_bytes:
        return "saves nothing"
    if plan is None:
        return "not asked"
    if plan.figures is None:
        return "no plan" if plan.status == "no plan" else "failed"
    theirs, ours = competitor.figures, plan.figures
    if ours.peak_bytes > theirs.peak_bytes:
        return "over budget"
    if ours.recomputed_flops != theirs.recomputed_flops:
        return "less" if ours.recomputed_flops < theirs.recomputed_flops else "more"
    return "same" if ours.recomputed_flops else "nothing"


def part_of(peak_bytes: int, fraction: float) -> int:
    """Returns a part of a peak, in whole bytes."""
    return int(peak_bytes * fraction)


def distances(suite: Suite, fraction: float) -> dict[tuple[str, str], float]:
    """Returns, by network and target, the distance of the plan for a part of no remat's peak to its lower bound.

    As a part of the operations of a step without rematerialization.
    """
    found = dict[tuple[str, str], float]()
    for net, target in suite.places:
        base = suite.without_remat(net, target)
        plan = suite.planned(net, target, part_of(base[0].peak_bytes, fraction)) if base else None
        if base is not None and plan is not None:
            found[net, target] = max(0.0, plan[1].cost_flops - plan[1].bound_flops) / base[1].flops
    return found


def prediction_errors(suite: Suite) -> dict[tuple[str, str], float]:
    """Returns, by network and target, the median error of the predicted peaks: as a part of the compiled one, without sign.

    A program that several budgets led to counts once.
    """
    found = dict[tuple[str, str], float]()
    for place in suite.places:
        pairs = {pair for r in suite.plans(*place) if r.planned is not None for pair in r.planned.attempts}
        if pairs:
            found[place] = median(abs(predicted - compiled) / compiled for predicted, compiled in pairs)
    return found


def compared_gradients(suite: Suite) -> Sequence[tuple[Result, float]]:
    """Returns the plans whose gradient was run beside that without rematerialization, each with the difference."""
    return [
        (r, r.planned.gradient_difference)
        for r in suite.results
        if r.planned is not None and r.planned.gradient_difference is not None
    ]


def gradient_tolerance(net: str) -> float:
    """Returns how far the gradient of a network may be off, by its spelling at `--nets`: 0 for one of ReLUs.

    Example:
        >>> gradient_tolerance("resnet18:16"), gradient_tolerance("gpt2")
        (0.0, 2e-05)
    """
    return 0.0 if net.partition(":")[0] in RELU_NETS else TOLERANCE


def wrong_gradients(suite: Suite) -> Sequence[tuple[Result, float]]:
    """Returns the plans whose gradient is farther from that without rematerialization than it may be."""
    return [(r, apart) for r, apart in compared_gradients(suite) if apart > gradient_tolerance(r.cell.net)]


def disagreements(suite: Suite) -> Sequence[Result]:
    """Returns the plans that report another peak or recomputation than an independent count of their program."""
    return [
        r
        for r in suite.results
        if r.figures is not None
        and r.planned is not None
        and (r.planned.told_flops != r.figures.recomputed_flops or r.planned.told_peak_bytes != r.figures.peak_bytes)
    ]
