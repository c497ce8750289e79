"""`--policy budget:...`: planned with the real step, trained, kept for the next run, and refused with one message."""

import dataclasses
import json
import sys

import jax
import pytest
from rich.console import Console

import jaxremat
from experiments import budgets, cifar, data, program, report
from experiments.config import Config
from experiments.devices import all_devices
from experiments.records import Record
from experiments.training import make_loss
from jaxremat.policy import Values

TARGETS = sys.modules["jaxremat.targets"]
SHORT = ["--data=sample", "--batch-size=50", "--max-steps=2"]
CONFIG = Config(data="sample", batch_size=50, max_steps=2, policy="budget:96%")
# JAX's XLA:CPU rounds the same sums otherwise in other fusions from here on.
SAME_BITS = jax.__version_info__ < (0, 11)


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def shared(cache, monkeypatch):
    monkeypatch.setenv("JAXREMAT_CACHE_DIR", str(cache))
    return cache


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXREMAT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def status(argv):
    try:
        return cifar.main(argv)
    except SystemExit as end:  # tyro's own errors
        return int(end.code or 0)


def run(capsys, *argv):
    code = status(list(argv))
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out.splitlines()[-1]), out, err


def counted(monkeypatch, **changed):
    """Counts the calls of the planner."""
    calls, real = [], jaxremat.plan

    def plan(*args, **kwargs):
        calls.append(kwargs["budget"])
        return real(*args, **kwargs, **changed)

    monkeypatch.setattr(jaxremat, "plan", plan)
    return calls


def same_training(one, other):
    assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
    if SAME_BITS:
        assert one["params_sha256"] == other["params_sha256"]


@pytest.fixture(scope="module")
def plain():
    config = dataclasses.replace(CONFIG, policy="everything")
    record = cifar.train(config, Console(quiet=True)).record
    assert record is not None
    return dataclasses.asdict(record)


def test_a_budget_is_planned_trained_and_kept(plain, shared, capsys, monkeypatch):
    calls = counted(monkeypatch)
    first, out, err = run(capsys, *SHORT, "--policy=budget:96 %")
    assert calls == ["96%"]
    assert plain["plan"] is None
    assert (first["policy_asked"], first["regions"]) == ("budget:96 %", "net")
    same_training(first, plain)
    plan = first["plan"]
    assert set(plan) == set(budgets.FIGURES)
    assert plan["budget_bytes"] == int(0.96 * plan["without_remat_bytes"])
    assert plan["peak_bytes"] <= plan["budget_bytes"] < plan["without_remat_bytes"]
    assert 0 < plan["recomputed_flops"] <= plan["forward_flops"]
    # What was weighed is what ran: the same temporary memory.
    assert first["compiled_temp_bytes"] < plain["compiled_temp_bytes"]
    saved = plan["without_remat_bytes"] - plan["peak_bytes"]
    assert plain["compiled_temp_bytes"] - first["compiled_temp_bytes"] == pytest.approx(saved, abs=64)
    assert "budget:96%: " in out
    assert "planned for local" in out
    assert report.bytes_text(plan["peak_bytes"]) in out
    assert "planning, which compiles the step several times" in err

    (kept,) = (shared / "plans").glob("*.json")
    monkeypatch.setattr(jaxremat, "plan", lambda *_, **__: pytest.fail("planned again"))
    second, _, err = run(capsys, *SHORT, "--policy=budget:96%")
    assert f"the plan is taken from {kept}" in err
    assert "planning" not in err
    assert (second["policy"], second["plan"]) == (first["policy"], plan)
    assert second["params_sha256"] == first["params_sha256"]

    # A dry run shows the same plan.
    document, out, err = run(capsys, *SHORT[:2], "--policy=budget:96%", "--dry-run", "--largest-batch")
    none, row = document["rows"]
    assert (none["policy"], none["plan"], none["resolved"]) == ("everything", None, None)
    assert (row["policy"], row["resolved"], row["plan"]) == ("budget:96%", first["policy"], plan)
    assert row["peak_bytes"] == plan["peak_bytes"]
    assert none["peak_bytes"] == plan["without_remat_bytes"]
    assert row["recomputed_flops"] == row["flops"] - none["flops"] > 0
    assert "a plan is for one batch" in row["problem"]
    assert "budget:96% (" in out


def test_a_list_of_values_means_the_same_inside_of_the_step(plain, empty, capsys, monkeypatch):
    """The planner counts the values of the loss as the step traces it, over a mesh."""
    calls = counted(monkeypatch, compile=False)
    planned, out, _ = run(capsys, *SHORT, "--policy=budget:3.3MiB")
    assert len(calls) == 1
    assert isinstance(jaxremat.parse(planned["policy"]), Values)
    assert planned["plan"]["peak_bytes"] is None
    assert "stored values (whole loss)" in out
    assert planned["policy"] not in out.splitlines()[3]
    assert "the planner's model decided" in out
    same_training(planned, plain)
    spelled = program.apply_policy(dataclasses.replace(CONFIG, policy=planned["policy"]), 10)
    assert spelled.residual_bytes(50) == planned["residual_bytes"] < plain["residual_bytes"]


def a_plan(policy, **changed):
    plan = dataclasses.replace(
        jaxremat.plan(lambda w: (w**2).sum(), jax.ShapeDtypeStruct((8,), "float32"), budget="1MiB", compile=False),
        policy=jaxremat.parse(policy), peak_bytes=2**20,
    )  # fmt: skip
    return dataclasses.replace(plan, **changed)


def plan_again(monkeypatch, found):
    calls = []

    def plan(*args, **kwargs):
        calls.append(kwargs)
        return found

    monkeypatch.setattr(jaxremat, "plan", plan)
    said = []
    target = jaxremat.targets()["local"]
    return lambda config=CONFIG: budgets.plan_run(config, target, 1000, said.append)[1], calls, said


DAMAGE = {
    "another program": lambda path, plan: dataclasses.replace(plan, policy=Values((1, 2), "abcdef")).save(path),
    "over its budget": lambda path, plan: dataclasses.replace(plan, peak_bytes=2**20 + 1).save(path),
    "a figure of another type": lambda path, plan: dataclasses.replace(plan, budget_bytes="1MiB").save(path),
    "half a file": lambda path, plan: path.write_text(plan.to_json()[:99]),
    "no text": lambda path, plan: path.write_bytes(b"\xff\xfe"),
    "a list": lambda path, plan: path.write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_kept_plan_that_does_not_fit_is_made_anew(damage, empty, monkeypatch):
    found = a_plan("dots")
    again, calls, said = plan_again(monkeypatch, found)
    assert again() == again() == found
    assert len(calls) == 1
    (path,) = (empty / "plans").iterdir()
    damage(path, found)
    assert again() == found
    assert len(calls) == 2
    assert again() == found
    assert len(calls) == 2
    assert sum("is taken from" in line for line in said) == 2


def test_what_a_plan_depends_on(empty, monkeypatch):
    again, calls, _ = plan_again(monkeypatch, a_plan("dots"))
    again()
    for same in ({"seed": 1}, {"epochs": 3}, {"learning_rate": 0.1}, {"max_steps": None}, {"policy": "budget:96 %"}):
        again(dataclasses.replace(CONFIG, **same))
    assert len(calls) == 1
    others = ({"batch_size": 52}, {"precision": "bfloat16"}, {"ops": "lean"}, {"policy": "budget:80%"})
    for other in others:
        again(dataclasses.replace(CONFIG, **other))
    assert len(calls) == 1 + len(others)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2 ")
    again()
    assert len(calls) == 2 + len(others)


def test_a_directory_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXREMAT_CACHE_DIR", str(tmp_path / "file"))
    again, calls, _ = plan_again(monkeypatch, a_plan("dots"))
    assert again() == again()
    assert len(calls) == 2


def test_a_plan_that_stores_nothing_is_for_the_whole_loss():
    under = budgets.resolved(CONFIG, a_plan("nothing"))
    assert (under.policy, under.regions) == ("nothing", "net")


def test_the_checkpoint_belongs_to_the_budget():
    assert Config(policy="budget: 60 %").identity()["policy"] == "budget:60%"


def test_the_planner_gets_the_step_that_runs(empty, monkeypatch):
    again, calls, _ = plan_again(monkeypatch, a_plan("dots"))
    again()
    (asked,) = calls
    assert (asked["budget"], asked["target"]) == ("96%", "local")
    applied = program.apply_policy(dataclasses.replace(CONFIG, policy="everything"), 10)
    parts = program.describe(CONFIG, applied, 1000, all_devices())
    step, args = asked["step"](make_loss(applied.model))
    assert jax.tree.leaves(args) == jax.tree.leaves((parts.state, parts.training, parts.order))
    lowered = [each.lower(*args).as_text() for each in (step, parts.jit_step(jaxremat.compiler_options()))]
    assert lowered[0] == lowered[1]


def test_a_budget_above_the_peak_trains_without_remat_and_says_so(empty, capsys):
    record, out, err = run(capsys, "--data=sample", "--batch-size=50", "--max-steps=1", "--policy=budget:1GiB")
    assert record["policy"] == "everything"
    assert record["plan"]["peak_bytes"] == record["plan"]["without_remat_bytes"]
    assert "no rematerialization is needed within this budget" in err
    assert "no rematerialization is needed within this budget" in out
    assert record["note"]


def test_a_budget_below_the_floor_is_one_message(empty, capsys, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("the data set was fetched"))
    assert status([*SHORT, "--policy=budget:1MiB"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert "no plan keeps the peak within 1.0 MiB. The smallest found is" in err
    assert not list(empty.glob("plans/*"))


# arguments, what the message must say
BAD = {
    "blocks": (["--policy=budget:60%", "--regions=block"], "use --regions net or auto; got block for budget:60%"),
    "blocks in a dry run": (["--policy=dots,budget:60%", "--regions=block", "--dry-run"], "use --regions net or auto"),
    "several processes": (["--policy=budget:60%", "--coordinator=auto"], "A budget is planned in one process"),
    "no size": (["--policy=budget:much"], "2GiB, 500MB, 60% or fits"),
    "more than all": (["--policy=budget:140%"], "at most 100%"),
    "target of another policy": (["--target=h100", "--policy=dots"], "--target needs --dry-run, or a budget"),
    "several targets": (["--target=h100,local", "--policy=budget:60%"], "one target to plan a training for"),
    "no target": (["--target=", "--policy=budget:60%"], "'' does not exist"),
    "unknown target": (["--target=h10", "--policy=budget:60%"], "Did you mean 'h100'"),
    "plot": (["--target=h100", "--policy=budget:60%", "--plot=a.png"], "--plot needs --dry-run: training"),
    "compiler": (["--target=v5e", "--policy=budget:60%"], "nothing here compiles for v5e. Needed: pip install it"),
    "chips": (["--target=h100:3", "--policy=budget:60%"], "--target h100:3: --batch-size must be a multiple of the 3"),
}


@pytest.mark.parametrize(("argv", "message"), BAD.values(), ids=BAD.keys())
def test_refused_before_anything_is_fetched_or_planned(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("the data set was fetched"))
    monkeypatch.setattr(jaxremat, "plan", lambda *_, **__: pytest.fail("planned"))
    monkeypatch.setattr(TARGETS, "missing_package", lambda kind: "" if kind == "gpu" else "pip install it")
    assert status(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert message in err


def test_a_plan_for_auto_waits_for_the_data_set(monkeypatch, capsys):
    """What fits beside the sample may not fit beside the full set."""
    sizes = []

    def plan_run(config, target, training_images, say):
        sizes.append(training_images)
        raise jaxremat.PolicyError("enough")

    monkeypatch.setattr(budgets, "plan_run", plan_run)
    sample = data.load("sample")
    monkeypatch.setattr(data, "load", lambda *_: sample)
    for source in ("auto", "sample", "cifar10"):
        assert status(["--policy=budget:60%", f"--data={source}"]) == 2
    assert sizes == [1000, 1000, 50_000]


def test_a_budget_that_cannot_be_met_is_a_row(empty, capsys, monkeypatch):
    def plan(*_, **__):
        raise jaxremat.PolicyError("plan: no plan keeps [the] peak")

    monkeypatch.setattr(jaxremat, "plan", plan)
    document, out, _ = run(capsys, "--data=sample", "--batch-size=50", "--policy=budget:1MiB", "--dry-run")
    plain, row = document["rows"]
    assert plain["peak_bytes"] > 0
    assert (row["policy"], row["peak_bytes"], row["problem"]) == ("budget:1MiB", None, "plan: no plan keeps [the] peak")
    assert "no plan keeps [the] peak" in out


def test_records_without_a_plan_say_none():
    assert Record.__dataclass_fields__["plan"].default is None
