"""`frontier`: the whole curve of compiled peak against recomputation, with the standard policies on it."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxremat import policy as p
from jaxremat.errors import PolicyError, RematWarning
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.curve import Frontier, Point
from jaxremat.plan.judge import Step, Verdict
from jaxremat.plan.search import Search
from jaxremat.plan.task import Task, standard, task
from jaxremat.policy import Policy
from jaxremat.targets import package_versions

# Always compiled; other standard policies only where the model does not expect them to lie above the curve.
_ALWAYS = ("dots", "dots_no_batch", "names:*", "nothing", "segments:sqrt")
# Two points lie at least this part of the curve's width apart.
_NEAREST = 64


def frontier(
    loss: Callable[..., Any],
    *args: Any,
    target: str = "local",
    objective: str = "flops",
    argnums: int | Sequence[int] = 0,
    step: Step | None = None,
    compile: bool = True,
    points: int = 8,
    **kwargs: Any,
) -> Frontier:
    """Returns the curve of a program's peak against what it recomputes, from the leanest policy found to none at all.

    The planner's search is asked for policies under limits spread between both ends, and each is compiled once, like the
    standard policies. What another one beats in peak and recomputation is taken off the curve: so less memory never comes
    with less recomputation, and no point needs more than one that recomputes less.

    Args:
        loss: any JAX function with floating-point outputs; most often a scalar loss.
        *args: its arguments; arrays or `jax.ShapeDtypeStruct`s. No data is read.
        target: a name of `jaxremat.targets()`.
        objective: what recomputation costs: `flops`, `bytes` moved, or roofline `time` on the target.
        argnums: the arguments that are differentiated, as for `jax.grad`.
        step: called with the wrapped loss, it returns a training step and its arguments, whose peak is weighed. By
            default the step is `jax.value_and_grad(loss, argnums)`.
        compile: False asks no compiler: then the planner's model decides, and the frontier says so.
        points: how many policies of the search are weighed at most, both ends included; 2 or more.
        **kwargs: keyword arguments of `loss`.

    Returns:
        A `Frontier`, whose `points` are policies: `jaxremat.remat(loss, found.points[0])`.

    Raises:
        PolicyError: `points` is no whole number of 2 or more; there is no such objective; the function has side effects.
        TargetError: there is no such target, or nothing here compiles for it.
        TypeError: nothing at `argnums` can be differentiated; no `step` is given, and `loss` returns no real number.

    Reference:
        Jain et al., "Checkmate", MLSys 2020, arXiv:1910.02653, figure 5: the curve that planners are compared by.

    Example:
        >>> import jax, jax.numpy as jnp, jaxremat
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = jnp.tanh(x @ w)
        ...     return (x**2).sum()
        >>> ws, x = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4, jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        >>> found = jaxremat.frontier(loss, ws, x, points=3)
        >>> peaks = [point.peak_bytes for point in found.points]
        >>> flops = [point.recomputed_flops for point in found.points]
        >>> peaks == sorted(peaks), flops == sorted(flops, reverse=True), flops[-1]
        (True, True, 0)
    """
    began = time.perf_counter()
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        raise PolicyError(
            f"frontier: points must be a whole number of 2 or more, for both ends of the curve; got {points!r}."
        )
    work = task(loss, args, kwargs, target=target, objective=objective, argnums=argnums, step=step, compile=compile)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # candidates are weighed here, whatever they waste
        verdicts = _weighed(work, points)
    baseline = next(v for v in verdicts if isinstance(v.candidate.policy, p.Everything))
    curve = _unbeaten(verdicts)
    on_curve = {v.candidate.policy for v in curve}
    forward = work.search.operations.forward_count
    return Frontier(
        points=tuple(_point(v, work) for v in curve),
        beaten=tuple(_point(v, work) for v in verdicts if v.candidate.policy not in on_curve),
        target=target,
        objective=objective,
        without_remat_bytes=baseline.peak_bytes,
        forward_flops=forward.dot_flops + forward.conv_flops + forward.elementwise_flops,
        is_compiled=work.judge.compiles,
        seconds=time.perf_counter() - began,
        versions=package_versions(work.chip.kind),
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
    distinct = dict[Policy, Candidate]((c.policy, c) for c in (*searched, *others))
    return [work.judge.ask(candidate) for candidate in distinct.values()]


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
        peak_bytes=verdict.peak_bytes if work.judge.compiles else None,
        recomputed_contraction_flops=candidate.contraction_flops,
        recomputed_flops=candidate.flops,
        cost=candidate.cost,
        bound=min(work.search.bound(verdict.peak_bytes), candidate.cost),
    )
