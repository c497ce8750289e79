"""Pictures of the comparison as SVG: memory against time, and what each layer keeps."""

import io
import statistics
from typing import Any

from experiments.compare_records import Framework, Result
from experiments.compare_table import Group

PANELS: tuple[tuple[Framework, str], ...] = (("jax", "JAX"), ("torch", "PyTorch"))
_MARKERS = "osD^vPXph*<>"
# Told apart in black and white by their markers; the colours are Okabe and Ito's, safe for colour-blind readers.
_COLOURS = ("#000000", "#e69f00", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")


def memory_against_time(group: Group) -> str:
    """Returns a picture: a panel a framework, a marker a policy, peak against the median step."""
    figure, axes = _panels(3.6)
    for axis, (framework, name) in zip(axes, PANELS):
        points = [
            (statistics.median(r.step_seconds) * 1000, (r.peak_bytes or 0) / 2**20, r.cell.policy)
            for r in _measured(group, framework)
            if r.step_seconds and r.peak_bytes is not None
        ]
        for x, y, policy in points:
            axis.plot([x], [y], label=policy, **_style(group, policy), linestyle="none", markersize=8)
        axis.set_title(f"{name} ({'compiled' if framework == 'jax' else 'measured'} peak)", fontsize=10, loc="left")
        axis.set_xlabel("median step, ms", fontsize=9)
        axis.set_ylabel("peak, MiB", fontsize=9)
        if points:
            axis.set_ylim(0, 1.12 * max(y for _, y, _ in points))
            axis.set_xlim(0, 1.12 * max(x for x, _, _ in points))
    return _svg(figure, axes, f"time-{group.model}")


def kept_by_layer(group: Group) -> str:
    """Returns a picture: a panel a framework, a line a policy, what each part of the network keeps."""
    figure, axes = _panels(3.6)
    parts = list(
        dict.fromkeys(
            _part(kept.path) for framework, _ in PANELS for r in _measured(group, framework) for kept in r.kept
        )
    )
    parts = [part for part in parts if part] + ["loss"]
    for axis, (framework, name) in zip(axes, PANELS):
        for result in _measured(group, framework):
            sizes = dict.fromkeys(parts, 0)
            for kept in result.kept:
                sizes[_part(kept.path) or "loss"] += kept.size_bytes
            if [kept.op for kept in result.kept if kept.op == "compiled"]:
                continue  # layers have no names inside of a compiled program
            heights = [sizes[part] / 2**20 for part in parts]
            axis.plot(
                range(len(parts)), heights, label=result.cell.policy, **_style(group, result.cell.policy), linewidth=1.2
            )
        axis.set_title(f"{name} ({'traced' if framework == 'jax' else 'counted'})", fontsize=10, loc="left")
        axis.set_xticks(range(len(parts)), parts, rotation=60, ha="right", fontsize=8)
        axis.set_ylabel("kept, MiB", fontsize=9)
        axis.set_ylim(bottom=0)
    return _svg(figure, axes, f"layers-{group.model}")


def _measured(group: Group, framework: Framework) -> list[Result]:
    return [r for r in group.results if r.cell.framework == framework and r.status == "measured"]


def _part(path: str) -> str:
    return path.partition("/")[0]


def _style(group: Group, policy: str) -> dict[str, Any]:
    index = group.policies.index(policy)
    colour = _COLOURS[index % len(_COLOURS)]
    return {
        "marker": _MARKERS[index % len(_MARKERS)],
        "color": colour,
        "markerfacecolor": "none",
        "markeredgewidth": 1.4,
    }


def _panels(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, height), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, axes


def _svg(figure: Any, axes: Any, name: str) -> str:
    from matplotlib import rc_context

    labels = dict[str, Any]()
    for axis in axes:
        labels |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    if labels:
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    buffer = io.StringIO()
    # Text stays text, and the same figures give the same file; the salt keeps the pictures' inner names apart on one page.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
