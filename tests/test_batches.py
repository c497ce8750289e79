import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.batches import Batches, evaluation_batches
from experiments.data import load
from experiments.devices import all_devices
from experiments.training import Images, TrainState, make_optimizer, make_step


@pytest.mark.parametrize("augmented", [False, True])
def test_batches_are_those_that_the_compiled_step_makes(augmented):
    """The step's loss is made to be a weighted sum of its images, which tells any two batches apart."""
    sample, weights = load("sample"), np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype(np.float32)

    def loss(params, stats, images, labels, key):
        return jnp.sum(images * weights) + jnp.sum(labels) + 0 * params["w"], stats

    optimizer = make_optimizer(0.1, 10)
    step = jax.jit(
        make_step(loss, optimizer, seed=5, augmented=augmented, dtype=jnp.float32, split=all_devices().split)
    )
    params, zero = {"w": jnp.zeros(())}, jnp.zeros((), jnp.int32)
    state = TrainState(zero, params, {}, optimizer.init(params), zero)
    data = Images(jnp.asarray(sample.train_images), jnp.asarray(sample.train_labels))
    order = jnp.asarray(np.random.default_rng(1).permutation(1000)[:24].reshape(3, 8))
    batches = Batches(sample, 5, augmented=augmented)
    for number in range(3):
        state, value = step(state, data, order)
        batch = batches.of_step(number, np.asarray(order[number]))
        expected = float(np.sum(batch.images.astype(np.float64) * weights)) + float(batch.labels.sum())
        assert float(value) == pytest.approx(expected, rel=1e-4, abs=1e-2)


def test_a_run_goes_through_epochs():
    sample = load("sample")
    labels = [batch.labels for _, batch in zip(range(4), Batches(sample, 0, augmented=False).of_run(400))]
    assert all(len(batch) == 400 for batch in labels)  # two steps an epoch; 200 images wait
    assert not np.array_equal(labels[0], labels[2])


def test_every_test_image_comes_once():
    sample = load("sample")
    found = list(evaluation_batches(sample, 150))
    assert [len(batch.labels) for batch in found] == [150, 150, 150, 50]
    assert np.array_equal(np.concatenate([batch.labels for batch in found]), sample.test_labels)
