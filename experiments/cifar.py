"""Train on CIFAR-10 under a rematerialization policy.

    python -m experiments.cifar --policy dots
    python -m experiments.cifar --policy nothing --model resnet18 --data sample --epochs 1
    python -m experiments.cifar --policy names:conv_out --checkpoint-dir ckpt --out results.jsonl
    python -m experiments.cifar --policy budget:60% --model resnet18 --data sample --epochs 1
    python -m experiments.cifar --policy nothing,dots,budget:fits --target h100,v5e --dry-run --plot cost.png

Progress goes to standard error; standard output gets a table and, as its last line, the run's record (of a dry run, all
figures) as JSON. The exit status is 0, or 2 with one message on standard error when something asked for cannot be done.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import tyro
from rich.console import Console

from experiments import budgets, checkpoints, data, devices, dry_run, dry_run_report, loop, progress, records, report
from experiments.cifar_files import CLASSES
from experiments.command import exit_status, resuming
from experiments.config import Config, check
from experiments.dry_run import DryRun
from experiments.errors import ExperimentError
from experiments.program import Applied, apply_policy, build_program
from experiments.records import Record
from experiments.training import TrainState
from jaxremat import Plan, PolicyError


@dataclass(frozen=True)
class Command:
    """Train a network on CIFAR-10 under a rematerialization policy and say what that keeps and costs."""

    training: Config = field(default_factory=Config)
    dry: DryRun = field(default_factory=DryRun)


@dataclass(frozen=True)
class Trained:
    """The outcome of a run. Its record is None in all processes but the first."""

    state: TrainState
    record: Record | None


@dataclass(frozen=True)
class Chosen:
    """What a run keeps for its backward pass; `plan` where its policy is a budget."""

    applied: Applied
    residual_bytes: int
    plan: Plan | None


def train(config: Config, console: Console, target: str = "local") -> Trained:
    """Trains as configured and returns the final state with the run's record.

    Args:
        config: what to do.
        console: where progress is shown.
        target: for which chips a budget is planned, whatever it is trained on.

    Raises:
        ExperimentError: something asked for cannot be done; the message says what, and the remedy.
        PolicyError: the policy is none, cannot be applied to the model, or is a budget that no plan meets.
        TargetError: the target does not exist, or nothing here compiles for it.
        CompileError: the target's compiler refused the step that was planned.
    """
    check(config)
    records.require_outputs(config.out, config.checkpoint_dir)
    devices.join_processes(config)
    over = devices.all_devices()
    # What can be refused without the data set is refused before it is fetched.
    images = data.TRAINING_IMAGES[config.data]
    devices.check_batch(config.batch_size, over, images)
    budget = budgets.is_budget(config)
    if budget:
        budgets.require_target(config, target, images)
    # The data set lies on the device: a plan beside the sample is another than beside the full set.
    early = not budget or data.is_certain(config.data, config.data_dir)
    chosen = _choose(config, target, images, console) if early else None
    dataset = data.load(config.data, None if config.data_dir is None else Path(config.data_dir).expanduser())
    devices.check_batch(config.batch_size, over, len(dataset.train_labels))
    if chosen is None:
        chosen = _choose(config, target, len(dataset.train_labels), console)
    applied, plan = chosen.applied, chosen.plan
    first = jax.process_index() == 0
    saved = checkpoints.open_checkpoints(config.checkpoint_dir, config.identity() | {"dataset": dataset.name})
    try:
        saved.require_same_run()
        program = build_program(config, applied, dataset, over)
        state = program.init()
        state = saved.restore(state) or state
        extent = progress.Extent(
            epochs=config.epochs,
            steps=loop.last_step(config, program),
            first_step=int(state.step),
            batch_size=config.batch_size,
        )
        display = progress.choose_display(console, extent) if first else progress.Silent()
        state, history = loop.run(config, program, over, state, saved, display)
        accuracy = history.test_accuracies[-1] if history.test_accuracies else loop.evaluate(program, state)
    finally:
        saved.close()
    if not first:
        return Trained(state, None)
    loss_steps, losses = records.thin(history.losses, history.first_step)
    record = Record(
        config=config.as_json(),
        policy_asked=config.policy,
        policy=str(applied.policy),
        regions=applied.regions,
        model=config.model,
        dataset=dataset.name,
        dataset_origin=dataset.origin,
        device=devices.describe_devices(over),
        versions=records.versions(),
        date=records.now(),
        first_step=history.first_step,
        last_step=int(state.step),
        test_accuracy=accuracy,
        test_accuracies=history.test_accuracies,
        loss_steps=loss_steps,
        losses=losses,
        step_seconds=history.median_step_seconds,
        residual_bytes=chosen.residual_bytes,
        compiled_temp_bytes=program.compiled_temp_bytes,
        params_sha256=checkpoints.digest(state.params),
        note="" if plan is None else plan.note,
        plan=None if plan is None else budgets.as_json(plan),
    )
    return Trained(state, record)


def _choose(config: Config, target: str, training_images: int, console: Console) -> Chosen:
    plan = None
    if budgets.is_budget(config):
        chip = budgets.require_target(config, target, training_images)
        applied, plan = budgets.plan_run(config, chip, training_images, _sayer(console))
    else:
        applied = apply_policy(config, len(CLASSES))
    return Chosen(applied, applied.residual_bytes(config.batch_size), plan)


def _sayer(console: Console) -> dry_run.Say:
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


def compile_only(config: Config, options: DryRun, console: Console) -> int:
    """Prints what the policies cost on the targets, draws them if asked to, and returns the exit status.

    Args:
        config: the run; its policy may name several.
        options: the targets, and what to find out.
        console: where progress is shown.

    Raises:
        ExperimentError, PolicyError, TargetError: as `dry_run.run`; or there are no figures to show.
    """
    rows = dry_run.run(config, options, _sayer(console))
    out = Console()
    # Narrower it would lose figures; a file or a pipe has no width of its own.
    out = Console(width=max(out.width, 120 if out.is_terminal else 200))
    out.print(dry_run_report.table(config, rows))
    print(dry_run_report.to_json(config, rows), flush=True)
    if all(row.peak_bytes is None for row in rows):
        raise ExperimentError(dry_run_report.no_figures(rows))
    if options.plot is not None:
        dry_run_report.draw(rows, options.plot)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, 2 for what cannot be done, 130 when interrupted."""
    plain = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    command = tyro.cli(Command, prog="python -m experiments.cifar", args=argv, config=plain)
    return exit_status(partial(_run, command), interrupted=resuming(command.training.checkpoint_dir))


def _run(command: Command) -> int:
    """Does what was asked for; what cannot be done is an error that says so in the words of the command line."""
    config = command.training
    try:
        dry_run.check_options(command.dry, config)
        if command.dry.dry_run:
            return compile_only(config, command.dry, Console(stderr=True))
        target = "local" if command.dry.target is None else command.dry.target.strip()
        record = train(config, Console(stderr=True), target).record
    except PolicyError as error:
        raise ExperimentError(f"{error}{_hint(config)}") from None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ExperimentError(
            f"The step does not fit into the device's memory ({str(error).splitlines()[0]}). Store less, for example "
            f"--policy nothing or segments:sqrt instead of {config.policy}, or lower --batch-size."
        ) from None
    if record is not None:
        Console().print(report.summary(record))
        print(record.to_json(), flush=True)
        if config.out is not None:
            records.append(config.out, record)
    return 0


def _hint(config: Config) -> str:
    if config.regions != "block":
        return ""
    return "\nWith --regions block the policy must fit every kind of block by itself; --regions net applies it to the whole loss."


if __name__ == "__main__":
    sys.exit(main())
