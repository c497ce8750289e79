"""`frontier_of`: the whole curve of compiled peak against recomputation, with the standard policies on it."""

import time
import warnings
from collections.abc import Iterable

from jaxremat import policy as p
from jaxremat.errors import PolicyError, RematWarning
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.curve import Frontier, Point
from jaxremat.plan.judge import Verdict
from jaxremat.plan.search import Search
from jaxremat.plan.task import Task, standard
from jaxremat.targets import package_versions

# Always compiled; other standard policies only where the model does not expect them to lie above the curve.
_ALWAYS = ("dots", "dots_no_batch", "names:*", "nothing", "segments:sqrt")
# Two points lie at least this part of the curve's width apart.
_NEAREST = 64


def frontier_of(work: Task, points: int, began: float) -> Frontier:
    """Returns the curve of a task, as `frontier` has it; `began` is when that did, by `time.perf_counter`.

    Raises:
        PolicyError: `points` is no whole number of 2 or more.
    """
    require_points(points)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # candidates are weighed here, whatever they waste
        verdicts = _weighed(work, points)
    baseline = next(v for v in verdicts if isinstance(v.candidate.policy, p.Everything))
    on_top = _unbeaten(verdicts)
    on_curve = {v.candidate.policy for v in on_top}
    forward = work.search.operations.forward_count
    return Frontier(
        points=tuple(_point(v, work) for v in on_top),
        beaten=tuple(_point(v, work) for v in verdicts if v.candidate.policy not in on_curve),
        target=work.chip.name,
        objective=work.objective,
        without_remat_bytes=baseline.peak_bytes,
        forward_flops=forward.dot_flops + forward.conv_flops + forward.elementwise_flops,
        is_compiled=work.judge().compiles,
        seconds=time.perf_counter() - began,
        versions=package_versions(work.chip.kind),
    )


def require_points(points: int) -> None:
    """Checks how many points a curve is to have.

    Raises:
        PolicyError: they are no whole number of 2 or more.
    """
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        raise PolicyError(
            f"frontier: points must be a whole number of 2 or more, for both ends of the curve; got {points!r}."
        )


def _weighed(work: Task, count: int) -> list[Verdict]:
    """Asks for the peak of every policy that may lie on the curve."""
    searched = _spread(work.search, count)
    others = [
        c
        for c in standard(work.search)
        if str(c.policy) in _ALWAYS
        or not any(s.predicted_bytes <= c.predicted_bytes and s.order[:2] <= c.order[:2] for s in searched)
    ]
    judge = work.judge()
    for candidate in (*searched, *others):
        judge.ask(candidate)
    judge.check_refusals()
    return [v for v in judge.verdicts.values() if v.refusal is None]


def _spread(search: Search, count: int) -> list[Candidate]:
    """What the search finds under limits between its leanest candidate and none, the widest gap halved each time."""
    lean, most = search.leanest(), search.everything
    found = {most.policy: most}
    if lean.predicted_bytes >= most.predicted_bytes:
        return [most]
    found[lean.policy] = lean
    nearest = max(1, (most.predicted_bytes - lean.predicted_bytes) // _NEAREST)
    gaps = [(lean.predicted_bytes, most.predicted_bytes)]
    while gaps and len(found) < count:
        gaps.sort(key=lambda gap: gap[1] - gap[0])
        low, high = gaps.pop()
        middle = (low + high) // 2
        candidate = search.best(middle)
        if candidate is not None:
            found.setdefault(candidate.policy, candidate)
        gaps += [gap for gap in ((low, middle), (middle, high)) if gap[1] - gap[0] > nearest]
    return list(found.values())


def _unbeaten(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Returns the verdicts by rising peak, each with less recomputation than the one before, contractions and all in all."""
    kept = list[Verdict]()
    for verdict in sorted(verdicts, key=lambda v: (v.peak_bytes, v.candidate.order)):
        new = verdict.candidate
        old = kept[-1].candidate if kept else None
        if old is None or (
            new.contraction_flops <= old.contraction_flops
            and new.cost <= old.cost
            and new.flops <= old.flops
            and new.order[:2] != old.order[:2]
        ):
            kept.append(verdict)
    return kept


def _point(verdict: Verdict, work: Task) -> Point:
    candidate = verdict.candidate
    return Point(
        policy=candidate.policy,
        predicted_bytes=candidate.predicted_bytes,
        peak_bytes=verdict.peak_bytes if work.judge().compiles else None,
        recomputed_contraction_flops=candidate.contraction_flops,
        recomputed_flops=candidate.flops,
        cost=candidate.cost,
        bound=min(work.search.bound(verdict.peak_bytes), candidate.cost),
    )
