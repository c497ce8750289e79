"""The compiled program of a run: initial state, step and evaluation, built once from a configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import jaxremat
from experiments import policies
from experiments.config import Config
from experiments.data import Dataset
from experiments.devices import Devices, absent_devices
from experiments.models import build
from experiments.training import (
    AUGMENTED,
    Images,
    Loss,
    TrainState,
    is_sound,
    make_count_correct,
    make_init,
    make_loss,
    make_optimizer,
    make_step,
)

TEST_BATCH = 500


@dataclass(frozen=True)
class Program:
    """What a run calls, compiled ahead for its devices, and what was found out while compiling.

    `step(state, training, order)` gives new state and loss, `count_correct(params, batch_stats, test, first)` the right
    answers among `test_batch` images; `sound(state)` says whether the state may be saved, `copy(state)` copies it.
    """

    steps_per_epoch: int
    test_batch: int
    training: Images
    test: Images
    init: Callable[[], TrainState]
    step: Callable[[TrainState, Images, jax.Array], tuple[TrainState, jax.Array]]
    count_correct: Callable[..., jax.Array]
    sound: Callable[[TrainState], jax.Array]
    copy: Callable[[TrainState], TrainState]
    compiled_temp_bytes: int | None


@dataclass(frozen=True)
class Applied:
    """A model and its loss under a policy: what needs neither data nor devices.

    `shapes` are those of the parameters and of BatchNorm's statistics.
    """

    policy: jaxremat.Policy
    regions: policies.Regions
    model: nn.Module
    dtype: Any
    loss: Loss
    shapes: tuple[Any, Any]

    def residual_bytes(self, batch_size: int) -> int:
        """Returns what the loss keeps for its backward pass, in bytes for the whole batch, from the trace alone.

        Raises:
            PolicyError: the policy does not fit this model.
        """
        return jaxremat.residuals(self.loss, *self.arguments(batch_size)).total_bytes

    def arguments(self, batch_size: int) -> tuple[Any, ...]:
        """Returns the shapes that a step hands to the loss.

        They are laid out over a mesh, as those of the step are: there JAX traces a function to another program than without
        one, with other numbers of values, and a plan is a list of such numbers.
        """
        images = jax.ShapeDtypeStruct((batch_size, 32, 32, 3), self.dtype)
        labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        whole = absent_devices(1).whole
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
            (*self.shapes, images, labels, key),
        )


def apply_policy(config: Config, classes: int) -> Applied:
    """Returns the run's model and loss under its policy. Nothing is computed."""
    policy = jaxremat.parse(config.policy)
    regions = policies.resolve_regions(policy, config.regions)
    dtype = jnp.dtype(config.precision)
    wrap_block = policies.block_wrapper(policy, regions)
    model = build(config.model, classes=classes, dtype=dtype, ops=config.ops, wrap_block=wrap_block)
    state = jax.eval_shape(make_init(model, make_optimizer(config.learning_rate, 1), config.seed))
    loss = policies.wrap_loss(make_loss(model), policy, regions)
    return Applied(policy, regions, model, dtype, loss, (state.params, state.batch_stats))


@dataclass(frozen=True)
class Parts:
    """A run's functions and the shapes that they take, before anything is compiled.

    `jit_step(compiler_options)` is the step as training runs it, the state donated; it takes `state`, `training` and
    `order`. All shapes carry their layout over the devices.
    """

    init: Callable[[], TrainState]
    jit_step: Callable[[dict[str, str] | None], Any]
    state: TrainState
    training: Images
    order: jax.ShapeDtypeStruct


def describe(config: Config, applied: Applied, training_images: int, devices: Devices) -> Parts:
    """Returns a run's functions and shapes. Nothing is computed, and the devices need not be there."""
    steps_per_epoch = training_images // config.batch_size
    optimizer = make_optimizer(config.learning_rate, config.epochs * steps_per_epoch)
    step = make_step(
        applied.loss,
        optimizer,
        seed=config.seed,
        augmented=AUGMENTED[config.model],
        dtype=applied.dtype,
        split=devices.split,
    )

    def jit_step(compiler_options: dict[str, str] | None) -> Any:
        return jax.jit(step, donate_argnums=0, out_shardings=devices.whole, compiler_options=compiler_options)

    def shape(dims: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=devices.whole)

    init = make_init(applied.model, optimizer, config.seed)
    return Parts(
        init=init,
        jit_step=jit_step,
        state=jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype), jax.eval_shape(init)),
        training=Images(shape((training_images, 32, 32, 3), jnp.uint8), shape((training_images,), jnp.int32)),
        order=shape((steps_per_epoch, config.batch_size), jnp.int32),
    )


def build_program(config: Config, applied: Applied, dataset: Dataset, devices: Devices) -> Program:
    """Compiles the run's functions and moves the data set to the devices.

    Raises:
        PolicyError: the policy does not fit the model.
    """
    parts = describe(config, applied, len(dataset.train_labels), devices)
    model, dtype, state = applied.model, applied.dtype, parts.state
    training = to_devices(dataset.train_images, dataset.train_labels, devices)
    test = to_devices(dataset.test_images, dataset.test_labels, devices)
    test_batch = -(-min(TEST_BATCH, len(dataset.test_labels)) // devices.count) * devices.count

    whole = devices.whole
    init = jax.jit(parts.init, out_shardings=whole, compiler_options=_options_of_init())
    compiled_step = parts.jit_step(jaxremat.compiler_options()).lower(state, training, parts.order).compile()
    count_correct = (
        jax.jit(make_count_correct(model, batch_size=test_batch, dtype=dtype, split=devices.split), out_shardings=whole)
        .lower(state.params, state.batch_stats, test, jax.ShapeDtypeStruct((), jnp.int32))
        .compile()
    )
    memory = compiled_step.memory_analysis()
    return Program(
        steps_per_epoch=parts.order.shape[0],
        test_batch=test_batch,
        training=training,
        test=test,
        init=init,
        step=compiled_step,
        count_correct=count_correct,
        sound=jax.jit(is_sound, out_shardings=whole),
        copy=jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=whole),
        compiled_temp_bytes=None if memory is None else int(memory.temp_size_in_bytes),
    )


def _options_of_init() -> dict[str, bool | int | float | str]:
    """Returns the options to compile the initial state with: it runs once, and optimizing it takes longer than the step."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def to_devices(images: np.ndarray, labels: np.ndarray, devices: Devices) -> Images:
    """Returns a set of images as copies on every device."""
    return Images(devices.replicate(images), devices.replicate(labels.astype(np.int32)))
