"""Modules on the operations beside Flax's: the same variables, initial values, results, gradients and new statistics."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ops_cases import QUICK

import jaxremat.flax
import jaxremat.flax.nnx

X = jax.random.normal(jax.random.key(0), (4, 6, 6, 8)) * 2 + 0.3
MASK = jnp.arange(4).reshape(4, 1, 1, 1) < 3

# (class, fields)
CASES = [
    ("BatchNorm", {}),
    ("BatchNorm", {"axis": 1, "momentum": 0.5, "use_scale": False}),
    ("BatchNorm", {"dtype": jnp.bfloat16, "use_fast_variance": False, "epsilon": 1e-3}),
    ("LayerNorm", {}),
    ("LayerNorm", {"use_bias": False, "dtype": jnp.bfloat16}),
    ("LayerNorm", {"reduction_axes": (1, 2, 3), "feature_axes": -1}),
    ("RMSNorm", {}),
    ("RMSNorm", {"use_scale": False, "epsilon": 1e-2}),
    ("GroupNorm", {"num_groups": 4}),
    ("GroupNorm", {"num_groups": None, "group_size": 4, "use_fast_variance": False}),
]
IDS = [f"{name}-{','.join(fields)}" for name, fields in CASES]


def assert_equal(mine, theirs):
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


def assert_close(mine, theirs):
    for m, t in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert m.dtype == t.dtype
        m, t = np.asarray(m, np.float32), np.asarray(t, np.float32)
        np.testing.assert_allclose(m, t, rtol=0, atol=2e-2 * np.abs(t).max() if t.dtype == jnp.bfloat16 else 2e-2)


def linen_results(module, variables, **call):
    """The value and new statistics, and the gradients, of programs of their own.

    Beside its gradient Flax's own group norm has other last bits than alone, in JAX 0.12: XLA:CPU rounds a product and the
    sum after it once where they are in one fusion.
    """

    def apply(params, x):
        return module.apply(variables | {"params": params}, x, mutable=["batch_stats"], **call)

    def loss(params, x):
        return jnp.sum(jnp.sin(apply(params, x)[0].astype(jnp.float32)))

    params = variables.get("params", {})
    return jax.jit(apply)(params, X), jax.jit(jax.grad(loss, argnums=(0, 1)))(params, X)


@pytest.mark.parametrize(("name", "fields"), CASES, ids=IDS)
def test_linen_norms(name, fields):
    mine, theirs = (getattr(m, name)(**fields) for m in (jaxremat.flax, nn))
    call = {"use_running_average": False} if name == "BatchNorm" else {}
    variables = theirs.init(jax.random.key(1), X, **call)
    assert_equal(mine.init(jax.random.key(1), X, **call), variables)
    (result, grads), (expected, expected_grads) = (linen_results(m, variables, **call) for m in (mine, theirs))
    assert_equal(result, expected)  # values and statistics, bit for bit
    assert_close(grads, expected_grads)


@pytest.mark.parametrize("options", [{"mask": MASK}, {"use_running_average": True}])
def test_what_the_operations_do_not_cover_is_flaxs_own(options):
    mine, theirs = jaxremat.flax.BatchNorm(), nn.BatchNorm()
    call = {"use_running_average": False} | options
    variables = theirs.init(jax.random.key(1), X, **call)
    assert_equal(mine.init(jax.random.key(1), X, **call), variables)
    assert_equal(linen_results(mine, variables, **call), linen_results(theirs, variables, **call))


class ThenConv(nn.Module):
    """A batch norm, ReLU and convolution: as one operation or one by one, with the same names."""

    fused: bool
    train: bool = True
    dtype: jnp.dtype | None = None
    padding: str = "SAME"

    @nn.compact
    def __call__(self, x):
        norm = (jaxremat.flax if self.fused else nn).BatchNorm(not self.train, dtype=self.dtype, name="bn")
        conv = partial(nn.Conv, 4, (3, 3), strides=2, padding=self.padding, dtype=self.dtype, name="conv")
        return jaxremat.flax.norm_relu_conv(norm, conv, x) if self.fused else conv()(nn.relu(norm(x)))


@pytest.mark.parametrize("fields", [{}, {"train": False}, {"dtype": jnp.bfloat16}])
def test_a_convolution_of_normalized_inputs(fields):
    mine, theirs = ThenConv(True, **fields), ThenConv(False, **fields)
    variables = theirs.init(jax.random.key(1), X)
    assert_equal(mine.init(jax.random.key(1), X), variables)
    found, expected = (linen_results(m, variables) for m in (mine, theirs))
    tolerance = 2e-2 if fields.get("dtype") else 1e-5  # of the largest: the compiler contracts products and sums

    def close(a, b):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())

    jax.tree.map(close, found, expected)


def test_padding_before_normalization_is_an_error():
    with pytest.raises(ValueError, match=r"must take its input as it is.*made .4, 8, 8, 8. of .4, 6, 6, 8.\."):
        ThenConv(True, padding="CIRCULAR").init(jax.random.key(1), X)


class Auto(nn.Module):
    """Auto-named submodules, of whichever module `modules` provides."""

    modules: object

    @nn.compact
    def __call__(self, x):
        x = self.modules.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        return self.modules.LayerNorm()(self.modules.Dropout(0.5, deterministic=False)(x))


def test_names_and_random_streams_are_flaxs():
    keys = {"params": jax.random.key(0), "dropout": QUICK}
    mine, theirs = (jax.jit(Auto(m).init_with_output)(keys, X) for m in (jaxremat.flax, nn))
    assert_equal(mine, theirs)


@pytest.mark.parametrize(("name", "fields"), CASES, ids=IDS)
def test_nnx_norms(name, fields):
    features = X.shape[fields.get("axis", -1)]

    @nnx.jit
    def gradients(module, x):
        grads = nnx.grad(lambda module, x: jnp.sum(jnp.sin(module(x).astype(jnp.float32))), argnums=(0, 1))(module, x)
        return nnx.to_pure_dict(grads[0]), grads[1]

    mine, theirs = (getattr(m, name)(features, **fields, rngs=nnx.Rngs(0)) for m in (jaxremat.flax.nnx, nnx))
    apply = nnx.jit(lambda module, x: module(x))  # alone, as `linen_results` does
    assert_equal(apply(mine, X), apply(theirs, X))
    assert_equal(*(nnx.to_pure_dict(nnx.state(m)) for m in (mine, theirs)))  # the new statistics too
    assert_close(gradients(mine, X), gradients(theirs, X))


def test_nnx_dropout():
    for source in (None, nnx.Rngs(3), nnx.Rngs(3)["dropout"], QUICK):
        mine, theirs = (m.Dropout(0.4, broadcast_dims=(1,), rngs=nnx.Rngs(5)) for m in (jaxremat.flax.nnx, nnx))
        assert_equal(
            mine(X, rngs=source if source is QUICK else nnx.clone(source)),
            theirs(X, rngs=source if source is QUICK else nnx.clone(source)),
        )
    np.testing.assert_array_equal(mine(X, deterministic=True), X)
    with pytest.raises(ValueError, match="rngs"):
        jaxremat.flax.nnx.Dropout(0.4)(X)


@pytest.mark.parametrize("module", [jaxremat.flax.LayerNorm(), jaxremat.flax.Dropout(0.3, deterministic=False)])
def test_integers_are_a_clear_error(module):
    with pytest.raises(TypeError, match="floating-point"):
        module.init({"params": jax.random.key(0), "dropout": QUICK}, jnp.ones((2, 4), jnp.int32))


class Mixed(nn.Module):
    """Modules of Flax, of this package, and operations of both, each on a line of its own."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        x = jaxremat.flax.BatchNorm(use_running_average=False)(x)
        x = jaxremat.ops.gelu(x)
        return optax.huber_loss(nn.softmax(x))


def test_the_ledger_shows_the_line_of_the_user():
    net = Mixed()
    variables = net.init(jax.random.key(0), X)

    def loss(params, x):
        return net.apply(variables | {"params": params}, x, mutable=["batch_stats"])[0].mean()

    rows = jaxremat.residuals(jaxremat.remat(loss, "dots"), variables["params"], X).rows
    assert {row.source.rpartition(":")[0] for row in rows if row.op != "input"} == {__file__}
    first = Mixed.__call__.__wrapped__.__code__.co_firstlineno
    lines = {op: {int(row.source.rpartition(":")[2]) - first for row in rows if row.op == op} for op in ("dot", "gelu")}
    assert lines == {"dot": {2}, "gelu": {5}}
    assert {int(row.source.rpartition(":")[2]) - first for row in rows if row.op == "batch_norm"} == {3, 4}
