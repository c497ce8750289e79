"""`--policy budget:60%`: the plan of a run, made with its real training step and kept on disk for the next run.

A plan belongs to a program, so it is kept under a digest of the step without rematerialization, together with the budget, the
target, the number of devices and the versions. It lies beside the compiled figures of `jaxremat.cost_cache`, one JSON file
each; a file that cannot be read, or that does not fit the program, counts as absent.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jaxremat
from experiments import devices, records
from experiments.cifar_files import CLASSES
from experiments.config import Config
from experiments.program import Applied, apply_policy, describe
from experiments.training import make_loss
from jaxremat.cost_cache import cache_directory, cache_key
from jaxremat.plan.result import short
from jaxremat.policy import Budget
from jaxremat.targets import package_versions
from jaxremat.text import human_bytes

Say = Callable[[str], None]

# What a record says of a plan, beside the policy that was found.
FIGURES = (
    "budget_bytes", "target", "peak_bytes", "without_remat_bytes", "predicted_bytes", "recomputed_flops", "forward_flops",
    "bound", "seconds",
)  # fmt: skip


def is_budget(config: Config) -> bool:
    """Says whether the run's policy has to be planned first.

    Raises:
        PolicyError: the policy is not a spelling of one.
    """
    return isinstance(jaxremat.parse(config.policy), Budget)


def require_target(config: Config, name: str, training_images: int) -> jaxremat.Target:
    """Returns the target of a name, before anything is fetched or traced.

    Raises:
        TargetError: it does not exist, or nothing here compiles for it.
        ExperimentError: the batch does not divide over its chips.
    """
    target = jaxremat.targets()[name]
    if not target.available:
        raise jaxremat.TargetError(devices.why_missing(target))
    devices.check_batch_on(target, config.batch_size, training_images)
    return target


def plan_run(config: Config, target: jaxremat.Target, training_images: int, say: Say) -> tuple[Applied, jaxremat.Plan]:
    """Returns the run's model and loss under the plan for its budget, and the plan, a kept one where there is one.

    Args:
        config: the run; its policy is a budget.
        target: whose compiler judges.
        training_images: how many of them lie on every device beside the state.
        say: gets a line of progress, as planning takes long, and one on what was found.

    Raises:
        PolicyError: nothing fits the budget; the message has the smallest that can be met.
        TargetError: nothing here compiles for the target.
        CompileError: its compiler refused the step.
    """
    over = devices.devices_of(target)
    options = jaxremat.compiler_options() if target.kind == "local" else None
    plain = apply_policy(dataclasses.replace(config, policy="everything", regions="net"), len(CLASSES))
    budget = str(jaxremat.parse(config.policy))

    def step(loss: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        parts = describe(config, dataclasses.replace(plain, loss=loss), training_images, over)
        return parts.jit_step(options), (parts.state, parts.training, parts.order)

    path = _path(config, plain, target, training_images, over.count, options)
    kept = _kept(path, config)
    if kept is not None:
        say(f"{target.name}  {_found(budget, kept[1])}; the plan is taken from {path}")
        return kept
    say(f"{target.name}  {budget}: planning, which compiles the step several times")
    plan = jaxremat.plan(
        make_loss(plain.model),
        *plain.arguments(config.batch_size),
        budget=budget.removeprefix("budget:"),
        target=target.name,
        step=step,
    )
    with contextlib.suppress(OSError):  # a directory that cannot be written to is done without
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
    say(f"{target.name}  {_found(budget, plan)}; planned in {plan.seconds:.1f} s")
    return _under(config, plan), plan


def resolved(config: Config, plan: jaxremat.Plan) -> Config:
    """Returns the configuration with what was planned in place of the budget; it is for the whole loss, whatever it is."""
    return dataclasses.replace(config, policy=str(plan.policy), regions="net")


def as_json(plan: jaxremat.Plan) -> dict[str, Any]:
    """Returns the plan's figures for a record; sizes in bytes, `bound` in FLOPs, `seconds` of the planning."""
    return {name: getattr(plan, name) for name in FIGURES}


def _under(config: Config, plan: jaxremat.Plan) -> Applied:
    return apply_policy(resolved(config, plan), len(CLASSES))


def _found(budget: str, plan: jaxremat.Plan) -> str:
    peak = (
        "" if plan.peak_bytes is None else f", peak {human_bytes(plan.peak_bytes)} of {human_bytes(plan.budget_bytes)}"
    )
    return f"{budget}: {short(plan.policy)}{peak}{f'; {plan.note}' if plan.note else ''}"


def _kept(path: Path, config: Config) -> tuple[Applied, jaxremat.Plan] | None:
    """Returns what a file holds if it is a plan that fits its budget and this program."""
    try:
        plan = jaxremat.load_plan(path)
        if plan.peak_bytes is None or plan.peak_bytes > plan.budget_bytes:
            return None
        applied = _under(config, plan)
        applied.residual_bytes(config.batch_size)  # a plan of another program is refused when it is applied
    except (OSError, ValueError, TypeError):  # a PolicyError is a ValueError
        return None
    return applied, plan


def _path(
    config: Config,
    plain: Applied,
    target: jaxremat.Target,
    training_images: int,
    devices_count: int,
    options: dict[str, str] | None,
) -> Path:
    """Returns where the plan of a program is kept, whatever numbers the seed and the schedule put into it."""
    # A step over devices that are not here reads the same on every machine.
    alike = dataclasses.replace(config, seed=Config.seed, learning_rate=Config.learning_rate, epochs=1)
    parts = describe(alike, plain, training_images, devices.absent_devices(devices_count))
    text = str(parts.jit_step(None).trace(parts.state, parts.training, parts.order).jaxpr)
    versions = {name: version for name, version in records.versions().items() if name in ("jaxremat", "jax", "jaxlib")}
    circumstances = {
        "budget": str(jaxremat.parse(config.policy)),
        "target": [target.kind, target.chips, target.specification, target.memory_bytes],
        "device": jax.devices()[0].device_kind if target.kind == "local" else "",
        "versions": versions | package_versions(target.kind),
        "options": options,
        "environment": [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
    }
    # Functions of custom derivatives are printed with their addresses.
    return cache_directory() / "plans" / f"{cache_key(re.sub('0x[0-9a-f]+', '', text), circumstances)}.json"
