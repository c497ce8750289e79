"""`plan`: the cheapest policy whose compiled peak stays within a budget."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxremat import policy as p
from jaxremat.compat import Var
from jaxremat.errors import PolicyError, RematWarning
from jaxremat.flops import FlopCount, count_equation
from jaxremat.graph import size_bytes
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.judge import Judge, Step, Verdict
from jaxremat.plan.result import Attempt, Plan, Share, short
from jaxremat.plan.search import Search
from jaxremat.plan.task import standard, task
from jaxremat.spelling import parse
from jaxremat.targets import find_target, package_versions
from jaxremat.text import human_bytes

_ROUNDS, _MOST_ROUNDS = 5, 8  # the latter while nothing has fitted
# Where the plan for a limit was compiled before, so many beside it are tried, at distances that double from this part on.
_NUDGES, _NUDGE = 10, 8192
# So many standard policies that are expected to need little are asked where nothing has fitted.
_LEAN = 4
# Another round must promise to save at least this part of a forward pass.
_WORTH = 0.001
# The model's limit moves by at least this part.
_RETREAT = 64


def plan(
    loss: Callable[..., Any],
    *args: Any,
    budget: int | float | str,
    target: str = "local",
    objective: str = "flops",
    argnums: int | Sequence[int] = 0,
    step: Step | None = None,
    compile: bool = True,
    offload: bool = False,
    **kwargs: Any,
) -> Plan:
    """Returns the policy that keeps a program's peak within a budget at the least recomputation that was found.

    The search knows costs and sizes of every value: minimum cuts say what is worth storing at every price of a byte,
    and a dynamic programme over the function's waists mixes them so that at no time too much is in use. Then the target's
    compiler judges, at most five plans (eight while none fits) and those standard policies that would recompute less;
    the cheapest that fits wins, so a plan is never worse than they are. No rematerialization competes too, and wins where it
    fits.

    Args:
        loss: any JAX function with floating-point outputs; most often a scalar loss.
        *args: its arguments; arrays or `jax.ShapeDtypeStruct`s. No data is read. Where the step lays them out over a mesh,
            give them with that layout: JAX traces another program then, and a plan fits one program.
        budget: bytes, or `"2GiB"`; `"60%"` (or 0.6) of the peak without rematerialization; `"fits"`: the target's memory.
            It covers all that the compiled step has in use at once: arguments, results and temporary values; with `"fits"`
            also the gaps between them (`Cost.needed_bytes`).
        target: a name of `jaxremat.targets()`.
        objective: what recomputation costs: `flops`, `bytes` moved, or roofline `time` on the target.
        argnums: the arguments that are differentiated, as for `jax.grad`.
        step: what the budget covers: called with the wrapped loss, it returns a training step and its arguments. By
            default the step is `jax.value_and_grad(loss, argnums)`.
        compile: False asks no compiler: then the planner's model decides, and the plan says so.
        offload: values may be kept in host memory, where that costs less than to compute them again: a byte costs what the
            chip could do while it goes there and back by the link, nothing else running meanwhile.
        **kwargs: keyword arguments of `loss`.

    Returns:
        A `Plan`, which is a policy: `jaxremat.remat(loss, plan)`.

    Raises:
        PolicyError: the budget is no size; or no plan fits it: the message has the smallest that does, what occupies it,
            and about which batch would fit; `offload` for a CPU, or where the rates of the chip are not known.
        TargetError: there is no such target, or nothing here compiles for it.
        TypeError: nothing at `argnums` can be differentiated; no `step` is given, and `loss` returns no real number.

    References:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174. Jain et al., "Checkmate",
        MLSys 2020, arXiv:1910.02653. Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, arXiv:1911.13214.

    Example:
        >>> import jax, jax.numpy as jnp, jaxremat
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = jnp.tanh(x @ w)
        ...     return (x**2).sum()
        >>> ws, x = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        >>> found = jaxremat.plan(loss, ws, x, budget="70%")
        >>> found.peak_bytes <= found.budget_bytes < found.without_remat_bytes
        True
        >>> gradient = jax.grad(jaxremat.remat(loss, found))
    """
    began = time.perf_counter()
    amount = _amount(budget)
    work = task(
        loss, args, kwargs, target=target, objective=objective, argnums=argnums, step=step, compile=compile,
        counts_gaps=amount == "fits", offload=offload,
    )  # fmt: skip
    search, judge = work.search, work.judge
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # candidates are weighed here, whatever they waste
        judge.check(p.Values((0,), search.graph.fingerprint))
        baseline = judge.ask(search.everything)
        limit = _limit(amount, baseline, work.chip.memory_bytes, target)
        searched = time.perf_counter()
        if baseline.peak_bytes <= limit:
            best, search_seconds = baseline, time.perf_counter() - searched
        else:
            best, search_seconds = _within(search, judge, limit, baseline)
    if best.peak_bytes > limit:
        beside = _beside(search, baseline)
        raise PolicyError(_too_small(limit, search, best, beside, args, argnums))
    return _plan(search, judge, best, baseline, limit, target, objective, began, search_seconds)


def _amount(budget: int | float | str) -> int | float | str:
    if isinstance(budget, str):
        policy = parse(f"budget:{budget.removeprefix('budget:')}")
    else:
        policy = p.Budget(budget)
    assert isinstance(policy, p.Budget)
    return policy.amount


def _limit(amount: int | float | str, baseline: Verdict, memory_bytes: int | None, target: str) -> int:
    if isinstance(amount, int):
        return amount
    if isinstance(amount, float):
        return int(baseline.peak_bytes * amount)
    if memory_bytes is None:
        raise PolicyError(f"budget:fits needs the memory of {target}, which is not known; give a size such as 8GiB.")
    return memory_bytes


def _within(search: Search, judge: Judge, limit: int, baseline: Verdict) -> tuple[Verdict, float]:
    """Returns the best verdict within a limit, or the smallest one where none is; and the seconds spent searching.

    The model is asked for plans under a limit of its own, moved until the compiler's peak meets the budget: what the
    compiler allotted beyond the prediction for one plan is expected for the next one, too.
    """
    seconds = 0.0
    verdicts = list[Verdict]()

    def ask(candidate: Candidate) -> Verdict:
        verdicts.append(judge.ask(candidate))
        return verdicts[-1]

    def best_fit() -> Verdict | None:
        return min((v for v in verdicts if v.peak_bytes <= limit), key=lambda v: v.candidate.order, default=None)

    asked = limit - _beside(search, baseline)
    low, high = 0, 2 * max(limit, asked)  # the model's limits that were found to fit, and not to
    misses = 0
    for number in range(_MOST_ROUNDS if judge.compiles else 1):
        if number >= _ROUNDS and best_fit() is not None:
            break
        start = time.perf_counter()
        candidate = _new_candidate(search, judge, asked, low, high)
        seconds += time.perf_counter() - start
        fit = best_fit()
        if candidate is None or (fit is not None and not _is_worth(candidate, fit.candidate, search)):
            break
        verdict = ask(candidate)
        beyond = verdict.peak_bytes - candidate.predicted_bytes
        if verdict.peak_bytes <= limit:
            low = max(low, asked)
            if candidate.cost <= search.bound(limit):
                break
            asked = max(limit - beyond, low + low // _RETREAT)
        else:
            high = min(high, asked)
            asked = min(limit - beyond, high - (high << misses) // (8 * _RETREAT))
            misses += 1
        if not low < asked < high:
            asked = (low + high) // 2
    # What the compiler allots beyond the model, at least: a candidate that exceeds the budget by more is not worth asking.
    beyond = min(v.peak_bytes - v.candidate.predicted_bytes for v in (baseline, *verdicts))
    known = standard(search)
    others = [c for c in known if c.predicted_bytes + min(beyond, 0) <= limit or not judge.compiles]
    for candidate in others:
        if (fit := best_fit()) is None or candidate.order < fit.candidate.order:
            ask(candidate)
    if best_fit() is None:
        ask(search.leanest())
    for candidate in sorted(known, key=lambda c: c.predicted_bytes)[:_LEAN]:
        if best_fit() is None:
            ask(candidate)
    return best_fit() or min((baseline, *verdicts), key=lambda v: v.peak_bytes), seconds


def _beside(search: Search, baseline: Verdict) -> int:
    """What the compiled step reads beside what the loss reads: optimizer state, a whole data set."""
    return max(0, (baseline.argument_bytes or 0) - search.input_bytes)


def _is_worth(candidate: Candidate, fit: Candidate, search: Search) -> bool:
    """Says whether a candidate saves enough against one that fits to compile it."""
    return candidate.order < fit.order and fit.cost - candidate.cost > _WORTH * search.forward_cost


def _new_candidate(search: Search, judge: Judge, asked: int, low: int, high: int) -> Candidate | None:
    """Returns what the model finds best near a limit and the compiler has not seen; None where there is nothing new."""
    nudges = [sign * (asked << i) // _NUDGE for i in range(_NUDGES) for sign in (-1, 1)]
    for tried in (asked, *(asked + nudge for nudge in nudges)):
        if low < tried < high:
            candidate = search.best(tried)
            if candidate is not None and candidate.policy not in judge.verdicts:
                return candidate
    return None


def _too_small(
    limit: int, search: Search, best: Verdict, beside: int, args: Sequence[Any], argnums: int | Sequence[int]
) -> str:
    inputs = search.input_bytes
    gradients = sum(size_bytes(g.aval) for g in search.graph.gradients if isinstance(g, Var))
    asked = {argnums} if isinstance(argnums, int) else set(argnums)
    parameters = sum(
        leaf.size * leaf.dtype.itemsize
        for i in asked
        for leaf in jax.tree.leaves(args[i])
        if hasattr(leaf, "dtype") and hasattr(leaf.dtype, "itemsize")
    )
    fixed = parameters + gradients + beside
    floor = best.peak_bytes
    scale = (limit - fixed) / (floor - fixed) if floor > fixed else 0.0
    batch = (
        f"A batch of about {scale:.0%} of this one would fit."
        if scale > 0
        else "No batch fits: what does not depend on it exceeds the budget alone."
    )
    return (
        f"plan: no plan keeps the peak within {human_bytes(limit)}. The smallest found is {human_bytes(floor)} "
        f"({floor} bytes, {short(best.candidate.policy)}): {human_bytes(inputs)} of inputs, {human_bytes(parameters)} of them "
        f"parameters; {human_bytes(gradients)} of gradients; "
        f"{f'{human_bytes(beside)} that the step reads beside the loss; ' if beside else ''}the rest is what one part of the "
        f"backward pass works on. {batch}"
    )


def _plan(
    search: Search,
    judge: Judge,
    best: Verdict,
    baseline: Verdict,
    limit: int,
    target: str,
    objective: str,
    began: float,
    search_seconds: float,
) -> Plan:
    candidate = best.candidate
    note = ""
    if not judge.compiles:
        note = "no compiler was asked: the planner's model decided"
    elif isinstance(candidate.policy, p.Everything):
        note = "no rematerialization is needed within this budget"
    elif not isinstance(candidate.policy, p.Values | p.Loops):
        note = f"the standard policy {candidate.policy} recomputes least of all that fit"
    attempts = [
        Attempt(
            short(v.candidate.policy),
            v.candidate.predicted_bytes,
            v.peak_bytes if judge.compiles else None,
            v.candidate.flops,
        )
        for v in judge.verdicts.values()
    ]
    forward = search.operations.forward_count
    return Plan(
        policy=candidate.policy,
        budget_bytes=limit,
        target=target,
        objective=objective,
        predicted_bytes=candidate.predicted_bytes,
        peak_bytes=best.peak_bytes if judge.compiles else None,
        without_remat_bytes=baseline.peak_bytes,
        recomputed_contraction_flops=candidate.contraction_flops,
        recomputed_flops=candidate.flops,
        forward_flops=forward.dot_flops + forward.conv_flops + forward.elementwise_flops,
        bound=min(search.bound(limit), candidate.cost),
        cost=candidate.cost,
        host_bytes=candidate.host_bytes,
        shares=_shares(candidate),
        attempts=tuple(attempts),
        seconds=time.perf_counter() - began,
        search_seconds=search_seconds,
        versions=package_versions(find_target(target).kind),
        note=note,
    )


def _shares(candidate: Candidate) -> tuple[Share, ...]:
    """What is stored and recomputed of every operation in every module; only what is worth a row."""
    stored, stored_bytes, host, again, flops = Counter(), Counter(), Counter(), Counter(), Counter()
    order = dict[tuple[str, str], None]()
    for times, choice in candidate.choices if not isinstance(candidate.policy, p.Everything) else ():
        graph = choice.graph
        for value in graph.values:
            labels = graph.labels[value.var]
            key = (labels.path, labels.op)
            if value.size_bytes <= graph.small_bytes:
                continue
            if value.var in choice.kept:
                order[key] = None
                stored[key] += times
                (host if choice.kept[value.var].host else stored_bytes)[key] += times * value.size_bytes
            elif value.index in choice.recomputed:
                order[key] = None
                again[key] += times
                count = count_equation(value.eqn) if value.index in choice.run_twice else FlopCount()
                flops[key] += times * (count.dot_flops + count.conv_flops + count.elementwise_flops)
    return tuple(Share(*key, stored[key], stored_bytes[key], again[key], flops[key], host[key]) for key in order)
