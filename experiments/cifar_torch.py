"""Train on CIFAR-10 in PyTorch under a rematerialization policy: the mirror of `experiments.cifar`.

    python -m experiments.cifar_torch --policy dots
    python -m experiments.cifar_torch --policy nothing --model resnet18 --data sample --epochs 1
    python -m experiments.cifar_torch --policy budget:50% --out results.jsonl

The flags, spellings, initial weights, batches, schedule, table and record are those of `experiments.cifar`; dropout masks are
PyTorch's own. `--precision bfloat16` is PyTorch's autocast. One process on one device. PyTorch comes with the extra `torch`.

Progress goes to standard error; standard output gets a table and, as its last line, the run's record as JSON. The exit
status is 0, or 2 with one message on standard error when something asked for cannot be done.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

import jaxremat
from experiments import batches as batching
from experiments import checkpoints, data, progress, records, report
from experiments.augment import epoch_order
from experiments.config import Config, check
from experiments.errors import ExperimentError
from experiments.records import Record
from experiments.training import AUGMENTED
from jaxremat import PolicyError

INSTALL = 'pip install "torch==2.13.0"'
WARM_UP_STEPS = 3  # not timed


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
        raise ExperimentError("--coordinator belongs to experiments.cifar: the mirror in PyTorch runs in one process; leave it out.")


def train(config: Config, console: Console) -> Record:
    """Trains as configured and returns the run's record.

    Raises:
        ExperimentError: something asked for cannot be done; the message says what, and the remedy.
        PolicyError: the policy is none, or PyTorch cannot express it.
    """
    check_torch(config)
    require_torch()
    import torch

    from experiments import torch_measure, torch_policies, torch_training, torch_weights
    from experiments.torch_checkpoints import TorchCheckpoint

    if config.out is not None:
        records.require_appendable(config.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = data.load(config.data, None if config.data_dir is None else Path(config.data_dir).expanduser())
    per_epoch = len(dataset.train_labels) // config.batch_size
    if not per_epoch:
        raise ExperimentError(
            f"--batch-size must be at most the number of training images, {len(dataset.train_labels)}; got {config.batch_size}."
        )
    saved = TorchCheckpoint(config.checkpoint_dir, config.identity() | {"dataset": dataset.name})
    network = torch_training.initial_network(config.model, classes=len(dataset.classes), seed=config.seed, device=device)
    optimizer = torch_training.make_sgd(network)
    batches = batching.Batches(dataset, config.seed, augmented=AUGMENTED[config.model])
    images, labels = torch_training.to_device(batches.of_step(0, np.arange(config.batch_size)), device)
    loss_of = torch_training.make_loss(labels)

    def kept_bytes(under: torch_policies.Applied) -> int:
        return sum(kept.size_bytes for kept in torch_measure.kept(network, under, loss_of, images, [labels]))

    policy = jaxremat.parse(config.policy)
    plain = torch_policies.Applied(torch_training.with_precision(network, config.precision, device), "net", {})
    applied = torch_policies.apply(network, policy, config.regions, kept_without_policy=lambda: kept_bytes(plain))
    applied.forward = forward = torch_training.with_precision(applied.forward, config.precision, device)
    residual_bytes = kept_bytes(applied)
    if device.type == "cpu":  # the first backward pass of a process allocates what later ones find there
        loss_of(forward(images)).backward()
        network.zero_grad()
    peak_bytes = torch_measure.peak_bytes(lambda: loss_of(forward(images)).backward(), device)
    network.zero_grad()
    del images, labels, loss_of

    total = config.epochs * per_epoch
    end = total if config.max_steps is None else min(total, config.max_steps)
    first = saved.restore(network, optimizer)
    if first > end:
        raise ExperimentError(
            f"--max-steps {end} lies before the checkpoint of step {first}: raise it, or choose another --checkpoint-dir."
        )
    rates = torch_training.learning_rates(config.learning_rate, total)
    extent = progress.Extent(epochs=config.epochs, steps=end, first_step=first, batch_size=config.batch_size)
    losses, accuracies, seconds = list[float](), list[float](), list[float]()
    with progress.choose_display(console, extent) as display:
        for epoch in range(first // per_epoch, -(-end // per_epoch)):
            begun, epoch_losses = time.perf_counter(), list[float]()
            order = epoch_order(config.seed, epoch, len(dataset.train_labels))
            for step in range(max(first, epoch * per_epoch), min(end, (epoch + 1) * per_epoch)):
                at = step % per_epoch * config.batch_size
                batch = batches.of_step(step, order[at : at + config.batch_size])
                images, labels = torch_training.to_device(batch, device)
                torch_training.seed_dropout(config.seed, step)
                started = time.perf_counter()
                value = float(torch_training.train_step(network, forward, optimizer, rates[step], images, labels))
                if step - first >= WARM_UP_STEPS:
                    seconds.append(time.perf_counter() - started)
                if not np.isfinite(value):
                    raise ExperimentError(
                        f"Training stopped: the loss became infinite or NaN at step {step + 1}. Lower --learning-rate, or use "
                        "--precision float32."
                    )
                epoch_losses.append(value)
                if display.wants_loss():
                    display.step(step + 1, epoch + 1, value)
            losses += epoch_losses
            accuracies.append(torch_training.evaluate(network, dataset, config.precision, device))
            saved.save(first + len(losses), network, optimizer)
            display.epoch(epoch + 1, float(np.mean(epoch_losses)), accuracies[-1], time.perf_counter() - begun)
    accuracy = accuracies[-1] if accuracies else torch_training.evaluate(network, dataset, config.precision, device)
    loss_steps, thinned = records.thin(losses, first)
    return Record(
        config=config.as_json(),
        policy_asked=config.policy,
        policy=str(policy),
        regions=applied.regions,
        model=config.model,
        dataset=dataset.name,
        dataset_origin=dataset.origin,
        device=describe_device(device),
        versions=records.versions() | {"torch": torch.__version__},
        date=records.now(),
        first_step=first,
        last_step=first + len(losses),
        test_accuracy=accuracy,
        test_accuracies=accuracies,
        loss_steps=loss_steps,
        losses=thinned,
        step_seconds=float(np.median(seconds)) if seconds else None,
        residual_bytes=residual_bytes,
        compiled_temp_bytes=None,
        params_sha256=checkpoints.digest(jax.tree.map(jnp.asarray, torch_weights.to_flax(network)[0])),
        framework="torch",
        peak_bytes=peak_bytes,
        note=applied.note,
    )


def describe_device(device: Any) -> dict[str, Any]:
    """Returns what `devices.describe_devices` returns, of a PyTorch device."""
    import torch

    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"platform": device.type, "kind": kind, "devices": 1, "processes": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, or 2 for bad input."""
    config = tyro.cli(Config, prog="python -m experiments.cifar_torch", args=argv)
    try:
        record = train(config, Console(stderr=True))
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
