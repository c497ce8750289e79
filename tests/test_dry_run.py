"""`--dry-run`: the table of policies and targets, the largest batch, and what goes wrong."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from compilers import wants

import jaxremat
from experiments import cifar, dry_run, program
from experiments.config import Config
from experiments.devices import absent_devices
from experiments.dry_run import DryRun, run_queues
from experiments.largest_batch import Found, Probe, find_largest_batch
from experiments.policies import KINDS, split_policies
from jaxremat import policy as p

MIB = 2**20
GIB = 2**30
TARGETS = sys.modules["jaxremat.targets"]
# The state of `net` beside its data set: parameters and momentum.
NET_PARAMETERS = 62_006


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXREMAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


def status(argv):
    try:
        return cifar.main([*argv, "--dry-run"])
    except SystemExit as end:  # tyro's own errors
        return int(end.code or 0)


# text, the policies in it
LISTS = {
    "dots": ["dots"],
    "dots,names:a,b,segments:sqrt": ["dots", "names:a,b", "segments:sqrt"],
    "everything,nothing": ["everything", "nothing"],
    "ops:conv=store,relu=recompute": ["ops:conv=store,relu=recompute"],
    "ops:conv=store,*=recompute,dots,nothing": ["ops:conv=store,*=recompute", "dots", "nothing"],
    "names:a,b+dots,c": ["names:a,b+dots", "c"],
    "dots+names:a,b,nothing": ["dots+names:a,b", "nothing"],
    "names:a,nothing+names:b,c": ["names:a", "names:b,c"],
    "offload:names:a,b,offload:dots": ["offload:names:a,b", "offload:dots"],
    "values:3,17,budget:60%,budget:2GiB": ["values:3,17", "budget:60%", "budget:2GiB"],
    "paths:*/Conv_*,head,segments:4": ["paths:*/Conv_*,head", "segments:4"],
    "dots_saveable,nothing_saveable": ["dots", "nothing"],
    "dots, names:a, b ,nothing": ["dots", "names:a,b", "nothing"],
    "dots,dots_saveable,dots": ["dots"],
}


@pytest.mark.parametrize("text", LISTS)
def test_a_list_of_policies_is_split_where_a_policy_begins(text):
    wanted = LISTS[text]
    if wanted[-1] == "c":  # after a policy that takes no list
        with pytest.raises(jaxremat.PolicyError, match="'c' is not a policy"):
            split_policies(text)
    else:
        assert split_policies(text) == list(map(jaxremat.parse, wanted))


def test_every_kind_of_the_grammar_begins_a_policy():
    examples = [
        p.Everything(), p.Nothing(), p.Dots(), p.DotsNoBatch(), p.Names(("a",)), p.Ops((("conv", "store"),)),
        p.Paths(("a",)), p.Segments(2), p.Values((1,)), p.Loops(p.Nothing(), ((p.Part(p.Dots(), 4),),)), p.Offload(p.Dots()),
        p.Budget("fits"),
    ]  # fmt: skip
    # A union is spelt as what it holds; what resolves to another policy, such as a plan, as that.
    kinds = {kind for kind in p.Policy.__subclasses__() if kind.resolved is p.Policy.resolved}
    assert {type(e) for e in examples} == kinds - {p.Union}
    assert {str(e).partition(":")[0] for e in examples if ":" in str(e)} == set(KINDS)
    for example in examples:
        assert split_policies(f"names:x,{example}") == [p.Names(("x",)), example]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dots,nothng", "'nothng' is not a policy. Did you mean 'nothing'"),
        ("dots,segments:sqt", "Did you mean 'sqrt'"),
        ("names:a,segments:sqt", "Did you mean 'sqrt'"),
        ("dots,none", "opposite things"),
        ("ops:conv=store,relu=recomptue,dots", "Did you mean 'recompute'"),
        ("dots,", "empty policy"),
        ("", "empty policy"),
        (",dots", "empty policy"),
        ("names:a,,dots", "got ''"),
    ],
)
def test_what_is_no_list_of_policies(text, message):
    with pytest.raises(jaxremat.PolicyError) as error:
        split_policies(text)
    assert message in str(error.value)


def test_the_table_of_a_small_net(capsys, tmp_path):
    plot = tmp_path / "cost.svg"
    argv = ["--data=sample", "--batch-size=64", "--policy=dots,everything", f"--plot={plot}"]
    assert status(argv) == 0
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    plain, dots = document["rows"]
    assert [(row["target"], row["policy"], row["regions"]) for row in (plain, dots)] == [
        ("local", "everything", "net"),
        ("local", "dots", "net"),
    ]
    # `net` keeps for dots the outputs of its five layers, and small values besides.
    layers = 64 * 4 * (28 * 28 * 6 + 10 * 10 * 16 + 120 + 84 + 10)
    assert layers <= dots["residual_bytes"] < 1.1 * layers < plain["residual_bytes"]
    assert plain["recomputed_flops"] == 0 < dots["recomputed_flops"] == dots["flops"] - plain["flops"]
    # One device's peak holds at least the data set, parameters and momentum.
    for row in (plain, dots):
        assert row["peak_bytes"] > 1000 * 32 * 32 * 3 + 2 * 4 * NET_PARAMETERS
        assert row["fits"] is True
        assert row["problem"] is row["largest_batch"] is None
    assert document["training_images"] == 1000
    assert document["config"]["policy"] == "dots,everything"
    assert document["versions"]["jax"] == jax.__version__
    assert "everything (no remat)" in out
    assert err.count("compiled in") == 2
    assert ">dots<" in plot.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["cost.svg"]


def test_what_is_compiled_is_what_training_compiles():
    """The dry run's shapes are those of the arrays and state that a run makes."""
    config = Config(model="net", data="sample", batch_size=50)
    parts = program.describe(config, program.apply_policy(config, 10), 1000, absent_devices(1))
    state = jax.eval_shape(parts.init)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), parts.state
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(parts.state.params)) == NET_PARAMETERS
    assert (parts.training.images.shape, parts.training.images.dtype) == ((1000, 32, 32, 3), "uint8")
    assert (parts.order.shape, parts.order.dtype) == ((20, 50), "int32")


@wants("h100")
def test_a_gpu_that_is_not_here():
    config = Config(model="net", batch_size=128, policy="nothing,dots")
    plain, nothing, dots = dry_run.run(config, DryRun(dry_run=True, target="h100"), lambda line: None)
    assert [row.policy for row in (plain, nothing, dots)] == ["everything", "nothing", "dots"]
    assert nothing.peak_bytes < plain.peak_bytes
    # At this size the data set counts most.
    for row in (plain, nothing, dots):
        assert 50_000 * 3072 + 2 * 4 * NET_PARAMETERS < row.peak_bytes < 200 * MIB
        assert row.memory_bytes == jaxremat.targets()["h100"].memory_bytes
        assert row.fits


@wants("h100")
def test_several_chips_divide_the_batch():
    config = Config(model="net", batch_size=8192)
    one, four = (
        dry_run.run(config, DryRun(dry_run=True, target=target), lambda line: None)[0] for target in ("h100", "h100:4")
    )
    assert one.residual_bytes == four.residual_bytes
    # What a batch needs beside the data set is divided.
    data = 50_000 * 3072
    assert 0.2 * (one.peak_bytes - data) < four.peak_bytes - data < 0.4 * (one.peak_bytes - data)


def pretend(monkeypatch, **missing):
    """Compilers of the kinds are missing with these remedies, or, with an empty one, there."""
    monkeypatch.setattr(TARGETS, "missing_package", lambda kind: missing[kind])


def costs(monkeypatch, answer):
    """Puts `answer(policy's number of the call, batch, target)` in place of the compilers."""
    calls = list[tuple[int, str]]()
    lock = threading.Lock()
    real = jaxremat.cost(lambda x: x, 1.0)

    def cost(step, state, training, order, *, target):
        with lock:
            calls.append((order.shape[1], target))
        result = answer(order.shape[1], target)
        if isinstance(result, Exception):
            raise result
        return dataclasses.replace(
            real, target=target, peak_bytes=result, memory_bytes=jaxremat.targets()[target].memory_bytes
        )

    monkeypatch.setattr(jaxremat, "cost", cost)
    return calls


def rows_of(capsys):
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return json.loads(out.splitlines()[-1])["rows"], out, err


def test_a_missing_compiler_is_a_row_and_the_rest_goes_on(monkeypatch, capsys):
    pretend(monkeypatch, gpu="", tpu="pip install the-tpu-compiler")
    costs(monkeypatch, lambda batch, target: GIB)
    assert status(["--policy=dots", "--target=v5e,H100,h100"]) == 0
    rows, out, err = rows_of(capsys)
    assert [(row["target"], row["policy"], row["peak_bytes"]) for row in rows] == [
        ("v5e", None, None),
        ("h100", "everything", GIB),
        ("h100", "dots", GIB),
    ]
    line = next(line for line in out.splitlines() if line.strip().startswith("v5e"))
    assert "nothing here compiles for v5e. Needed: pip install the-tpu-compiler" in line
    assert "error" not in err


def test_nothing_to_compile_with_is_status_2(monkeypatch, capsys, tmp_path):
    pretend(monkeypatch, gpu="pip install the-gpu-compiler", tpu="pip install the-tpu-compiler")
    assert status(["--target=v5e,h100", f"--plot={tmp_path / 'cost.png'}"]) == 2
    rows, _, err = rows_of(capsys)
    assert [row["target"] for row in rows] == ["v5e", "h100"]
    assert err.startswith(
        "error: none of the targets gave a figure: nothing here compiles for v5e. Needed: pip install "
    )
    assert err.count("\n") == 1
    assert not (tmp_path / "cost.png").exists()


def test_a_program_that_does_not_fit_or_compile_says_so(monkeypatch, capsys, tmp_path):
    pretend(monkeypatch, gpu="", tpu="")
    refusals = iter(
        [jaxremat.CompileError("cost: out of memory", 20 * GIB), jaxremat.CompileError("cost: no [such] op"), GIB]
    )
    costs(monkeypatch, lambda batch, target: next(refusals))
    plot = tmp_path / "cost.svg"
    assert status(["--policy=dots,nothing", "--target=v5e", f"--plot={plot}"]) == 0
    (plain, dots, nothing), out, _ = rows_of(capsys)
    assert (plain["peak_bytes"], plain["fits"], plain["problem"]) == (20 * GIB, False, "cost: out of memory")
    assert (dots["peak_bytes"], dots["fits"], dots["problem"]) == (None, None, "cost: no [such] op")
    assert (nothing["peak_bytes"], nothing["fits"], nothing["problem"]) == (GIB, True, None)
    assert nothing["recomputed_flops"] > 0
    assert "cost: no [such] op" in out
    assert "not compiled: dots" in plot.read_text()
    assert "no remat, 20.00 GiB" in plot.read_text()


def test_the_largest_batch_is_found_with_few_compilations(monkeypatch, capsys):
    pretend(monkeypatch, gpu="", tpu="")

    # 16 GiB: 100 MiB and 6 MiB an image leave room for 2,714. With 4 chips each has a quarter of the batch.
    def peak(batch, target):
        return (100 + 6 * batch // (4 if target == "v5e:2x2" else 1)) * MIB

    calls = costs(monkeypatch, peak)
    assert status(["--largest-batch", "--target=v5e,v5e:2x2", "--batch-size=128"]) == 0
    (one, four), out, _ = rows_of(capsys)
    # Between 2,048 and 4,096 batches are told apart in steps of 64, and in units of four chips likewise.
    assert one["largest_batch"] == 2714 // 64 * 64 == 2688
    assert four["largest_batch"] == 4 * 2688
    assert len(calls) <= 2 * 5
    assert "2,688" in out
    assert not one["largest_batch_is_limit"]


def test_the_largest_batch_ends_at_the_training_set_and_at_nothing(monkeypatch, capsys):
    pretend(monkeypatch, gpu="", tpu="")
    calls = costs(
        monkeypatch, lambda batch, target: MIB if target == "h100" else jaxremat.CompileError("oom", 99 * GIB)
    )
    assert status(["--largest-batch", "--target=h100,v5e", "--batch-size=50", "--data=sample"]) == 0
    (h100, v5e), out, _ = rows_of(capsys)
    assert (h100["largest_batch"], h100["largest_batch_is_limit"]) == (1000, True)
    assert (v5e["largest_batch"], v5e["largest_batch_is_limit"]) == (0, False)
    assert "1,000 (all images)" in out
    assert max(batch for batch, _ in calls) == 1000
    assert len(set(calls)) == len(calls)


def test_a_refusal_while_searching_is_noted(monkeypatch, capsys):
    pretend(monkeypatch, gpu="", tpu="")
    costs(monkeypatch, lambda batch, target: 6 * MIB * batch if batch == 128 else jaxremat.CompileError("cost: odd"))
    assert status(["--largest-batch", "--target=v5e"]) == 0
    (row,), _, _ = rows_of(capsys)
    assert row["largest_batch"] is None
    assert row["peak_bytes"] == 6 * MIB * 128
    assert row["problem"].startswith("largest batch: with ")


# bytes an image, bytes beside, memory
GROWTH = [(7, 100, 8000), (1, 0, 1000), (3, 5, 100_000), (50, 0, 40), (50, 0, 60), (1, 900, 1000)]


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize(("slope", "fixed", "memory"), GROWTH)
def test_the_search_is_within_a_32nd(slope, fixed, memory, unit, tells):
    asked = []

    def probe(batch):
        asked.append(batch)
        size = fixed + slope * batch
        return Probe(size <= memory, size if tells else None)

    found = find_largest_batch(probe, start=8, unit=unit, limit=50_001, memory_bytes=memory)
    highest = 50_001 // unit * unit
    best = min((memory - fixed) // slope // unit * unit, highest)
    assert found.batch_size <= best
    assert best - found.batch_size <= max(unit - 1, found.batch_size / 32)
    assert found.is_limit == (found.batch_size == highest)
    assert len(set(asked)) == len(asked) == found.probes <= (6 if tells else 12)
    assert all(batch % unit == 0 and unit <= batch <= highest for batch in asked)


def test_the_search_ends_where_sizes_jump_about():
    found = find_largest_batch(
        lambda batch: Probe(batch % 3 == 0, None), start=3, unit=1, limit=50_000, memory_bytes=1, most_probes=6
    )
    assert found == Found(found.batch_size, False, 6)
    assert found.batch_size % 3 == 0


def test_the_search_gets_past_a_plateau():
    """From 12,000 to 24,000 the size hardly grows, as when a compiler begins to recompute by itself."""

    def size(batch):
        return 4 * min(batch, 12_000) + max(0, min(batch, 24_000) - 12_000) // 2 + 7 * max(0, batch - 24_000)

    found = find_largest_batch(
        lambda batch: Probe(size(batch) <= 61_000, size(batch)), start=512, unit=1, limit=50_000, memory_bytes=61_000
    )
    assert 25_000 * 31 / 32 <= found.batch_size <= 25_000 == 24_000 + 7_000 / 7
    assert found.probes <= 9


@pytest.mark.parametrize(("start", "unit"), [(0, 1), (3, 2), (101, 1)])
def test_a_search_begins_within_its_bounds(start, unit):
    with pytest.raises(ValueError, match=f"multiple of {unit}, from {unit} to 100; got {start}"):
        find_largest_batch(lambda batch: Probe(True, 1), start=start, unit=unit, limit=100, memory_bytes=1)


def test_queues_run_beside_each_other_and_hand_on_what_they_raise():
    first, second = threading.Event(), threading.Event()

    def meet(mine, other):
        mine.set()
        assert other.wait(30)

    run_queues([[lambda: meet(first, second)], [lambda: meet(second, first)], []])
    with pytest.raises(ZeroDivisionError):
        run_queues([[lambda: None, lambda: 1 // 0, lambda: pytest.fail("went on")]])


# arguments, what the message must say
BAD = {
    "target": (["--target=h10"], "Did you mean 'h100'"),
    "one of several targets": (["--target=local,h10"], "Did you mean 'h100'"),
    "no target": (["--target="], "'' does not exist. There are local"),
    "topology": (["--target=v5e:2"], "grid of 2 dimensions"),
    "local with a suffix": (["--target=local:2"], "no suffix"),
    "policy": (["--policy=dots,nothng"], "Did you mean 'nothing'"),
    "policy that fits nothing": (["--policy=dots,names:conv_uot"], "conv_out"),
    "plot": (["--plot=cost.pdf"], "--plot must name a file that ends in .svg or .png; got 'cost.pdf'"),
    "plot in no directory": (["--plot=/nowhere/at/all.png"], "--plot must name a file that can be written"),
    "batch of several chips": (["--target=h100:3"], "--target h100:3: --batch-size must be a multiple of the 3 devices"),
    "batch larger than the data": (["--data=sample", "--batch-size=1002"], "number of training images, 1000; got 1002"),
    "no batch": (["--batch-size=0"], "--batch-size must be at least 1"),
    "checkpoints": (["--checkpoint-dir=ckpt"], "--checkpoint-dir belongs to training"),
    "out": (["--out=records.jsonl"], "--out belongs to training"),
    "steps": (["--max-steps=3"], "--max-steps belongs to training"),
    "processes": (["--coordinator=auto"], "--coordinator belongs to training"),
    "data directory": (["--data-dir=/tmp"], "--data-dir belongs to training"),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_message_and_status_2(argv, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    pretend(monkeypatch, gpu="", tpu="")
    monkeypatch.setattr(jaxremat, "cost", lambda *_, **__: pytest.fail("compiled"))
    assert status(argv) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--target=h100", "--target needs --dry-run"),
        ("--largest-batch", "--largest-batch needs --dry-run"),
        ("--plot=a.png", "--plot needs --dry-run"),
        ("--policy=dots,nothing", "--policy takes one policy to train with, and several only with --dry-run; got 2: dots and nothing"),
    ],
)  # fmt: skip
def test_options_of_a_dry_run_alone(option, message, capsys):
    assert cifar.main([option]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {message}")
    assert out == ""


def test_no_backend_starts_for_chips_that_are_not_here():
    """With a platform that does not exist, whatever starts a backend would fail."""
    script = """if True:
        import sys
        import jaxremat.targets as t
        from experiments import dry_run
        from experiments.config import Config
        sys.modules["jaxremat.targets"].missing_package = lambda kind: "" if kind == "gpu" else "nothing"
        def cost(*_, **__):
            raise jaxremat.CompileError("asked")
        import jaxremat
        jaxremat.cost = cost
        options = dry_run.DryRun(dry_run=True, target="h100,v5e")
        print([row.problem for row in dry_run.run(Config(policy="nothing"), options, lambda line: None)])
    """
    root = Path(__file__).parents[1]
    environment = {**os.environ, "JAX_PLATFORMS": "there_is_none", "PYTHONPATH": str(root)}
    answer = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert answer.stdout == "['asked', 'asked', 'nothing here compiles for v5e. Needed: nothing']\n", answer.stderr
