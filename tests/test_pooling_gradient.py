"""The gradient of max pooling with zeros of its own: the same numbers, all of JAX's transformations, less memory on GPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import wants
from jax import lax
from programs import same

import jaxremat
from jaxremat import pooled

CASES = {  # window, strides, padding
    "disjoint": ((1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4),
    "overlapping": ((1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (0, 1), (0, 0))),
    "wider than its step": ((1, 1, 5, 1), (1, 1, 1, 1), ((0, 0), (0, 0), (2, 2), (0, 0))),
}
SHAPE = (2, 8, 6, 3)


def pool(x, case, reducer=lax.max):
    window, strides, padding = CASES[case]
    start = np.asarray(-np.inf if reducer is lax.max else np.inf, x.dtype)
    return lax.reduce_window(x, start, reducer, window, strides, padding)


def loss(x, case="overlapping"):
    return (pool(jax.nn.relu(jnp.sin(3 * x)), case) ** 3).sum()


def example(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), SHAPE).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("reducer", [lax.max, lax.min])
@pytest.mark.parametrize("case", CASES)
def test_what_gpus_run_gives_the_same_numbers(case, reducer, dtype):
    """JAX's equation and ours, both on this machine: equal bits, also where several values of a window are the largest."""
    x = jnp.round(example(dtype) * 2)
    closed = jax.make_jaxpr(jax.grad(lambda x: pool(x, case, reducer).sum()))(x)
    (eqn,) = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "select_and_scatter_add"]
    source = jax.random.normal(jax.random.key(1), eqn.invars[0].aval.shape).astype(dtype)
    theirs = jax.jit(lambda *args: eqn.primitive.bind(*args, **eqn.params))(source, x)
    ours = jax.jit(lambda *args: pooled.scattered(*args, **eqn.params))(source, x)
    assert ours.dtype == theirs.dtype == dtype
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
    assert np.asarray(ours, np.float32).any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "transform",
    [
        jax.grad,
        lambda f: jax.vmap(jax.grad(f)),
        lambda f: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum()),
        lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),)),
        lambda f: jax.vmap(jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())),
    ],
    ids=["gradient", "batch", "gradient of gradient", "derivative of gradient", "batch of both"],
)
def test_transformations(transform, case):
    f = lambda x: loss(x.reshape(SHAPE), case)  # noqa: E731
    x = jnp.stack([example(), example()[::-1]]) if "vmap" in transform.__code__.co_names else example()
    ours, theirs = (jax.jit(transform(g))(x) for g in (jaxremat.remat(f, "segments:2"), f))
    same(ours, theirs, rtol=1e-5)


def text_for(platform):
    step = jax.jit(jax.grad(jaxremat.remat(loss, "segments:2")))
    return step.trace(example()).lower(lowering_platforms=(platform,)).as_text()


def zero_of(text):
    """The line of StableHLO that defines the zero of the scatter, its third operand."""
    zero = re.search(r'"stablehlo.select_and_scatter"\(\S+, \S+, (%\w+)', text)[1]
    before = text[: text.index("stablehlo.select_and_scatter")]
    return re.findall(rf"^ *{zero}(?::\d)? = .*$", before, re.MULTILINE)[-1]


def test_the_zero_is_a_constant_elsewhere_alone():
    assert "optimization_barrier" in zero_of(text_for("cuda"))
    assert "constant" in zero_of(text_for("cpu"))
    assert "constant" in zero_of(text_for("tpu"))


@wants("h100")
def test_compiled_memory_falls():
    """Two blocks of [convolution, ReLU, 2x2 pooling] that store the convolutions.

    The first activation has 64 MiB. With JAX's own equation the compiler makes its zeros in the forward pass, once more as
    much; they are there when the gradient of the second block is computed.
    """

    def blocks(kernels, x):
        for kernel in kernels:
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = pool(jax.nn.relu(x), "disjoint")
        return (x**2).sum()

    shape = jax.ShapeDtypeStruct
    args = [shape((3, 3, 16, 16), jnp.float32)] * 2, shape((16, 256, 256, 16), jnp.float32)
    wrapped = jaxremat.remat(blocks, "dots")
    peaks = []
    for is_ours in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not is_ours:
                patch.setattr(pooled, "with_own_zeros", lambda eqn: eqn)
            step = jax.value_and_grad(jaxremat.remat(blocks, "dots") if not is_ours else wrapped)
            peaks.append(jaxremat.cost(step, *args, target="h100").peak_bytes)
    assert peaks[0] <= peaks[1] - 48 * 2**20
