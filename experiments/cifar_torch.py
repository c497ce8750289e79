"""Train on CIFAR-10 in PyTorch under a rematerialization policy: the mirror of `experiments.cifar`.

    python -m experiments.cifar_torch --policy dots
    python -m experiments.cifar_torch --policy nothing --model resnet18 --data sample --epochs 1
    python -m experiments.cifar_torch --policy budget:50% --out results.jsonl

The flags, spellings, initial weights, batches, schedule, table and record are those of `experiments.cifar`; dropout masks are
PyTorch's own. `--precision bfloat16` is PyTorch's autocast. One process on one device. PyTorch comes with the extra `torch`.

Progress goes to standard error; standard output gets a table and, as its last line, the run's record as JSON. The exit
status is 0, or 2 with one message on standard error when something asked for cannot be done.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console

import jaxremat
from experiments import checkpoints, data, records, report
from experiments.command import exit_status, resuming
from experiments.config import Config, check, check_filled
from experiments.errors import ExperimentError
from experiments.records import Record

INSTALL = 'pip install "torch==2.13.0"'


def require_torch() -> None:
    """Makes sure that PyTorch is there.

    Raises:
        ExperimentError: it is not; the message holds the line that installs it.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ExperimentError(f"This needs PyTorch, which cannot be imported ({error}): {INSTALL}") from None


def check_torch(config: Config) -> None:
    """Refuses what PyTorch's mirror cannot do.

    Raises:
        ExperimentError: several processes were asked for.
        PolicyError: the policy is not a spelling of one.
    """
    check(config)
    if config.coordinator is not None:
        raise ExperimentError(
            "--coordinator belongs to experiments.cifar: the mirror in PyTorch runs in one process; leave it out."
        )


def train(config: Config, console: Console) -> Record:
    """Trains as configured and returns the run's record.

    Raises:
        ExperimentError: something asked for cannot be done; the message says what, and the remedy.
        PolicyError: the policy is none, or PyTorch cannot express it.
    """
    check_torch(config)
    require_torch()
    import torch

    from experiments import torch_loop, torch_weights
    from experiments.torch_checkpoints import TorchCheckpoint

    records.require_outputs(config.out, config.checkpoint_dir)
    check_filled(config.batch_size, data.TRAINING_IMAGES[config.data])
    torch_loop.check_policy(config)  # before the data set is fetched
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = data.load(config.data, None if config.data_dir is None else Path(config.data_dir).expanduser())
    check_filled(config.batch_size, len(dataset.train_labels))
    saved = TorchCheckpoint(config.checkpoint_dir, config.identity() | {"dataset": dataset.name})
    prepared = torch_loop.prepare(config, dataset, device)
    history = torch_loop.run(config, dataset, prepared, saved, console)
    loss_steps, losses = records.thin(history.losses, history.first_step)
    return Record(
        config=config.as_json(),
        policy_asked=config.policy,
        policy=str(jaxremat.parse(config.policy)),
        regions=prepared.applied.regions,
        model=config.model,
        dataset=dataset.name,
        dataset_origin=dataset.origin,
        device=describe_device(device),
        versions=records.versions() | {"torch": torch.__version__},
        date=records.now(),
        first_step=history.first_step,
        last_step=history.first_step + len(history.losses),
        test_accuracy=history.test_accuracies[-1],
        test_accuracies=history.test_accuracies,
        loss_steps=loss_steps,
        losses=losses,
        step_seconds=history.median_step_seconds,
        residual_bytes=prepared.residual_bytes,
        compiled_temp_bytes=None,
        params_sha256=checkpoints.digest(jax.tree.map(jnp.asarray, torch_weights.to_flax(prepared.network)[0])),
        framework="torch",
        peak_bytes=prepared.peak_bytes,
        note=prepared.applied.note,
    )


def describe_device(device: Any) -> dict[str, Any]:
    """Returns what `devices.describe_devices` returns, of a PyTorch device."""
    import torch

    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"platform": device.type, "kind": kind, "devices": 1, "processes": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, 2 for what cannot be done, 130 when interrupted."""
    # Waiting threads that spin take the cores from other processes: on a busy machine steps then take ten times as long.
    # PyTorch's OpenMP reads this once, when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    config = tyro.cli(Config, prog="python -m experiments.cifar_torch", args=argv)
    return exit_status(partial(_run, config), interrupted=resuming(config.checkpoint_dir))


def _run(config: Config) -> int:
    record = train(config, Console(stderr=True))
    Console().print(report.summary(record))
    print(record.to_json(), flush=True)
    if config.out is not None:
        records.append(config.out, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
