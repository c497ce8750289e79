import json
import os
import warnings
from pathlib import Path

import jax
import pytest
from rich.console import Console

import jaxremat
from experiments import cifar, data, devices, records
from experiments.config import Config
from experiments.errors import ExperimentError
from experiments.progress import Bar, Extent, Lines, choose_display

SHORT = ["--data=sample", "--batch-size=50", "--max-steps=3"]


def records_of(capsys) -> tuple[dict, str, str]:
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), out, err


def status(argv: list[str]) -> int:
    try:
        return cifar.main(argv)
    except SystemExit as end:  # tyro's own errors
        return int(end.code or 0)


def test_a_run_prints_its_table_and_its_record(capsys, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"earlier": true}\n')
    assert cifar.main([*SHORT, "--policy=dots_saveable", f"--out={path}"]) == 0
    record, out, err = records_of(capsys)
    assert "net on sample" in out
    assert "test accuracy" in err
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"earlier": True}, record]
    assert (record["policy_asked"], record["policy"], record["regions"]) == ("dots_saveable", "dots", "net")
    assert (record["dataset"], record["model"]) == ("sample", "net")
    assert (record["first_step"], record["last_step"], record["loss_steps"]) == (0, 3, [1, 2, 3])
    assert len(record["losses"]) == 3
    assert record["test_accuracies"] == [record["test_accuracy"]]
    # 500 test images
    assert record["test_accuracy"] * 500 == pytest.approx(round(record["test_accuracy"] * 500))
    assert record["compiled_temp_bytes"] > 0
    assert len(record["params_sha256"]) == 64
    assert record["config"]["batch_size"] == 50
    assert record["versions"]["jax"] == jax.__version__
    assert record["device"] == {"platform": "cpu", "kind": "cpu", "devices": jax.device_count(), "processes": 1}


def test_every_policy_ends_with_the_same_bits(capsys):
    digests = {}
    for policy in ("everything", "nothing", "dots", "dots_no_batch", "names:conv_out"):
        assert cifar.main([*SHORT, f"--policy={policy}"]) == 0
        record, _, _ = records_of(capsys)
        digests[policy] = record["params_sha256"]
        assert record["regions"] == ("block" if policy.startswith("nothing") else "net")
    assert len(set(digests.values())) == 1, digests


def test_seed_and_precision_matter(capsys):
    digests = set()
    for extra in ("--seed=0", "--seed=1", "--precision=bfloat16"):
        assert cifar.main([*SHORT, extra]) == 0
        digests.add(records_of(capsys)[0]["params_sha256"])
    assert len(digests) == 3


def test_training_learns(capsys):
    assert cifar.main(["--data=sample", "--batch-size=50", "--epochs=2"]) == 0
    record, _, _ = records_of(capsys)
    # The first losses are those of ten equal logits, log(10) = 2.303.
    assert sum(record["losses"][-10:]) / 10 < 2.2 < 2.25 < sum(record["losses"][:5]) / 5
    assert record["test_accuracy"] > 0.15


# argument, what the message must say
BAD = {
    "policy": (["--policy=dotz"], "Did you mean 'dots'"),
    "policy that means two things": (["--policy=none"], "opposite things"),
    "policy without argument": (["--policy=names:"], "needs an argument"),
    "action of an operation": (["--policy=ops:conv=stor"], "Did you mean 'store'"),
    "model": (["--model=resnet81"], "resnet18"),
    "precision": (["--precision=float16"], "float32"),
    "no epochs": (["--epochs=0"], "--epochs must be at least 1; got 0"),
    "epochs that are no number": (["--epochs=ten"], "ten"),
    "no batch": (["--batch-size=0"], "--batch-size must be at least 1; got 0"),
    "batch larger than the data": (["--data=sample", "--batch-size=1200"], "number of training images, 1000; got 1200"),
    "learning rate of nothing": (["--learning-rate=0"], "positive number; got 0.0"),
    "learning rate that is no number": (["--learning-rate=nan"], "positive number; got nan"),
    "negative seed": (["--seed=-1"], "--seed must be at least 0; got -1"),
    "large seed": ([f"--seed={2**32}"], "below 2**32"),
    "no steps": (["--max-steps=0"], "--max-steps must be at least 1; got 0"),
    "data": (["--data=imagenet"], "cifar10"),
    "data directory": (["--data-dir=/nowhere/at/all"], "/nowhere/at/all"),
    "data directory of the sample": (["--data=sample", "--data-dir=/tmp"], "sample"),
    "out in no directory": (["--out=/nowhere/at/all.jsonl"], "--out must name a file that can be written"),
    "out that is a directory": (["--out=/"], "Is a directory"),
    "process id alone": (["--process-id=0"], "need --coordinator HOST:PORT"),
    "processes for auto": (["--coordinator=auto", "--num-processes=2"], "need --coordinator HOST:PORT"),
    "coordinator without port": (["--coordinator=host"], "must be HOST:PORT"),
    "coordinator alone": (["--coordinator=host:1"], "needs --num-processes N"),
    "process id beyond": (["--coordinator=h:1", "--num-processes=2", "--process-id=2"], "from 0 to N-1"),
    "no cluster": (["--coordinator=auto"], "could not be joined"),
    "unknown flag": (["--polciy=dots"], "polciy"),
}


@pytest.mark.parametrize(("argv", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_message_and_status_2(argv, message, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    assert status(argv) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("policy", "near"), [("names:conv_outt", "conv_out"), ("paths:blok1", "block1"), ("ops:convv=store", "conv")]
)
def test_a_selector_that_fits_nothing_lists_near_matches(policy, near, capsys):
    assert status([*SHORT, f"--policy={policy}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert f"'{near}'" in err


def test_a_policy_that_fits_some_blocks_only(capsys):
    # Two blocks of net have convolutions, its head has none.
    assert status([*SHORT, "--policy=names:conv_out", "--regions=block"]) == 2
    assert "--regions net applies it to the whole loss" in capsys.readouterr().err


# What is found out without the data set, which nobody should download first.
REFUSED_BEFORE_DATA = {
    "tag": (["--policy=names:conv_outt"], "Did you mean 'conv_out'"),
    "operation": (["--policy=dots+ops:convv=store"], "Did you mean 'conv'"),
    "path": (["--policy=paths:blok1"], "Did you mean 'block1'"),
    "tag of a block": (["--policy=names:conv_out", "--regions=block"], "--regions net applies it to the whole loss"),
    "segments": (["--policy=segments:999"], "at most"),
    "batch larger than the data": (["--batch-size=50002"], "number of training images, 50000; got 50002"),
    "batch that does not divide": (["--batch-size=50"], "--batch-size must be a multiple of the 3 devices; got 50"),
    "out in no directory": (["--out=/nowhere/at/all.jsonl"], "--out must name a file that can be written"),
    "checkpoints in a file": (["--checkpoint-dir=/dev/null/x"], "--checkpoint-dir must be a directory"),
}


@pytest.mark.parametrize(("argv", "message"), REFUSED_BEFORE_DATA.values(), ids=REFUSED_BEFORE_DATA.keys())
def test_refused_before_the_data_set_is_fetched(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("the data set was fetched"))
    if "3 devices" in message:
        monkeypatch.setattr(devices, "all_devices", lambda: devices.absent_devices(3))
    assert status(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert message in err


def test_a_refused_policy_leaves_no_directory(tmp_path, capsys):
    assert status([*SHORT, "--policy=segments:999", f"--checkpoint-dir={tmp_path / 'a' / 'b'}"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_wasteful_policy_is_warned_of_once(capsys):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cifar.main([*SHORT, "--max-steps=1", "--policy=nothing", "--regions=net"]) == 0
    (warning,) = [w for w in caught if issubclass(w.category, jaxremat.RematWarning)]
    assert "the wrapped function returns a scalar" in str(warning.message)
    assert Path(warning.filename).parent.name == "experiments"  # not a line of JAX or of the library


def test_a_file_that_cannot_be_written_is_found_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("training began"))
    directory = tmp_path / "missing"
    assert status([*SHORT, f"--out={directory / 'records.jsonl'}"]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert not directory.exists()


def test_a_device_that_is_full_names_policies_that_store_less(capsys, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nA long table")

    monkeypatch.setattr(cifar, "build_program", full)
    assert status(SHORT) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Out of memory allocating 99 bytes." in err
    assert "--policy nothing or segments:sqrt instead of everything" in err
    assert "A long table" not in err


def test_other_errors_of_the_runtime_are_not_hidden(monkeypatch):
    def broken(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: a defect")

    monkeypatch.setattr(cifar, "build_program", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a defect"):
        status(SHORT)


def test_an_interrupted_run_says_how_to_go_on(capsys, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cifar, "build_program", interrupt)
    assert status([*SHORT, f"--checkpoint-dir={tmp_path}"]) == 130
    assert "The same command resumes" in capsys.readouterr().err


def test_a_record_that_cannot_be_appended_in_the_end_is_still_printed(capsys, monkeypatch, tmp_path):
    def fail(path, record):
        raise ExperimentError(f"no space for {path}")

    monkeypatch.setattr(records, "append", fail)
    assert status([*SHORT, "--max-steps=1", f"--out={tmp_path / 'records.jsonl'}"]) == 2
    record, _, err = records_of(capsys)
    assert record["last_step"] == 1
    assert "no space for" in err


def test_a_refused_run_leaves_no_file(tmp_path):
    path = tmp_path / "records.jsonl"
    assert status(["--data=sample", "--batch-size=5000", f"--out={path}"]) == 2
    assert not path.exists()


def test_help_lists_few_flags(capsys):
    assert status(["--help"]) == 0
    flags = {word for word in capsys.readouterr().out.split() if word.startswith("--")}
    assert {"--policy", "--model", "--data", "--checkpoint-dir"} <= flags
    assert len(Config.__dataclass_fields__) <= 17  # beside them those of the dry run


def display_to(path: Path, *, terminal: bool):
    file = path.open("w")
    console = Console(file=file, force_terminal=terminal, width=120)
    return choose_display(console, Extent(epochs=2, steps=14, first_step=7, batch_size=128)), file


def test_a_terminal_gets_a_bar(tmp_path):
    display, file = display_to(tmp_path / "out", terminal=True)
    assert isinstance(display, Bar)
    with file, display:
        display.step(9, 2, 1.25)
        display.epoch(2, 1.5, 0.25, 3.0)
    shown = Path(file.name).read_text()
    assert "9/14" in shown
    assert "loss 1.2500" in shown
    assert "images/s" in shown
    assert "test accuracy 25.00%" in shown


def test_a_file_gets_plain_lines(tmp_path):
    display, file = display_to(tmp_path / "out", terminal=False)
    assert isinstance(display, Lines)
    assert not isinstance(display, Bar)
    with file, display:
        assert not display.wants_loss()
        display.step(9, 2, 1.25)
        display.epoch(2, 1.5, 0.25, 3.0)
    first, second = Path(file.name).read_text().splitlines()
    assert first.startswith("epoch 2/2  step 9/14  loss 1.2500  ")
    assert second == "epoch 2/2  loss 1.5000  test accuracy 25.00%  3.0 s"
    assert os.linesep not in first
