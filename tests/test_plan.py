"""`plan` with the compiler that is here: budgets are met, gradients are those without it, figures are true."""

import jax
import pytest
from plans import search_of
from programs import same

import jaxremat
from jaxremat.flops import count_flops

ROWS, SIDE, DEPTH = 1024, 64, 6


def relu(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer{i}"):
            x = jax.nn.relu(x @ w)
    return (x**2).sum()


def smooth(ws, x):
    for w in ws:
        h = jax.nn.gelu(x @ w)
        x = x + jax.nn.softmax(h)
    return (x**2).mean()


def arguments(rows=ROWS):
    ws = [jax.random.normal(jax.random.key(i), (SIDE, SIDE)) / SIDE**0.5 for i in range(DEPTH)]
    return ws, jax.random.normal(jax.random.key(99), (rows, SIDE))


def shapes(rows=ROWS):
    return jax.eval_shape(lambda: arguments(rows))


@pytest.fixture(scope="module")
def of_relu():
    return jaxremat.plan(relu, *shapes(), budget="70%")


@pytest.fixture(scope="module")
def of_smooth():
    return jaxremat.plan(smooth, *shapes(), budget="70%")


def step_of(loss):
    return jax.jit(jax.value_and_grad(loss), compiler_options=jaxremat.compiler_options())


def flops(loss):
    return count_flops(jax.make_jaxpr(jax.value_and_grad(loss))(*shapes()))


@pytest.mark.parametrize(("loss", "found"), [(relu, "of_relu"), (smooth, "of_smooth")])
def test_the_compiled_peak_is_within_the_budget(loss, found, request):
    found = request.getfixturevalue(found)
    compiled = jaxremat.cost(jax.value_and_grad(jaxremat.remat(loss, found)), *shapes())
    assert found.peak_bytes == compiled.peak_bytes <= found.budget_bytes
    without = jaxremat.cost(jax.value_and_grad(loss), *shapes()).peak_bytes
    assert found.without_remat_bytes == without
    assert found.budget_bytes == int(0.7 * without)


@pytest.mark.parametrize(("loss", "found"), [(relu, "of_relu"), (smooth, "of_smooth")])
def test_what_a_plan_says_it_recomputes_is_what_is_recomputed(loss, found, request):
    found = request.getfixturevalue(found)
    plain, planned = flops(loss), flops(jaxremat.remat(loss, found))
    assert planned.flops - plain.flops == found.recomputed_flops > 0
    assert planned.dot_flops - plain.dot_flops == found.recomputed_contraction_flops
    assert sum(share.recomputed_flops for share in found.shares) <= found.recomputed_flops
    assert 0 <= found.bound <= found.cost == found.recomputed_flops
    assert found.gap == (found.cost - found.bound) / found.forward_flops
    # Products forward; what is elementwise comes on top.
    assert found.forward_flops >= DEPTH * 2 * ROWS * SIDE * SIDE


def test_gradients_of_a_relu_net_are_bit_identical(of_relu):
    ws, x = arguments()
    same(step_of(jaxremat.remat(relu, of_relu))(ws, x), step_of(relu)(ws, x))


def test_gradients_of_a_smooth_net(of_smooth):
    ws, x = arguments()
    same(step_of(jaxremat.remat(smooth, of_smooth))(ws, x), step_of(smooth)(ws, x), rtol=2e-5)


def test_a_plan_is_never_worse_than_the_standard_policies(of_relu):
    for policy in ("dots", "segments:sqrt", "segments:2", "segments:3"):
        wrapped = jaxremat.remat(relu, policy)
        again = flops(wrapped).flops - flops(relu).flops
        if again < of_relu.recomputed_flops:
            peak = jaxremat.cost(jax.value_and_grad(wrapped), *shapes()).peak_bytes
            assert peak > of_relu.budget_bytes, policy


def test_stored_masks_are_kept_in_place_of_what_they_are_made_of():
    """Of the input's gradient a mask of a byte an element is all that a layer keeps, where each was asked for.

    Without rematerialization the compiler keeps the floats that the masks are made of, four times as much.
    """

    def loss(x, ws):
        return relu(ws, x)

    ws, x = shapes()
    graph = search_of(loss, x, ws).graph
    masks = [v.position for v in graph.values if v.eqn.primitive.name == "gt"]
    last = max(v.position for v in graph.values if v.size_bytes == 4 * ROWS * SIDE)
    stored = jaxremat.parse(f"values:{','.join(map(str, (*masks, last)))}")
    peak, plain = (jaxremat.cost(jax.value_and_grad(f), x, ws).peak_bytes for f in (jaxremat.remat(loss, stored), loss))
    floats, bools = DEPTH * 4 * ROWS * SIDE, DEPTH * ROWS * SIDE
    assert len(masks) == DEPTH
    assert plain - peak >= 0.5 * (floats - bools)


def test_spellings_of_a_budget():
    """A part, a percentage, bytes and a size mean the same; nothing is compiled for it."""
    plans = [jaxremat.plan(relu, *shapes(), budget=b, compile=False) for b in (0.75, "75%", "budget:75%")]
    limit = plans[0].budget_bytes
    plans += [jaxremat.plan(relu, *shapes(), budget=b, compile=False) for b in (limit, f"{limit}B")]
    assert len({(p.policy, p.budget_bytes) for p in plans}) == 1
    assert limit == int(0.75 * plans[0].without_remat_bytes)


def test_without_a_compiler_the_plan_says_so():
    found = jaxremat.plan(relu, *shapes(), budget="75%", compile=False)
    assert found.peak_bytes is None
    assert found.predicted_bytes <= found.budget_bytes
    assert "no compiler was asked" in found.note
    assert "not compiled" in str(found)
    assert "no compiler was asked" in str(found)
    assert all(attempt.peak_bytes is None for attempt in found.attempts)


@pytest.mark.parametrize("budget", ["100%", "fits", "1TiB"])
def test_no_rematerialization_where_it_fits(budget):
    found = jaxremat.plan(relu, *shapes(), budget=budget)
    assert found.policy == jaxremat.parse("everything")
    assert found.recomputed_flops == found.cost == found.bound == found.gap == 0
    assert "no rematerialization is needed" in found.note
    assert found.peak_bytes == found.without_remat_bytes


def test_a_budget_below_the_floor():
    with pytest.raises(jaxremat.PolicyError) as error:
        jaxremat.plan(relu, *shapes(), budget="10%")
    message = str(error.value)
    parameters = DEPTH * SIDE * SIDE * 4
    assert "no plan keeps the peak within" in message
    smallest = int(message.split("(")[1].split(" bytes")[0])
    for part in (
        "The smallest found",
        f"{parameters // 1024}.0 KiB of them parameters",
        "of gradients",
        "batch of about",
    ):
        assert part in message
    # The smallest is one: it is found when it is asked for.
    found = jaxremat.plan(relu, *shapes(), budget=smallest)
    assert found.peak_bytes <= smallest


def test_a_budget_below_parameters_and_gradients():
    with pytest.raises(jaxremat.PolicyError, match="No batch fits"):
        jaxremat.plan(relu, *shapes(8), budget=1000)


def test_a_training_step():
    """What `step` returns is what is compiled: here momentum comes on top, as much as the parameters."""

    def builder(loss):
        def step(ws, momentum, x):
            value, gradients = jax.value_and_grad(loss)(ws, x)
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
            return jax.tree.map(lambda w, m: w - 0.1 * m, ws, momentum), momentum, value

        ws, x = shapes()
        return step, (ws, ws, x)

    found = jaxremat.plan(relu, *shapes(), budget="75%", step=builder)
    step, step_arguments = builder(jaxremat.remat(relu, found))
    assert found.peak_bytes == jaxremat.cost(step, *step_arguments).peak_bytes <= found.budget_bytes
    plain, plain_arguments = builder(relu)
    assert found.without_remat_bytes == jaxremat.cost(plain, *plain_arguments).peak_bytes
    assert found.without_remat_bytes > jaxremat.cost(jax.value_and_grad(relu), *shapes()).peak_bytes


def test_objectives():
    by_flops, by_bytes = (
        jaxremat.plan(smooth, *shapes(), budget="80%", objective=o, compile=False) for o in ("flops", "bytes")
    )
    assert by_flops.cost == by_flops.recomputed_flops
    assert by_bytes.objective == "bytes"
    assert 0 < by_bytes.cost != by_bytes.recomputed_flops
    assert by_bytes.gap == (by_bytes.cost - by_bytes.bound) / by_bytes.cost
    assert "(bytes)" in str(by_bytes)
    with pytest.raises(jaxremat.PolicyError, match="objective='time' needs the rates"):
        jaxremat.plan(smooth, *shapes(), budget="80%", objective="time")
    by_time = jaxremat.plan(smooth, *shapes(), budget="80%", objective="time", target="h100", compile=False)
    assert 0 < by_time.cost < 1e-3  # seconds
    with pytest.raises(
        jaxremat.PolicyError, match=r"objective must be one of flops, bytes, time; got 'flop'.*Did you mean"
    ):
        jaxremat.plan(smooth, *shapes(), budget="80%", objective="flop")


def test_what_is_differentiated():
    """With respect to the input alone no product's gradient of a weight is there to be planned for."""

    def loss(x, ws):
        return relu(ws, x)

    ws, x = shapes()
    found = jaxremat.plan(loss, x, ws, budget="90%", argnums=(0,), compile=False)
    both = jaxremat.plan(loss, x, ws, budget="90%", argnums=(0, 1), compile=False)
    assert found.without_remat_bytes < both.without_remat_bytes
    gradient = jax.jit(jax.grad(jaxremat.remat(loss, found)), compiler_options=jaxremat.compiler_options())
    plain = jax.jit(jax.grad(loss), compiler_options=jaxremat.compiler_options())
    ws, x = arguments()
    same(gradient(x, ws), plain(x, ws))
