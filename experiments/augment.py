"""What happens to the images on the device: pad-crop, flip and normalising, and the order in which an epoch sees them.

Images stay uint8 until they are normalised: a quarter of the memory and of the traffic of float32. The functions are pure
and meant to be traced into the training step with the step's own random key. Pad-crop and flip are those of He et al.,
"Deep Residual Learning for Image Recognition" (2015), https://arxiv.org/abs/1512.03385, section 4.2.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

# Over the 50,000 training images, per channel, of pixels scaled to 0 … 1.
TRAIN_MEAN = (0.49140, 0.48216, 0.44653)
TRAIN_STD = (0.24703, 0.24349, 0.26159)
PADDING = 4


def normalise(images: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Scales pixels to mean 0 and standard deviation 1 per channel over the training set.

    Args:
      images: uint8 of shape (..., 3: red, green, blue).
      dtype: of the result; the arithmetic is float32, so bfloat16 is rounded once.

    Returns:
      An array of the same shape and of `dtype`.

    Example:
      >>> white = normalise(jnp.full((1, 3), 255, jnp.uint8), jnp.float32)
      >>> np.asarray(white, np.float64).round(3).tolist()
      [[2.059, 2.127, 2.116]]
    """
    # The difference first. XLA:CPU rounds a product and a sum after it once or twice, as they are fused with what follows,
    # so that two policies would train on images that differ in the last bit.
    mean, scale = 255 * np.asarray(TRAIN_MEAN, np.float32), np.float32(1 / 255) / np.asarray(TRAIN_STD, np.float32)
    return ((images.astype(jnp.float32) - mean) * scale).astype(dtype)


def augment(key: jax.Array, images: jax.Array) -> jax.Array:
    """Shifts each image by up to 4 pixels either way (black comes in) and mirrors half of them.

    The shift is one slice an image, not a gather of pixels: few, large slices suit TPUs, and on two CPU cores a batch
    of 128 takes 0.3 ms (a gather of pixels 0.26, a product with one-hot matrices 0.9, nine shifted selects 20).

    Under a mesh whose batch axis is of type Auto the batch stays where it is, without communication; under an Explicit axis
    JAX refuses, as the shifts come from a key that has no such axis.

    Args:
      key: a random key of `jax.random.key`; the same key gives the same result.
      images: of shape (images, height, width, channels), of any dtype.

    Returns:
      An array of the same shape and dtype.

    Example:
      >>> images = jnp.ones((2, 32, 32, 3), jnp.uint8)
      >>> augment(jax.random.key(0), images).shape
      (2, 32, 32, 3)
    """
    shift_key, flip_key = jax.random.split(key)
    shifts = jax.random.randint(shift_key, (len(images), 2), 0, 2 * PADDING + 1)
    flips = jax.random.bernoulli(flip_key, 0.5, (len(images),))
    return crop_and_flip(images, shifts, flips)


def crop_and_flip(images: jax.Array, shifts: jax.Array, flips: jax.Array) -> jax.Array:
    """What `augment` does, for shifts and flips that are given.

    Args:
      images: of shape (images, height, width, channels).
      shifts: integers of shape (images, 2: rows, columns), the corner of each crop in the padded image, 0 to 8; 4 is the
        image where it was.
      flips: booleans of shape (images,): which crops are mirrored left to right.

    Returns:
      An array of the shape and dtype of `images`.

    Example:
      >>> image = jnp.arange(4, dtype=jnp.uint8).reshape(1, 1, 4, 1)
      >>> crop_and_flip(image, jnp.array([[4, 5]]), jnp.array([True])).ravel().tolist()
      [0, 3, 2, 1]
    """
    padded = jnp.pad(images, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))

    def crop(image: jax.Array, shift: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(image, (shift[0], shift[1], 0), images.shape[1:])

    cropped = jax.vmap(crop)(padded, shifts)
    return jnp.where(flips[:, None, None, None], cropped[:, :, ::-1], cropped)


def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of an epoch: a permutation that depends on the arguments alone, so that a resumed run computes it again.

    Args:
      seed: of the run; any integer of 64 bits, a negative one too.
      epoch: from 0.
      n: the number of images.

    Returns:
      int32 of shape (n,). numpy keeps the streams of its PCG64 generator fixed between versions, but not a method's use of
      them: a run is resumed under the numpy that began it.

    Example:
      >>> epoch_order(0, 0, 8).tolist() == epoch_order(0, 0, 8).tolist() != epoch_order(0, 1, 8).tolist()
      True
    """
    generator = np.random.default_rng([seed % 2**64, epoch])
    return generator.permutation(n).astype(np.int32)
