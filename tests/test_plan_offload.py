"""Plans that may keep values in host memory: when that pays, what it counts as, and that compiled memory falls.

| question | tests |
| --- | --- |
| is the cheaper way chosen? | test_what_is_cheap_is_recomputed, test_what_is_dear_goes_to_the_host |
| does it reach what recomputation cannot? | test_less_than_any_plan_without, test_compiled_memory_falls |
| is the bound still one? | test_the_bound_counts_the_host |
| are gradients the same? | test_gradients |
| what goes when? | test_one_copy_at_a_time, test_nothing_waits_inside_of_a_loop |
| bad input | test_a_cpu_has_no_other_memory, test_unknown_rates |
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from compilers import wants
from plans import search_of
from programs import same

import jaxremat
from jaxremat import PolicyError, compat
from jaxremat import policy as p
from jaxremat.forward import forward_program
from jaxremat.plan.objective import Link, link_of
from jaxremat.plan.task import standard
from jaxremat.targets import find_target

DEPTH = 8
# A product's operations for each byte of its result: 2 · SIDE / 4. An H100 does 2 · 67 TFLOP/s / 63 GB/s = 2,123 while a byte
# goes to the host and back.
NARROW, WIDE = 64, 8192
FREE = Link(1e-3, 1e-3)


def chain(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def scanned(ws, x):
    return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w, None), x, ws)[0] ** 2).sum()


def shapes(side, rows):
    return [jax.ShapeDtypeStruct((side, side), jnp.float32)] * DEPTH, jax.ShapeDtypeStruct((rows, side), jnp.float32)


def stacked(side, rows):
    return jax.ShapeDtypeStruct((DEPTH, side, side), jnp.float32), jax.ShapeDtypeStruct((rows, side), jnp.float32)


def values(tree):
    keys = iter(jax.random.split(jax.random.key(0), 99))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) / leaf.shape[-1] ** 0.5, tree)


def test_what_an_h100_does_meanwhile():
    """132 cores of 128 units at 1.98 GHz, two operations each; 63 GB/s each way."""
    rate = 2 * 132 * 128 * 1.98e9
    h100 = find_target("h100")
    assert link_of("flops", h100) == Link(rate * 2 / 63e9, rate * 2 / 63e9)
    assert link_of("time", h100).cost == 2 / 63e9
    assert link_of("bytes", h100).cost == pytest.approx(2 * 3352.32 / 63)


def test_what_is_cheap_is_recomputed():
    found = jaxremat.plan(chain, *shapes(NARROW, 65536), budget="75%", target="h100", compile=False, offload=True)
    assert found.recomputed_contraction_flops > 0 == found.host_bytes


def test_what_is_dear_goes_to_the_host():
    """16,384 / 4 = 4,096 operations for a byte: more than the link takes."""
    args = shapes(WIDE, 65536)
    without = jaxremat.plan(chain, *args, budget="60%", target="h100", compile=False)
    found = jaxremat.plan(chain, *args, budget="60%", target="h100", compile=False, offload=True)
    assert without.recomputed_contraction_flops > 0 == without.host_bytes
    assert found.recomputed_contraction_flops == 0 < found.host_bytes
    # An activation is 2 GiB. All that goes to the host are whole ones, and each counts as what the chip does meanwhile.
    assert found.host_bytes % 2**31 == 0
    meanwhile = link_of("flops", find_target("h100")).cost * found.host_bytes
    assert found.cost - found.recomputed_flops == pytest.approx(meanwhile)
    assert found.bound <= found.cost < without.cost
    assert sum(share.host_bytes for share in found.shares) == found.host_bytes
    assert "host memory" in str(found)
    assert "on the host" in str(found)


def test_less_than_any_plan_without():
    args = shapes(NARROW, 65536)
    lean = search_of(chain, *args, platform="gpu").leanest().predicted_bytes
    budget = lean - 1
    with pytest.raises(PolicyError, match="no plan keeps the peak"):
        jaxremat.plan(chain, *args, budget=budget, target="h100", compile=False)
    found = jaxremat.plan(chain, *args, budget=budget, target="h100", compile=False, offload=True)
    assert found.predicted_bytes <= budget
    assert found.host_bytes > 0


@pytest.mark.parametrize("part", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("link", [FREE, Link(10.0, 10.0), Link(1e6, 1e6)], ids=["free", "cheap", "dear"])
def test_the_bound_counts_the_host(link, part):
    search = search_of(chain, *shapes(NARROW, 4096), platform="gpu", link=link)
    limit = int(search.everything.predicted_bytes * part)
    found = search.best(limit)
    assert found is not None
    assert search.bound(limit) <= found.cost * (1 + 1e-6)
    if link is FREE:  # a byte of an activation costs 2 · 64 / 4 = 32 operations to make, and next to nothing to keep
        assert found.contraction_flops == 0


@pytest.mark.filterwarnings("ignore::jaxremat.RematWarning")  # on a CPU nothing is saved by it
@pytest.mark.parametrize(
    ("loss", "args", "part"), [(chain, shapes(NARROW, 4096), 0.5), (scanned, stacked(NARROW, 4096), 0.7)]
)
def test_gradients(loss, args, part):
    search = search_of(loss, *args, platform="gpu", link=FREE)
    found = search.best(int(search.everything.predicted_bytes * part))
    assert found is not None
    assert "^" in str(found.policy)
    assert jaxremat.parse(str(found.policy)) == found.policy
    wrapped = jaxremat.remat(loss, found.policy)
    assert jaxremat.residuals(wrapped, *args).host_bytes == found.host_bytes > 0
    arrays = values(args)
    options = jaxremat.compiler_options()
    ours, theirs = (jax.jit(jax.grad(f), compiler_options=options)(*arrays) for f in (wrapped, loss))
    same(ours, theirs, rtol=2e-5)


def test_standard_policies_compete():
    known = [str(c.policy) for c in standard(search_of(chain, *shapes(NARROW, 4096), link=FREE))]
    assert "offload:dots" in known
    assert "offload:dots" not in [str(c.policy) for c in standard(search_of(chain, *shapes(NARROW, 4096)))]


def forward_of(loss, policy, args, is_body=False):
    program, _, _ = jaxremat.remat(loss, policy).program(*args)
    cut = program.cut((True,) * len(jax.tree.leaves(args)))
    return forward_program(cut.choice, is_body).jaxpr


def test_one_copy_at_a_time():
    """Eight products go to the host. Each of the last seven and the copy before it pass a barrier, and the next product reads it."""
    jaxpr = forward_of(chain, "offload:dots", shapes(NARROW, 4096))
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    on_host = [v for v in jaxpr.outvars if compat.is_on_host(v.aval)]
    assert len(set(on_host)) == DEPTH
    gates = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    assert len(gates) == DEPTH - 1
    for copy, gate in zip(on_host[:-1], gates, strict=True):
        assert made_by[copy] is gate
        assert compat.is_on_host(gate.invars[0].aval)
        product = made_by[gate.invars[1]]
        assert product.primitive.name == "dot_general"
        # What the product is made of was made behind the gate before.
        assert gate is gates[0] or gates[gates.index(gate) - 1] in behind(product, made_by)


def behind(eqn, made_by):
    found, todo = [], [eqn]
    while todo:
        for var in todo.pop().invars:
            if isinstance(var, compat.Var) and var in made_by and made_by[var] not in found:
                found.append(made_by[var])
                todo.append(made_by[var])
    return found


def test_nothing_waits_inside_of_a_loop():
    jaxpr = forward_of(chain, "offload:dots", shapes(NARROW, 4096), is_body=True)
    assert not [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    assert len([v for v in jaxpr.outvars if compat.is_on_host(v.aval)]) == DEPTH


@wants("h100")
class TestCompiled:
    def test_compiled_memory_falls(self):
        """`dots` keeps eight products of 16 MiB on the device, `offload:dots` two or three: those that come and go."""
        args = shapes(NARROW, 65536)
        peaks = []
        for policy in ("dots", "offload:dots"):
            found = jaxremat.cost(jax.value_and_grad(jaxremat.remat(chain, policy)), *args, target="h100")
            peaks.append(found.peak_bytes)
        assert found.host_bytes == DEPTH * 16 * 2**20
        assert peaks[1] < peaks[0] - 4 * 16 * 2**20

    def test_a_plan_that_needs_the_host(self):
        args = shapes(NARROW, 65536)
        budget = search_of(chain, *args, platform="gpu").leanest().predicted_bytes * 7 // 8
        self.check(jaxremat.plan(chain, *args, budget=budget, target="h100", offload=True), chain, args)

    def test_a_plan_inside_of_a_scan(self):
        args = stacked(WIDE, 65536)
        found = jaxremat.plan(scanned, *args, budget="60%", target="h100", offload=True)
        assert found.recomputed_contraction_flops == 0
        self.check(found, scanned, args)

    def check(self, found, loss, args):
        compiled = jaxremat.cost(jax.value_and_grad(jaxremat.remat(loss, found)), *args, target="h100")
        assert compiled.peak_bytes == found.peak_bytes <= found.budget_bytes
        assert compiled.host_bytes >= found.host_bytes > 0


def test_a_cpu_has_no_other_memory():
    with pytest.raises(PolicyError, match=r"host memory, and on a CPU that is the memory.*target='h100'"):
        jaxremat.plan(chain, *shapes(NARROW, 4096), budget="60%", offload=True)


def test_unknown_rates():
    unknown = dataclasses.replace(find_target("h100"), host_bytes_per_second=None)
    with pytest.raises(PolicyError, match="needs the rates of the chip"):
        link_of("flops", unknown)


def test_values_in_host_memory_are_stored():
    with pytest.raises(PolicyError, match="in host memory is stored"):
        p.Values((1, 2), host=(3,))
