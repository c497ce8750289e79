"""One cell of the comparison in PyTorch."""

import time
from functools import cached_property
from typing import Any

import torch
from torch import nn

import jaxremat
from experiments import records, torch_layers, torch_measure, torch_models, torch_policies, torch_training
from experiments.batches import Batches
from experiments.compare_jax import LEARNING_RATE
from experiments.compare_records import Cell, Kept, Result, gather, hardware
from experiments.data import Dataset
from experiments.torch_models import Network
from experiments.torch_relu import Keep
from experiments.training import AUGMENTED

# Modules that Flax writes as functions inside their parent, under whose path its values are found.
_FUNCTIONS = (
    torch_layers.ReLU,
    torch_layers.Add,
    torch_layers.MatMul,
    torch_layers.Mean,
    nn.MaxPool2d,
    nn.GELU,
    nn.Softmax,
)


class TorchCell:
    """A model under a policy, ready to be timed.

    Raises:
        PolicyError: PyTorch cannot express the policy, or it does not fit the model.
    """

    kept: tuple[Kept, ...]

    def __init__(self, cell: Cell, dataset: Dataset):
        self._cell, self._dataset = cell, dataset
        model: Any = cell.model
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._network = self._fresh()
        self._batches = Batches(dataset, cell.seed, augmented=AUGMENTED[model])
        first = next(self._batches.of_run(cell.batch_size))
        self._images, self._labels = torch_training.to_device(first, self._device)
        loss = torch_training.make_loss(self._labels)
        plain = torch_policies.Applied(self._network, "net", {})

        def kept(applied: torch_policies.Applied) -> list[torch_measure.Kept]:
            return torch_measure.kept(self._network, applied, loss, self._images, [self._labels])

        self._applied = torch_policies.apply(
            self._network,
            jaxremat.parse(cell.policy),
            kept_without_policy=lambda: sum(row.size_bytes for row in kept(plain)),
        )
        self.kept = gather(
            (flax_path(self._network, row.path), row.op, row.dtype, row.how, row.size_bytes)
            for row in kept(self._applied)
        )
        self._loss = loss
        self._optimizer = torch_training.make_sgd(self._network)

    @cached_property
    def _measured(self) -> tuple[dict[str, int] | None, int]:
        """The operations that run again, and the peak of a step: taken before anything is timed."""
        recomputed = torch_measure.recomputed(self._network, self._applied, self._loss, self._images)
        self._step()  # makes the optimizer's state
        self._optimizer.zero_grad(set_to_none=True)
        return recomputed, torch_measure.peak_bytes(self._step, self._device)

    def _fresh(self) -> Network:
        model: Any = self._cell.model
        return torch_training.initial_network(
            model, classes=len(self._dataset.classes), seed=self._cell.seed, device=self._device
        ).train()

    def _step(self) -> torch.Tensor:
        return torch_training.train_step(
            self._network, self._applied.forward, self._optimizer, LEARNING_RATE, self._images, self._labels
        )

    def time_steps(self, count: int) -> list[float]:
        """Does steps on the first batch and returns the seconds of each."""
        _, seconds = self._measured, list[float]()
        for _ in range(count):
            begun = time.perf_counter()
            self._step().item()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - begun)
        return seconds

    def finish(self, seconds: list[float]) -> Result:
        """Trains from the initial weights, and returns all that was found out."""
        cell, (recomputed, peak_bytes) = self._cell, self._measured
        self._network.load_state_dict(self._fresh().state_dict())
        self._network.train()
        optimizer, losses = torch_training.make_sgd(self._network), list[float]()
        rates = torch_training.learning_rates(LEARNING_RATE, cell.steps)
        for step, batch in zip(range(cell.steps), self._batches.of_run(cell.batch_size)):
            torch_training.seed_dropout(cell.seed, step)
            images, labels = torch_training.to_device(batch, self._device)
            value = torch_training.train_step(
                self._network, self._applied.forward, optimizer, rates[step], images, labels
            )
            losses.append(value.item())
        return Result(
            cell=cell,
            status="measured",
            note=self._applied.note or ("each block" if cell.policy != "everything" else ""),
            kept=self.kept,
            recomputed=recomputed,
            peak_bytes=peak_bytes,
            step_seconds=tuple(seconds),
            losses=tuple(losses),
            test_accuracy=torch_training.evaluate(self._network, self._dataset, "float32", self._device),
            date=records.now(),
            hardware=hardware() | {"device": device_name(self._device)},
            versions=records.versions() | {"torch": torch.__version__},
        )


def flax_path(network: nn.Module, path: str) -> str:
    """Returns the path under which Flax's name stacks show what a module computes: functions belong to their parent.

    Example:
        >>> from experiments import compare_torch, torch_models
        >>> net = torch_models.build("net")
        >>> compare_torch.flax_path(net, "block1/relu"), compare_torch.flax_path(net, "block1/conv")
        ('block1', 'block1/conv')
    """
    if not path or not isinstance(network.get_submodule(path.replace("/", ".")), _FUNCTIONS):
        return path
    return path.rpartition("/")[0]


def device_name(device: torch.device) -> str:
    """Returns the accelerator's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def relu_bytes(model: Any, keep: Keep, batch_size: int) -> int:
    """Returns what plain autograd keeps with every ReLU keeping `keep`, for a batch of noise."""
    torch.manual_seed(0)
    network = torch_models.build(model, keep_relu=keep)
    images, labels = torch.randn(batch_size, 3, 32, 32), torch.zeros(batch_size, dtype=torch.long)
    applied = torch_policies.Applied(network, "net", {})
    return sum(
        row.size_bytes
        for row in torch_measure.kept(network, applied, torch_training.make_loss(labels), images, [labels])
    )
