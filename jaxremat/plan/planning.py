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
from jaxremat.plan.rounds import bytes_beside, within
from jaxremat.plan.search import Search
from jaxremat.plan.task import task
from jaxremat.spelling import parse
from jaxremat.targets import find_target, package_versions
from jaxremat.text import human_bytes


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
            best, search_seconds = within(search, judge, limit, baseline)
    if best.peak_bytes > limit:
        beside = bytes_beside(search, baseline)
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
