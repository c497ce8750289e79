"""One cell of the comparison in JAX."""

import time
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxremat
from experiments import policies, records
from experiments.batches import Batch, Batches, evaluation_batches
from experiments.compare_records import Cell, Kept, Result, gather, hardware
from experiments.data import Dataset
from experiments.models import build
from experiments.training import AUGMENTED, TrainState, make_init, make_loss, make_optimizer
from jaxremat.flops import conv_and_dot_counts
from jaxremat.policy import Budget

TEST_BATCH = 500
LEARNING_RATE = 0.05


class JaxCell:
    """A model under a policy, traced; it is compiled when it is first timed.

    Raises:
        PolicyError: the policy does not fit the model.
    """

    kept: tuple[Kept, ...]

    def __init__(self, cell: Cell, dataset: Dataset):
        policy = jaxremat.parse(cell.policy)
        regions = policies.resolve_regions(policy, "auto")
        model: Any = cell.model
        self._cell, self._dataset = cell, dataset
        self._network = build(model, classes=len(dataset.classes), wrap_block=policies.block_wrapper(policy, regions))
        self._batches = Batches(dataset, cell.seed, augmented=AUGMENTED[model])
        self._first = next(self._batches.of_run(cell.batch_size))
        self._optimizer = make_optimizer(LEARNING_RATE, cell.steps)

        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
        self._init = jax.jit(make_init(self._network, self._optimizer, cell.seed), compiler_options=options)
        state = jax.eval_shape(self._init)
        key = jax.eval_shape(lambda: jax.random.key(0))
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (self._first.images, self._first.labels)
        )
        arguments = (state.params, state.batch_stats, *shapes, key)
        self._note = "each block" if regions == "block" else ""
        if isinstance(policy, Budget):
            policy = jaxremat.plan(
                make_loss(self._network),
                *arguments,
                budget=cell.policy,
                step=lambda loss: (self._jitted(loss), (state, *shapes)),
            )
            self._note = _planned(policy)
        loss = policies.wrap_loss(make_loss(self._network), policy, regions)
        ledger = jaxremat.residuals(loss, *arguments)
        self.kept = gather(
            (_module_path(row.path), row.op, row.dtype, _how(row.why), row.kept_bytes)
            for row in ledger.rows
            if row.kept_bytes
        )
        self._recomputed = ledger.recomputed
        self._count_contractions = partial(self._contractions_again, loss, arguments)
        self._lower = partial(self._jitted(loss).lower, state, *shapes)
        self._timed: TrainState | None = None

    def _jitted(self, loss: Any) -> Any:
        """Returns a step of training with `loss`: state, images and labels to the new state and the loss."""
        optimizer, seed = self._optimizer, self._cell.seed

        def step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
            key = jax.random.split(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), state.step))[1]
            (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(
                state.params, state.batch_stats, images, labels, key
            )
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return replace(state, step=state.step + 1, params=params, batch_stats=stats, opt_state=opt_state), value

        return jax.jit(step, donate_argnums=0, compiler_options=jaxremat.compiler_options())

    @cached_property
    def _step(self) -> Any:
        return self._lower().compile()

    def _contractions_again(self, loss: Any, arguments: tuple[Any, ...]) -> dict[str, int]:
        """Counts the convolutions and products of a whole gradient that one without policy lacks: also inside of blocks."""
        plain = make_loss(build(cast(Any, self._cell.model), classes=len(self._dataset.classes)))
        under, without = (
            conv_and_dot_counts(jax.make_jaxpr(jax.grad(f, has_aux=True))(*arguments)) for f in (loss, plain)
        )
        return {"conv": under.convolutions - without.convolutions, "dot": under.dots - without.dots}

    def time_steps(self, count: int) -> list[float]:
        """Does steps on the first batch and returns the seconds of each."""
        images, labels = jnp.asarray(self._first.images), jnp.asarray(self._first.labels)
        state, step, seconds = self._timed or self._init(), self._step, list[float]()
        for _ in range(count):
            begun = time.perf_counter()
            state, value = step(state, images, labels)
            jax.block_until_ready((state, value))
            seconds.append(time.perf_counter() - begun)
        self._timed = state
        return seconds

    def finish(self, seconds: list[float]) -> Result:
        """Trains from the initial weights, and returns all that was found out."""
        state, losses = self._init(), list[float]()
        memory = self._step.memory_analysis()
        for _, batch in zip(range(self._cell.steps), self._batches.of_run(self._cell.batch_size)):
            state, value = self._step(state, batch.images, batch.labels)
            losses.append(float(value))
        count = jax.jit(self._count_correct)
        right = sum(
            int(count(state.params, state.batch_stats, *_padded(batch)))
            for batch in evaluation_batches(self._dataset, TEST_BATCH)
        )
        return Result(
            cell=self._cell,
            status="measured",
            note=self._note,
            kept=self.kept,
            recomputed=self._recomputed | self._count_contractions(),
            # On a GPU or TPU the compiler's peak counts arguments too; temporary values are what a step takes beside them.
            peak_bytes=None if memory is None else int(memory.temp_size_in_bytes),
            step_seconds=tuple(seconds),
            losses=tuple(losses),
            test_accuracy=right / len(self._dataset.test_labels),
            date=records.now(),
            hardware=hardware() | {"device": jax.devices()[0].device_kind},
            versions=records.versions(),
        )

    def _count_correct(self, params: Any, stats: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = self._network.apply({"params": params, "batch_stats": stats}, images, False)
        return jnp.sum(jnp.argmax(jnp.asarray(logits), -1) == labels)


def _padded(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Fills the last batch up with black images of no class, so that evaluation compiles once."""
    missing = TEST_BATCH - len(batch.labels)
    images = np.pad(batch.images, ((0, missing), (0, 0), (0, 0), (0, 0)))
    return images, np.pad(batch.labels, (0, missing), constant_values=-1)


def _planned(plan: jaxremat.Plan) -> str:
    """Returns what a reader must know of a plan: what it was for, and what came out."""
    stored = plan.policy if len(str(plan.policy)) < 60 else "a set of values of its own"
    peak = "" if plan.peak_bytes is None else f"; the compiler allots {plan.peak_bytes / 2**20:.1f} MiB"
    return (
        f"planned for {plan.budget_bytes / 2**20:.1f} MiB of all that a step has in use, parameters, momentum and batch included "
        f"(without rematerialization {plan.without_remat_bytes / 2**20:.1f} MiB): {stored}{peak}"
    )


def _how(why: str) -> str:
    """Returns `compare_records.Kept.how` for a ledger's reason."""
    if why.startswith("small:"):
        return "small"
    if why == "everything" or why.endswith("(the last segment is used at once)"):
        return "autodiff"
    return "border" if why.startswith("segments:") else "chosen"


def _module_path(path: str) -> str:
    """Returns a name stack's module path: without the network's class, which starts it, and without an einsum's scope.

    `ViT/block1/attention/bqhd,bkhd->bhqk` becomes `block1/attention`.
    """
    return "/".join(part for part in path.split("/")[1:] if "->" not in part)
