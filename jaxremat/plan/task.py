"""`Task`: what a planner works on, made from its arguments; and the standard policies, which always compete."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxremat.arguments import name_of
from jaxremat.errors import PolicyError, TargetError
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.judge import Judge, Step
from jaxremat.plan.loops import make_search
from jaxremat.plan.neighbours import but_for_the_last
from jaxremat.plan.objective import cost_of, link_of
from jaxremat.plan.search import Search
from jaxremat.plan.subject import Subject
from jaxremat.spelling import parse
from jaxremat.targets import Target, find_target

_SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# What blocks give is tagged by convention; one in so many of these values is stored.
BLOCKS, EVERY = parse("names:*"), (1, 2, 4)


@dataclass(frozen=True, eq=False)
class Task:
    """A function to plan for a chip: the search for stored sets, and the judge of what it finds.

    Attributes:
        search: for stored sets.
        chip: the target.
        objective: what recomputation costs.
        parameter_bytes: of the arguments that are differentiated.
    """

    search: Search
    chip: Target
    objective: str
    parameter_bytes: int
    _judges: tuple[Judge, Judge]

    def judge(self, counts_gaps: bool = False) -> Judge:
        """Returns the judge; its peaks are all that a run needs (`Cost.needed_bytes`) with `counts_gaps`."""
        return self._judges[counts_gaps]


def task(
    loss: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    target: str,
    objective: str,
    argnums: int | Sequence[int],
    step: Step | None,
    compile: bool,
    offload: bool = False,
) -> Task:
    """Returns the task of planning a function; the arguments are those of `plan`.

    Raises:
        PolicyError: the function has side effects; there is no such objective; nothing is known of the link to the host, and
            that is wanted.
        TargetError: there is no such target, or nothing here compiles for it and that is wanted.
        TypeError: nothing at `argnums` can be differentiated; no step is given, and the function returns no real number.
    """
    chip = find_target(target)
    if compile and not chip.available:
        raise TargetError(
            f"plan: nothing here compiles for {target}. Needed: {chip.remedy}. Or plan with compile=False."
        )
    cost = cost_of(objective, chip)
    platform = chip.specification if chip.kind == "local" else chip.kind
    subject = Subject(loss, args, kwargs, argnums)
    outs = subject.function.out_avals
    if (
        compile
        and step is None
        and (len(outs) != 1 or outs[0].shape or not jnp.issubdtype(outs[0].dtype, jnp.floating))
    ):
        raise TypeError(
            "plan: the step that is compiled is jax.value_and_grad(loss), so the loss must return one real number; "
            f"{name_of(loss)} returns {', '.join(out.str_short() for out in outs)}. Give the step: step=lambda loss: "
            "(the function that calls it, its arguments)."
        )
    link = link_of(objective, chip) if offload else None
    search = make_search(subject, cost, platform, max(1, chip.chips), link, by_cost=objective != "flops")
    asked = {argnums} if isinstance(argnums, int) else set(argnums)
    leaves = [leaf for i in asked for leaf in jax.tree.leaves(args[i])]
    # A key of random numbers has a dtype without a size.
    parameters = sum(x.size * x.dtype.itemsize for x in leaves if hasattr(getattr(x, "dtype", None), "itemsize"))
    plain, gaps = (
        Judge(loss, step, args, kwargs, argnums, target if compile else None, counts_gaps)
        for counts_gaps in (False, True)
    )
    return Task(search, chip, objective, parameters, (plain, gaps))


def standard(search: Search) -> list[Candidate]:
    """Returns the standard policies, the one that recomputes least first."""
    found = list[Candidate]()
    segments = (f"segments:{count}" for count in _SEGMENTS)
    scans = search.subject.scans
    # What is commonly done: the body of a scan is rematerialized, in runs or not, and the function round it is not.
    runs = [f"{run}*{policy}" for policy in ("dots", "nothing") for run in search.runs]
    inside = ["dots", "dots_no_batch", "nothing", *runs] if scans else []
    bodies = [f"loops:everything{f'|{body}' * scans}" for body in inside]
    more = ["names:*"] if search.has_names else []
    if search.link is not None:
        more += [f"offload:{spelling}" for spelling in ("dots", *more)]
    for spelling in ("dots", "dots_no_batch", "segments:sqrt", "nothing", *segments, *bodies, *more):
        try:
            found.append(search.of_policy(parse(spelling)))
        except PolicyError:  # segments of a function that cannot be cut; runs that are not those of all its scans
            continue
    if search.has_blocks:
        found += [but_for_the_last(search, BLOCKS, every, parts) for every in EVERY for parts in (1, 0)]
    return sorted(found, key=lambda c: c.order)
