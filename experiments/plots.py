"""Pictures of what policies cost; matplotlib without a display, readable in black and white."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = (".svg", ".png")
NO_REMAT = "no remat"
_MARKERS = "osD^vPXph*<>"


@dataclass(frozen=True)
class CostRow:
    """One policy on one target, as `cost_picture` draws it.

    Attributes:
        target: the chip, such as `h100`; each has a panel of its own.
        policy: its spelling, or `NO_REMAT`.
        peak_bytes: compiled peak of the whole step, or None where it did not compile (it is then listed, not drawn).
        recomputed_flops: more than without rematerialization, or None where unknown.
        baseline_flops: without rematerialization: the unit of the axis, as the figures in FLOP say little.
        memory_bytes: of one chip, or None.
    """

    target: str
    policy: str
    peak_bytes: int | None
    recomputed_flops: int | None
    baseline_flops: int | None
    memory_bytes: int | None


def cost_picture(rows: Sequence[CostRow], path: str | Path) -> Path:
    """Writes the picture of peak memory against recomputation: one panel a target, one marker a policy.

    Lines show the peak without rematerialization and, where it is not far above all peaks, the memory of the chip. The
    policies are told apart by markers with their names beside them, not by colours.

    Args:
        rows: in any order; those of one target share a panel.
        path: ends in .svg or .png.

    Returns:
        The path, once the file is complete.

    Raises:
        ValueError: the path has another ending, or no row has figures to draw.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"cost_picture: a file that ends in {' or '.join(FORMATS)} is required; got {str(path)!r}.")
    targets = list(dict.fromkeys(row.target for row in rows if _is_drawn(row)))
    if not targets:
        raise ValueError(
            "cost_picture: none of the rows has both a peak and a FLOP count, so there is nothing to draw."
        )
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(targets))
    lines = -(-len(targets) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.9 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    policies = list(dict.fromkeys(row.policy for row in rows if row.policy != NO_REMAT))
    markers = {policy: _MARKERS[i % len(_MARKERS)] for i, policy in enumerate(policies)}
    for i, target in enumerate(targets):
        axes = figure.add_subplot(lines, columns, i + 1)
        _panel(axes, target, [row for row in rows if row.target == target], markers)
        if i % columns == 0:
            axes.set_ylabel("compiled peak of the step (GiB)")
    figure.supxlabel("recomputed work, as a share of a step without rematerialization", fontsize=10)
    partial = path.with_name(f".{path.stem}.part{path.suffix}")
    # Names stay text in an SVG, and the same figures give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxremat"}):
        figure.savefig(partial, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    partial.replace(path)
    return path


def _is_drawn(row: CostRow) -> bool:
    return row.peak_bytes is not None and row.recomputed_flops is not None and bool(row.baseline_flops)


def _panel(axes: Any, target: str, rows: list[CostRow], markers: dict[str, str]) -> None:
    drawn = [row for row in rows if _is_drawn(row)]
    points = [(_share(row), _gib(row.peak_bytes), row.policy) for row in drawn if row.policy != NO_REMAT]
    baseline = next((_gib(row.peak_bytes) for row in drawn if row.policy == NO_REMAT), None)
    memory = next((_gib(row.memory_bytes) for row in rows if row.memory_bytes), None)
    top = max([y for _, y, _ in points] + ([baseline] if baseline else []))
    right = max([x for x, _, _ in points] + [0.05])
    axes.set_xlim(-0.06 * right, 1.45 * right)
    shows_memory = memory is not None and memory < 2.5 * top
    axes.set_ylim(0, 1.12 * max(top, memory if shows_memory and memory else 0))
    name = target if memory is None or shows_memory else f"{target} (chip memory {memory:.1f} GiB, far above)"
    axes.set_title(name, fontsize=11, loc="left")
    if baseline is not None:
        _line(axes, baseline, "--", f"{NO_REMAT}, {baseline:.2f} GiB")
    if shows_memory and memory is not None:
        _line(axes, memory, "-", f"chip memory, {memory:.1f} GiB")
    for x, y, policy in points:
        axes.plot([x], [y], markers[policy], color="black", markerfacecolor="white", markersize=7, markeredgewidth=1.3)
    _label(axes, points, [y for y in (baseline, memory if shows_memory else None) if y is not None])
    failed = [row.policy for row in rows if not _is_drawn(row)]
    if failed:
        note = "not compiled: " + ", ".join(failed)
        axes.text(0.02, 0.02, note, transform=axes.transAxes, fontsize=8, style="italic")
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _line(axes: Any, height: float, style: str, text: str) -> None:
    axes.axhline(height, linestyle=style, color="0.35", linewidth=1)
    axes.annotate(
        text, (1, height), xycoords=axes.get_yaxis_transform(), xytext=(0, 2.5), textcoords="offset points",
        ha="right", va="bottom", fontsize=8, color="0.25",
    )  # fmt: skip


def _label(axes: Any, points: list[tuple[float, float, str]], lines: list[float]) -> None:
    """Writes each policy's name beside its marker, at the first of a few places that nothing else takes."""
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    box_height = (high - low) * 0.065
    letter = (right - left) * 0.0165
    taken = [(x - letter, x + letter, y - box_height / 3, y + box_height / 3) for x, y, _ in points]
    taken += [(right - 30 * letter, right, y, y + box_height) for y in lines]
    for x, y, policy in sorted(points, key=lambda p: -p[1]):
        width = letter * len(policy)
        places = [(x + 1.6 * letter, y + step * box_height) for step in (0, -0.9, 0.9, -1.8, 1.8, -2.7, 2.7)]
        boxes = [(px, px + width, py - box_height / 2, py + box_height / 2) for px, py in places]
        free = [i for i, box in enumerate(boxes) if not any(_overlap(box, other) for other in taken)]
        crossing = [i for i in free if not any(boxes[i][2] < line < boxes[i][3] for line in lines)]
        chosen = (crossing or free or [0])[0]
        taken.append(boxes[chosen])
        arrow = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkB": 4} if chosen > 2 else None
        axes.annotate(policy, (x, y), xytext=places[chosen], va="center", fontsize=8.5, arrowprops=arrow)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


def _share(row: CostRow) -> float:
    return (row.recomputed_flops or 0) / (row.baseline_flops or math.inf)


def _gib(size: int | None) -> float:
    return (size or 0) / 2**30
