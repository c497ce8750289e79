"""Bad input: one clear message, of the right kind, that names the operation and the argument."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import QUICK

from jaxremat import ops

X = jnp.ones((4, 8))
IMAGE = jnp.ones((2, 6, 6, 8))
_XENT = ops.softmax_cross_entropy_with_integer_labels
_FUSED = partial(
    ops.batch_norm_relu_conv, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
)

UNARY = {
    **{name: getattr(ops, name) for name in (
        "relu", "relu6", "leaky_relu", "hard_tanh", "tanh", "sigmoid", "gelu", "silu", "softmax", "log_softmax",
        "logsumexp", "layer_norm", "rms_norm", "group_norm", "batch_norm", "batch_norm_relu",
    )},
    "dropout": lambda x: ops.dropout(x, 0.5, QUICK),
    "conv_general_dilated": lambda x: ops.conv_general_dilated(x, jnp.ones((1, 1, 1)), (1,), "SAME"),
    "batch_norm_relu_conv": lambda x: _FUSED(x, jnp.ones((1, 1, 8, 2))),
    "max_pool": lambda x: ops.max_pool(x, (2, 2)),
    "avg_pool": lambda x: ops.avg_pool(x, (2, 2)),
    "softmax_cross_entropy_with_integer_labels": lambda x: _XENT(x, jnp.zeros(3, int)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize(
    ("x", "got"),
    [
        (np.ones((4, 8), np.int32), "int32"),
        (np.ones((4, 8), bool), "bool"),
        (np.ones((4, 8), np.complex64), "complex64"),
        (3, "int32"),
        ("x", "str"),
        ([1.0, 2.0], "list"),
        (None, "NoneType"),
    ],
)
def test_only_floating_point_numbers(name, x, got):
    with pytest.raises(TypeError, match=rf"^{name}: (x|logits|lhs) must .*{got}"):
        UNARY[name](x)


@pytest.mark.parametrize("name", UNARY)
def test_python_floats_and_numpy_arrays_are_numbers(name):
    if name in ("relu", "relu6", "leaky_relu", "hard_tanh", "tanh", "sigmoid", "gelu", "silu", "dropout", "logsumexp"):
        assert UNARY[name](0.5).shape == ()
    elif not any(part in name for part in ("pool", "cross", "general")):
        with pytest.raises(ValueError, match=name):  # no axis to normalize over
            UNARY[name](0.5)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: ops.relu(X, keep="bit"), ValueError, "keep must be one of 'output', 'bits'; got 'bit'. Did you mean 'bits'"),
        (lambda: ops.relu6(X, keep=None), ValueError, "relu6: keep"),
        (lambda: ops.leaky_relu(X, jnp.array(0.1)), TypeError, "negative_slope must be a plain number"),
        (lambda: ops.leaky_relu(X, 0.0, keep="output"), ValueError, "negative_slope > 0; got 0.0"),
        (lambda: ops.gelu(X, "tanh"), TypeError, "approximate must be True or False"),
        (lambda: ops.softmax(X, axis=2), ValueError, "softmax: axis 2 is out of range for an array of 2"),
        (lambda: ops.softmax(X, axis=(0, -2)), ValueError, "names an axis twice"),
        (lambda: ops.softmax(X, axis=0.5), TypeError, "axis must be an integer"),
        (lambda: ops.softmax(X, where=jnp.ones((4, 8))), TypeError, "where must be a boolean mask; got float32"),
        (lambda: ops.log_softmax(X, where=jnp.ones((3, 8), bool)), ValueError, "where must broadcast"),
        (lambda: ops.logsumexp(X, keepdims=1), TypeError, "keepdims must be True or False"),
        (lambda: _XENT(X, jnp.zeros(4)), TypeError, "labels must be integers"),
        (lambda: _XENT(X, jnp.zeros(8, int)), ValueError, "labels must have the shape"),
        (lambda: _XENT(X, jnp.zeros(4, int), axis=None), TypeError, "axis must be"),
        (lambda: ops.layer_norm(X, jnp.ones(4)), ValueError, r"scale must have the shape \(8,\).*got \(4,\)"),
        (lambda: ops.layer_norm(X, epsilon=None), TypeError, "epsilon must be a plain number"),
        (lambda: ops.layer_norm(X, dtype=jnp.int32), TypeError, "dtype must be a floating-point type"),
        (lambda: ops.rms_norm(X, reduction_axes=-3), ValueError, "reduction_axes -3 is out of range"),
        (lambda: ops.batch_norm(jnp.ones(3)), ValueError, "at least 2 dimensions"),
        (lambda: ops.batch_norm_relu(X, use_fast_variance=None), TypeError, "use_fast_variance must be"),
        (lambda: ops.group_norm(IMAGE, num_groups=3), ValueError, "divides the 8 channels; got 3"),
        (lambda: ops.group_norm(IMAGE, num_groups=4, group_size=2), ValueError, "either num_groups or group_size"),
        (lambda: ops.group_norm(IMAGE, num_groups=None), ValueError, "either num_groups or group_size"),
        (lambda: ops.dropout(X, 1.5, QUICK), ValueError, r"rate must be in \[0, 1\]"),
        (lambda: ops.dropout(X, float("nan"), QUICK), ValueError, r"rate must be in \[0, 1\]"),
        (lambda: ops.dropout(X, 0.5, None), TypeError, "key must be one random key"),
        (lambda: ops.dropout(X, 0.5, jax.random.split(QUICK, 2)), TypeError, "key must be one random key"),
        (lambda: ops.dropout(X, 0.5, QUICK, keep="mask"), ValueError, "keep must be one of"),
        (lambda: ops.dropout(X, 0.5, QUICK, broadcast_dims=(2,)), ValueError, "broadcast_dims 2 is out of range"),
        (lambda: ops.max_pool(X, (2, 2)), ValueError, "x must have the 2 axes of window_shape"),
        (lambda: ops.max_pool(IMAGE, 2), ValueError, "window_shape must be positive integers"),
        (lambda: ops.max_pool(IMAGE, (2, 0)), ValueError, "window_shape must be positive integers"),
        (lambda: ops.max_pool(IMAGE, (2, 2), (2,)), ValueError, "strides must be 2 numbers"),
        (lambda: ops.max_pool(IMAGE, (2, 2), padding="SAMR"), ValueError, "Did you mean 'SAME'"),
        (lambda: ops.max_pool(IMAGE, (2, 2), padding=((0, 0),)), ValueError, "padding must be"),
        (lambda: ops.max_pool(IMAGE, (2, 2), padding=3), ValueError, "padding must be"),
        (lambda: ops.avg_pool(IMAGE, (2, 2), count_include_pad="no"), TypeError, "count_include_pad must be"),
        (lambda: ops.conv_general_dilated(IMAGE, jnp.ones((8, 6, 1, 1), int), (1, 1), "SAME"), TypeError, "rhs must hold real"),
        (lambda: ops.conv_general_dilated(IMAGE, IMAGE.astype(jnp.bfloat16), (1, 1), "SAME"), TypeError, "of one type; got float32"),
        (lambda: _FUSED(IMAGE, None), TypeError, "kernel must be an array"),
        (lambda: _FUSED(IMAGE, jnp.ones((1, 1, 8, 2)), jnp.ones(4)), ValueError, r"scale must have the shape \(8,\)"),
        (lambda: _FUSED(jnp.ones(3), jnp.ones((1, 1, 8, 2))), ValueError, "at least 2 dimensions"),
        (lambda: ops.pack_bits(X), TypeError, "mask must be boolean"),
        (lambda: ops.unpack_bits(jnp.zeros(2, jnp.uint8), (17,)), ValueError, r"packs to uint8 of shape \(3,\)"),
    ],
)  # fmt: skip
def test_one_clear_message(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_rates_of_nothing_and_all_need_no_key():
    np.testing.assert_array_equal(ops.dropout(X, 0.0, None), X)
    np.testing.assert_array_equal(ops.dropout(X, 0.7, None, deterministic=True), X)
    np.testing.assert_array_equal(ops.dropout(X, 1.0, None), 0 * X)
    assert float(jax.grad(lambda x: ops.dropout(x, 1.0, None).sum())(X).sum()) == 0.0


def test_raw_keys_are_keys():
    raw, typed = jax.random.PRNGKey(3), jax.random.key(3)
    np.testing.assert_array_equal(ops.dropout(X, 0.5, raw), ops.dropout(X, 0.5, typed))


def test_traced_options_are_refused():
    with pytest.raises(TypeError, match="rate must be a plain number"):
        jax.jit(partial(ops.dropout, X, key=QUICK))(rate=0.5)
