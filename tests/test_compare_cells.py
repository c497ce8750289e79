"""Cells in their own processes: one that measures, one that is refused, one that breaks, and the rest go on."""

import pytest

pytest.importorskip("torch", reason='needs PyTorch: pip install "torch==2.13.0"')

from experiments.compare_records import Cell
from experiments.compare_run import Timing, run_group


def run(cells):
    results = {}
    run_group(
        cells,
        None,
        Timing(rounds=2, steps=2),
        done=lambda result: results.__setitem__(result.cell, result),
        say=lambda text: None,
    )
    return results


def test_one_cell_breaks_one_is_refused_and_the_rest_go_on():
    good = Cell("torch", "net", "nothing", 4, "sample", 2, 0)
    refused = Cell("torch", "net", "values:1", 4, "sample", 2, 0)
    broken = Cell("torch", "resnet81", "nothing", 4, "sample", 2, 0)
    results = run([broken, refused, good])
    assert (results[broken].status, results[refused].status) == ("failed", "refused")
    assert "resnet81" in results[broken].why
    assert results[broken].why.endswith("(exit status 1)")
    assert "PyTorch cannot express values:1" in results[refused].why
    result = results[good]
    assert result.status == "measured"
    # The inputs of two blocks, log softmax and a scalar: derived in test_torch_policies.
    assert result.kept_bytes == 4 * 4 * (1176 + 400 + 10) + 4
    assert result.recomputed == {"conv": 2, "relu": 4, "max_pool": 2, "dot": 2}
    assert result.peak_bytes is not None
    assert result.peak_bytes > result.kept_bytes
    assert (len(result.step_seconds), len(result.losses)) == (4, 2)
    assert result.test_accuracy is not None
    assert 0 <= result.test_accuracy <= 1


def test_both_frameworks_recompute_the_same_and_lose_the_same():
    ours, theirs = (Cell(framework, "net", "nothing", 4, "sample", 2, 0) for framework in ("jax", "torch"))
    jax, torch = run([ours])[ours], run([theirs])[theirs]
    assert (jax.status, torch.status) == ("measured", "measured")
    for op in ("conv", "dot"):
        assert jax.recomputed[op] == torch.recomputed[op] == 2
    assert torch.losses == pytest.approx(jax.losses, rel=1e-5)
    assert torch.test_accuracy == jax.test_accuracy
    assert jax.peak_bytes > 0
