from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import SingleDeviceSharding

from experiments.models import build
from experiments.training import (
    AUGMENTED,
    MOMENTUM,
    WEIGHT_DECAY,
    Images,
    decayed,
    is_sound,
    make_count_correct,
    make_init,
    make_loss,
    make_optimizer,
    make_step,
)

SPLIT = SingleDeviceSharding(jax.devices()[0])


class Linear(nn.Module):
    """The smallest network: one dense layer on the pixels; logits are zero at first."""

    @nn.compact
    def __call__(self, images, train):
        return nn.Dense(10, kernel_init=nn.initializers.zeros, name="fc")(images.reshape(images.shape[0], -1))


def images(n: int = 12) -> Images:
    random = np.random.default_rng(0)
    return Images(
        jnp.asarray(random.integers(0, 256, (n, 32, 32, 3), np.uint8)), jnp.asarray(np.arange(n, dtype=np.int32) % 10)
    )


def linear_step(learning_rate=0.1, *, augmented=False, seed=0, loss=None):
    optimizer = make_optimizer(learning_rate, 100)
    loss = make_loss(Linear()) if loss is None else loss
    step = make_step(loss, optimizer, seed=seed, augmented=augmented, dtype=jnp.float32, split=SPLIT)
    return jax.jit(step), make_init(Linear(), optimizer, seed)()


def test_every_model_says_whether_it_augments():
    assert set(AUGMENTED) == {"net", "resnet18", "wrn16_4", "vit"}


@pytest.mark.parametrize("name", ["net", "resnet18", "wrn16_4", "vit"])
def test_weight_decay_spares_biases_norms_and_positions(name):
    model = build(name)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), False))["params"]
    for path, spared in jax.tree.leaves_with_path(jax.tree.map(lambda x: not x, decayed(params))):
        assert spared == (path[-1].key in ("bias", "scale", "positions")), path


def test_schedule_warms_up_and_ends_at_zero():
    # 100 steps: 5 of warm-up. The first update has rate 0, the sixth the peak. With zero weight decay on a bias and a
    # constant gradient of 1, Nesterov's update is -rate * (1 + m * trace), trace = 1 + m + m**2 ...
    optimizer, params = make_optimizer(0.5, 100), {"bias": jnp.zeros(())}
    state, rates, trace = optimizer.init(params), [], 0.0
    for _ in range(101):
        updates, state = optimizer.update({"bias": jnp.ones(())}, state, params)
        trace = 1 + MOMENTUM * trace
        rates.append(float(-updates["bias"]) / (1 + MOMENTUM * trace))
    assert rates[0] == 0
    np.testing.assert_allclose(rates[:6], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], rtol=1e-5)
    np.testing.assert_allclose(rates[100], 0, atol=1e-6)
    assert sorted(rates[5:], reverse=True) == rates[5:]


def test_weight_decay_enters_the_gradient():
    optimizer, params = make_optimizer(1.0, 2), {"kernel": jnp.full((), 2.0)}
    state = optimizer.init(params)
    _, state = optimizer.update({"kernel": jnp.zeros(())}, state, params)  # rate 0
    updates, _ = optimizer.update({"kernel": jnp.zeros(())}, state, params)  # rate 1
    gradient = 2.0 * WEIGHT_DECAY
    trace = gradient + MOMENTUM * gradient
    np.testing.assert_allclose(updates["kernel"], -(gradient + MOMENTUM * trace), rtol=1e-6)


def test_shortest_runs_have_a_schedule():
    for steps in (1, 2, 3):
        optimizer = make_optimizer(0.1, steps)
        params = {"bias": jnp.zeros(())}
        updates, _ = optimizer.update({"bias": jnp.ones(())}, optimizer.init(params), params)
        assert np.isfinite(updates["bias"])


def test_loss_of_equal_logits_is_the_log_of_the_classes():
    params = {"fc": {"kernel": jnp.zeros((3072, 10)), "bias": jnp.zeros(10)}}
    loss, stats = make_loss(Linear())(params, {}, jnp.ones((4, 32, 32, 3)), jnp.array([0, 1, 2, 3]), jax.random.key(0))
    np.testing.assert_allclose(loss, np.log(10), rtol=1e-6)
    assert loss.dtype == jnp.float32
    assert jax.tree.leaves(stats) == []


def test_loss_returns_new_batch_statistics_and_changes_none():
    model = build("wrn16_4")
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), False))
    batch = jax.ShapeDtypeStruct((4, 32, 32, 3), jnp.bfloat16)
    labels, key = jax.ShapeDtypeStruct((4,), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
    loss, stats = jax.eval_shape(make_loss(model), variables["params"], variables["batch_stats"], batch, labels, key)
    assert loss.dtype == jnp.float32
    assert jax.tree.structure(stats) == jax.tree.structure(variables["batch_stats"])


def test_a_step_reads_the_images_that_the_order_names():
    def loss(params, stats, batch, labels, key):
        return (params["fc"]["bias"] ** 2).sum() + labels.sum(), stats

    step, state = linear_step(loss=loss)
    order = jnp.array([[3, 4], [5, 6], [7, 9]], jnp.int32)
    seen = []
    for _ in range(4):  # the fourth step is the first of the next epoch
        state, value = step(state, images(), order)
        seen.append(int(value))
    assert seen == [3 + 4, 5 + 6, 7 + 9, 3 + 4]
    assert int(state.step) == 4


def test_steps_depend_on_seed_and_step_alone():
    step, state = linear_step(augmented=True)
    order = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    once, _ = step(step(state, images(), order)[0], images(), order)
    again, _ = step(step(state, images(), order)[0], images(), order)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    other, _ = linear_step(augmented=True, seed=1)
    different, _ = other(other(state, images(), order)[0], images(), order)
    assert not np.array_equal(once.params["fc"]["kernel"], different.params["fc"]["kernel"])


def test_augmentation_is_a_choice():
    order = jnp.arange(12, dtype=jnp.int32).reshape(1, 12)
    losses = []
    for augmented in (False, True):
        step, state = linear_step(augmented=augmented)
        state = replace(
            state,
            params=jax.tree.map(lambda leaf: leaf + jnp.linspace(0, 1, leaf.size).reshape(leaf.shape), state.params),
        )
        losses.append(float(step(state, images(), order)[1]))
    assert losses[0] != losses[1]


def test_the_first_step_without_a_finite_loss_is_remembered():
    def loss(params, stats, batch, labels, key):
        return jnp.where(labels[0] >= 5, jnp.nan, 1.0) + 0 * params["fc"]["bias"].sum(), stats

    step, state = linear_step(loss=loss)
    order = jnp.array([[3], [5], [4], [6]], jnp.int32)
    remembered = []
    for _ in range(4):
        state, _ = step(state, images(), order)
        remembered.append(int(state.diverged_at))
    assert remembered == [0, 2, 2, 2]
    assert not bool(is_sound(state))


def test_soundness_looks_at_parameters_and_statistics():
    _, state = linear_step()
    assert bool(is_sound(state))
    assert not bool(is_sound(replace(state, batch_stats={"mean": jnp.array([0.0, jnp.inf])})))
    assert not bool(is_sound(replace(state, params={"w": jnp.array(jnp.nan)})))


@pytest.mark.parametrize("batch_size", [4, 5, 12, 20])
def test_every_test_image_counts_once(batch_size):
    # A bias that always answers 3: of the labels 0 1 ... 9 0 1 one is a 3.
    params = {"fc": {"kernel": jnp.zeros((3072, 10)), "bias": jnp.zeros(10).at[3].set(1)}}
    count = make_count_correct(Linear(), batch_size=batch_size, dtype=jnp.float32, split=SPLIT)
    assert sum(int(count(params, {}, images(), jnp.int32(first))) for first in range(0, 12, batch_size)) == 1
    # And one that always answers 0 meets two, one of which is image 0, that the padding repeats.
    params["fc"]["bias"] = jnp.zeros(10).at[0].set(1)
    assert sum(int(count(params, {}, images(), jnp.int32(first))) for first in range(0, 12, batch_size)) == 2


def test_optimizer_state_has_one_trace():
    _, state = linear_step()
    traces = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 0]
    assert sum(leaf.size for leaf in traces) == 30730
    assert optax.tree.norm(traces) == 0
