"""The device side of the data against numpy, written another way: crops by loops over pixels, never by slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.augment import PADDING, TRAIN_MEAN, TRAIN_STD, augment, crop_and_flip, epoch_order, normalise


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(7).integers(1, 256, (64, 32, 32, 3), dtype=np.uint8)  # no black pixel


def reference(image, down, right, flip):
    out = np.zeros_like(image)
    height, width, _ = image.shape
    for row in range(height):
        for column in range(width):
            r, c = row + down - PADDING, (width - 1 - column if flip else column) + right - PADDING
            if 0 <= r < height and 0 <= c < width:
                out[row, column] = image[r, c]
    return out


@pytest.mark.parametrize("shift", [(4, 4), (0, 0), (8, 8), (0, 8), (3, 6)])
@pytest.mark.parametrize("flip", [False, True])
def test_crop_and_flip_is_what_a_loop_over_pixels_gives(images, shift, flip):
    got = crop_and_flip(images[:1], jnp.array([shift]), jnp.array([flip]))
    np.testing.assert_array_equal(got[0], reference(images[0], *shift, flip))


def test_augment_is_one_of_the_162_crops_of_each_image(images):
    got = np.asarray(jax.jit(augment)(jax.random.key(3), images))
    assert got.dtype == np.uint8
    shifts, flips = [], []
    for image, out in zip(images, got):
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        matches = [
            (down, right, flip)
            for down in range(9)
            for right in range(9)
            for flip in (0, 1)
            if np.array_equal(padded[down : down + 32, right : right + 32][:, :: 1 - 2 * flip], out)
        ]
        assert len(matches) == 1  # random images: no two crops are alike
        shifts.append(matches[0][:2])
        flips.append(matches[0][2])
    # 64 draws out of 9: a given shift fails to come with probability (8/9)^64 = 0.0005. The key is fixed.
    assert {s[0] for s in shifts} == {s[1] for s in shifts} == set(range(9))
    assert 20 <= sum(flips) <= 44  # 32 expected, standard deviation 4


def test_augment_depends_on_the_key_alone(images):
    first, again, other = (np.asarray(augment(jax.random.key(k), images)) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_array_equal(jax.jit(augment)(jax.random.key(0), images), first)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_normalise_is_mean_zero_and_deviation_one(dtype, images):
    got = normalise(images, dtype)
    assert got.dtype == dtype
    expected = (images / 255 - np.array(TRAIN_MEAN)) / np.array(TRAIN_STD)
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-8  # half a unit in the last of bfloat16's 8 bits
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=2e-6)


@pytest.mark.parametrize("use", [lambda x: x, lambda x: x.transpose(3, 1, 2, 0), lambda x: x[::2]])
def test_normalise_has_the_same_bits_in_every_fusion(use, images):
    """A policy decides what the images are fused with, and every policy has to train on the same images."""
    mean, scale = 255 * np.float32(TRAIN_MEAN), np.float32(1 / 255) / np.float32(TRAIN_STD)
    expected = (images.astype(np.float32) - mean) * scale  # two roundings
    np.testing.assert_array_equal(jax.jit(lambda i: use(normalise(i, jnp.float32)))(images), use(expected))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63])
@pytest.mark.parametrize("epoch", [0, 41])
def test_epoch_order_is_a_permutation_that_its_arguments_determine(seed, epoch):
    order = epoch_order(seed, epoch, 1000)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(1000))
    np.testing.assert_array_equal(order, epoch_order(seed, epoch, 1000))
    assert (order != epoch_order(seed, epoch + 1, 1000)).any()
    assert (order != epoch_order(seed + 1, epoch, 1000)).any()
