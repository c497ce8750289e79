"""`python -m experiments.cifar_torch`: the flags, table and record of `experiments.cifar`, and the same training."""

import json
import sys

import pytest

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install "torch==2.13.0"')

from experiments import cifar, cifar_torch, data  # noqa: E402

SHORT = ["--data=sample", "--batch-size=50", "--max-steps=3"]


def record_of(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def status(argv: list[str]) -> int:
    try:
        return cifar_torch.main(argv)
    except SystemExit as end:  # tyro's own errors
        return int(end.code or 0)


def test_both_frameworks_train_the_same(capsys, tmp_path):
    records = tmp_path / "records.jsonl"
    assert cifar.main([*SHORT, "--policy=dots", f"--out={records}"]) == 0
    assert cifar_torch.main([*SHORT, "--policy=dots", f"--out={records}"]) == 0
    printed = capsys.readouterr().out
    assert "stored for the backward pass (saved tensors)" in printed
    jax, mirror = map(json.loads, records.read_text().splitlines())
    assert (jax["framework"], mirror["framework"]) == ("jax", "torch")
    assert jax.keys() == mirror.keys()
    assert mirror["losses"] == pytest.approx(jax["losses"], rel=1e-5)
    assert mirror["test_accuracy"] == jax["test_accuracy"]
    # All products and convolutions, the blocks' inputs, log softmax and a scalar: derived in test_torch_policies.
    assert mirror["residual_bytes"] == 50 * 4 * (4704 + 1600 + 120 + 84 + 10 + 1176 + 400 + 10) + 4
    assert mirror["peak_bytes"] > mirror["residual_bytes"]
    assert mirror["versions"]["torch"] == torch.__version__


def test_a_run_resumes_where_it_was(capsys, tmp_path):
    argv = ["--data=sample", "--batch-size=100", "--epochs=2"]
    assert cifar_torch.main(argv) == 0
    whole = record_of(capsys)
    assert cifar_torch.main([*argv, f"--checkpoint-dir={tmp_path}", "--max-steps=13"]) == 0
    assert record_of(capsys)["last_step"] == 13
    assert cifar_torch.main([*argv, f"--checkpoint-dir={tmp_path}"]) == 0
    resumed = record_of(capsys)
    assert (resumed["first_step"], resumed["last_step"]) == (13, 20)
    assert resumed["losses"] == whole["losses"][13:]
    assert resumed["params_sha256"] == whole["params_sha256"]
    assert status([*argv, f"--checkpoint-dir={tmp_path}", "--seed=1"]) == 2
    assert "seed 0 there, 1 asked for" in capsys.readouterr().err
    assert status([*argv, f"--checkpoint-dir={tmp_path}", "--max-steps=5"]) == 2
    assert "lies before the checkpoint of step 20" in capsys.readouterr().err
    (tmp_path / "torch.pt").write_bytes(b"damaged")
    assert status([*argv, f"--checkpoint-dir={tmp_path}"]) == 2
    assert "delete it" in capsys.readouterr().err


def test_bfloat16_keeps_less(capsys):
    kept = []
    for precision in ("float32", "bfloat16"):
        assert cifar_torch.main([*SHORT, "--policy=nothing", f"--precision={precision}"]) == 0
        kept.append(record_of(capsys)["residual_bytes"])
    assert kept[1] < kept[0]


BAD = {
    "policy": (["--policy=dotz"], "Did you mean 'dots'"),
    "policy of another framework": (["--policy=values:1"], "PyTorch cannot express values:1"),
    "policy that fits nothing": (["--policy=names:block_out"], "matches no operation"),
    "processes": (["--coordinator=auto"], "runs in one process"),
    "batch larger than the data": (["--batch-size=1001"], "number of training images, 1000; got 1001"),
    "no epochs": (["--epochs=0"], "--epochs must be at least 1; got 0"),
    "out in no directory": (["--out=/nowhere/at/all.jsonl"], "--out must name a file that can be written"),
    "checkpoint in a file": (["--checkpoint-dir=/dev/null/x"], "--checkpoint-dir must be a directory"),
    "loss that is lost": (["--learning-rate=1e30", "--epochs=1", "--batch-size=50"], "infinite or NaN at step"),
}


@pytest.mark.parametrize(("argv", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_message_and_status_2(argv, message, capsys):
    assert status(["--data=sample", *argv]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy=names:conv_outt"], "Did you mean 'conv_out'"),
        (["--policy=ops:conv=offload"], "PyTorch cannot express ops:conv=offload"),
        (["--policy=segments:999"], "at most"),
        (["--policy=budget:1MiB", "--regions=block"], "use --regions net or auto"),
        (["--batch-size=50001"], "number of training images, 50000; got 50001"),
        (["--out=/nowhere/at/all.jsonl"], "--out must name a file that can be written"),
        (["--checkpoint-dir=/dev/null/x"], "--checkpoint-dir must be a directory"),
    ],
)
def test_refused_before_the_data_set_is_fetched(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("the data set was fetched"))
    assert status(argv) == 2
    assert message in capsys.readouterr().err


def test_without_pytorch_the_install_line_is_said(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert status(SHORT) == 2
    assert 'pip install "torch==2.13.0"' in capsys.readouterr().err
