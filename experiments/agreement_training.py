"""The same training in JAX and in PyTorch: equal initial weights, batches, rates and rounding, and how far the losses part.

In float64 the frameworks must agree to 1e-9 relative over some steps, at the rate that training really uses: whatever they did
differently (an epsilon, a padding, the order of weight decay and momentum, a statistic) would show there at once, while
rounding takes fifty steps of ResNet-18 to grow from 1e-16 to 5e-8. In float32 ResNet-18 cannot: a value before a ReLU that is
as near to zero as rounding errors falls on either side, and a part of the gradient comes or goes with it. Of the 4,456,448 such
values of a batch of 8 at the initial weights one does, between PyTorch's float32 and float64: losses are 2e-7 apart and
gradients 3e-3 (4e-6 with GELU in place of ReLU). The next weights differ by that, more signs flip, and the gradients'
difference grows with the square root of the weights' difference: 2e-2, 4e-2, 1e-1, 2e-1 where the weights are 6e-6, 3e-5, 3e-4,
6e-4 apart. So at the rate of 0.05 float32 losses are 1e-2 off after some ten steps, in either framework. As what parts them is
the square of the path's length, the float32 comparison of ResNet-18 is made at a rate at which fifty steps stay below the
tolerance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.batches import Batch, Batches
from experiments.data import load
from experiments.models import ModelName, build
from experiments.training import TrainState, make_init, make_loss, make_optimizer


@dataclass(frozen=True)
class Training:
    """A short training run on the embedded sample, without augmentation and dropout.

    Attributes:
        model: the network.
        steps: of training; the learning rate's schedule is as long.
        batch_size: images of each step.
        learning_rate: the schedule's peak.
        bits: of the floating-point numbers, 32 or 64, from the images to the weights.
    """

    model: ModelName
    steps: int
    batch_size: int
    learning_rate: float
    bits: Literal[32, 64] = 32

    def batches(self) -> list[Batch]:
        """Returns the batches of the steps, in float32."""
        batches = Batches(load("sample"), 0, augmented=False).of_run(self.batch_size)
        return [batch for _, batch in zip(range(self.steps), batches)]


@dataclass(frozen=True)
class Losses:
    """The losses of the steps, and the first batch's loss again after the last step: how far training has come."""

    of_steps: Sequence[float]
    of_first_batch: float


def without_dropout(model: ModelName, dtype: Any = jnp.float32) -> Any:
    """Returns the Flax network with dropout off, as masks differ between the frameworks."""
    network: Any = build(model, dtype=dtype)
    return network.clone(dropout=0.0) if model == "vit" else network


def train_jax(training: Training) -> Losses:
    """Returns what JAX's losses are."""
    dtype = jnp.float64 if training.bits == 64 else jnp.float32
    initial, batches = jax.device_get(_initial(training.model)), training.batches()
    with jax.enable_x64(training.bits == 64):
        params, batch_stats = jax.tree.map(partial(jnp.asarray, dtype=dtype), initial)
        optimizer = make_optimizer(training.learning_rate, training.steps)
        loss = make_loss(without_dropout(training.model, dtype))
        step_zero, never = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        state = TrainState(step_zero, params, batch_stats, optimizer.init(params), never)

        def step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
            (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(
                state.params, state.batch_stats, images, labels, jax.random.key(0)
            )
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return replace(state, step=state.step + 1, params=params, batch_stats=stats, opt_state=opt_state), value

        # A program that runs a few times is not worth optimizing.
        quickly = training.steps < 10 and jax.default_backend() == "cpu"
        options = {"xla_backend_optimization_level": 0} if quickly else {}
        compiled, losses = jax.jit(step, donate_argnums=0, compiler_options=options), list[float]()
        for batch in (*batches, batches[0]):
            state, value = compiled(state, jnp.asarray(batch.images, dtype), jnp.asarray(batch.labels))
            losses.append(float(value))
    return Losses(losses[:-1], losses[-1])


def train_torch(training: Training) -> Losses:
    """Returns what PyTorch's losses are."""
    import torch

    from experiments import torch_models, torch_training, torch_weights

    dtype = torch.float64 if training.bits == 64 else torch.float32
    network = torch_models.build(training.model, dropout=0.0).train()
    torch_weights.load_flax(network, *jax.device_get(_initial(training.model)))
    network.to(dtype)
    sgd = torch_training.make_sgd(network)
    with jax.enable_x64(training.bits == 64):
        rates = torch_training.learning_rates(training.learning_rate, training.steps)
    losses, batches = list[float](), training.batches()
    for rate, batch in zip((*rates, 0.0), (*batches, batches[0])):
        images, labels = torch_training.to_device(batch, torch.device("cpu"))
        losses.append(torch_training.train_step(network, network, sgd, rate, images.to(dtype), labels).item())
    return Losses(losses[:-1], losses[-1])


def _initial(model: ModelName) -> tuple[Any, Any]:
    """Returns Flax's initial parameters and statistics in float32."""
    # Each program runs once: optimizing it would take longer than running it.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    state = jax.jit(make_init(without_dropout(model), make_optimizer(1.0, 2), 0), compiler_options=options)()
    return state.params, state.batch_stats


def largest_difference(one: Losses, other: Losses) -> float:
    """Returns the largest relative difference of the losses of a step."""
    return float(np.max(np.abs(np.divide(one.of_steps, other.of_steps) - 1)))
