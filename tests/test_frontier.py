"""`frontier`: monotone, of policies that can be applied, with the standard policies beside; as table, JSON and picture."""

import builtins
import json

import jax
import jax.numpy as jnp
import pytest
from programs import same

import jaxremat
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.frontier import _unbeaten
from jaxremat.plan.judge import Verdict

ROWS, SIDE, DEPTH = 512, 32, 6


def layers(ws, x):
    for i, w in enumerate(ws):
        x = jax.nn.relu(jaxremat.name(x @ w, f"h{i}"))
    return (x**2).sum()


def shapes():
    return [jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)] * DEPTH, jax.ShapeDtypeStruct((ROWS, SIDE), jnp.float32)


@pytest.fixture(scope="module")
def predicted():
    return jaxremat.frontier(layers, *shapes(), compile=False, points=10)


@pytest.fixture(scope="module")
def compiled():
    return jaxremat.frontier(layers, *shapes(), points=3)


def check_monotone(found):
    heights = [point.height_bytes for point in found.points]
    assert heights == sorted(set(heights))
    for figure in ("recomputed_flops", "recomputed_contraction_flops", "cost", "bound"):
        figures = [getattr(point, figure) for point in found.points]
        assert figures == sorted(figures, reverse=True), figure
    # No point is beaten by one that was taken off, and each of those is beaten or equalled by a point.
    for other in found.beaten:
        better = [q for q in found.points if q.height_bytes <= other.height_bytes]
        assert min(q.cost for q in better) <= other.cost
    assert found.points[-1].recomputed_flops == 0
    assert all(0 <= point.bound <= point.cost for point in (*found.points, *found.beaten))


def test_the_predicted_curve(predicted):
    check_monotone(predicted)
    assert len(predicted.points) >= 4
    assert not predicted.is_compiled
    assert {point.peak_bytes for point in predicted.points} == {None}
    assert "no compiler was asked" in str(predicted)
    assert predicted.points[-1].height_bytes <= predicted.without_remat_bytes


def test_the_compiled_curve(compiled):
    check_monotone(compiled)
    everything = (*compiled.points, *compiled.beaten)
    spellings = {str(point) for point in everything}
    assert {"everything", "nothing", "dots", "dots_no_batch", "segments:sqrt", "names:*"} <= spellings
    assert len(spellings) == len(everything)
    for point in everything[:2]:
        wrapped = jax.value_and_grad(jaxremat.remat(layers, point))
        assert point.peak_bytes == jaxremat.cost(wrapped, *shapes()).peak_bytes
    plain = jaxremat.cost(jax.value_and_grad(layers), *shapes()).peak_bytes
    assert compiled.without_remat_bytes == plain
    assert compiled.points[0].peak_bytes < plain


def test_points_are_policies(predicted):
    ws, x = (jax.tree.map(lambda s: jnp.full(s.shape, 0.1, s.dtype), part) for part in shapes())
    step = lambda f: jax.jit(jax.grad(f), compiler_options=jaxremat.compiler_options())  # noqa: E731
    lean = predicted.points[0]
    same(step(jaxremat.remat(layers, lean))(ws, x), step(layers)(ws, x))
    assert jaxremat.remat(layers, lean).policy == lean.policy == jaxremat.parse(str(lean))
    assert lean + jaxremat.parse("everything") == jaxremat.parse("everything")


def test_json(predicted):
    document = json.loads(predicted.to_json())
    assert [jaxremat.parse(point["policy"]) for point in document["points"]] == [q.policy for q in predicted.points]
    assert document["points"][0]["recomputed_flops"] == predicted.points[0].recomputed_flops
    assert document["target"] == "local"
    assert document["is_compiled"] is False
    assert document["versions"]["jax"] == jax.__version__


def test_the_table(compiled):
    lines = str(compiled).splitlines()
    assert lines[0].startswith("Frontier on local (compiled); without rematerialization")
    rows = lines[4:]
    assert len(rows) == len(compiled.points) + len(compiled.beaten)
    assert sum(row.endswith("beaten") for row in rows) == len(compiled.beaten)
    for word in ("peak", "predicted", "recomputed GFLOP", "of forward", "lower bound"):
        assert word in lines[2]


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_pictures(predicted, tmp_path, ending):
    path = predicted.plot(tmp_path / f"curve{ending}")
    assert [f.name for f in tmp_path.iterdir()] == [f"curve{ending}"]
    content = path.read_bytes()
    assert content.startswith({".svg": b"<?xml", ".png": b"\x89PNG"}[ending])
    if ending == ".svg":
        for text in (b"predicted peak on local", b"no rematerialization", b"everything", b"recomputed"):
            assert text in content


def test_pictures_that_cannot_be_drawn(predicted, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"ends in \.svg or \.png; got"):
        predicted.plot(tmp_path / "curve.pdf")
    with pytest.raises(OSError, match="nowhere"):
        predicted.plot(tmp_path / "nowhere" / "curve.svg")
    imported = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="Install it: pip install matplotlib"):
        predicted.plot(tmp_path / "curve.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("points", [1, 0, -3, 2.5, "8", True, None])
def test_numbers_of_points_that_are_none(points):
    with pytest.raises(jaxremat.PolicyError, match="points must be a whole number of 2 or more"):
        jaxremat.frontier(layers, *shapes(), compile=False, points=points)


def test_nothing_to_recompute():
    """A linear function keeps its inputs alone: there is one point, and nothing to choose."""
    found = jaxremat.frontier(
        lambda w, x: (x @ w).sum(), *(jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2, compile=False
    )
    assert [str(point) for point in found.points] == ["everything"]
    assert found.points[0].recomputed_flops == 0


def test_what_beats_what():
    """By rising peak; of equal peaks the least recomputation; whoever recomputes no less than a smaller one goes."""
    recomputed = {10: 50, 20: 30, 21: 30, 22: 31, 30: 0, 40: 0}
    verdicts = []
    for peak, flops in recomputed.items():
        count = jaxremat.flops.FlopCount(elementwise_flops=flops)
        verdicts.append(Verdict(Candidate(jaxremat.parse(f"segments:{peak}"), peak, count, float(flops)), peak, None))
    assert [v.peak_bytes for v in _unbeaten(reversed(verdicts))] == [10, 20, 30]
