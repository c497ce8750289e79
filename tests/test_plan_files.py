"""Plans as values: saved, loaded, combined, applied; and the errors of what cannot be planned or applied."""

import json

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from programs import counts, kept, same

import jaxremat
from jaxremat import policy as p
from jaxremat.fingerprint import fingerprint
from jaxremat.plan.result import short

ROWS, SIDE, DEPTH = 256, 32, 8


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def shapes(rows=ROWS):
    return [jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)] * DEPTH, jax.ShapeDtypeStruct((rows, SIDE), jnp.float32)


def data():
    return jax.tree.map(lambda s: jnp.full(s.shape, 0.1, s.dtype), shapes())


@pytest.fixture(scope="module")
def found():
    plan = jaxremat.plan(layers, *shapes(), budget="75%", compile=False)
    assert isinstance(plan.policy, p.Values)
    return plan


def test_a_plan_comes_back_from_its_file(found, tmp_path):
    path = tmp_path / "plan.json"
    found.save(path)
    again = jaxremat.load_plan(path)
    assert again == found
    assert hash(again) == hash(found)
    assert again.policy == found.policy
    assert str(again) == str(found)
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"]
    assert jaxremat.load_plan(str(path)) == found
    assert counts(jax.grad(jaxremat.remat(layers, again)), *data()) == counts(
        jax.grad(jaxremat.remat(layers, found)), *data()
    )


@pytest.mark.parametrize("loss", ["empty", "cut", "list", "number", "unknown", "missing", "format", "policy", "share"])
def test_files_that_hold_no_plan(found, tmp_path, loss):
    document = json.loads(found.to_json())
    damaged = {
        "empty": "",
        "cut": found.to_json()[:-20],
        "list": "[]",
        "number": "3",
        "unknown": json.dumps({**document, "speed": 1}),
        "missing": json.dumps({k: v for k, v in document.items() if k != "policy"}),
        "format": json.dumps({**document, "format": 99}),
        "policy": json.dumps({**document, "policy": "values:a"}),
        "share": json.dumps({**document, "shares": [{"path": "x"}]}),
    }[loss]
    path = tmp_path / "plan.json"
    path.write_text(damaged)
    with pytest.raises(jaxremat.PolicyError, match=r"plan\.json holds no plan that Plan.save of this version wrote"):
        jaxremat.load_plan(path)


def test_files_that_are_not_there(found, tmp_path):
    with pytest.raises(FileNotFoundError):
        jaxremat.load_plan(tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError, match=r"no such directory.*nowhere"):
        found.save(tmp_path / "nowhere" / "plan.json")
    with pytest.raises(IsADirectoryError, match="needs the path of a file"):
        found.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(jaxremat.PolicyError, match=r"plan\.json holds no plan"):
        jaxremat.load_plan(tmp_path / "plan.json")


def test_a_plan_is_a_policy(found):
    assert jaxremat.parse(found) is found
    wrapped = jaxremat.remat(layers, found)
    assert wrapped.policy == found.policy
    # What it stores beside the inputs is what the gradient keeps.
    stored = sum(share.stored_bytes for share in found.shares)
    ws, x = data()
    assert sum(v.nbytes for v in kept(lambda ws: wrapped(ws, x), ws) if v is not x) == stored > 0
    union = found + jaxremat.parse("dots")
    assert isinstance(union, p.Union)
    assert set(union.parts) == {found.policy, jaxremat.parse("dots")}
    products = counts(jax.grad(layers), *data())["dot_general"]
    assert counts(jax.grad(jaxremat.remat(layers, union)), *data())["dot_general"] == products
    assert jaxremat.parse("everything") + found == jaxremat.parse("everything")
    with pytest.raises(jaxremat.PolicyError, match="JAX has no policy"):
        found.to_jax()


def test_equal_plans_do_not_trace_twice(found, tmp_path):
    traces = []

    def counted(ws, x):
        traces.append(1)
        return layers(ws, x)

    found.save(tmp_path / "plan.json")
    step = jax.jit(lambda policy, ws, x: jax.grad(jaxremat.remat(counted, policy))(ws, x), static_argnums=0)
    step(found, *data())
    assert len(traces) == 1
    step(jaxremat.load_plan(tmp_path / "plan.json"), *data())
    assert len(traces) == 1
    wrapped = jaxremat.remat(counted, found)
    jax.grad(wrapped)(*data())
    wrapped(*data())
    jax.grad(wrapped)(*data())
    assert len(traces) == 2


def test_plans_of_other_programs_are_refused(found):
    ws, x = data()
    with pytest.raises(jaxremat.PolicyError, match=r"this plan was made for the program .* Plan again"):
        jax.grad(jaxremat.remat(layers, found))(ws, x[:10])
    with pytest.raises(jaxremat.PolicyError, match="what is differentiated"):
        jax.grad(jaxremat.remat(layers, found), 1)(ws, x)
    with pytest.raises(jaxremat.PolicyError, match="Plan again"):
        jax.grad(jaxremat.remat(lambda ws, x: jnp.sin(layers(ws, x)), found))(ws, x)


def test_plans_that_chose_a_policy_for_any_program_know_theirs(tmp_path):
    ws, x = data()
    found = jaxremat.plan(layers, *shapes(), budget="100%", compile=False)
    assert found.policy == jaxremat.parse("everything")
    found.save(tmp_path / "plan.json")
    loaded = jaxremat.load_plan(tmp_path / "plan.json")
    same(jax.grad(jaxremat.remat(layers, loaded))(ws, x), jax.grad(layers)(ws, x))
    with pytest.raises(
        jaxremat.PolicyError, match=r"this plan was made for the program .* Plan again, or give .*plan\.policy"
    ):
        jax.grad(jaxremat.remat(layers, loaded))(ws, x[:10])
    jax.grad(jaxremat.remat(layers, loaded.policy))(ws, x[:10])


def test_a_body_that_is_not_differentiated_is_part_of_the_program():
    """Two programs of equal values that store alike and need different amounts of memory."""

    def wide(size):
        def loss(w, x):
            def step(carry):
                i, u = carry
                return i + 1, jnp.tanh(u @ jnp.full((4, size), 0.01)) @ jnp.full((size, 4), 0.01)

            u = jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, jax.lax.stop_gradient(x)))[1]
            return (jnp.tanh(x @ w) * u).sum()

        return jax.make_jaxpr(loss)(jnp.ones((4, 4)), jnp.ones((8, 4))).jaxpr

    digests = [fingerprint(jaxpr.invars, jaxpr.eqns) for jaxpr in (wide(8), wide(8), wide(1024))]
    assert digests[0] == digests[1] != digests[2]


def test_a_loss_that_has_a_policy_or_a_flag():
    ws, x = shapes()
    with pytest.raises(jaxremat.PolicyError, match="layers is wrapped with segments:2 already"):
        jaxremat.plan(jaxremat.remat(layers, "segments:2"), ws, x, budget="75%", compile=False)

    def flagged(ws, x, train):
        return layers(ws, x) if train else 0.0

    with pytest.raises(TypeError, match=r"Make it static.*To plan it, .* functools\.partial"):
        jaxremat.plan(flagged, ws, x, True, budget="75%", compile=False)
    static = jaxremat.remat(flagged, "everything", static_argnames="train")
    found = jaxremat.plan(static, ws, x, True, budget="75%", compile=False)
    jax.grad(jaxremat.remat(flagged, found, static_argnames="train"))(*data(), True)


@pytest.mark.parametrize("budget", [np.int64(10**9), np.float32(0.75), "FITS", " 75% "])
def test_budgets_in_other_words(budget):
    assert jaxremat.plan(layers, *shapes(), budget=budget, compile=False).predicted_bytes > 0


@pytest.mark.parametrize(
    "budget", [0, -1, 0.0, 1.5, -0.5, True, None, "", "0%", "160%", "2 potatoes", "GiB", "nan", float("nan"), [1]]
)
def test_budgets_that_are_none(budget):
    with pytest.raises(jaxremat.PolicyError, match="budget"):
        jaxremat.plan(layers, *shapes(), budget=budget, compile=False)


@pytest.mark.parametrize("built", [3, None, (layers,), (layers, 3), (3, (1,)), [layers, ()]])
def test_steps_that_are_none(built):
    with pytest.raises(TypeError, match="step must return the training step and a tuple of its arguments"):
        jaxremat.plan(layers, *shapes(), budget="50%", step=lambda loss: built)


def test_steps_that_do_something_else():
    """A step that differentiates otherwise, or another batch: stored positions would mean other values there."""
    ws, x = shapes()
    message = r"must call the loss with arguments of the shapes.*differentiate it with respect to argnums=0"
    with pytest.raises(jaxremat.PolicyError, match=message):
        jaxremat.plan(layers, ws, x, budget="75%", step=lambda loss: (jax.grad(loss, (0, 1)), (ws, x)))
    with pytest.raises(jaxremat.PolicyError, match=message):
        jaxremat.plan(layers, ws, x, budget="75%", step=lambda loss: (jax.grad(loss), shapes(100)))


def test_losses_that_are_no_number():
    """`jax.value_and_grad` takes them no more than the planner does; with a step of their own they are planned."""
    ws, x = shapes()

    def loss(ws, x):
        return layers(ws, x), x.mean()

    with pytest.raises(TypeError, match=r"the loss must return one real number; loss returns float32\[\], float32\[\]"):
        jaxremat.plan(loss, ws, x, budget="50%")
    found = jaxremat.plan(loss, ws, x, budget="80%", step=lambda loss: (jax.grad(loss, has_aux=True), (ws, x)))
    assert found.peak_bytes <= found.budget_bytes < found.without_remat_bytes


def test_functions_of_all_kinds():
    """What needs no decision gets none; what cannot be planned says why."""
    matrix = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    for loss in (lambda w: w.sum(), lambda w: (w @ w).sum(), lambda w: w.reshape(-1)[0]):
        found = jaxremat.plan(loss, matrix, budget="100%", compile=False)
        assert found.policy == jaxremat.parse("everything")
    with pytest.raises(jaxremat.PolicyError, match="computes nothing from its arguments"):
        jaxremat.plan(lambda w: w, matrix, budget="100%", compile=False)
    with pytest.raises(jaxremat.PolicyError, match="must be free of side effects"):
        jaxremat.plan(
            lambda w: jax.experimental.io_callback(lambda: None, None) or w.sum(), matrix, budget="100%", compile=False
        )
    with pytest.raises(TypeError, match="needs a function; got int"):
        jaxremat.plan(3, matrix, budget="100%", compile=False)
    for argnums in (7, -2, "0", True, (0, 1)):
        with pytest.raises(TypeError, match="argnums counts the positional arguments"):
            jaxremat.plan(lambda w: w.sum(), matrix, budget="100%", argnums=argnums, compile=False)


def test_nothing_to_decide_on():
    with pytest.raises(TypeError):
        jaxremat.plan(lambda n: n * 2, jnp.arange(3), budget="50%", compile=False)
    with pytest.raises(TypeError):
        jaxremat.plan(lambda: 1.0, budget="50%", compile=False)


def test_targets():
    with pytest.raises(jaxremat.TargetError, match="h1000"):
        jaxremat.plan(layers, *shapes(), budget="50%", target="h1000")


def test_a_target_without_its_package(monkeypatch):
    module = __import__("jaxremat.targets", fromlist=["targets"])
    monkeypatch.setattr(module, "_installed", lambda distribution: None)
    with pytest.raises(jaxremat.TargetError, match=r"nothing here compiles for h100\. Needed: pip install"):
        jaxremat.plan(layers, *shapes(), budget="50%", target="h100")
    assert jaxremat.plan(layers, *shapes(), budget="90%", target="h100", compile=False).peak_bytes is None


def test_short_spellings():
    assert short(jaxremat.parse("values:1,2,30@abc")) == "3 stored values"
    assert short(jaxremat.parse("values:1,2/7,8/9@abc")) == "5 stored values on 3 levels"
    assert (
        short(jaxremat.parse("loops:values:1,2@abc|4*values:3|dots")) == "loops:2 stored values|4*1 stored values|dots"
    )
    assert short(jaxremat.parse("segments:sqrt")) == "segments:sqrt"
