"""Training in PyTorch with what JAX trains with: initial weights, batches, schedule and optimizer."""

import contextlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from experiments import models, torch_models
from experiments.batches import Batch, evaluation_batches
from experiments.data import Dataset
from experiments.models import ModelName
from experiments.torch_layers import commit_statistics
from experiments.torch_models import Network
from experiments.torch_policies import Forward
from experiments.torch_weights import load_flax
from experiments.training import MOMENTUM, WEIGHT_DECAY, make_init, make_optimizer, make_schedule

TEST_BATCH = 500


def to_device(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch as images of shape (batch, channels, height, width) and the int64 labels that PyTorch's loss wants."""
    images = torch.from_numpy(batch.images.transpose(0, 3, 1, 2).copy())
    return images.to(device), torch.from_numpy(batch.labels.astype(np.int64)).to(device)


def seed_dropout(seed: int, step: int) -> None:
    """Seeds PyTorch's random numbers for a step, so that a resumed run repeats them. Masks differ from JAX's."""
    torch.manual_seed(int(np.random.default_rng([seed, step]).integers(2**63)))


def initial_network(
    model: ModelName, *, classes: int = 10, seed: int = 0, device: torch.device | None = None, dropout: float = 0.1
) -> Network:
    """Returns the network with the initial weights that Flax gives it for this seed."""
    flax_model = models.build(model, classes=classes)
    # Unoptimized: it runs once. The weights are those of the optimized program, as random bits and a scaling are exact.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    state = jax.jit(make_init(flax_model, make_optimizer(0.1, 2), seed), compiler_options=options)()
    network = torch_models.build(model, classes=classes, dropout=dropout)
    load_flax(network, jax.device_get(state.params), jax.device_get(state.batch_stats))
    return network.to(device or torch.device("cpu"))


def make_sgd(network: Network) -> torch.optim.SGD:
    """Returns SGD with Nesterov momentum and weight decay on the weights of convolutions and dense layers alone."""
    kernels = [m.weight for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    chosen = {id(weight) for weight in kernels}
    rest = [parameter for parameter in network.parameters() if id(parameter) not in chosen]
    groups = [{"params": kernels, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.0, momentum=MOMENTUM, nesterov=True)


def learning_rates(learning_rate: float, steps: int) -> list[float]:
    """Returns the rate of each step of JAX's schedule, of steps counted in int32 as optax counts them."""
    schedule = make_schedule(learning_rate, steps)
    return np.asarray(jax.vmap(schedule)(jnp.arange(steps, dtype=jnp.int32))).tolist()


def make_loss(labels: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the loss of a batch with these labels: logits to mean cross-entropy."""
    return partial(functional.cross_entropy, target=labels)


def with_precision(forward: Forward, precision: str, device: torch.device) -> Forward:
    """Returns `forward` computing in `precision`: float32, or bfloat16 by PyTorch's autocast."""
    if precision == "float32":
        return forward

    def cast(images: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return forward(images).float()

    return cast


def train_step(
    network: Network,
    forward: Forward,
    optimizer: torch.optim.SGD,
    rate: float,
    images: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """Changes the network by one step and returns the loss before it; BatchNorm's statistics count the batch once."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss = functional.cross_entropy(forward(images), labels)
    loss.backward()
    optimizer.step()
    commit_statistics(network)
    return loss.detach()


def evaluate(network: Network, dataset: Dataset, precision: str, device: torch.device) -> float:
    """Returns the fraction of test images that the network classifies rightly."""
    training, right = network.training, 0
    network.eval()
    forward = with_precision(network, precision, device)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        stack.callback(network.train, training)
        for batch in evaluation_batches(dataset, TEST_BATCH):
            images, labels = to_device(batch, device)
            right += int((forward(images).argmax(-1) == labels).sum())
    return right / len(dataset.test_labels)
