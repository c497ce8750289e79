"""ResNet-18 under every kind of policy: the bits of its value, statistics and gradients are those without any.

On a CPU in float32 with the compiler's default options; tests/test_counts.py has the same for the chain, under more
policies. Scales and biases are drawn at random: those of a new network, 1 and 0, round nothing, and would hide another
order of operations.
"""

import jax
import jax.numpy as jnp
import pytest
from programs import same

import jaxremat
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
