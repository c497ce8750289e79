"""The loop of a run in PyTorch: a network under its policy, what that keeps, and epochs of steps with evaluation."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console

import jaxremat
from experiments import progress, torch_measure, torch_models, torch_policies, torch_training
from experiments.augment import epoch_order
from experiments.batches import Batches
from experiments.config import Config
from experiments.data import Dataset
from experiments.errors import ExperimentError
from experiments.loop import History
from experiments.torch_checkpoints import TorchCheckpoint
from experiments.torch_models import Network
from experiments.torch_policies import Applied
from experiments.training import AUGMENTED

WARM_UP_STEPS = 3  # not timed


@dataclass(frozen=True)
class Prepared:
    """A network with its initial weights under a policy, and what one step of it keeps and allocates.

    `residual_bytes` counts the storages kept for the backward pass, `peak_bytes` the most that forward and backward pass
    allocate above parameters and batch.
    """

    network: Network
    applied: Applied
    residual_bytes: int
    peak_bytes: int


def check_policy(config: Config) -> None:
    """Makes sure that the run's policy can be applied to its model, without data.

    Raises:
        PolicyError: PyTorch cannot express the policy, or it does not fit the model.
    """
    policy = jaxremat.parse(config.policy)
    torch_policies.apply(torch_models.build(config.model), policy, config.regions, kept_without_policy=lambda: 1)


def prepare(config: Config, dataset: Dataset, device: torch.device) -> Prepared:
    """Returns the run's network under its policy, measured on the first images.

    Raises:
        PolicyError: PyTorch cannot express the policy, or it does not fit the model.
    """
    network = torch_training.initial_network(
        config.model, classes=len(dataset.classes), seed=config.seed, device=device
    ).train()
    first = Batches(dataset, config.seed, augmented=False).of_step(0, np.arange(config.batch_size))
    images, labels = torch_training.to_device(first, device)
    loss = torch_training.make_loss(labels)

    def kept_bytes(applied: Applied) -> int:
        return sum(kept.size_bytes for kept in torch_measure.kept(network, applied, loss, images, [labels]))

    plain = Applied(torch_training.with_precision(network, config.precision, device), "net", {})
    applied = torch_policies.apply(
        network, jaxremat.parse(config.policy), config.regions, kept_without_policy=lambda: kept_bytes(plain)
    )
    applied.forward = forward = torch_training.with_precision(applied.forward, config.precision, device)

    def step() -> None:
        network.zero_grad()
        loss(forward(images)).backward()

    residual_bytes = kept_bytes(applied)
    step()  # a compiled program is made here, and not while the peak is taken
    network.zero_grad()
    peak_bytes = torch_measure.peak_bytes(step, device)
    network.zero_grad()
    return Prepared(network, applied, residual_bytes, peak_bytes)


def run(config: Config, dataset: Dataset, prepared: Prepared, saved: TorchCheckpoint, console: Console) -> History:
    """Trains the prepared network to the end, from its checkpoint where there is one, and returns what happened.

    The last of `test_accuracies` is that of the final weights.

    Raises:
        ExperimentError: the loss became infinite or NaN, or the checkpoint lies beyond the last step.
    """
    network, device = prepared.network, next(prepared.network.parameters()).device
    per_epoch = len(dataset.train_labels) // config.batch_size
    total = config.epochs * per_epoch
    end = total if config.max_steps is None else min(total, config.max_steps)
    optimizer = torch_training.make_sgd(network)
    first = saved.restore(network, optimizer)
    if first > end:
        raise ExperimentError(
            f"--max-steps {end} lies before the checkpoint of step {first}: raise it, or choose another --checkpoint-dir."
        )
    history = History(first)
    batches = Batches(dataset, config.seed, augmented=AUGMENTED[config.model])
    rates = torch_training.learning_rates(config.learning_rate, total)
    extent = progress.Extent(epochs=config.epochs, steps=end, first_step=first, batch_size=config.batch_size)
    with progress.choose_display(console, extent) as display:
        for epoch in range(first // per_epoch, -(-end // per_epoch)):
            begun, losses = time.perf_counter(), list[float]()
            order = epoch_order(config.seed, epoch, len(dataset.train_labels))
            for step in range(max(first, epoch * per_epoch), min(end, (epoch + 1) * per_epoch)):
                at = step % per_epoch * config.batch_size
                batch = batches.of_step(step, order[at : at + config.batch_size])
                images, labels = torch_training.to_device(batch, device)
                torch_training.seed_dropout(config.seed, step)
                started = time.perf_counter()
                value = torch_training.train_step(
                    network, prepared.applied.forward, optimizer, rates[step], images, labels
                ).item()
                if step - first >= WARM_UP_STEPS:
                    history.step_seconds.append(time.perf_counter() - started)
                if not np.isfinite(value):
                    raise ExperimentError(
                        f"Training stopped: the loss became infinite or NaN at step {step + 1}. Lower --learning-rate, or "
                        "use --precision float32."
                    )
                losses.append(value)
                if display.wants_loss():
                    display.step(step + 1, epoch + 1, value)
            history.losses += losses
            history.test_accuracies.append(torch_training.evaluate(network, dataset, config.precision, device))
            saved.save(first + len(history.losses), network, optimizer)
            display.epoch(epoch + 1, float(np.mean(losses)), history.test_accuracies[-1], time.perf_counter() - begun)
    if not history.test_accuracies:
        history.test_accuracies.append(torch_training.evaluate(network, dataset, config.precision, device))
    return history
