"""The stored sets of the two frameworks: every byte is in a row, and every row that is not equal says why."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install "torch==2.13.0"')

import jaxremat  # noqa: E402
from experiments.compare_diff import OUTSIDE_BLOCKS, REGION_INPUT, SMALL, UNEXPLAINED, Row, diff  # noqa: E402
from experiments.compare_jax import JaxCell  # noqa: E402
from experiments.compare_readme import committed_results  # noqa: E402
from experiments.compare_records import Cell, Kept, Result  # noqa: E402
from experiments.compare_torch import TorchCell, flax_path  # noqa: E402
from experiments.data import load  # noqa: E402
from experiments.torch_models import build  # noqa: E402

POLICIES = (
    "everything", "nothing", "dots", "names:*_out", "ops:conv=store,*=recompute", "segments:sqrt",
)  # fmt: skip
ARTICLES_TABLE = "ops:conv=store,relu=recompute,batch_norm=store"
# All strategies of the smallest network, and of the others those whose stored sets differ most.
LIVE = [("net", policy) for policy in POLICIES]
LIVE += [("resnet18", ARTICLES_TABLE), ("wrn16_4", "segments:sqrt"), ("vit", "everything"), ("vit", "names:*_out")]


def require_explained(ours: Result, theirs: Result) -> list[Row]:
    rows = diff(ours, theirs)
    assert sum(row.jax.size_bytes for row in rows if row.jax) == ours.kept_bytes
    assert sum(row.torch.size_bytes for row in rows if row.torch) == theirs.kept_bytes
    for row in rows:
        assert row.why not in ("", UNEXPLAINED), (ours.cell, row)
        assert (row.why == "equal") == row.equal
        if row.equal:
            assert (row.jax.dtype, row.jax.size_bytes) == (row.torch.dtype, row.torch.size_bytes)
    return rows


@pytest.mark.parametrize(("model", "policy"), LIVE)
def test_stored_sets_are_explained_to_the_last_byte(model, policy):
    cell = Cell("jax", model, str(jaxremat.parse(policy)), 4, "sample", 1, 0)
    ours = Result(cell, "measured", kept=JaxCell(cell, load("sample")).kept)
    cell = replace(cell, framework="torch")
    theirs = Result(cell, "measured", kept=TorchCell(cell, load("sample")).kept)
    rows = require_explained(ours, theirs)
    assert any(row.equal for row in rows)


def test_committed_stored_sets_are_explained_to_the_last_byte():
    results = {r.cell.key: r for r in committed_results() if r.status == "measured"}
    pairs = [
        (ours, results[other.key])
        for ours in results.values()
        if (other := replace(ours.cell, framework="torch")).key in results and ours.cell.framework == "jax"
    ]
    assert len(pairs) >= 24
    for pair in pairs:
        require_explained(*pair)


@pytest.mark.parametrize("model", OUTSIDE_BLOCKS)
def test_layers_outside_of_blocks_are_the_parts_that_are_none(model):
    network = build(model)
    blocks = {part.name for part in network.parts() if part.is_block}
    layers = {flax_path(network, name) for name, _ in network.named_children()} - {""}
    assert layers - blocks == set(OUTSIDE_BLOCKS[model])


def kept(op="conv", count=1, unit=64, how="autodiff", path="block1/conv", dtype="float32") -> Kept:
    return Kept(path, op, dtype, how, count, count * unit)


def pair(ours: list[Kept], theirs: list[Kept], policy="everything") -> list[Row]:
    cell = Cell("jax", "net", policy, 1, "sample", 1, 0)
    one = Result(cell, "measured", kept=tuple(ours))
    other = Result(replace(cell, framework="torch"), "measured", kept=tuple(theirs))
    return diff(one, other)


def test_values_are_paired_one_by_one():
    rows = pair([kept("relu", 2), kept("relu", 1, 128)], [kept("relu", 5, how="region input")])
    assert [(row.jax and row.jax.size_bytes, row.torch and row.torch.size_bytes) for row in rows] == [
        (2 * 64, 2 * 64), (128, None), (None, 3 * 64),
    ]  # fmt: skip
    assert rows[-1].why == REGION_INPUT


def test_equal_operations_are_paired_before_equal_sizes():
    rows = pair([kept("add"), kept("conv")], [kept("conv", how="saved"), kept("mul", how="saved")])
    assert [(row.jax.op, row.torch.op) for row in rows] == [("conv", "conv"), ("add", "mul")]


def test_values_of_other_types_layers_and_sizes_are_no_pair():
    for other in (kept(dtype="int32"), kept(path="block2/conv"), kept(unit=32)):
        assert not any(row.equal for row in pair([kept()], [other]))


UNKNOWN = {
    "a kernel": ([], [kept("a_new_kernel", how="saved")], "everything"),
    "a value of autodiff": ([kept("a_new_op")], [], "everything"),
    "a chosen value": ([kept("conv", how="chosen")], [], "dots"),
    "a large value inside of a block": ([kept("batch_norm", unit=4096), kept("relu", unit=8192)], [], "nothing"),
}


@pytest.mark.parametrize(("ours", "theirs", "policy"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_what_nobody_explained_is_called_so(ours, theirs, policy):
    assert UNEXPLAINED in [row.why for row in pair(ours, theirs, policy)]


def test_small_values_inside_of_a_block_are_called_small():
    rows = pair([kept("batch_norm", unit=64), kept("relu", unit=8192)], [], "nothing")
    assert rows[0].why == SMALL
