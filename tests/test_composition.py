"""`remat` under every transformation of JAX and inside of every construct: the same values, the same gradients."""

from functools import partial
from typing import Any, ClassVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import POLICIES, counts, data, equations, network, same, transformations, weights

import jaxremat

# What may be rounded otherwise: outside of `jit`, where each operation is compiled by itself, and in tiny fused loops.
EAGER = 2e-6
FEW = ["nothing", "offload:dots"]  # of the latter several values go to the host, one after the other


def both(f, policy: str, transform, *args: Any, rtol: float = 0.0, **options: Any) -> None:
    """Asserts that a transformation, compiled, does the same to `f` and to its rematerialized form."""
    expected = jax.jit(transform(f))(*args)
    same(jax.jit(transform(jaxremat.remat(f, policy, **options)))(*args), expected, rtol)


@pytest.mark.parametrize("policy", POLICIES)
class TestPlainTransformations:
    def test_value(self, policy):
        both(network, policy, lambda f: f, weights(), data())

    def test_gradient(self, policy):
        both(network, policy, lambda f: jax.grad(f, (0, 1)), weights(), data())

    def test_eager_gradient_is_that_of_eager_jax(self, policy):
        g = jaxremat.remat(network, policy)
        same(jax.value_and_grad(g)(weights(), data()), jax.value_and_grad(network)(weights(), data()), rtol=EAGER)

    def test_value_and_grad_with_aux(self, policy):
        def with_aux(ws, x):
            y = x @ ws[0]
            return network(ws, x), {"mean": y.mean(), "argmax": y.argmax(), "nothing": None}

        both(with_aux, policy, lambda f: jax.value_and_grad(f, has_aux=True), weights(), data())

    def test_vmap_over_data(self, policy):
        xs = jnp.stack([data(), 2 * data()])
        both(network, policy, lambda f: jax.vmap(jax.grad(f), (None, 0)), weights(), xs, rtol=EAGER)

    def test_vmap_over_weights(self, policy):
        wss = [jnp.stack([w, w.T]) for w in weights()]
        both(network, policy, lambda f: jax.vmap(jax.grad(f), (0, None)), wss, data(), rtol=EAGER)

    def test_gradient_of_vmap(self, policy):
        xs = jnp.stack([data(), 2 * data()])
        both(
            network,
            policy,
            lambda f: jax.grad(lambda w, x: jax.vmap(f, (None, 0))(w, x).sum()),
            weights(),
            xs,
            rtol=EAGER,
        )


@pytest.mark.parametrize("policy", FEW)
class TestControlFlow:
    def test_inside_of_a_scan(self, policy):
        def looped(f):
            def loss(ws, x):
                return jax.lax.scan(lambda c, s: (c + f(ws, x * s), c), 0.0, jnp.arange(1.0, 4.0))[0]

            return jax.grad(loss)

        both(network, policy, looped, weights(), data(), rtol=EAGER)

    def test_round_a_scan(self, policy):
        def scanned(ws, x):
            def layer(x, w):
                h = jaxremat.name(x @ w, "h1")
                return jax.nn.relu(h), h.mean()

            x, means = jax.lax.scan(layer, x, jnp.stack(ws))
            return network(ws, x) + means.sum()

        both(scanned, policy, lambda f: jax.grad(f, (0, 1)), weights(), data(), rtol=EAGER)

    def test_inside_of_a_while_loop(self, policy):
        def descend(f):
            def loop(ws, x):
                step = lambda c: (c[0] + 1, jax.tree.map(lambda w, g: w - 0.1 * g, c[1], jax.grad(f)(c[1], x)))  # noqa: E731
                return jax.lax.while_loop(lambda c: c[0] < 3, step, (0, ws))

            return loop

        both(network, policy, descend, weights(), data(), rtol=EAGER)

    def test_round_a_while_loop(self, policy):
        def powered(ws, x):
            n = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
            return network(ws, x * n)

        both(powered, policy, jax.grad, weights(), data())

    @pytest.mark.parametrize("flag", [True, False])
    def test_inside_of_a_branch(self, policy, flag):
        def branching(f):
            return jax.grad(lambda ws, x, flag: jax.lax.cond(flag, f, lambda ws, x: x.sum() * ws[0].sum(), ws, x))

        both(network, policy, branching, weights(), data(), flag, rtol=EAGER)

    @pytest.mark.parametrize("flag", [True, False])
    def test_round_a_branch(self, policy, flag):
        def chosen(ws, x, flag):
            x = jax.lax.cond(flag, lambda x: jaxremat.name(jax.nn.relu(x @ ws[0]), "h1"), lambda x: 2 * x, x)
            return network(ws, x)

        both(chosen, policy, jax.grad, weights(), data(), flag, rtol=EAGER)

    @pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap", "grad of grad", "jvp of grad"])
    def test_round_a_branch_that_is_transformed(self, policy, order):
        """Of one branch's values and zeros for another's JAX makes one array: it has to be in one memory."""

        def chosen(ws, x):
            def taken(x):
                return jax.lax.scan(lambda c, w: (jnp.sin(jnp.tanh(c @ w) @ w), None), x, jnp.stack(ws[:1]))[0]

            return network(ws, jax.lax.cond(x[0, 0] > 0, taken, lambda x: jnp.cos(x @ ws[0]), x))

        x = jnp.stack([data(), -data()]) if "vmap" in order else data()
        both(chosen, policy, transformations(0)[order], weights(), x, rtol=1e-5)

    def test_round_a_custom_root_and_a_sort(self, policy):
        def sorted_network(ws, x):
            return network(ws, jnp.sort(jax.scipy.linalg.solve(jnp.eye(5) * 2, x, assume_a="pos"), axis=0))

        both(sorted_network, policy, jax.grad, weights(), data(), rtol=EAGER)


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:2]), ("data",))


@pytest.mark.parametrize("policy", FEW)
class TestDevices:
    def test_inside_of_shard_map(self, policy, mesh):
        def spread(f):
            def part(ws, x):
                return jax.lax.pmean(f(ws, x), "data")

            mapped = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
            return jax.grad(mapped)

        both(network, policy, spread, weights(), data(6), rtol=EAGER)

    def test_collectives_inside(self, policy, mesh):
        def reduced(ws, x):
            return jax.lax.pmean(network(ws, x - jax.lax.pmean(x, "data")), "data")

        def spread(f):
            return jax.grad(jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))

        both(reduced, policy, spread, weights(), data(6), rtol=EAGER)

    def test_round_shard_map(self, policy, mesh):
        def mapped(ws, x):
            product = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
            return network(ws, product(x, ws[0]))

        both(mapped, policy, jax.grad, weights(), data(6), rtol=EAGER)

    def test_sharded_jit(self, policy, mesh):
        x = jax.device_put(data(6), NamedSharding(mesh, P("data")))
        both(network, policy, jax.grad, weights(), x, rtol=EAGER)

    def test_sharding_constraint_inside(self, policy, mesh):
        def constrained(ws, x):
            return network(ws, jax.lax.with_sharding_constraint(x @ ws[0], NamedSharding(mesh, P("data"))))

        both(constrained, policy, jax.grad, weights(), data(6), rtol=EAGER)

    def test_jit_with_shardings_inside(self, policy, mesh):
        rows = NamedSharding(mesh, P("data"))
        inner = jax.jit(lambda w, x: jax.nn.relu(x @ w), in_shardings=(None, rows), out_shardings=rows)
        both(lambda ws, x: network(ws, inner(ws[0], x)), policy, jax.grad, weights(), data(6), rtol=EAGER)


@pytest.mark.parametrize("policy", FEW)
class TestDerivativesOfDerivatives:
    def test_gradient_of_gradient(self, policy):
        def twice(f):
            return jax.grad(lambda ws, x: sum((g**2).sum() for g in jax.grad(f)(ws, x)))

        both(network, policy, twice, weights(), data(), rtol=2e-5)

    def test_hessian(self, policy):
        both(network, policy, lambda f: jax.jacfwd(jax.grad(f)), weights(2), data(), rtol=2e-5)

    def test_reverse_over_reverse_jacobian(self, policy):
        both(network, policy, lambda f: jax.jacrev(jax.grad(f, 1), 1), weights(2), data(), rtol=2e-5)

    def test_nested(self, policy):
        inner = jaxremat.remat(lambda w, x: jax.nn.relu(jaxremat.name(x @ w, "h1")), "nothing")

        def outer(ws, x):
            for w in ws:
                x = inner(w, x)
            return network(ws, x)

        both(outer, policy, jax.grad, weights(), data())

    def test_jax_checkpoint_inside(self, policy):
        inner = jax.checkpoint(lambda w, x: jax.nn.relu(x @ w))

        def outer(ws, x):
            for w in ws:
                x = inner(w, x)
            return network(ws, x)

        both(outer, policy, jax.grad, weights(), data())

    def test_jax_checkpoint_round_it(self, policy):
        both(network, policy, lambda f: jax.grad(jax.checkpoint(f)), weights(), data())


@jax.custom_jvp
def doubled(x):
    return 2 * x


@doubled.defjvp
def _doubled_jvp(primals, tangents):
    return doubled(*primals), 3 * tangents[0]


@jax.custom_vjp
def tripled(x, n):
    return 3 * x


tripled.defvjp(lambda x, n: (tripled(x, n), (x > 0, n)), lambda res, ct: (jnp.where(res[0], 5 * ct, ct), None))


@pytest.mark.parametrize("policy", FEW)
class TestContents:
    """What may stand inside of `f`, and what may be handed to it."""

    def test_custom_jvp(self, policy):
        both(lambda ws, x: network(ws, doubled(x)), policy, lambda f: jax.grad(f, 1), weights(), data())

    def test_custom_vjp(self, policy):
        both(lambda ws, x: network(ws, tripled(x, 4)), policy, lambda f: jax.grad(f, 1), weights(), data())

    @pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
    def test_dropout(self, policy, make_key):
        def noisy(ws, x, key):
            for i, w in enumerate(ws):
                kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
                x = jax.nn.relu(jaxremat.name(jnp.where(kept, x @ w, 0), "h1"))
            return network(ws, x)

        both(noisy, policy, jax.grad, weights(), data(), make_key(7))

    def test_returns_a_key_and_counts(self, policy):
        def with_key(ws, x, key, n):
            return network(ws, x), (jax.random.split(key)[0], n + 1, x > 0)

        both(with_key, policy, lambda f: jax.value_and_grad(f, has_aux=True), weights(), data(), jax.random.key(1), 3)

    def test_integer_and_bool_inputs(self, policy):
        def picked(ws, x, index, mask):
            return network(ws, jnp.where(mask, x[index], 0.0))

        both(picked, policy, jax.grad, weights(), data(), jnp.array([2, 0, 1]), jnp.ones((3, 4), bool))

    def test_integer_inputs_have_float0_gradients(self, policy):
        def picked(ws, x, index):
            return network(ws, x[index])

        g = jaxremat.remat(picked, policy)
        ways = {"argnums": (0, 2), "allow_int": True}
        expected = jax.grad(picked, **ways)(weights(), data(), jnp.array([2, 0]))
        same(jax.grad(g, **ways)(weights(), data(), jnp.array([2, 0])), expected, rtol=EAGER)
        assert jax.grad(g, **ways)(weights(), data(), jnp.array([2, 0]))[1].dtype == jax.dtypes.float0

    def test_float0_cotangents(self, policy):
        def two(ws, x):
            return network(ws, x), (x > 0)

        (_, mask), pull = jax.vjp(jaxremat.remat(two, policy), weights(), data())
        given = np.zeros(mask.shape, jax.dtypes.float0)
        same(pull((jnp.float32(2), given)), jax.vjp(two, weights(), data())[1]((jnp.float32(2), given)), rtol=EAGER)

    def test_pytrees_and_none(self, policy):
        def tree(params, x, unused=None):
            assert unused is None
            return {"loss": network(params["ws"], x), "none": None, "pair": (x.sum(), [params["scale"] * 2])}

        params = {"ws": weights(), "scale": jnp.float32(3), "absent": None}
        both(tree, policy, lambda f: jax.grad(lambda p, x: f(p, x, unused=None)["loss"]), params, data())
        both(tree, policy, lambda f: f, params, data())

    def test_only_some_outputs_are_used(self, policy):
        def two(ws, x):
            return network(ws, x), (x @ ws[0]).sum() ** 2, jnp.exp(x).sum()

        both(two, policy, lambda f: jax.grad(lambda ws, x: f(ws, x)[1]), weights(), data())

    def test_output_is_an_input_or_a_constant(self, policy):
        def through(ws, x):
            return network(ws, x) + x.sum(), x, jnp.zeros(3), 1.0, ws[0]

        both(
            through,
            policy,
            lambda f: jax.grad(lambda ws, x: sum(jnp.sum(o) for o in f(ws, x)), (0, 1)),
            weights(),
            data(),
        )

    def test_numbers_as_arguments(self, policy):
        both(lambda ws, x, s: network(ws, x * s), policy, lambda f: jax.grad(f, 2), weights(), data(), 2.0)

    def test_closed_over_array(self, policy):
        x = data()
        both(lambda ws: network(ws, x), policy, jax.grad, weights())

    def test_closed_over_tracer_has_a_gradient(self, policy):
        def closing(wrap):
            return jax.grad(lambda ws, x: wrap(lambda x: network(ws, x))(x) + ws[0].sum())

        expected = jax.jit(closing(lambda f: f))(weights(), data())
        same(jax.jit(closing(lambda f: jaxremat.remat(f, policy)))(weights(), data()), expected)

    def test_donated_arrays(self, policy):
        g = jaxremat.remat(network, policy)

        def step(f):
            return lambda ws, x: jax.tree.map(lambda w, d: w - d, ws, jax.grad(f)(ws, x))

        expected = jax.jit(step(network))(weights(), data())
        same(jax.jit(step(g), donate_argnums=0)(weights(), data()), expected)

    def test_bfloat16(self, policy):
        ws = [w.astype(jnp.bfloat16) for w in weights()]
        both(network, policy, jax.grad, ws, data().astype(jnp.bfloat16), rtol=2e-2)

    def test_double_precision(self, policy):
        with jax.enable_x64(True):
            ws = [np.asarray(w, np.float64) for w in weights()]
            both(network, policy, jax.grad, ws, np.asarray(data(), np.float64), rtol=1e-14)

    def test_complex_numbers(self, policy):
        def spectrum(ws, x):
            return network(ws, jnp.abs(jnp.fft.fft(x @ ws[0])))

        both(spectrum, policy, jax.grad, weights(), data(), rtol=EAGER)

    def test_jitted_function(self, policy):
        both(jax.jit(network), policy, jax.grad, weights(), data())

    def test_jitted_layers(self, policy):
        layer = jax.jit(lambda w, x: jax.nn.relu(jaxremat.name(x @ w, "h1")))

        def layers(ws, x):
            for w in ws:
                x = layer(w, x)
            return network(ws, x)

        both(layers, policy, jax.grad, weights(), data())

    def test_empty_arrays_and_no_parameters(self, policy):
        both(lambda ws, x: network(ws, x) + 0 * jnp.zeros((0, 3)).sum(), policy, jax.grad, weights(), data())
        both(lambda ws, x, p: network(ws, x), policy, jax.grad, weights(), data(), {})


def test_static_arguments():
    calls = list[Any]()

    def flagged(ws, x, act, *, layers=1):
        calls.append((act, layers))
        return network(ws[:layers], jax.nn.relu(x) if act else x)

    g = jaxremat.remat(flagged, "nothing", static_argnums=2, static_argnames="layers")
    for act in (True, False):
        for layers in (1, 2):
            same(
                jax.grad(g)(weights(), data(), act, layers=layers),
                jax.grad(flagged)(weights(), data(), act, layers=layers),
                rtol=EAGER,
            )
    calls.clear()
    jax.grad(g)(weights(), data(), True, layers=2)
    assert calls == []
    assert jax.grad(g)(weights(), data(), 1, layers=2) is not None
    assert calls == [(1, 2)]  # 1 == True, but they are two arguments


def test_static_argnums_counted_from_the_end():
    g = jaxremat.remat(lambda ws, x, act: network(ws, x) if act else x.sum(), "nothing", static_argnums=-1)
    same(jax.grad(g)(weights(), data(), "yes"), jax.grad(network)(weights(), data()), rtol=EAGER)


def test_methods():
    class Model:
        scale: ClassVar[float] = 2.0

        @partial(jaxremat.remat, policy="dots", static_argnums=0)
        def loss(self, ws, x):
            return network(ws, self.scale * x)

    expected = jax.grad(lambda ws, x: network(ws, 2.0 * x))(weights(), data())
    same(jax.grad(Model().loss)(weights(), data()), expected, rtol=EAGER)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "everything"])
def test_one_trace(policy):
    calls = 0

    def counted(ws, x):
        nonlocal calls
        calls += 1
        return network(ws, x)

    g = jaxremat.remat(counted, policy)
    for _ in range(2):
        g(weights(), data())
        jax.grad(g)(weights(), data())
        jax.grad(g, (0, 1))(weights(), data())
        jax.jit(jax.grad(g))(weights(), data())
        jax.jit(lambda ws, x: jax.value_and_grad(g)(ws, x))(weights(), data())
        jax.vmap(g, (None, 0))(weights(), jnp.stack([data(), data()]))
    assert calls == 1
    g(weights(), data(rows=7))
    assert calls == 2


@pytest.mark.parametrize("policy", FEW)
def test_closed_over_arrays_are_no_constants(policy):
    """A large array that `f` closes over stays an argument of the programs, under `jit` and outside."""
    x = data(rows=1000)
    g = jaxremat.remat(lambda ws: network(ws, x), policy)
    plain = jax.make_jaxpr(jax.grad(lambda ws: network(ws, x)))(weights())
    cut = jax.make_jaxpr(jax.grad(g))(weights())
    assert sum(c is x for c in plain.consts) == 1
    assert sum(c is x for c in cut.consts) == 1  # hoisted to the outermost jaxpr, exactly as without remat
    for eqn in equations(cut):
        for param in eqn.params.values():
            consts = getattr(param, "consts", ())
            assert not [c for c in consts if np.size(c) > 100]
            if hasattr(param, "jaxpr"):
                assert not [
                    v for inner in equations(param) for v in inner.invars if np.size(getattr(v, "val", 0)) > 100
                ]


def test_changed_closed_over_arrays_are_seen():
    box = {"x": data()}
    g = jaxremat.remat(lambda ws: network(ws, box["x"]), "nothing")
    same(jax.grad(g)(weights()), jax.grad(network)(weights(), box["x"]), rtol=EAGER)
    box["x"] = 3 * data()
    same(jax.grad(g)(weights()), jax.grad(network)(weights(), box["x"]), rtol=EAGER)


@pytest.mark.parametrize("policy", POLICIES)
def test_exported_for_every_batch_size(policy):
    (batch,) = jax.export.symbolic_shape("batch")
    of_all = jax.ShapeDtypeStruct((batch, *data().shape[1:]), data().dtype)
    exported = jax.export.export(jax.jit(jax.grad(jaxremat.remat(network, policy))))(weights(), of_all)
    for rows in (1, 7):
        x = jnp.resize(data(), (rows, *data().shape[1:]))
        same(exported.call(weights(), x), jax.jit(jax.grad(network))(weights(), x), rtol=EAGER)


def test_donated_residuals_do_not_alias():
    """The forward pass returns values that the backward pass reads, not buffers of arguments."""
    g = jaxremat.remat(network, "dots")
    value, pull = jax.vjp(g, weights(), data())
    same(pull(jnp.ones_like(value)), pull(jnp.ones_like(value)))


def test_trace_depends_on_precision_settings():
    g = jaxremat.remat(lambda ws, x: network(ws, x), "nothing")
    ws, x = weights(), data()
    plain = str(jax.make_jaxpr(jax.grad(g))(ws, x))
    with jax.default_matmul_precision("highest"):
        highest = str(jax.make_jaxpr(jax.grad(g))(ws, x))
    assert "HIGHEST" in highest
    assert "HIGHEST" not in plain


def test_under_another_mesh_or_axis_a_function_is_traced_again(mesh):
    g = jaxremat.remat(lambda x: (jax.lax.axis_index("data") + x).sum(), "nothing")
    spread = jax.shard_map(jax.grad(g), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    same(spread(data(6)), jnp.ones((6, 4)))
    same(jax.vmap(jax.grad(g), axis_name="data")(data()), jnp.ones((5, 4)))


def test_debug_callbacks_run_once(capfd):
    def spoken(ws, x):
        jax.debug.print("hello {}", x.sum())
        return network(ws, x)

    g = jaxremat.remat(spoken, "nothing")
    same(jax.jit(jax.grad(g))(weights(), data()), jax.jit(jax.grad(network))(weights(), data()))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("hello") == 1


@pytest.mark.parametrize("policy", FEW)
def test_linen_with_batch_statistics(policy):
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            for i in range(2):
                x = jaxremat.name(nn.Conv(4, (3, 3), use_bias=False, name=f"conv{i}")(x), f"h{i}")
                x = nn.relu(nn.BatchNorm(use_running_average=not train, name=f"bn{i}")(x))
            return x.mean((1, 2))

    model = Block()
    x = jax.random.normal(jax.random.key(1), (2, 6, 6, 3))
    variables = model.init(jax.random.key(0), x, train=True)

    def loss(params, stats, x):
        y, updates = model.apply({"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"])
        return (y**2).sum(), updates

    both(
        loss,
        policy,
        lambda f: jax.value_and_grad(f, has_aux=True),
        variables["params"],
        variables["batch_stats"],
        x,
        rtol=EAGER,
    )


@pytest.mark.parametrize("policy", FEW)
def test_nnx_after_split_and_merge(policy):
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
            self.second = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.norm(jaxremat.name(self.first(x), "h1")))) @ jnp.eye(4)

    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(graphdef, params, jax.tree.map(lambda leaf: leaf, rest))
        y = model(x)
        return (y**2).sum(), nnx.split(model, nnx.Param, ...)[2]

    both(loss, policy, lambda f: jax.value_and_grad(f, has_aux=True), params, rest, data(), rtol=EAGER)


@pytest.mark.parametrize("remat3", [False, True])
class TestNames:
    """Tags mean the same with JAX's new rematerialization as without."""

    @pytest.fixture(autouse=True)
    def _remat3(self, remat3):
        before = jax.config.jax_remat3
        jax.config.update("jax_remat3", remat3)
        jax.clear_caches()
        yield
        jax.config.update("jax_remat3", before)
        jax.clear_caches()

    @pytest.mark.parametrize("tagged", [jaxremat.name, checkpoint_name])
    def test_seen_by_remat(self, tagged):
        def f(x):
            return jnp.cos(tagged(jnp.sin(x), "h")).sum()

        g = jaxremat.remat(f, "names:h")
        same(jax.jit(jax.grad(g))(data()), jax.jit(jax.grad(f))(data()))
        # sin runs once (it is stored) and once more as the derivative of cos; without the tag it would run three times.
        assert counts(jax.grad(g), data())["sin"] == 2
        assert counts(jax.grad(jaxremat.remat(f, "nothing")), data())["sin"] == 3

    def test_seen_by_jax_checkpoint(self):
        if jax.config.jax_remat3:
            pytest.skip("there JAX tags in another way, as jaxremat.name says")

        def f(x):
            return jnp.cos(jaxremat.name(jnp.sin(x), "h")).sum()

        g = jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("h"))
        assert counts(jax.grad(g), data())["sin"] == 2

    @pytest.mark.parametrize("policy", ["nothing", "names:h"])
    def test_in_a_scan_under_jit(self, policy):
        def f(x):
            return jax.lax.scan(lambda c, _: (jnp.sin(jaxremat.name(jnp.cos(c), "h")), None), x, length=3)[0].sum()

        both(f, policy, jax.grad, data())
        # In the body: cos and sin forward; backward cos (of sin) and sin (of cos); `nothing` runs cos again.
        assert counts(jax.grad(jaxremat.remat(f, policy)), data())["cos"] == (2 if policy == "names:h" else 3)
