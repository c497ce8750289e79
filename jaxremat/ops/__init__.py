"""Drop-in operations with the values and gradients of `jax.nn`, Flax and optax that keep less for the backward pass."""

from jaxremat.ops.activations import gelu, hard_tanh, leaky_relu, relu, relu6, sigmoid, silu, tanh
from jaxremat.ops.batch_norms import batch_norm, batch_norm_relu
from jaxremat.ops.bits import pack_bits, unpack_bits
from jaxremat.ops.convolution import batch_norm_relu_conv, conv_general_dilated
from jaxremat.ops.dropout import dropout
from jaxremat.ops.norms import group_norm, layer_norm, rms_norm
from jaxremat.ops.pooling import avg_pool, max_pool
from jaxremat.ops.softmax import log_softmax, logsumexp, softmax, softmax_cross_entropy_with_integer_labels

__all__ = [
    "avg_pool",
    "batch_norm",
    "batch_norm_relu",
    "batch_norm_relu_conv",
    "conv_general_dilated",
    "dropout",
    "gelu",
    "group_norm",
    "hard_tanh",
    "layer_norm",
    "leaky_relu",
    "log_softmax",
    "logsumexp",
    "max_pool",
    "pack_bits",
    "relu",
    "relu6",
    "rms_norm",
    "sigmoid",
    "silu",
    "softmax",
    "softmax_cross_entropy_with_integer_labels",
    "tanh",
    "unpack_bits",
]
