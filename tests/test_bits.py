"""ResNet-18 under every kind of policy: the bits of its value, statistics and gradients are those without any.

On a CPU in float32 without fused multiply-adds, as conftest.py starts JAX; tests/test_counts.py has the same for the chain,
under more policies. Scales and biases are drawn at random: those of a new network, 1 and 0, round nothing, and would hide
another order of operations.
"""

import os
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import same

import jaxremat
from experiments.devices import all_devices
from experiments.models import build
from experiments.training import make_loss

BATCH = 4
POLICIES = [
    "nothing",
    "dots",
    "ops:conv=store,*=recompute",
    "names:block_out",
    "paths:stage1_*",
    "segments:sqrt",
    "offload:names:conv_out",
]


@pytest.fixture(scope="module")
def arguments():
    images = jax.random.normal(jax.random.key(0), (BATCH, 32, 32, 3))
    quickly = {"xla_backend_optimization_level": 0}  # it runs once
    init = jax.jit(lambda key: build("resnet18").init(key, images, False), compiler_options=quickly)
    variables = init(jax.random.key(1))
    leaves, tree = jax.tree.flatten(variables["params"])
    keys = jax.random.split(jax.random.key(2), len(leaves))
    scattered = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape) if leaf.ndim == 1 else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, scattered), variables["batch_stats"], images, jnp.arange(BATCH), jax.random.key(3)


def run(loss, arguments):
    step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=jaxremat.compiler_options())
    return step(*arguments)


@pytest.fixture(scope="module")
def expected(arguments):
    return run(make_loss(build("resnet18")), arguments)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the order of sums on accelerators is the compiler's own")
@pytest.mark.filterwarnings("ignore::jaxremat.RematWarning")
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_bit_identical(policy, arguments, expected):
    same(run(jaxremat.remat(make_loss(build("resnet18")), policy), arguments), expected)


x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the option names x86 instructions")


@x86
def test_a_product_and_a_sum_are_rounded_apart():
    x, y, z = np.random.default_rng(0).normal(size=(3, 4096)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x, y, z: x * y + z)(x, y, z), x * y + z)


@x86
@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("", "--xla_cpu_max_isa=AVX"),
        ("--xla_dump_to=x", "--xla_dump_to=x --xla_cpu_max_isa=AVX"),
        ("--xla_cpu_max_isa=AVX2", "--xla_cpu_max_isa=AVX2"),
    ],
)
def test_runs_start_jax_without_fused_multiply_adds(given, flags, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    all_devices()
    assert os.environ["XLA_FLAGS"] == flags
