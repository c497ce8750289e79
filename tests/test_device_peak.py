"""The script that compares predictions with an attached accelerator: what it says where there is none."""

import jax
import pytest

from experiments import device_peak


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an accelerator is attached")
def test_a_cpu_is_refused_in_one_line(capsys):
    assert device_peak.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("JAX found cpu. Run it where there is one.\n")
    assert err.count("\n") == 1


def test_one_measurement():
    row = device_peak.measure("nothing", batch_size=2)
    assert row["policy"] == "nothing"
    assert row["predicted_peak_bytes"] > 2 * 32 * 32 * 32 * 4


@pytest.mark.parametrize("arguments", [["--policies", "frob"], ["--batch-size", "0"], ["--batch-size", "x"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as e:
        device_peak.main(arguments)
    assert e.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ")
