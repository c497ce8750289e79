"""The picture of the planner's bench: peak against recomputation, competitors as points and plans as a line."""

from pathlib import Path
from typing import Any

from experiments.bench.plan_cells import NO_REMAT, Figures, Step
from experiments.bench.plan_verdicts import Suite
from experiments.plots import FORMATS

# Competitors are told apart by family: the lengths of segments are along the curve.
_FAMILIES = (("per block", "s"), ("whole net", "D"), ("segments of", "o"), ("nested loop", "^"))


def picture(suite: Suite, path: str | Path) -> Path:
    """Writes the picture: one panel a network and target.

    Args:
        suite: the results.
        path: ends in .svg or .png.

    Returns:
        The path, once the file is complete.

    Raises:
        ValueError: the path has another ending, or there is nothing to draw.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"picture: a file that ends in {' or '.join(FORMATS)} is required; got {str(path)!r}.")
    places = [(place, base) for place in suite.places if (base := suite.without_remat(*place)) and curve(suite, *place)]
    if not places:
        raise ValueError("picture: no network has plans, so there is nothing to draw.")
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(places))
    lines = -(-len(places) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.7 * lines + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    handles = dict[str, Any]()
    for i, ((net, target), base) in enumerate(places, start=1):
        axes = figure.add_subplot(lines, columns, i)
        _panel(axes, suite, net, target, base)
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    figure.supxlabel("recomputed convolutions and matrix products, as a share of a step's", fontsize=9)
    figure.supylabel("compiled peak, as a share of no remat's", fontsize=9)
    partial = path.with_name(f".{path.stem}.part{path.suffix}")
    # Names stay text in an SVG, and the same figures give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "plan"}):
        figure.savefig(partial, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    partial.replace(path)
    return path


def curve(suite: Suite, net: str, target: str) -> list[Figures]:
    """Returns the plans that no other plan beats in both memory and recomputation, the largest peak first."""
    found = [plan.figures for plan in suite.plans(net, target) if plan.figures is not None]
    best, least = list[Figures](), float("inf")
    for figures in sorted(found, key=lambda f: (f.peak_bytes, f.recomputed_flops)):
        if figures.recomputed_flops < least:
            best.append(figures)
            least = figures.recomputed_flops
    return best[::-1]


def _panel(axes: Any, suite: Suite, net: str, target: str, base: tuple[Figures, Step]) -> None:
    without, step = base

    def place(figures: Figures) -> tuple[float, float]:
        return figures.recomputed_flops / step.contraction_flops, figures.peak_bytes / without.peak_bytes

    # The line of no remat, then the plans: what a larger budget finds is allowed under each peak, hence steps.
    plans = [(0.0, 1.0), *map(place, curve(suite, net, target))]
    axes.plot(*zip(*plans), color="black", drawstyle="steps-post", linewidth=1.2, marker=".", label="plans")
    for family, marker in _FAMILIES:
        points = [
            place(r.figures)
            for r in suite.competitors(net, target)
            if r.figures is not None and r.cell.asked != NO_REMAT and str(r.cell.asked).startswith(family)
        ]
        if points:
            axes.plot(*zip(*points), marker, color="0.35", markerfacecolor="white", markersize=5, label=family)
    axes.axhline(1.0, linestyle="--", color="0.5", linewidth=0.8)
    axes.set_title(f"{net}, {target} ({without.peak_bytes / 2**30:.2f} GiB)", fontsize=9, loc="left")
    axes.set_ylim(0, None)
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
