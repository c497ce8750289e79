"""`jaxremat.flax.remat`: nothing is renamed, state is updated once, flags are flags, policies see the module's values."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import numpy as np
import pytest

import jaxremat
import jaxremat.flax


class Block(nn.Module):
    features: int = 8
    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.Dense(self.features)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = jaxremat.name(nn.relu(x), "hidden")
        return nn.Dropout(self.rate, deterministic=not train)(x)


class Net(nn.Module):
    block: Callable[..., nn.Module] = Block
    by_keyword: bool = False

    @nn.compact
    def __call__(self, x, train: bool = True):
        for _ in range(3):
            x = self.block()(x, train=train) if self.by_keyword else self.block()(x, train)
        return x.sum()


X = jax.random.normal(jax.random.key(1), (16, 8))
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(2)}
POLICIES = ["everything", "nothing", "dots", "names:hidden", "ops:dropout=store,batch_norm=recompute"]


def run(net, variables):
    def loss(params):
        return net.apply(
            variables | {"params": params}, X, True, rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"]
        )

    step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=jaxremat.compiler_options())
    return step(variables["params"])


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert jax.tree.structure(one) == jax.tree.structure(other)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_same_network(policy, by_keyword):
    plain, wrapped = Net(by_keyword=by_keyword), Net(jaxremat.flax.remat(Block, policy), by_keyword)
    variables = plain.init(KEYS, X)
    assert_equal(variables, wrapped.init(KEYS, X))  # names and initial values
    # The value, and the new statistics (updated once).
    (expected, gradients), (found, others) = run(plain, variables), run(wrapped, variables)
    assert_equal(expected, found)
    # A gate between blocks parts the sums over a dropout's cotangent from it: they may be rounded in another order.
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * largest), gradients, others)
    assert_equal(plain.apply(variables, X, False), wrapped.apply(variables, X, False))


@pytest.mark.parametrize("policy", ["nothing", "dots", "names:hidden"])
def test_same_bits_without_dropout(policy):
    """Compiled so that the barriers stay."""
    plain, wrapped = (Net(partial(block, rate=0.0)) for block in (Block, jaxremat.flax.remat(Block, policy)))
    variables = plain.init(KEYS, X)
    assert_equal(run(plain, variables), run(wrapped, variables))


def test_the_class_keeps_its_name():
    wrapped = jaxremat.flax.remat(Block, "nothing")
    assert (wrapped.__name__, wrapped.__qualname__, wrapped.__module__) == ("Block", "Block", __name__)
    assert issubclass(wrapped, Block)
    assert "Block_0" in Net(wrapped).init(KEYS, X)["params"]


def test_a_policy_sees_the_module():
    net = Net(jaxremat.flax.remat(Block, "names:hidden"))
    variables = net.init(KEYS, X)

    def loss(params):
        return net.apply(
            variables | {"params": params}, X, True, rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"]
        )[0]

    report = jaxremat.residuals(loss, variables["params"])
    # Three blocks of 16 x 8 float32 activations: `hidden` is not read by any derivative (relu's needs its input, dropout's
    # its mask), so that nothing is kept but the inputs of blocks 1 and 2, and small statistics.
    large = [row for row in report.rows if row.kept_bytes >= 512]
    assert [row.kept_bytes for row in large] == [512, 512]
    assert {row.path for row in report.rows if row.op == "batch_norm"} >= {
        "Net/Block_0/BatchNorm_0",
        "Net/Block_2/BatchNorm_0",
    }


def test_static_names():
    class Power(nn.Module):
        @nn.compact
        def __call__(self, x, n):
            for _ in range(n):
                x = nn.Dense(8)(x)
            return x

    wrapped = jaxremat.flax.remat(Power, "nothing", static="n")()
    variables = Power().init(KEYS, X, 3)
    assert_equal(variables, wrapped.init(KEYS, X, 3))
    assert_equal(Power().apply(variables, X, 3), wrapped.apply(variables, X, n=3))
    with pytest.raises(TypeError, match=r"which has x, n; got m"):
        jaxremat.flax.remat(Power, "nothing", static="m")


@pytest.mark.parametrize("target", [Block(), lambda x: x, 3])
def test_only_module_classes(target):
    with pytest.raises(TypeError, match=r"flax\.linen\.Module class"):
        jaxremat.flax.remat(target, "nothing")


def test_bad_policies():
    with pytest.raises(jaxremat.PolicyError, match="Did you mean 'nothing'"):
        jaxremat.flax.remat(Block, "nothin")
    net = Net(jaxremat.flax.remat(Block, "names:hiden"))
    variables = Net().init(KEYS, X)
    with pytest.raises(jaxremat.PolicyError, match="Did you mean 'hidden'"):
        run(net, variables)
