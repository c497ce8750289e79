"""Plans inside of scans, and the `loops:` policies that they resolve to."""

import jax
import jax.numpy as jnp
import pytest
from plans import search_of
from programs import counts, same, transformations

import jaxremat
from jaxremat import policy as p
from jaxremat.flops import count_flops
from jaxremat.plan.task import standard

LENGTH, SIDE, ROWS = 12, 32, 256


def layer(x, w):
    return jnp.tanh(x @ w) + x, x.sum()


def scanned(ws, x, **options):
    x, sums = jax.lax.scan(layer, x, ws, **options)
    return (x**2).mean() + sums.mean()


def backwards(ws, x):
    return scanned(ws, x, reverse=True)


def two(ws, x):
    return scanned(ws, x) + scanned(ws[::2], jnp.sin(x))


def nested(ws, x):
    def outer(x, ws):
        return jax.lax.scan(layer, x, ws)[0], None

    return (jax.lax.scan(outer, x, ws.reshape(4, 3, SIDE, SIDE))[0] ** 2).mean()


def beside_one_without_gradient(ws, x):
    numbers = jax.lax.scan(lambda c, _: (c + 1, c), 0, None, length=5)[1]
    return scanned(ws, x) * numbers.sum()


LOSSES = [scanned, backwards, two, nested, beside_one_without_gradient]


def arguments():
    keys = jax.random.split(jax.random.key(0), LENGTH)
    ws = jax.vmap(lambda key: jax.random.normal(key, (SIDE, SIDE)))(keys) / SIDE**0.5
    return ws, jax.random.normal(jax.random.key(1), (ROWS, SIDE))


def shapes():
    return jax.eval_shape(arguments)


def gradient(loss):
    return jax.jit(jax.grad(loss), compiler_options=jaxremat.compiler_options())(*arguments())


def flops(loss):
    return count_flops(jax.make_jaxpr(jax.value_and_grad(loss))(*shapes()))


def test_a_plan_within_its_budget():
    found = jaxremat.plan(scanned, *shapes(), budget="60%")
    assert isinstance(found.policy, p.Loops)
    wrapped = jaxremat.remat(scanned, found)
    peak = jaxremat.cost(jax.value_and_grad(wrapped), *shapes()).peak_bytes
    assert found.peak_bytes == peak <= found.budget_bytes
    assert flops(wrapped).flops - flops(scanned).flops == found.recomputed_flops > 0
    same(gradient(wrapped), gradient(scanned), rtol=2e-5)
    assert jaxremat.parse(str(found.policy)) == found.policy


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_plans_of_all_kinds_of_scans(loss):
    """By the model alone: what is recomputed is what the plan says, and gradients stay."""
    # Inside of a nested scan's inner body nothing is decided, so that less can be saved.
    budget = "85%" if loss is nested else "75%"
    found = jaxremat.plan(loss, *shapes(), budget=budget, compile=False)
    assert found.predicted_bytes <= found.budget_bytes
    wrapped = jaxremat.remat(loss, found)
    assert flops(wrapped).flops - flops(loss).flops == found.recomputed_flops
    same(gradient(wrapped), gradient(loss), rtol=2e-5)
    assert jaxremat.parse(str(found.policy)) == found.policy


def test_runs_of_steps_need_less():
    """Twelve carries, or four and what three steps need: the leanest plan cuts the scan into runs."""
    frontier = jaxremat.frontier(scanned, *shapes(), compile=False, points=4)
    lean = frontier.points[0].policy
    assert isinstance(lean, p.Loops)
    assert lean.bodies[0][0].run in (2, 3, 4, 6)
    same(gradient(jaxremat.remat(scanned, lean)), gradient(scanned), rtol=2e-5)


@pytest.mark.parametrize(("outer", "once_more"), [("everything", 0), ("nothing", LENGTH)])
@pytest.mark.parametrize(
    ("body", "again"),
    [("dots", 0), ("everything", 0), ("nothing", LENGTH), ("3*dots", LENGTH), ("4*nothing", 2 * LENGTH)],
)
def test_loops(outer, once_more, body, again):
    """How often the product of a step runs again, by what the function keeps of the scan and a step of itself.

    A step that keeps nothing runs again; so do the steps of a run, of which only the carry is kept, before its backward
    pass; and where the function keeps nothing that the scan stacks, all of the scan.
    """
    policy = f"loops:{outer}|{body}"
    assert str(jaxremat.parse(policy)) == policy
    wrapped = jaxremat.remat(scanned, policy)
    product = 2 * ROWS * SIDE * SIDE
    assert flops(wrapped).dot_flops - flops(scanned).dot_flops == (once_more + again) * product
    if outer == "nothing":
        same(gradient(wrapped), gradient(scanned), rtol=2e-5)


@pytest.mark.parametrize("loss", [scanned, backwards], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("body", "again"),
    [
        ("4:nothing>dots", 4),
        ("4:dots>nothing", LENGTH - 4),
        ("1:nothing>1:dots>1:dots>nothing", 1 + 9),
        ("8:4*nothing>dots", 16),
    ],
)
def test_a_scan_in_parts(loss, body, again):
    """The product of a step runs again in those parts that keep nothing, and twice in runs; the values that it makes are the same."""
    policy = f"loops:everything|{body}"
    assert str(jaxremat.parse(policy)) == policy
    wrapped = jaxremat.remat(loss, policy)
    assert flops(wrapped).dot_flops - flops(loss).dot_flops == again * 2 * ROWS * SIDE * SIDE
    # Of what is done to a whole array nothing is done twice: its gradient is put together, not added up.
    assert (
        flops(jaxremat.remat(loss, f"loops:everything|{body.replace('nothing', 'dots').replace('4*', '')}")).dot_flops
        == flops(loss).dot_flops
    )
    same(gradient(wrapped), gradient(loss), rtol=2e-5)
    ws, x = arguments()
    same(jax.jit(wrapped)(ws, x), jax.jit(loss)(ws, x), rtol=1e-6)


@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap", "grad of grad", "jvp of grad"])
def test_parts_under_transformations(order):
    ws, x = arguments()
    x = jnp.stack([x[:8], -x[:8]]) if "vmap" in order else x[:8]
    wrapped = jaxremat.remat(backwards, "loops:everything|4:nothing>6:3*dots>nothing")
    ours, theirs = (jax.jit(transformations((0, 1))[order](f))(ws, x) for f in (wrapped, backwards))
    same(ours, theirs, rtol=2e-5)


def test_parts_of_carries_that_are_keys_and_counts():
    """A carry may hold what has no gradient: a random key, a number of steps."""

    def loss(ws, x, key):
        def step(carry, w):
            x, key, count = carry
            key, own = jax.random.split(key)
            x = jnp.tanh(x @ w) * jax.random.bernoulli(own, 0.8, x.shape)
            return (x, key, count + 1), (x.sum(), count)

        (x, _, count), (sums, counts) = jax.lax.scan(step, (x, key, 0), ws)
        return (x**2).mean() + sums.mean(), (count, counts)

    ws, x = arguments()
    wrapped = jaxremat.remat(loss, "loops:everything|5:nothing>dots")
    ours, theirs = (jax.jit(jax.grad(f, has_aux=True))(ws, x, jax.random.key(3)) for f in (wrapped, loss))
    same(ours, theirs, rtol=2e-5)


def test_a_plan_splits_a_scan():
    """Between all products computed again and none there is a plan for every number of them, which the budget decides."""
    peaks = {body: jaxremat.cost(jax.value_and_grad(jaxremat.remat(scanned, f"loops:everything|{body}")), *shapes()).peak_bytes
             for body in ("nothing", "dots")}  # fmt: skip
    assert peaks["nothing"] < peaks["dots"]
    between = jaxremat.plan(scanned, *shapes(), budget=(peaks["nothing"] + peaks["dots"]) // 2)
    assert isinstance(between.policy, p.Loops)
    assert len(between.policy.bodies[0]) == 2
    product = 2 * ROWS * SIDE * SIDE
    assert 0 < between.recomputed_contraction_flops < LENGTH * product
    wrapped = jaxremat.remat(scanned, between)
    assert flops(wrapped).dot_flops - flops(scanned).dot_flops == between.recomputed_contraction_flops
    same(gradient(wrapped), gradient(scanned), rtol=2e-5)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("loops:nothing|12:dots>nothing", "its first 1 parts 12; leave one or more to the last part"),
        ("loops:nothing|4:dots>9:dots>nothing", "its first 2 parts 13"),
        ("loops:nothing|4:dots>3*nothing", "8 steps in one of its parts, which cannot be cut into runs of 3"),
        ("loops:nothing|5*nothing", "12 steps, which cannot be cut into runs of 5"),
        ("loops:nothing|12*nothing", "12 steps, which cannot be cut into runs of 12"),
        ("loops:nothing|24*nothing", "12 steps, which cannot be cut into runs of 24"),
    ],
)
def test_runs_that_do_not_divide(policy, reason):
    with pytest.raises(jaxremat.PolicyError, match=reason):
        jax.grad(jaxremat.remat(scanned, policy))(*arguments())


def test_bodies_that_are_missing():
    with pytest.raises(jaxremat.PolicyError, match="needs a policy for every scan of the function; got 1"):
        jax.grad(jaxremat.remat(two, "loops:nothing|dots"))(*arguments())


@pytest.mark.parametrize(
    "policy",
    [
        "loops:",
        "loops:nothing",
        "loops:nothing|",
        "loops:nothing|1*dots",
        "loops:segments:2|dots",
        "loops:nothing|budget:1GiB",
        "loops:nothing|dots>nothing",
        "loops:nothing|4:dots",
        "loops:nothing|0:dots>nothing",
        "loops:nothing|4:dots>",
        "loops:nothing|4:names:a|b>dots",
    ],
)
def test_loops_that_are_none(policy):
    with pytest.raises(jaxremat.PolicyError):
        jaxremat.parse(policy)


def test_a_scan_of_other_length_is_another_program():
    found = jaxremat.plan(scanned, *shapes(), budget="75%", compile=False)
    ws, x = arguments()
    with pytest.raises(jaxremat.PolicyError):
        jax.grad(jaxremat.remat(scanned, found))(ws[:, :, :8] @ ws[:, :8], x[:4])


def test_bodies_are_compiled_once_each():
    """A planned scan stays a scan: its body is in the program once for the forward and once for the backward pass.

    A step has one product, and its backward pass three, with that which is computed again. The plan splits it in two.
    """
    found = jaxremat.plan(scanned, *shapes(), budget="75%", compile=False)
    assert isinstance(found.policy, p.Loops)
    parts = len(found.policy.bodies[0])
    assert parts <= 2
    assert counts(jax.grad(jaxremat.remat(scanned, found)), *arguments())["dot_general"] <= 4 * parts


@pytest.mark.parametrize("loss", [scanned, two, nested], ids=lambda f: f.__name__)
def test_what_bodies_lead_to_at_least(loss):
    """The search skips bodies by what they store and cost at least: no candidate with them stays below that."""
    search = search_of(loss, *shapes(), platform="gpu")
    assert [v.floor for v in search.variants] == sorted(v.floor for v in search.variants)
    for variant in search.variants:
        inner = search._search(variant)
        lean = inner.leanest()
        for candidate in (lean, inner.best(2 * lean.predicted_bytes)):
            assert candidate is not None
            assert candidate.order[0] >= variant.floor[0]
            assert candidate.cost >= variant.floor[1] * (1 - 1e-9)
            assert candidate.predicted_bytes >= search.input_bytes + variant.least_bytes


def test_bodies_without_small_values():
    """A step may store nothing but its carry: not even the sum of that, of which twelve would be stacked."""
    search = search_of(scanned, *shapes(), platform="gpu")
    stored = [body.stored_bytes for variant in search.variants for body in variant.bodies if not body.run]
    assert min(stored) == LENGTH * ROWS * SIDE * 4


def normalised(ws, x):
    """Each step stores, by the side of its product, two statistics for every column."""

    def layer(x, w):
        h = x @ w
        return jnp.tanh((h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1.0)), None

    return (jax.lax.scan(layer, x, ws)[0] ** 2).mean()


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ("loops:everything|dots", LENGTH),
        ("loops:everything|nothing", LENGTH),
        ("loops:everything|3*dots", 3),
        ("loops:everything|3*nothing", 3),
    ],
)
def test_a_policy_without_the_small_values_that_its_scan_would_stack(policy, steps):
    """The mean of a step's columns, their squares' sum, its root and its inverse: 32 numbers each, and all run again.

    Of a scan in runs, those of one run are there at once.
    """
    search = search_of(normalised, *shapes(), platform="tpu")
    full = search.of_policy(jaxremat.parse(policy))
    bare, most_bytes = search.without_small(full)
    kept, left = ([v.aval.shape for v in c.choices[-1][1].kept] for c in (full, bare))
    product = [(ROWS, SIDE)]
    assert kept == product * policy.endswith("dots") + [(SIDE,)] * 4
    assert left == product * policy.endswith("dots")
    assert most_bytes == steps * 4 * 4096
    assert isinstance(bare.policy, p.Loops)
    assert bare.policy.outer == p.Everything()
    assert bare.contraction_flops == full.contraction_flops
    assert bare.cost > full.cost
    expected, found = (jax.value_and_grad(jaxremat.remat(normalised, c.policy))(*arguments()) for c in (full, bare))
    same(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "policy"),
    [
        (normalised, "everything"),
        (normalised, "loops:everything|4:nothing>dots"),
        (nested, "loops:everything|nothing"),
    ],
)
def test_what_stays_with_its_small_values(loss, policy):
    search = search_of(loss, *shapes(), platform="tpu")
    candidate = search.of_policy(jaxremat.parse(policy))
    assert search.without_small(candidate) == (candidate, 0)


def test_a_scan_without_gradient_beside_one_with_small_values():
    search = search_of(lambda ws, x: beside_one_without_gradient(ws, x) + normalised(ws, x), *shapes(), platform="tpu")
    bare, most_bytes = search.without_small(search.of_policy(jaxremat.parse("loops:everything|dots|dots|dots")))
    assert most_bytes > 0
    assert [len(body) for body in bare.policy.bodies] == [1, 1, 1]


def test_runs_compete_as_they_are_commonly_made():
    known = [str(c.policy) for c in standard(search_of(scanned, *shapes()))]
    assert {f"loops:everything|{body}" for body in ("dots", "dots_no_batch", "nothing", "3*nothing")} <= set(known)


def test_a_jitted_function_with_a_scan_that_is_called_twice():
    layers = jax.jit(lambda ws, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    def twice(ws, x):
        return (layers(ws, layers(ws, x)) ** 2).mean()

    found = jaxremat.plan(twice, *shapes(), budget="80%", compile=False)
    expected, value = (jax.value_and_grad(f)(*arguments()) for f in (twice, jaxremat.remat(twice, found)))
    same(value, expected, rtol=1e-6)
