"""One step of training and one of evaluation, as pure functions of arrays that live on the devices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from experiments.augment import augment, normalise
from experiments.models import ModelName

Tree = Any
Loss = Callable[[Tree, Tree, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Tree]]

MOMENTUM = 0.9
WARM_UP = 1 / 20  # of all steps
WEIGHT_DECAY = 5e-4  # not on biases and norms

# Pad-crop and flip. `net` is too small to need them: in ten epochs they cost it accuracy.
AUGMENTED: dict[ModelName, bool] = {"net": False, "resnet18": True, "wrn16_4": True, "vit": True}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "batch_stats", "opt_state", "diverged_at"),
    meta_fields=(),
)
@dataclass(frozen=True)
class TrainState:
    """All that a step changes.

    `step` counts the steps done, `batch_stats` holds BatchNorm's running statistics (empty for models without),
    `diverged_at` is the first step, from 1, whose loss was not finite, or 0.
    """

    step: jax.Array
    params: Tree
    batch_stats: Tree
    opt_state: Tree
    diverged_at: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("images", "labels"), meta_fields=())
@dataclass(frozen=True)
class Images:
    """A set of images on the devices: uint8 of shape (n, 32, 32, 3), and int32 labels of shape (n,)."""

    images: jax.Array
    labels: jax.Array


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Returns SGD with Nesterov momentum, linear warm-up, cosine to zero over `steps`, and weight decay on kernels alone."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=learning_rate, warmup_steps=max(1, round(steps * WARM_UP)), decay_steps=max(2, steps)
    )
    return optax.chain(
        optax.add_decayed_weights(WEIGHT_DECAY, mask=decayed),
        optax.sgd(schedule, momentum=MOMENTUM, nesterov=True),
    )


def decayed(params: Tree) -> Tree:
    """Returns, leaf by leaf, whether weight decay applies: to the kernels of convolutions and dense layers."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def make_init(model: nn.Module, optimizer: optax.GradientTransformation, seed: int) -> Callable[[], TrainState]:
    """Returns the function that makes the state before the first step."""

    def init() -> TrainState:
        key = jax.random.fold_in(jax.random.key(seed), 0)
        variables = model.init(key, jnp.zeros((1, 32, 32, 3)), False)
        params = variables["params"]
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, params, variables.get("batch_stats", {}), optimizer.init(params), zero)

    return init


def make_loss(model: nn.Module) -> Loss:
    """Returns the loss: mean softmax cross-entropy of a batch in float32, and the new BatchNorm statistics.

    Its arguments are parameters, statistics, normalised images (batch, 32, 32, 3), int labels (batch,) and a key for dropout.
    """

    def loss(
        params: Tree, batch_stats: Tree, images: jax.Array, labels: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, Tree]:
        logits, updates = model.apply(
            {"params": params, "batch_stats": batch_stats}, images, True, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updates.get("batch_stats", {})

    return loss


def make_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    augmented: bool,
    dtype: Any,
    split: jax.sharding.Sharding,
) -> Callable[[TrainState, Images, jax.Array], tuple[TrainState, jax.Array]]:
    """Returns one step of training: state, training set and the epoch's order to new state and loss.

    The order has shape (steps, batch): row `step % steps` holds the indices of the step's images, so that a step takes
    nothing from the host. Random numbers follow from the seed and the step alone: a resumed run repeats them.
    """
    key_of_run = jax.random.key(seed)

    def step(state: TrainState, data: Images, order: jax.Array) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(jax.random.fold_in(key_of_run, 1), state.step)
        key_augment, key_dropout = jax.random.split(key)
        index = jax.lax.with_sharding_constraint(order[state.step % order.shape[0]], split)
        images, labels = data.images[index], data.labels[index]
        if augmented:
            images = augment(key_augment, images)
        images = jax.lax.with_sharding_constraint(normalise(images, dtype), split)
        (value, batch_stats), gradients = jax.value_and_grad(loss, has_aux=True)(
            state.params, state.batch_stats, images, labels, key_dropout
        )
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        diverged_at = jnp.where((state.diverged_at == 0) & ~jnp.isfinite(value), state.step + 1, state.diverged_at)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, batch_stats, opt_state, diverged_at), value

    return step


def make_count_correct(
    model: nn.Module, *, batch_size: int, dtype: Any, split: jax.sharding.Sharding
) -> Callable[[Tree, Tree, Images, jax.Array], jax.Array]:
    """Returns the evaluation of one batch: parameters, statistics, test set and first index to the number of right answers.

    Indices beyond the set do not count, so that the last batch may reach over its end.
    """

    def count_correct(params: Tree, batch_stats: Tree, data: Images, first: jax.Array) -> jax.Array:
        index = jax.lax.with_sharding_constraint(first + jnp.arange(batch_size), split)
        inside = index < data.labels.shape[0]
        index = jnp.where(inside, index, 0)
        images = jax.lax.with_sharding_constraint(normalise(data.images[index], dtype), split)
        logits = model.apply({"params": params, "batch_stats": batch_stats}, images, False)
        return jnp.sum(inside & (jnp.argmax(jnp.asarray(logits), -1) == data.labels[index]))

    return count_correct


def is_sound(state: TrainState) -> jax.Array:
    """Says whether no loss so far and no parameter or statistic is infinite or NaN: what a checkpoint must be."""
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.batch_stats))]
    return (state.diverged_at == 0) & jnp.all(jnp.array(finite))
