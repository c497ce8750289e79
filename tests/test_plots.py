"""The picture of costs."""

import pytest

from experiments.plots import NO_REMAT, CostRow, cost_picture

GIB = 2**30


def rows(target="h100", memory_bytes=4 * GIB):
    def row(policy, peak, recomputed):
        return CostRow(target, policy, peak, recomputed, 1000, memory_bytes)

    return [
        row(NO_REMAT, 3 * GIB, 0),
        row("nothing", GIB, 330),
        row("dots", 2 * GIB, 5),
        row("budget:1MiB", None, None),
    ]


def test_everything_is_named(tmp_path):
    path = cost_picture([*rows(), *rows("v5e:2x2", 16 * GIB)], tmp_path / "cost.svg")
    svg = path.read_text()
    for text in ("nothing", "dots", "h100", "v5e:2x2", "no remat, 3.00 GiB", "not compiled: budget:1MiB"):
        assert f">{text}" in svg
    assert svg.count(">chip memory, 4.0 GiB<") == 1  # of the h100; 16 GiB would flatten the other panel:
    assert svg.count(">v5e:2x2 (chip memory 16.0 GiB, far above)<") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["cost.svg"]


def test_same_rows_give_the_same_file(tmp_path):
    first, second = (cost_picture(rows(), tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second


def test_png(tmp_path):
    assert cost_picture(rows(), tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_markers_overlap_no_names(tmp_path):
    same = [CostRow("h100", f"values:{i}", 2 * GIB, 5, 1000, None) for i in range(4)]
    svg = cost_picture([*rows(), *same], tmp_path / "cost.svg").read_text()
    assert all(f">values:{i}<" in svg for i in range(4))


@pytest.mark.parametrize("name", ["cost.pdf", "cost", "cost.PNG"])
def test_other_endings(tmp_path, name):
    with pytest.raises(ValueError, match=r"ends in \.svg or \.png is required"):
        cost_picture(rows(), tmp_path / name)


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        cost_picture(rows()[-1:], tmp_path / "cost.svg")
    assert not list(tmp_path.iterdir())
