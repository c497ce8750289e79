"""The batches of a training run as host arrays, made outside of any compiled step: what two frameworks can both read.

They are those of `experiments.training`: the same images in the same order, augmented with the same random numbers, which are
JAX's and are drawn on the CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from experiments.augment import augment, epoch_order, normalise
from experiments.data import Dataset


@dataclass(frozen=True, eq=False)
class Batch:
    """Normalised float32 images of shape (batch, 32, 32, 3) and int32 labels of shape (batch,)."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True, eq=False)
class Batches:
    """The training batches of a run with this seed.

    Example:
        >>> from experiments.batches import Batches
        >>> from experiments.data import load
        >>> batches = Batches(load("sample"), seed=0, augmented=True)
        >>> [batch.images.shape for _, batch in zip(range(2), batches.of_run(50))]
        [(50, 32, 32, 3), (50, 32, 32, 3)]
    """

    dataset: Dataset
    seed: int
    augmented: bool

    def of_step(self, step: int, index: np.ndarray) -> Batch:
        """Returns the batch of a step, counted from 0 over the whole run, from indices into the training set."""
        with jax.default_device(jax.devices("cpu")[0]):
            images = _prepare(self.dataset.train_images[index], self.seed, step, augmented=self.augmented)
        return Batch(np.asarray(images), self.dataset.train_labels[index].astype(np.int32))

    def of_run(self, batch_size: int) -> Iterator[Batch]:
        """Yields the batches of all epochs without end."""
        per_epoch, step = len(self.dataset.train_labels) // batch_size, 0
        while True:
            order = epoch_order(self.seed, step // per_epoch, len(self.dataset.train_labels))
            for at in range(0, per_epoch * batch_size, batch_size):
                yield self.of_step(step, order[at : at + batch_size])
                step += 1


@partial(jax.jit, static_argnames="augmented")
def _prepare(images: jax.Array, seed: jax.Array, step: jax.Array, *, augmented: bool) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), step)
    key_augment, _ = jax.random.split(key)
    return normalise(augment(key_augment, images) if augmented else images, jnp.float32)


def evaluation_batches(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """Yields the test set in order; the last batch may be smaller."""
    for start in range(0, len(dataset.test_labels), batch_size):
        part = slice(start, start + batch_size)
        with jax.default_device(jax.devices("cpu")[0]):
            images = normalise(jnp.asarray(dataset.test_images[part]), jnp.float32)
        yield Batch(np.asarray(images), dataset.test_labels[part].astype(np.int32))
