"""One planner for several budgets: what the compiler judged for one is known for the next."""

import jax
import jax.numpy as jnp
import pytest

import jaxremat
from jaxremat.errors import CompileError, PolicyError
from jaxremat.plan import judge

ROWS, SIDE, DEPTH = 2048, 64, 8
FRACTIONS = (0.6, 0.65, 0.7, 0.8, 0.9)


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


ARGS = [jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)] * DEPTH, jax.ShapeDtypeStruct((ROWS, SIDE), jnp.float32)


@pytest.fixture
def compiled(monkeypatch):
    """The policies that were compiled, in order."""
    asked, real = [], judge.Judge._compiled
    monkeypatch.setattr(judge.Judge, "_compiled", lambda self, c: asked.append(c.policy) or real(self, c))
    return asked


def test_nothing_is_compiled_twice(compiled):
    planner = jaxremat.Planner(loss, *ARGS)
    first = planner.plan(0.6)
    assert compiled
    assert len(set(compiled)) == len(compiled)
    known = list(compiled)
    again = planner.plan(first.budget_bytes)
    assert compiled[: len(known)] == known
    assert len(set(compiled)) == len(compiled)
    assert (again.recomputed_flops, again.peak_bytes) <= (first.recomputed_flops, first.peak_bytes)
    assert again.without_remat_bytes == first.without_remat_bytes
    assert len(again.attempts) == len(compiled)


@pytest.mark.parametrize("compile", [True, False])
def test_more_budget_never_means_more_recomputation(compile):
    planner = jaxremat.Planner(loss, *ARGS, compile=compile)
    plans = [planner.plan(fraction) for fraction in FRACTIONS]
    flops = [plan.recomputed_contraction_flops for plan in plans]
    assert flops == sorted(flops, reverse=True)
    assert flops[0] > flops[-1]
    for plan, fraction in zip(plans, FRACTIONS, strict=True):
        peak = plan.peak_bytes if compile else plan.predicted_bytes
        assert peak <= plan.budget_bytes == int(plan.without_remat_bytes * fraction)


def test_a_plan_for_less_competes():
    """A search that finds nothing more has what the smaller budget led to."""
    planner = jaxremat.Planner(loss, *ARGS)
    small = planner.plan(0.6)
    planner._task.search.best = lambda limit_bytes: None
    found = planner.plan(small.budget_bytes + 1)
    assert found.recomputed_contraction_flops <= small.recomputed_contraction_flops
    assert found.peak_bytes <= found.budget_bytes == small.budget_bytes + 1


def test_the_frontier_has_the_plans_on_it(compiled):
    planner = jaxremat.Planner(loss, *ARGS)
    plan = planner.plan(0.7)
    curve = planner.frontier(points=3)
    assert len(set(compiled)) == len(compiled)
    weighed = {str(point): point for point in (*curve.points, *curve.beaten)}
    assert weighed[str(plan.policy)].peak_bytes == plan.peak_bytes
    assert any(
        point.peak_bytes <= plan.peak_bytes and point.recomputed_flops <= plan.recomputed_flops
        for point in curve.points
    )


def test_time_is_counted_once():
    """The first result takes account of the trace, the others of their own work."""
    planner = jaxremat.Planner(loss, *ARGS, compile=False)
    first, second = planner.plan(0.7), planner.plan(0.7)
    assert first.policy == second.policy
    assert 0 < second.seconds < first.seconds


@pytest.mark.parametrize("budget", ["much", 0, -1, 0.0, True, None])
def test_a_bad_budget_leaves_it_as_it_was(budget):
    planner = jaxremat.Planner(loss, *ARGS, compile=False)
    with pytest.raises(jaxremat.PolicyError, match="budget"):
        planner.plan(budget)
    with pytest.raises(jaxremat.PolicyError, match="points"):
        planner.frontier(points=1)
    assert planner.plan(0.7).predicted_bytes <= planner.plan(0.7).budget_bytes


@pytest.fixture
def refusal(monkeypatch):
    """The steps that were compiled, of which the compiler refuses the second."""
    whole, asked = judge.peak, []

    def refusing(step, *args, **kwargs):
        asked.append(step)
        if len(asked) == 2:
            raise CompileError("cost: the compiler process for TPU targets was ended by signal 6: Check failed")
        return whole(step, *args, **kwargs)

    monkeypatch.setattr(judge, "peak", refusing)
    return asked


def test_a_program_that_the_compiler_refuses_is_no_plan(refusal):
    found = jaxremat.Planner(loss, *ARGS).plan(0.8)
    assert len(refusal) > 2
    assert [attempt.peak_bytes for attempt in found.attempts].count(None) == 1
    assert found.peak_bytes <= 0.8 * found.without_remat_bytes
    assert "None" not in str(found)


def test_a_program_that_the_compiler_refuses_is_on_no_curve(refusal):
    found = jaxremat.Planner(loss, *ARGS).frontier(points=3)
    assert len(refusal) > 2
    assert all(point.peak_bytes <= found.without_remat_bytes for point in found.points)


def test_a_program_that_cannot_be_compiled_at_all(monkeypatch):
    def refusing(*args, **kwargs):
        raise CompileError("cost: the program does not compile for local: UNIMPLEMENTED")

    monkeypatch.setattr(judge, "peak", refusing)
    with pytest.raises(CompileError, match="does not compile"):
        jaxremat.Planner(loss, *ARGS).plan(0.6)


def test_what_is_compiled_is_logged(caplog):
    caplog.set_level("INFO", "jaxremat.plan.judge")
    planner = jaxremat.Planner(loss, *ARGS)
    found = planner.plan(0.8)
    assert len(caplog.messages) == len(found.attempts)
    assert caplog.messages[0].startswith("everything: ")
    assert all(" on local, expected " in message for message in caplog.messages)
    jaxremat.plan(loss, *ARGS, budget=0.8, compile=False)
    assert len(caplog.messages) == len(found.attempts)


def test_where_all_but_no_rematerialization_is_refused_the_compiler_has_the_word(monkeypatch):
    whole, asked = judge.peak, []

    def refusing(step, *args, **kwargs):
        asked.append(step)
        if len(asked) > 1:
            raise CompileError("cost: the compiler process for TPU targets was ended by signal 9: no message")
        return whole(step, *args, **kwargs)

    monkeypatch.setattr(judge, "peak", refusing)
    with pytest.raises(CompileError, match="signal 9"):
        jaxremat.Planner(loss, *ARGS).plan(0.8)
    asked.clear()
    with pytest.raises(CompileError, match="signal 9"):
        jaxremat.Planner(loss, *ARGS).frontier(points=3)


def test_an_error_says_what_was_refused(refusal):
    with pytest.raises(
        PolicyError, match=r"no plan keeps .* The compiler refused 1 of \d+ programs: cost: .* signal 6"
    ):
        jaxremat.Planner(loss, *ARGS).plan(0.3)
