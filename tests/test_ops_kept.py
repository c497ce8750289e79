"""What each operation keeps, as exact integers derived in the comments."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from ops_cases import KEY

from experiments.bench.kept import Kept, kept
from jaxremat import ops

N, H, W, C = 4, 8, 6, 16
SIZE = N * H * W * C
X = jax.ShapeDtypeStruct((N, H, W, C), jnp.float32)
P = jax.ShapeDtypeStruct((C,), jnp.float32)
ROWS = N * H * W
LABELS = jnp.zeros((N, H, W), jnp.int32)

K = jax.ShapeDtypeStruct((3, 3, C, C), jnp.float32)


def _convolve(f, x, kernel):
    return f(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _fused(x, kernel, *parameters):
    numbers = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    return ops.batch_norm_relu_conv(x, kernel, *parameters, **numbers)[0]


# name: (operation, arguments, bytes kept of inputs, of outputs, of values made on the way)
TABLE = {
    "relu": (ops.relu, (X,), 0, 4 * SIZE, 0),
    "relu-bits": (partial(ops.relu, keep="bits"), (X,), 0, 0, SIZE // 8),
    "relu6": (ops.relu6, (X,), 0, 4 * SIZE, 0),
    "relu6-bits": (partial(ops.relu6, keep="bits"), (X,), 0, 0, SIZE // 8),
    "leaky_relu": (ops.leaky_relu, (X,), 0, 0, SIZE // 8),
    "leaky_relu-output": (partial(ops.leaky_relu, keep="output"), (X,), 0, 4 * SIZE, 0),
    "hard_tanh": (ops.hard_tanh, (X,), 0, 0, SIZE // 8),
    "tanh": (ops.tanh, (X,), 0, 4 * SIZE, 0),
    "sigmoid": (ops.sigmoid, (X,), 0, 4 * SIZE, 0),
    "gelu": (ops.gelu, (X,), 4 * SIZE, 0, 0),
    "gelu-erf": (partial(ops.gelu, approximate=False), (X,), 4 * SIZE, 0, 0),
    "silu": (ops.silu, (X,), 4 * SIZE, 0, 0),
    "softmax": (ops.softmax, (X,), 0, 4 * SIZE, 0),
    "log_softmax-output": (partial(ops.log_softmax, keep="output"), (X,), 0, 4 * SIZE, 0),
    # The exponentials, and a sum for each row.
    "log_softmax": (ops.log_softmax, (X,), 0, 0, 4 * SIZE + 4 * ROWS),
    # A maximum and a sum for each row.
    "logsumexp": (partial(ops.logsumexp, axis=-1), (X,), 4 * SIZE, 0, 8 * ROWS),
    # The same, and the labels, a constant here.
    "cross_entropy": (
        lambda x: ops.softmax_cross_entropy_with_integer_labels(x, LABELS),
        (X,), 4 * SIZE, 0, 12 * ROWS,
    ),
    # A mean and a variance for each row, and the scale in the shape that broadcasts.
    "layer_norm": (ops.layer_norm, (X, P, P), 4 * SIZE, 0, 8 * ROWS + 4 * C),
    "layer_norm-bare": (ops.layer_norm, (X,), 4 * SIZE, 0, 8 * ROWS),
    # A mean square for each row, and the scale.
    "rms_norm": (ops.rms_norm, (X, P), 4 * SIZE, 0, 4 * ROWS + 4 * C),
    # A mean and a variance for each image and channel, and the scale.
    "group_norm": (partial(ops.group_norm, num_groups=4), (X, P, P), 4 * SIZE, 0, 8 * N * C + 4 * C),
    # A mean and a variance for each channel, and the scale.
    "batch_norm": (lambda *a: ops.batch_norm(*a)[0], (X, P, P), 4 * SIZE, 0, 12 * C),
    # The bias too, from which the sign is computed again.
    "batch_norm_relu": (lambda *a: ops.batch_norm_relu(*a)[0], (X, P, P), 4 * SIZE, 0, 16 * C),
    # The kernel is an input too.
    "conv": (partial(_convolve, ops.conv_general_dilated), (X, K), 4 * SIZE + 4 * 9 * C * C, 0, 0),
    # Beside those, a mean and a variance for each channel, scale and bias.
    "batch_norm_relu_conv": (_fused, (X, K, P, P), 4 * SIZE + 4 * 9 * C * C, 0, 16 * C),
    "dropout": (lambda x: ops.dropout(x, 0.5, KEY), (X,), 0, 0, SIZE // 8),
    # A key of two 32-bit words.
    "dropout-key": (lambda x: ops.dropout(x, 0.5, KEY, keep="key"), (X,), 0, 0, 8),
    # One byte an output: a quarter of the elements.
    "max_pool": (lambda x: ops.max_pool(x, (2, 2), (2, 2)), (X,), 0, 0, SIZE // 4),
    # 8 x 6 positions give 4 x 3 windows that overlap.
    "max_pool-3": (lambda x: ops.max_pool(x, (3, 3), (2, 2), "SAME"), (X,), 0, 0, N * 4 * 3 * C),
    "avg_pool": (lambda x: ops.avg_pool(x, (2, 2), (2, 2)), (X,), 0, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_kept_bytes(name):
    op, args, inputs, outputs, made = TABLE[name]
    assert kept(op, *args) == Kept(inputs, outputs, made)


@pytest.mark.parametrize("name", ["gelu", "silu", "layer_norm", "batch_norm_relu"])
def test_kept_bytes_of_bfloat16_are_those_of_its_input(name):
    op, args, *_ = TABLE[name]
    half = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in args]
    assert kept(op, *half).inputs == 2 * SIZE


def test_a_window_of_more_than_256_elements_keeps_the_input():
    x = jax.ShapeDtypeStruct((1, 40, 40, 2), jnp.float32)
    assert kept(lambda x: ops.max_pool(x, (17, 16), (1, 1)), x) == Kept(4 * 40 * 40 * 2, 0, 0)
    assert kept(lambda x: ops.max_pool(x, (16, 16), (1, 1)), x) == Kept(0, 0, 25 * 25 * 2)


def _chain_keeps(layers, layer):
    """Returns bytes of x, of an activation and of all that is made on the way through a chain of convolutions."""
    x = jax.ShapeDtypeStruct((2, 8, 8, C), jnp.float32)
    weights = [(K, P, P)] * layers
    found = kept(lambda x, weights: jnp.mean(layer(x, weights)), x, weights)
    return found.inputs - layers * 4 * 9 * C * C, 4 * x.size, found.made


def test_a_chain_keeps_two_activations_a_layer():
    # Each layer keeps the input of its convolution (the output of the layer before) and the convolution's output.
    layers = 5

    def chain(x, weights):
        for kernel, scale, bias in weights:
            x = ops.batch_norm_relu(_convolve(jax.lax.conv_general_dilated, x, kernel), scale, bias)[0]
        return x

    of_inputs, activation, made = _chain_keeps(layers, chain)
    assert of_inputs == activation  # x itself
    # Outputs of 5 convolutions, and 4 layers' outputs; the last one's goes into a mean. Statistics: see above.
    assert made == (2 * layers - 1) * activation + layers * 16 * C


def test_a_chain_of_normalized_inputs_keeps_one_activation_a_layer():
    layers = 5

    def chain(x, weights):
        for kernel, scale, bias in weights:
            x = _fused(x, kernel, scale, bias)
        return x

    of_inputs, activation, made = _chain_keeps(layers, chain)
    assert of_inputs == activation  # x itself
    # What goes into the other 4 layers; the last one's output goes into a mean.
    assert made == (layers - 1) * activation + layers * 16 * C


def test_a_transformer_block_keeps_at_most_three_fifths_of_the_standard():
    tokens, width = (2, 16), 32

    def block(norm, softmax, gelu, x, w):
        h = norm(x)
        q, k, v = (h @ w[i] for i in range(3))
        a = softmax(q @ k.swapaxes(-1, -2)) @ v
        x = x + a @ w[3]
        return x + gelu(norm(x) @ w[4]) @ w[5]

    def norm(x):
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-6)

    shapes = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
    args = (
        jax.ShapeDtypeStruct((*tokens, width), jnp.float32),
        [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes],
    )
    weights = sum(4 * a.size for a in args[1])
    lean = sum(kept(partial(block, ops.layer_norm, ops.softmax, ops.gelu), *args)) - weights
    standard = sum(kept(partial(block, norm, jax.nn.softmax, jax.nn.gelu), *args)) - weights
    assert lean <= 0.6 * standard
