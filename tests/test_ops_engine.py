"""The operations under the engine: it stores, recomputes and cuts through them, and its ledger knows them by name."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import QUICK

import jaxremat
from jaxremat import ops

POLICIES = ["nothing", "dots", "ops:relu=store,*=recompute"]


def images(weights, x):
    """A convolution, batch norm, ReLU and pooling, twice, and the loss of a classifier."""
    for w in weights:
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = ops.relu(ops.batch_norm(x)[0])
        x = ops.max_pool(x, (2, 2), (2, 2))
    labels = jnp.arange(x.shape[0]) % x.shape[-1]
    return ops.softmax_cross_entropy_with_integer_labels(x.mean((1, 2)), labels).mean()


def normalized_first(weights, x):
    """A convolution, then a batch norm, ReLU and convolution as one, twice."""
    first, *others = weights
    numbers = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    x = ops.conv_general_dilated(x, first, **numbers)
    for w in others:
        x = ops.batch_norm_relu_conv(x, w, **numbers)[0]
    return jnp.mean(ops.relu(x) ** 2)


def tokens(weights, x):
    """Attention and a perceptron with every operation of a transformer block, and a ReLU at the end."""
    q, k, v, out, up, down = weights
    h = ops.layer_norm(x)
    probs = ops.softmax((h @ q) @ (h @ k).swapaxes(-1, -2))
    x = x + ops.dropout(probs @ (h @ v) @ out, 0.3, QUICK)
    h = ops.gelu(ops.rms_norm(x) @ up)
    return jnp.mean(ops.relu(x + h @ down) ** 2)


def _normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) * 0.4


PROGRAMS = {
    "images": (images, ([_normal(0, 3, 3, 3, 8), _normal(1, 3, 3, 8, 8)], _normal(2, 4, 8, 8, 3))),
    "normalized first": (
        normalized_first,
        ([_normal(0, 3, 3, 3, 8), _normal(1, 3, 3, 8, 8), _normal(3, 3, 3, 8, 8)], _normal(2, 4, 8, 8, 3)),
    ),
    "tokens": (
        tokens,
        ([*(_normal(i, 8, 8) for i in range(4)), _normal(5, 8, 32), _normal(6, 32, 8)], _normal(7, 2, 6, 8)),
    ),
}


def gradients(f, args):
    options = jaxremat.compiler_options() | {"xla_backend_optimization_level": "0"}  # compiles in half the time
    return jax.jit(jax.value_and_grad(f, argnums=(0, 1)), compiler_options=options)(*args)


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request):
    f, args = PROGRAMS[request.param]
    return f, args, gradients(f, args)


@pytest.mark.filterwarnings(
    "ignore::jaxremat.RematWarning"
)  # a whole loss under `nothing`, and rbg keys: both on purpose
@pytest.mark.parametrize("policy", POLICIES)
def test_values_and_gradients_under_a_policy(program, policy):
    f, args, expected = program
    found = gradients(jaxremat.remat(f, policy), args)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, expected)


def test_policies_keep_what_they_say():
    def kept(policy):
        f, args = PROGRAMS["images"]
        report = jaxremat.residuals(jaxremat.remat(f, policy), *args)
        return [(row.op, row.kept_bytes) for row in report.rows if row.kept_bytes >= 2048]

    # Convolutions give 4 · 8 · 8 · 8 and 4 · 4 · 4 · 8 float32 numbers, 8192 and 2048 bytes; the ReLUs the same.
    assert kept("nothing") == []
    assert kept("dots") == [("conv", 8192), ("conv", 2048)]
    assert kept("ops:relu=store,*=recompute") == [("relu", 8192), ("relu", 2048)]


def test_policies_see_the_convolutions_of_operations():
    f, args = PROGRAMS["normalized first"]
    # The outputs of 3 convolutions, 4 · 8 · 8 · 8 float32 numbers each. Of the last one the ReLU needs its own output alone.
    for policy, kept_ops, again in [
        ("everything", ["conv", "conv", "relu"], 0),
        ("dots", ["conv"] * 3, 0),
        ("nothing", [], 3),
    ]:
        report = jaxremat.residuals(jaxremat.remat(f, policy), *args)
        assert [row.op for row in report.rows if row.kept_bytes == 8192][: len(kept_ops)] == kept_ops
        assert sum(row.kept_bytes >= 2048 for row in report.rows) <= len(kept_ops) + 1  # the square's derivative
        assert report.recomputed.get("conv", 0) == again


def test_the_ledger_names_the_operations():
    seen = set[str]()
    for f, args in PROGRAMS.values():
        seen |= {row.op for row in jaxremat.residuals(f, *args).rows}
    assert seen >= {
        "batch_norm", "cross_entropy", "dropout", "gelu", "layer_norm", "max_pool", "relu", "rms_norm", "softmax",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("op", "beyond_output"),
    [
        ("relu", 0), ("tanh", 0), ("softmax", 0), ("silu", 0), ("gelu", 0), ("hard_tanh", 96 // 8), ("leaky_relu", 96 // 8),
        ("layer_norm", 8 * 12), ("rms_norm", 4 * 12),
    ],
)  # fmt: skip
def test_one_operation_between_matrix_products(op, beyond_output):
    # The op's result, 12 rows of 8, is read by the second product. Beside it nothing (the input of SiLU and GELU belongs
    # to the first product), a bit an element, or a row's statistics.
    f = getattr(ops, op)

    def loss(w, x):
        return jnp.sum((f(x @ w) @ w) ** 2)

    args = (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((12, 8), jnp.float32))
    assert jaxremat.residuals(loss, *args).by("op")[op] == 4 * 96 + beyond_output
