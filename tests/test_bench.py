import importlib
import json
import os

import numpy as np
import pytest
from compilers import wants

import jaxremat
from experiments.bench import __main__ as bench
from experiments.bench import digests, distributed, harness, nets, peak
from experiments.errors import ExperimentError
from experiments.models import build
from experiments.training import AUGMENTED


def test_an_unknown_benchmark_lists_those_that_exist(capsys):
    assert bench.main(["harnes"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "got 'harnes'. Did you mean 'harness'?" in err
    assert all(name in err for name in bench.BENCHES)


def test_no_benchmark_and_help(capsys):
    assert bench.main([]) == 2
    assert "got none" in capsys.readouterr().err
    assert bench.main(["--help"]) == 0
    assert "usage" in capsys.readouterr().out


def test_every_listed_benchmark_exists():
    for name in bench.BENCHES:
        assert callable(importlib.import_module(f"experiments.bench.{name}").main)


def test_the_ratio_is_that_of_the_two_loops():
    result = harness.measure(harness.Options(batch_size=50, steps=3, turns=2))
    assert result["harness_step_seconds"] > 0
    assert result["ratio"] == result["harness_step_seconds"] / result["bare_step_seconds"]


def test_digests_of_two_policies_and_of_one_that_fits_nothing():
    options = digests.Options(policies="dots; names:conv_outt", steps=2)
    everything, dots, wrong = digests.compare(options)
    assert everything["digest"] == dots["digest"]
    assert dots["difference"] == 0
    assert wrong["digest"] is None
    assert "conv_outt" in str(wrong["error"])


def test_relative_difference_is_that_of_the_norms():
    reference = {"a": np.array([3.0, -4.0]), "b": np.zeros(2)}
    # |(0.3, 0, 0, 0.4)| / |(3, 4)|
    other = {"a": np.array([3.3, -4.0]), "b": np.array([0.0, 0.4])}
    assert digests.relative_difference(other, reference) == pytest.approx(0.1)
    assert digests.relative_difference(reference, reference) == 0


def test_every_model_has_policies_of_its_own():
    assert set(digests.PARTICULAR) == set(digests.TOLERANCE) == set(AUGMENTED)
    for name in digests.PARTICULAR:
        assert len(digests.policies_of(digests.Options(model=name))) == len(
            set(digests.policies_of(digests.Options(model=name)))
        )
        build(name)


@pytest.mark.parametrize("steps", [0, 51])
def test_curves_that_records_would_thin(steps):
    with pytest.raises(ExperimentError, match=f"1 to 50.*got {steps}"):
        distributed.compare(distributed.Options(steps=steps))


@wants("h100")
def test_the_peak_alone_beside_the_whole_compilation(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(nets.NETS, "tiny", lambda: nets.chain(3, batch_size=2, size=8, channels=4))
    monkeypatch.setenv("JAXREMAT_CACHE_DIR", str(tmp_path))
    assert peak.main(["--nets", "tiny", "--targets", "h100"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = found["rows"]
    assert row["peak_bytes"] == row["whole_peak_bytes"] > 0
    assert os.environ["JAXREMAT_CACHE_DIR"] == str(tmp_path)
    assert peak.main(["--nets", "tiny", "--targets", "h10"]) == 2
    assert "did you mean" in capsys.readouterr().err.lower()
    monkeypatch.setattr(jaxremat, "peak", lambda *args, **kwargs: jaxremat.Peak(1, 1))
    assert peak.main(["--nets", "tiny", "--targets", "h100"]) == 1
