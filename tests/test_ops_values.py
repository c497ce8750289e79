"""Values and gradients of the operations beside their counterparts', in float32, bfloat16 and against float64."""

from functools import cache, partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import CASES, POINTWISE, SOFTMAX, arguments, pullback, uneven

from jaxremat import ops

SETTINGS = {"deadline": None, "derandomize": True, "max_examples": 5}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 6.0, 3.0, np.inf, -np.inf, np.nan, 88.0, -88.0, 1e-30, -1e-30, 3e38, -3e38]


def equal_bits(a, b):
    return all(
        np.array_equal(p, q, equal_nan=True) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@cache
def compiled(case):
    """Returns op and counterpart, each as a compiled forward pass and a compiled pullback; once for all tests of a case."""
    return [(jax.jit(f), pullback(f, uneven)) for f in (case.op, case.counterpart)]


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_counterparts_bit_for_bit_and_gradients_agree(name):
    case = CASES[name]
    (op, op_pull), (counterpart, counterpart_pull) = compiled(case)

    @hypothesis.settings(**SETTINGS)
    @hypothesis.given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([1e-3, 0.5, 2.0, 20.0]))
    def check(seed, spread):
        args = arguments(case, seed, spread=spread)
        assert equal_bits(op(*args), counterpart(*args))
        for mine, theirs in zip(op_pull(*args)[1], counterpart_pull(*args)[1], strict=True):
            scale = np.abs(theirs).max(initial=0.0)
            np.testing.assert_allclose(
                mine, theirs, rtol=0, atol=3e-5 * scale + 3e-7
            )  # saturated rows cancel to nothing

    check()


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("dropout")])  # masks differ between precisions
def test_gradients_are_as_near_to_float64_as_the_counterparts(name):
    case = CASES[name]
    (_, op_pull), (_, counterpart_pull) = compiled(case)
    with jax.enable_x64(True):
        exact_pull = pullback(case.counterpart, uneven)

    def errors(found, exact):
        """Root mean square errors in units of each argument's largest gradient."""
        return [
            np.sqrt(np.mean(np.square(np.asarray(f, np.float64) - e))) / np.abs(e).max() for f, e in zip(found, exact)
        ]

    @hypothesis.settings(**SETTINGS)
    @hypothesis.given(first=st.integers(0, 2**31))
    def check(first):
        args = [arguments(case, first + i) for i in range(8)]
        mine, theirs = ([f(*a)[1] for a in args] for f in (op_pull, counterpart_pull))
        with jax.enable_x64(True):
            # As NumPy's, since JAX's own arrays turn into float32 in arithmetic outside of this context.
            exact = [jax.tree.map(np.asarray, exact_pull(*(np.asarray(p, np.float64) for p in a))[1]) for a in args]
        assert {e.dtype for e in exact[0]} == {np.dtype(np.float64)}
        # Averages, as single errors scatter. The floor is a fraction of one rounding: a counterpart that happens to be
        # exact must not fail its equal.
        of_mine, of_theirs = (np.mean(list(map(errors, found, exact)), axis=0) for found in (mine, theirs))
        assert (of_mine <= 2 * np.maximum(of_theirs, 2.0**-26)).all()

    check()


PLAIN = [n for n in CASES if "-" not in n and n != "dropout"]  # whose key compiles slowly


@pytest.mark.parametrize("name", [*PLAIN, "dropout-key", "relu-bits", "log_softmax-output", "layer_norm-two"])
def test_bfloat16(name):
    case = CASES[name]
    (op, op_pull), (counterpart, counterpart_pull) = compiled(case)
    args = [jnp.asarray(a, jnp.bfloat16) for a in arguments(case, seed=3)]
    mine, theirs = op(*args), counterpart(*args)
    assert jax.tree.map(lambda y: y.dtype, mine) == jax.tree.map(lambda y: y.dtype, theirs)
    assert equal_bits(mine, theirs)
    for m, t in zip(op_pull(*args)[1], counterpart_pull(*args)[1], strict=True):
        assert m.dtype == t.dtype
        m, t = np.asarray(m, np.float32), np.asarray(t, np.float32)
        np.testing.assert_allclose(m, t, rtol=0, atol=0.03 * np.abs(t).max())


@pytest.mark.parametrize("name", [*POINTWISE, *SOFTMAX])
def test_special_numbers_behave_as_in_the_counterpart(name):
    case = CASES[name]
    (op, op_pull), (counterpart, counterpart_pull) = compiled(case)
    (shape,) = case.shapes

    @hypothesis.settings(**SETTINGS)
    @hypothesis.given(data=st.data())
    def check(data):
        few = st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=6 if name in SOFTMAX else 30)
        x = np.random.default_rng(data.draw(st.integers(0, 999))).normal(0, 3, shape).astype(np.float32)
        values = data.draw(few)
        x.ravel()[: len(values)] = values
        assert equal_bits(op(x), counterpart(x))
        (mine,), (theirs,) = op_pull(x)[1], counterpart_pull(x)[1]
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
        finite = np.isfinite(theirs)
        np.testing.assert_array_equal(np.asarray(mine)[~finite], np.asarray(theirs)[~finite])
        np.testing.assert_allclose(np.asarray(mine)[finite], np.asarray(theirs)[finite], rtol=1e-5, atol=1e-6)

    check()


@pytest.mark.parametrize("op", [ops.relu, partial(ops.relu, keep="bits"), ops.relu6])
def test_kinks_have_derivative_zero(op):
    kinks = jnp.array([0.0, -0.0, jnp.nan])
    assert jax.vmap(jax.grad(op))(kinks).tolist() == [0.0, 0.0, 0.0]


def test_leaky_relu_can_read_its_slope_from_the_output():
    case = POINTWISE["leaky_relu"]._replace(op=partial(ops.leaky_relu, keep="output"))
    (op, op_pull), (counterpart, counterpart_pull) = compiled(case)
    x = np.array([-3.0, -1e-3, -0.0, 0.0, 1e-3, 2.0, np.inf, -np.inf, np.nan], np.float32)
    assert equal_bits(op(x), counterpart(x))
    assert equal_bits(op_pull(x)[1], counterpart_pull(x)[1])


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "batch_norm", "batch_norm_relu", "group_norm"])
def test_constant_rows_behave_as_in_the_counterpart(name):
    case = CASES[name]
    (op, op_pull), (counterpart, counterpart_pull) = compiled(case)
    args = arguments(case, seed=5)
    for fill in (0.0, 1.0, 1e4, np.nan, np.inf):
        args[0][:] = fill
        assert equal_bits(op(*args), counterpart(*args))
        for mine, theirs in zip(op_pull(*args)[1], counterpart_pull(*args)[1], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-3 * np.nan_to_num(np.abs(theirs)).max())


@pytest.mark.parametrize("name", ["relu", "relu-bits", "gelu", "softmax", "layer_norm", "dropout", "max_pool"])
def test_empty_arrays(name):
    case = CASES[name]
    args = arguments(case._replace(shapes=((0, *case.shapes[0][1:]), *case.shapes[1:])), seed=0)
    out, grads = pullback(case.op, uneven)(*args)
    assert out.shape[0] == 0
    assert [g.shape for g in grads] == [a.shape for a in args]


def test_statistics_of_batch_norm_are_differentiable():
    case = CASES["batch_norm"]
    args = arguments(case, seed=2)

    def loss(f, *args):
        y, mean, variance = f(*args)
        return jnp.sum(jnp.sin(y)) + jnp.sum(mean * jnp.cos(variance))

    mine, theirs = (jax.jit(jax.grad(partial(loss, f)))(*args) for f in (case.op, case.counterpart))
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
