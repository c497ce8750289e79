"""`jaxremat.flax` for nnx: `remat` of classes, modules and bound methods, scopes, and the same tables as linen's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxremat
import jaxremat.flax
from jaxremat import ops
from jaxremat.flax.nnx import BatchNorm, Dropout, scoped

WIDTH = 8
X = jax.random.normal(jax.random.key(1), (16, WIDTH))
POLICIES = ["everything", "nothing", "dots", "names:hidden", "ops:dropout=store,batch_norm=recompute"]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.bn = BatchNorm(WIDTH, rngs=rngs)
        self.dropout = Dropout(0.5, rngs=rngs)

    def __call__(self, x, train, repeat=1):
        for _ in range(repeat):
            x = self.bn(self.fc(x), use_running_average=not train)
            x = self.dropout(jaxremat.name(ops.relu(x), "hidden"), deterministic=not train)
        return x

    def project(self, x):
        return jnp.tanh(self.fc(x))


class Net(nnx.Module):
    def __init__(self, block, rngs):
        self.blocks = nnx.List([block(rngs) for _ in range(2)])
        self.last = block(rngs)

    def __call__(self, x, train=True):
        for block in (*self.blocks, self.last):
            x = block(x, train=train)
        return x.sum()


def trained(block):
    """Value, gradients and new state of one step."""
    net = Net(block, nnx.Rngs(0))
    step = nnx.jit(lambda net, x: nnx.value_and_grad(lambda net: net(x))(net))
    value, grads = step(net, X)
    return value, nnx.to_pure_dict(grads), jax.tree.map(_plain, nnx.state(net))


def _plain(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


@pytest.fixture(scope="module")
def expected():
    return trained(Block)


@pytest.mark.filterwarnings("ignore::jaxremat.RematWarning")
@pytest.mark.parametrize("policy", POLICIES)
def test_same_training_under_a_policy(expected, policy):
    found = trained(jaxremat.flax.remat(Block, policy))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    # Statistics are updated once, and streams advance once.
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=2e-5, atol=1e-6), found, expected)


def test_the_class_keeps_its_name():
    wrapped = jaxremat.flax.remat(Block, "nothing")
    assert (wrapped.__name__, wrapped.__qualname__, wrapped.__module__) == ("Block", "Block", __name__)
    assert issubclass(wrapped, Block)


def test_modules_and_bound_methods():
    block, other = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
    function = jaxremat.flax.remat(block, "nothing")
    np.testing.assert_array_equal(function(X, True), other(X, True))
    assert block.dropout.rngs.count[...] == 1  # its state is updated
    np.testing.assert_array_equal(block.bn.mean[...], other.bn.mean[...])

    def kept(policy):
        graph, state = nnx.split(block)

        def of_state(state):
            return jaxremat.flax.remat(nnx.merge(graph, state).project, policy)(X).sum()

        return jaxremat.residuals(of_state, state).by("op")

    array = 16 * WIDTH * 4  # y and 1 - y, or 1 - y² in JAX 0.12
    assert kept("everything") in ({"tanh": array, "sub": array}, {"one_minus_square": array})
    assert kept("nothing") == {}
    assert kept("dots") == {"dot": 16 * WIDTH * 4}


def test_static_names():
    block, other = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
    function = jaxremat.flax.remat(block, "nothing", static="repeat")
    np.testing.assert_array_equal(function(X, True, 2), other(X, True, repeat=2))
    with pytest.raises(TypeError, match=r"which has x, train, repeat; got m"):
        jaxremat.flax.remat(Block, "nothing", static="m")


def test_bad_targets_and_policies():
    with pytest.raises(TypeError, match="an nnx module or a bound method of one"):
        jaxremat.flax.remat(X.sum, "nothing")  # type: ignore[call-overload]
    with pytest.raises(jaxremat.PolicyError, match="Did you mean 'nothing'"):
        jaxremat.flax.remat(Block, "nothin")
    with pytest.raises(TypeError, match=r"flax\.nnx\.Module"):
        scoped(Block)  # type: ignore[type-var]


def test_new_variables_in_a_call_are_an_error():
    class Growing(nnx.Module):
        def __call__(self, x):
            self.seen = nnx.Variable(x)
            return x

    with pytest.raises(ValueError, match=r"Growing\.__call__ adds, removes or replaces"):
        jaxremat.flax.remat(Growing(), "nothing")(X)


def test_scopes_are_found_by_policies_and_change_nothing_else():
    plain, net = Net(Block, nnx.Rngs(0)), scoped(scoped(Net(Block, nnx.Rngs(0))))
    assert jax.tree.structure(nnx.state(net)) == jax.tree.structure(nnx.state(plain))
    assert isinstance(net.last, Block)
    assert type(net.last).__name__ == "Block"
    graph, state = nnx.split(net)

    def loss(state):
        return nnx.merge(graph, state)(X)

    paths = {row.path for row in jaxremat.residuals(loss, state).rows if row.op == "dot"}
    assert paths == {"Net/blocks_0/fc", "Net/blocks_1/fc", "Net/last/fc"}
    report = jaxremat.residuals(jaxremat.remat(loss, "paths:Net/last"), state)
    assert {row.path.split("/")[1] for row in report.rows if row.kept_bytes >= 16 * WIDTH * 4} == {"last"}


# A residual network, twice.


def _channels(stage):
    return WIDTH * (stage + 1)


class LinenResidual(nn.Module):
    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        def conv(size, stride, name):
            return nn.Conv(self.features, (size, size), stride, use_bias=False, name=name)

        def bn(name):
            return jaxremat.flax.BatchNorm(use_running_average=False, name=name)

        y = ops.relu(bn("bn1")(conv(3, self.stride, "conv1")(x)))
        y = bn("bn2")(conv(3, 1, "conv2")(y))
        if x.shape != y.shape:
            x = bn("bn_shortcut")(conv(1, self.stride, "conv_shortcut")(x))
        return ops.relu(x + y)


class LinenResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for stage in range(2):
            x = LinenResidual(_channels(stage), stage + 1, name=f"stage{stage}")(x)
        return nn.Dense(5, name="fc")(x.mean((1, 2)))


class NnxResidual(nnx.Module):
    def __init__(self, inputs, features, stride, rngs):
        def conv(a, size, stride):
            return nnx.Conv(a, features, (size, size), stride, use_bias=False, rngs=rngs)

        self.conv1, self.bn1 = conv(inputs, 3, stride), BatchNorm(features, rngs=rngs)
        self.conv2, self.bn2 = conv(features, 3, 1), BatchNorm(features, rngs=rngs)
        self.shape_changes = stride != 1 or inputs != features
        if self.shape_changes:
            self.conv_shortcut, self.bn_shortcut = conv(inputs, 1, stride), BatchNorm(features, rngs=rngs)

    def __call__(self, x):
        y = ops.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.shape_changes:
            x = self.bn_shortcut(self.conv_shortcut(x))
        return ops.relu(x + y)


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.stage0 = NnxResidual(3, _channels(0), 1, rngs)
        self.stage1 = NnxResidual(_channels(0), _channels(1), 2, rngs)
        self.fc = nnx.Linear(_channels(1), 5, rngs=rngs)

    def __call__(self, x):
        return self.fc(self.stage1(self.stage0(x)).mean((1, 2)))


def test_linen_and_nnx_have_equal_tables_by_path():
    rng = np.random.default_rng(3)  # compiling the initializers takes longer than all else here
    images = jnp.asarray(rng.normal(size=(2, 8, 8, 3)), jnp.float32)
    network = LinenResNet()
    shapes = jax.eval_shape(network.init, jax.random.key(0), images)
    variables = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(1, 0.3, leaf.shape), jnp.float32), shapes)
    net = scoped(nnx.eval_shape(lambda: ResNet(nnx.Rngs(0))), "LinenResNet")
    graph, params, statistics = nnx.split(net, nnx.Param, nnx.BatchStat)
    nnx.replace_by_pure_dict(params, variables["params"])  # the names are the same
    nnx.replace_by_pure_dict(statistics, variables["batch_stats"])

    def linen_loss(params):
        out, new = network.apply(variables | {"params": params}, images, mutable=["batch_stats"])
        return jnp.sum(out**2), (out, new["batch_stats"])

    def nnx_loss(params):
        net = nnx.merge(graph, params, statistics, copy=True)
        out = net(images)
        return jnp.sum(out**2), (out, nnx.to_pure_dict(nnx.state(net, nnx.BatchStat)))

    (_, one), (_, two) = jax.jit(linen_loss)(variables["params"]), jax.jit(nnx_loss)(params)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    for policy in ("everything", "dots", "ops:relu=store,*=recompute", "paths:*/bn1"):
        linen_table, nnx_table = (
            jaxremat.residuals(jaxremat.remat(lambda p, f=f: f(p)[0], policy), p)
            for f, p in ((linen_loss, variables["params"]), (nnx_loss, params))
        )
        assert linen_table.total_bytes > 0
        assert linen_table.by("path") == nnx_table.by("path")
        assert linen_table.by("op") == nnx_table.by("op")
