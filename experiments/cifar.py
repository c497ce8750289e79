"""Train on CIFAR-10 under a rematerialization policy.

    python -m experiments.cifar --policy dots
    python -m experiments.cifar --policy nothing --model resnet18 --data sample --epochs 1
    python -m experiments.cifar --policy names:conv_out --checkpoint-dir ckpt --out results.jsonl

Progress goes to standard error; standard output gets a table and, as its last line, the run's record as JSON. The exit
status is 0, or 2 with one message on standard error when something asked for cannot be done.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro
from rich.console import Console

from experiments import checkpoints, data, devices, loop, progress, records, report
from experiments.config import Config, check
from experiments.errors import ExperimentError
from experiments.program import build_program
from experiments.records import Record
from experiments.training import TrainState
from jaxremat import PolicyError


@dataclass(frozen=True)
class Trained:
    """The outcome of a run. Its record is None in all processes but the first."""

    state: TrainState
    record: Record | None


def train(config: Config, console: Console) -> Trained:
    """Trains as configured and returns the final state with the run's record.

    Args:
        config: what to do.
        console: where progress is shown.

    Raises:
        ExperimentError: something asked for cannot be done; the message says what, and the remedy.
        PolicyError: the policy is none, or cannot be applied to the model.
    """
    check(config)
    if config.out is not None:
        records.require_appendable(config.out)
    devices.join_processes(config)
    over = devices.all_devices()
    dataset = data.load(config.data, None if config.data_dir is None else Path(config.data_dir).expanduser())
    devices.check_batch(config.batch_size, over, len(dataset.train_labels))
    first = jax.process_index() == 0
    saved = checkpoints.open_checkpoints(config.checkpoint_dir, config.identity() | {"dataset": dataset.name})
    try:
        saved.require_same_run()
        program = build_program(config, dataset, over)
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
        policy=str(program.policy),
        regions=program.regions,
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
        residual_bytes=program.residual_bytes,
        compiled_temp_bytes=program.compiled_temp_bytes,
        params_sha256=checkpoints.digest(state.params),
    )
    return Trained(state, record)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, or 2 for bad input."""
    config = tyro.cli(Config, prog="python -m experiments.cifar", args=argv)
    try:
        record = train(config, Console(stderr=True)).record
        if record is None:
            return 0
        if config.out is not None:
            records.append(config.out, record)
    except (ExperimentError, PolicyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(report.summary(record))
    print(record.to_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
