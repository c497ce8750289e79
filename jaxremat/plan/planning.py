"""`plan_of`: the cheapest policy of a task whose compiled peak stays within a budget."""

import time
import warnings
from collections import Counter

import numpy as np

from jaxremat import policy as p
from jaxremat.compat import Var
from jaxremat.errors import PolicyError, RematWarning
from jaxremat.flops import FlopCount, count_equation
from jaxremat.graph import size_bytes
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.judge import Judge, Verdict
from jaxremat.plan.result import Attempt, Plan, Share, short
from jaxremat.plan.rounds import bytes_beside, within
from jaxremat.plan.task import Task
from jaxremat.spelling import parse
from jaxremat.targets import Target, package_versions
from jaxremat.text import human_bytes


def plan_of(work: Task, budget: int | float | str, began: float) -> Plan:
    """Returns the plan of a task for a budget, as `plan` has it; `began` is when its planning did, by `time.perf_counter`.

    Raises:
        PolicyError: the budget is no size, or no plan fits it.
    """
    amount = amount_of(budget)
    search, judge = work.search, work.judge(counts_gaps=amount == "fits")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # candidates are weighed here, whatever they waste
        judge.check(p.Values((0,), search.graph.fingerprint))
        baseline = judge.ask(search.everything)
        limit = _limit(amount, baseline, work.chip)
        searched = time.perf_counter()
        if baseline.peak_bytes <= limit:
            best, search_seconds = baseline, time.perf_counter() - searched
        else:
            best, search_seconds = within(search, judge, limit, baseline)
    if best.peak_bytes > limit:
        refusals, asked = judge.check_refusals(), len(judge.verdicts)
        others = f" The compiler refused {len(refusals)} of {asked} programs: {refusals[-1]}" if refusals else ""
        raise PolicyError(_too_small(limit, work, best, bytes_beside(search, baseline)) + others)
    return _plan(work, judge, best, baseline, limit, began, search_seconds)


def amount_of(budget: int | float | str) -> int | float | str:
    """Returns a budget as bytes, as a part of the peak without rematerialization, or as `"fits"`.

    Raises:
        PolicyError: it is none.
    """
    if isinstance(budget, str):
        text = budget.removeprefix("budget:").strip()
        policy = parse(f"budget:{text}") if text else p.Budget(budget)
    else:
        policy = p.Budget(budget.item() if isinstance(budget, np.integer | np.floating) else budget)
    assert isinstance(policy, p.Budget)
    return policy.amount


def _limit(amount: int | float | str, baseline: Verdict, chip: Target) -> int:
    if isinstance(amount, int):
        return amount
    if isinstance(amount, float):
        return int(baseline.peak_bytes * amount)
    if chip.memory_bytes is None:
        raise PolicyError(f"budget:fits needs the memory of {chip.name}, which is not known; give a size such as 8GiB.")
    return chip.memory_bytes


def _too_small(limit: int, work: Task, best: Verdict, beside: int) -> str:
    search, parameters = work.search, work.parameter_bytes
    inputs = search.input_bytes
    gradients = sum(size_bytes(g.aval) for g in search.graph.gradients if isinstance(g, Var))
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
    work: Task, judge: Judge, best: Verdict, baseline: Verdict, limit: int, began: float, search_seconds: float
) -> Plan:
    search = work.search
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
            v.peak_bytes if judge.compiles and v.refusal is None else None,
            v.candidate.flops,
        )
        for v in judge.verdicts.values()
    ]
    forward = search.operations.forward_count
    return Plan(
        policy=candidate.policy,
        budget_bytes=limit,
        target=work.chip.name,
        objective=work.objective,
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
        versions=package_versions(work.chip.kind),
        note=note,
        program=search.subject.fingerprint,
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
