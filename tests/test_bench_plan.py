"""The planner's bench: verdicts, claims and tables of results made by hand; and a small run that is taken up again."""

import json
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from compilers import wants

import jaxremat
from experiments.bench import gradients, nets, plan, plan_cells, plan_tables
from experiments.bench.plan_cells import NO_REMAT, Cell, Figures, Planned, Result, Step
from experiments.bench.plan_claims import CLAIMS, budgets
from experiments.bench.plan_plots import curve, picture
from experiments.bench.plan_verdicts import (
    NEAR,
    Suite,
    compared_gradients,
    disagreements,
    distances,
    outcome,
    prediction_errors,
    wrong_gradients,
)
from experiments.errors import ExperimentError
from experiments.marked import update_block

MIB = 2**20
STEP = Step(flops=200, contraction_flops=100)


def competitor(name, peak, flops, net="tiny", target="h100", temp=None):
    figures = None if peak is None else Figures(peak, flops, peak if temp is None else temp)
    status = "failed" if peak is None else "found"
    return Result(Cell("competitor", net, target, name), status, "" if peak else "refused", figures, STEP)


def planned(budget, peak, flops, net="tiny", target="h100", **changes):
    told = Planned("values", peak, flops, flops + 4, 2.0, 50, 1.0, 0.5, ((110, 100),))
    figures = Figures(peak, flops, peak)
    return Result(Cell("plan", net, target, budget), "found", figures=figures, planned=replace(told, **changes))


def no_plan(budget):
    return Result(Cell("plan", "tiny", "h100", budget), "no plan", "no plan keeps the peak within 60")


def suite_of(*results):
    return Suite({result.cell: result for result in results})


BASE = competitor(NO_REMAT, 1000, 0)
OUTCOMES = [  # the competitor's peak and recomputation, the plan's, what it is called
    ((600, 40), (600, 39), "less"),
    ((600, 40), (500, 40), "same"),
    ((600, 40), (600, 40), "same"),
    ((600, 0), (600, 0), "nothing"),
    ((600, 40), (500, 41), "more"),
    ((600, 0), (500, 1), "more"),
    ((600, 40), (601, 0), "over budget"),
    ((1000, 40), None, "saves nothing"),
    ((1200, 0), (900, 0), "saves nothing"),
    ((600, 40), None, "not asked"),
]


@pytest.mark.parametrize(("theirs", "ours", "expected"), OUTCOMES)
def test_outcome(theirs, ours, expected):
    plan_result = None if ours is None else planned(theirs[0], *ours)
    row = competitor("per block: nothing", *theirs)
    assert outcome(row, plan_result, BASE.figures) == expected
    found = suite_of(BASE, row, *([plan_result] if plan_result else []))
    assert found.rows("tiny", "h100")[0].outcome == expected
    assert bool(plan_tables.misses(found)) == (expected in ("more", "over budget"))
    assert plan.is_beaten(found) == (expected in ("more", "over budget"))


def test_without_a_plan_the_planner_is_at_fault_and_a_failed_competitor_is_not():
    found = suite_of(BASE, competitor("a", 60, 40), no_plan(60), competitor("b", None, 0))
    assert [row.outcome for row in found.rows("tiny", "h100")] == ["no plan", "failed"]
    ((row, text),) = plan_tables.misses(found)
    assert row.competitor.cell.asked == "a"
    assert text.endswith("no plan: no plan keeps the peak within 60")
    assert "tiny h100, b failed: refused" in plan_tables.sentences(found)


def test_budgets_are_asked_once_the_smallest_first():
    # a and e have one peak; c needs no less than no remat does.
    rows = [("a", 800, 10), ("b", 300, 30), ("c", 1000, 0), ("d", 400, 30), ("e", 800, 20), ("f", 750, 25)]
    found = suite_of(BASE, *(competitor(*row) for row in rows))
    names = [name for name, _, _ in rows]
    # 75 % is the peak of f, too.
    assert budgets(found, "tiny", "h100", names) == [300, 400, 500, 750, 800]
    assert budgets(found, "tiny", "h100", ["a"]) == [500, 750, 800]
    assert budgets(suite_of(competitor("a", 800, 10)), "tiny", "h100", ["a"]) == ()


def test_the_smallest_of_near_budgets_stands_for_all():
    # One part in a thousand of 700,700 is 700.7.
    base, names = competitor(NO_REMAT, 1_000_000, 0), ("a", "b", "c", "d")
    rows = [competitor(name, 700_000 + more, 9) for name, more in zip(names, (700, 0, 702, 701))]
    assert budgets(suite_of(base, *rows), "tiny", "h100", names) == [500_000, 700_000, 700_701, 750_000]
    found = suite_of(base, *rows, planned(700_000, 600_000, 8))
    outcomes = {row.competitor.cell.asked: row.outcome for row in found.rows("tiny", "h100")}
    assert outcomes == {"a": "less", "b": "less", "c": "not asked", "d": "not asked"}


def test_medians_and_distances():
    other = competitor(NO_REMAT, 1001, 0, net="other")
    # 75 % of 1001 is 750.75: budgets are whole bytes.
    found = suite_of(
        BASE, other, planned(750, 700, 8), planned(750, 700, 18, net="other", attempts=((90, 100), (70, 100)))
    )
    # What is recomputed of all kinds, less the bound of 2, of 200.
    assert distances(found, 0.75) == {("tiny", "h100"): 10 / 200, ("other", "h100"): 20 / 200}
    assert distances(found, 0.5) == {}
    assert prediction_errors(found) == {("tiny", "h100"): pytest.approx(0.1), ("other", "h100"): pytest.approx(0.2)}
    assert "median 7.5 % of a step's operations over 2 networks" in " ".join(plan_tables.sentences(found))


def test_a_plan_that_reports_what_is_not_so_and_plans_out_of_order():
    wrong = suite_of(BASE, planned(700, 600, 8, told_flops=7))
    assert [r.cell.asked for r in disagreements(wrong)] == [700]
    assert plan.is_beaten(wrong)
    found = suite_of(BASE, planned(700, 600, 8), planned(600, 550, 8), planned(500, 450, 7))
    assert [(more.cell.asked, less.cell.asked) for more, less in found.unordered("tiny", "h100")] == [(600, 500)]
    assert not plan.is_beaten(found)


RUN = [  # network, difference of the gradient, whether that is too much
    ("chain16", 0.0, False),
    ("chain16:2", 1e-45, True),
    ("densenet100", 1e-7, True),
    ("gpt2", 2e-5, False),
    ("gpt2_scanned:1", 2.1e-5, True),
    ("lstm", None, False),
]


@pytest.mark.parametrize(("net", "apart", "is_wrong"), RUN)
def test_a_wrong_gradient_is_a_miss(net, apart, is_wrong):
    place = {"net": net, "target": "local"}
    plan_result = planned(700, 600, 8, **place, gradient_difference=apart)
    found = suite_of(competitor(NO_REMAT, 1000, 0, **place), plan_result)
    assert [result for result, _ in wrong_gradients(found)] == [plan_result] * is_wrong
    assert plan.is_beaten(found) == is_wrong
    assert (f"- miss: {net} local, budget 700 bytes: the gradient is off by" in plan_tables.markdown(found)) == is_wrong
    assert (f"\nMISS: {net} local, budget 700 bytes: the gradient" in plan_tables.plain(found)) == is_wrong
    assert ("  MISS" in plan.progress(plan_result, found)) == is_wrong


def test_networks_of_relus_are_networks():
    smooth = {"vit_s16", "gpt2", "gpt2_scanned", "lstm"}
    assert nets.NETS.keys() - smooth == nets.RELU_NETS


def test_a_line_says_how_far_gradients_are_apart():
    place = partial(planned, target="local")
    plans = [
        place(700, 600, 8, gradient_difference=0.0),
        place(600, 500, 9, gradient_difference=3e-7),
        place(500, 400, 9, net="gpt2", gradient_difference=1.5e-6),
        place(400, 300, 9, net="vgg16"),
        planned(700, 600, 8),
    ]
    text = "Gradients of 3 of 4 local plans were compared with those without rematerialization: 1 bit-identical"
    found = suite_of(*plans)
    assert f"- {text}, the others within 1.5e-06 of a leaf's largest entry (gpt2)." in plan_tables.markdown(found)
    assert f"\n{text}, the others" in plan_tables.plain(found)
    assert "Gradients" not in plan_tables.markdown(suite_of(plans[3]))
    assert text.replace("3 of 4", "1 of 1") + "." in plan_tables.markdown(suite_of(plans[0]))


def test_the_largest_difference_is_that_of_the_worst_leaf():
    expected = {"a": np.array([2.0, -8.0], np.float32), "b": np.array([0.5], np.float32)}
    far = {"a": np.array([2.0, -7.0], np.float32), "b": np.array([0.375], np.float32)}
    # 1 of 8, and 0.125 of 0.5.
    assert gradients.largest_difference(far, expected) == 0.25
    assert gradients.largest_difference(expected, expected) == 0.0
    assert gradients.largest_difference([], []) == 0.0
    nothing = np.array([np.nan], np.float32)
    assert gradients.largest_difference(nothing, nothing) == 0.0
    assert gradients.largest_difference(nothing, expected["b"]) == 1.0
    assert gradients.largest_difference(expected["b"], 0 * expected["b"]) == 1.0
    zero = np.zeros(1, np.float32)
    # Not the same bits, and no distance apart.
    assert 0 < gradients.largest_difference(-zero, zero) < 1e-37
    low = jax.numpy.array([1.0, 1.5], jax.numpy.bfloat16)
    assert gradients.largest_difference(low, low + 0.5) == 0.25
    with pytest.raises(ValueError, match="dict"):
        gradients.largest_difference([zero], expected)


def claim_of(net, is_aim):
    return next(claim for claim in CLAIMS if claim.net == net and claim.is_aim == is_aim)


@pytest.mark.parametrize(("recomputed", "holds"), [(10_500_000_000, True), (10_500_000_001, False)])
def test_the_chain_at_its_best_segments(recomputed, holds):
    place = {"net": "chain16", "target": "local"}
    base = competitor(NO_REMAT, 400 * MIB, 0, **place)
    rows = [competitor(f"segments of {n}", peak * MIB, 1, **place) for n, peak in ((1, 160), (2, 112), (4, 120))]
    claim = claim_of("chain16", False)
    asked = suite_of(base, *rows)
    assert claim.budget_bytes(asked, "chain16", "local") == 112 * MIB
    assert claim.budget_bytes(asked, "chain16", "h100") is None
    assert not claim.is_asked(asked)
    assert not plan.is_beaten(asked)
    found = suite_of(base, *rows, planned(112 * MIB, 100 * MIB, recomputed, **place))
    assert claim.measured(found) == recomputed / 1e9
    assert claim.holds(found) == holds
    assert plan.is_beaten(found) == (not holds or bool(plan_tables.misses(found)))


def test_a_third_of_the_temporaries():
    base = competitor(NO_REMAT, 1000, 0, net="resnet50", temp=900)
    claim = claim_of("resnet50", True)
    assert claim.budget_bytes(suite_of(base), "resnet50", "h100") == 100 + 300
    found = suite_of(base, planned(400, 400, 13, net="resnet50"))
    assert claim.measured(found) == 13.0  # of the 100 of a step
    assert not claim.holds(found)
    assert not plan.is_beaten(found)  # it is aimed at


def test_results_survive_a_file(tmp_path):
    path = tmp_path / "plan.jsonl"
    first, second = planned(700, 600, 8), replace(planned(700, 500, 9), date="2026-11-29T10:00:00+00:00")
    for result in (BASE, first, competitor("b", None, 0), second):
        plan_cells.append(path, result)
    read = plan_cells.read([path])
    assert list(read) == [BASE.cell, second.cell, Cell("competitor", "tiny", "h100", "b")]
    assert read[BASE.cell] == BASE
    assert read[second.cell] == second
    # A line of the time before gradients were run.
    document = json.loads(second.to_json())
    assert document["planned"].pop("gradient_difference") is None
    assert plan_cells.from_json(json.dumps(document)) == second
    path.write_text(path.read_text() + '{"cell": 1}\n')
    with pytest.raises(ExperimentError, match=r"line 5 must be a result of this benchmark; it lacks .*Delete the line"):
        plan_cells.read([path])


TINY = {"tiny": lambda batch_size=2: nets.chain(3, batch_size=batch_size, size=8, channels=4)}
ARGUMENTS = ("--nets", "tiny", "--targets", "local", "--competitors", "per block: nothing", "segments of 1")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(plan, "NETS", TINY)


def test_a_run_is_taken_up_where_it_was_left(tiny, tmp_path, capsys, monkeypatch):
    path = tmp_path / "plan.jsonl"
    assert plan.main([*ARGUMENTS, "--out", str(path), "--seconds", "0"]) == 0
    out = capsys.readouterr().out
    # Nothing was begun, so the budgets are not known: no remat and two competitors are left.
    assert json.loads(out.splitlines()[-1])["left"] == 3
    assert not path.exists()

    status = plan.main([*ARGUMENTS, "--out", str(path)])
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert status == (1 if result["misses"] else 0)
    lines = path.read_text().splitlines()
    assert result["cells"] == len(lines) >= 5  # three competitors, 75 % and 50 % at least
    assert "tiny local, per block: nothing" in err
    found = plan_cells.read([path])
    three = [found[Cell("competitor", "tiny", "local", name)].figures for name in (NO_REMAT, *ARGUMENTS[5:])]
    # A convolution at 8 x 8 with 4 channels and batch 2; a block's each, and all but the last run's.
    conv = 2 * 2 * 22**2 * 4 * 4
    assert [figures.recomputed_flops for figures in three] == [0, 3 * conv, 2 * conv]
    for cell, result in found.items():
        assert result.hardware["cores"] >= 1, cell
        assert result.date.startswith("20"), cell
        assert result.versions["jax"], cell
    assert not disagreements(Suite(found))
    # It is a network of ReLUs: what is computed twice is the same twice.
    apart = [difference for _, difference in compared_gradients(Suite(found))]
    assert apart == [0.0] * sum(result.planned is not None for result in found.values())
    assert f"Gradients of {len(apart)} of {len(apart)} local plans were compared" in out
    assert f"{len(apart)} bit-identical." in out

    # The last line is lost: its cell alone is run again.
    path.write_text("\n".join(lines[:-1]) + "\n")
    ran = []
    monkeypatch.setattr(plan_cells, "plan", lambda cell, net, planner, early: ran.append(cell) or planned(1, 1, 1))
    monkeypatch.setattr(plan_cells, "compete", lambda cell, net, loss: pytest.fail(f"{cell} was run again"))
    plan.main([*ARGUMENTS, "--out", str(path)])
    assert ran == [plan_cells.from_json(lines[-1]).cell]

    plans = [cell for cell in found if cell.kind == "plan"]
    ran.clear()
    plan.main([*ARGUMENTS, "--out", str(path), "--again", "plan"])
    assert ran == plans


def test_gradients_are_run_where_they_fit(monkeypatch):
    net = TINY["tiny"]()
    cell = Cell("plan", "tiny", "local", jaxremat.cost(jax.value_and_grad(net.loss), *net.args).peak_bytes)
    planner = cache(lambda: jaxremat.Planner(net.loss, *net.args))
    apart = plan_cells.plan(cell, net, planner).planned.gradient_difference
    assert apart == 0.0
    # The same plan, with the loss of another batch of random numbers: the comparison is one.
    reference = gradients.reference(net)
    monkeypatch.setattr(gradients, "reference", lambda net: (net.arguments(seed=1), reference[1]))
    assert plan_cells.plan(cell, net, planner).planned.gradient_difference > 0.01
    monkeypatch.setattr(gradients, "_PART_OF_MEMORY", 0.0)
    assert plan_cells.plan(cell, net, planner).planned.gradient_difference is None


def test_what_fails_is_a_row(tiny, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise jaxremat.CompileError("no such instruction")

    monkeypatch.setattr(jaxremat, "cost", refuse)
    assert plan.main([*ARGUMENTS]) == 0
    out, err = capsys.readouterr()
    assert "tiny local, per block: nothing failed: CompileError: no such instruction" in out
    assert "tiny local, no remat: failed: CompileError: no such instruction" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--targets", "local", "--nets", "tinny"), "--nets takes tiny; got 'tinny'. Did you mean 'tiny'"),
        (("--targets", "local", "--nets", "tiny:0"), "as in tiny:32; got 'tiny:0'"),
        (("--nets", "tiny", "--targets", "h10"), "Did you mean 'h100'"),
        (("--nets", "tiny", "--targets", "v5e:2x2"), "on one chip, as in v5e; got 'v5e:2x2'"),
        ((*ARGUMENTS[:4], "--competitors", "per block: dot"), "Did you mean 'per block: dots'"),
        ((*ARGUMENTS[:4], "--out", "/"), "--out must name a file that can be written"),
        ((*ARGUMENTS[:4], "--seconds", "nan"), "--seconds must be a number of at least 0; got nan"),
        (("--picture", "plan.svg"), "must hold results, plan*.jsonl; it holds none"),
        (("--picture", "plan.svg", "--seconds", "3"), "beside them --out alone has a meaning"),
        (("--picture", "plan.svg", "--out", "/nowhere.jsonl"), "must be a file of results: No such file"),
    ],
)
def test_bad_input(tiny, arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "RESULTS", tmp_path)
    assert plan.main(list(arguments)) == 2
    assert message in capsys.readouterr().err


def test_another_batch(tiny):
    assert plan.net_of("tiny:5").args[1].shape == (5, 8, 8, 4)
    assert plan.net_of("tiny").args[1].shape == (2, 8, 8, 4)


def example():
    rows = [("per block: nothing", 600, 50), ("segments of 2", 500, 40), ("whole net: dots", 1200, 0)]
    plans = [planned(750, 740, 5), planned(600, 600, 10), planned(500, 490, 45)]
    return suite_of(BASE, *(competitor(*row) for row in rows), *plans)


def test_tables():
    rows = plan_tables.rows(example())
    assert [(row[2], row[-1]) for row in rows] == [
        ("per block: nothing", "less"),
        ("segments of 2", "more"),
        ("75% of no remat", "found"),
        ("50% of no remat", "found"),
    ]
    ((net, target, _, *counts, at_75, at_50, _, _, off, _),) = plan_tables.summary(example())
    assert (net, target, counts, at_75, at_50, off) == (
        "tiny",
        "h100",
        ["2", "1", "0", "0", "1"],
        "5.0 %",
        "45.0 %",
        "10.0 %",
    )
    text = plan_tables.markdown(example())
    assert "- miss: tiny h100, segments of 2: 500 bytes" in text
    assert "| tiny | h100 | per block: nothing |" in text


def test_the_block_of_a_page(tmp_path, capsys):
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- plan:begin -->\n<!-- plan:end -->\nb\n")
    lines, figure = tmp_path / "plan.jsonl", tmp_path / "plan.svg"
    for result in example().results:
        plan_cells.append(lines, result)
    assert plan.main(["--readme", str(page), "--picture", str(figure), "--out", str(lines)]) == 0
    assert figure.exists()
    assert json.loads(capsys.readouterr().out)["changed"]
    assert page.read_text() == f"a\n<!-- plan:begin -->\n{plan_tables.markdown(example())}\n<!-- plan:end -->\nb\n"
    assert update_block(page, "plan", plan_tables.markdown(example()), write=False)
    page.write_text("a\n")
    assert plan.main(["--readme", str(page), "--out", str(lines)]) == 2
    assert "must hold one block that begins with <!-- plan:begin -->" in capsys.readouterr().err


def test_picture(tmp_path):
    # A plan that another one beats is no corner of the line.
    found = suite_of(*example().results, planned(650, 650, 12))
    assert [(f.peak_bytes, f.recomputed_flops) for f in curve(found, "tiny", "h100")] == [
        (740, 5),
        (600, 10),
        (490, 45),
    ]
    first, second = (picture(found, tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    for text in ("tiny, h100", "plans", "per block", "segments of", "whole net"):
        assert f">{text}" in first.decode()
    with pytest.raises(ValueError, match=r"ends in \.svg or \.png"):
        picture(found, tmp_path / "plan.pdf")
    with pytest.raises(ValueError, match="nothing to draw"):
        picture(suite_of(BASE), tmp_path / "c.svg")


@wants("v5e")
def test_for_a_tpu_the_plan_for_half_is_compiled_to_its_end(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXREMAT_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "plan.jsonl"
    plan.main(["--nets", "tiny", "--targets", "v5e", "--competitors", "per block: nothing", "--out", str(path)])
    suite = Suite(plan_cells.read([path]))
    whole = {result.cell.asked for result in suite.results if result.figures and result.figures.temp_bytes is not None}
    half = suite.without_remat("tiny", "v5e")[0].peak_bytes // 2
    assert all(half - half // NEAR <= asked <= half for asked in whole)
    assert suite.plan("tiny", "v5e", half) is not None
    assert not disagreements(suite)
