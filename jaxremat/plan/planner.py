"""`Planner`: a program that is planned for one budget after another; `plan` and `frontier`: for one, and for all."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxremat.plan.curve import Frontier
from jaxremat.plan.frontier import frontier_of, require_points
from jaxremat.plan.judge import Step
from jaxremat.plan.planning import amount_of, plan_of
from jaxremat.plan.result import Plan
from jaxremat.plan.task import task


class Planner:
    """A program and a target, planned for any number of budgets: what was traced, searched and compiled serves them all.

    A plan is never worse than one that was found before for less: everything that the compiler has judged competes.

    Args:
        loss: as for `plan`, like all others.
        *args, target, objective, argnums, step, compile, offload, **kwargs: likewise.

    Raises:
        PolicyError: there is no such objective; the function has side effects; `offload` for a CPU, or where the rates of
            the chip are not known.
        TargetError: there is no such target, or nothing here compiles for it.
        TypeError: nothing at `argnums` can be differentiated; no `step` is given, and `loss` returns no real number.

    Example:
        >>> import jax, jax.numpy as jnp, jaxremat
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = jnp.tanh(x @ w)
        ...     return (x**2).sum()
        >>> ws, x = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        >>> planner = jaxremat.Planner(loss, ws, x)
        >>> small, large = planner.plan("70%"), planner.plan("90%")
        >>> large.recomputed_flops <= small.recomputed_flops
        True
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        *args: Any,
        target: str = "local",
        objective: str = "flops",
        argnums: int | Sequence[int] = 0,
        step: Step | None = None,
        compile: bool = True,
        offload: bool = False,
        **kwargs: Any,
    ) -> None:
        began = time.perf_counter()
        self._task = task(
            loss, args, kwargs, target=target, objective=objective, argnums=argnums, step=step, compile=compile,
            offload=offload,
        )  # fmt: skip
        self._seconds = time.perf_counter() - began  # of which the first result takes account

    def _began(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return time.perf_counter() - seconds

    def plan(self, budget: int | float | str) -> Plan:
        """Returns the policy that keeps the peak within a budget at the least recomputation that was found.

        Args:
            budget: as for `jaxremat.plan`.

        Raises:
            PolicyError: the budget is no size, or no plan fits it.
        """
        return plan_of(self._task, budget, self._began())

    def frontier(self, points: int = 8) -> Frontier:
        """Returns the curve of peak against recomputation; what was judged for budgets before may lie on it.

        Args:
            points: as for `jaxremat.frontier`.

        Raises:
            PolicyError: `points` is no whole number of 2 or more.
        """
        return frontier_of(self._task, points, self._began())


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
    compiler judges, from five plans on (more while none fits) and those standard policies that would recompute less, and
    what is left of the budget is filled with what saves most; the cheapest that fits wins, so a plan is never worse than
    the standard ones are. No rematerialization competes too, and wins where it fits.

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
    amount_of(budget)  # before anything is traced
    return Planner(
        loss,
        *args,
        target=target,
        objective=objective,
        argnums=argnums,
        step=step,
        compile=compile,
        offload=offload,
        **kwargs,
    ).plan(budget)


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
    require_points(points)  # before anything is traced
    return Planner(
        loss, *args, target=target, objective=objective, argnums=argnums, step=step, compile=compile, **kwargs
    ).frontier(points)
