"""`draw`: the picture of a frontier, by matplotlib, which is imported here alone and only when something is drawn."""

from collections.abc import Sequence
from pathlib import Path

from jaxremat.text import human_bytes

_FORMATS = (".svg", ".png")

_CELLS = 24  # so many names have room beside or above each other

Mark = tuple[float, int, str]  # recomputation as a part of a forward pass, bytes, name or nothing


def draw(path: str | Path, curve: Sequence[Mark], others: Sequence[Mark], title: str, baseline_bytes: int) -> Path:
    """Writes peak against recomputation: the curve as a line with markers, others as markers; whole or not at all.

    Args:
        path: ends in `.svg` or `.png`.
        curve: by rising peak.
        others: what lies above the curve.
        title: of the vertical axis.
        baseline_bytes: the peak without rematerialization, drawn as a line.

    Raises:
        ValueError: the path ends otherwise.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise ValueError(f"plot: needs a file that ends in {' or '.join(_FORMATS)}; got {str(path)!r}.")
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"plot: pictures are drawn by matplotlib, which cannot be imported ({error}). Install it: pip install matplotlib"
        ) from error
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    unit, scale = _unit(max(size for _, size, _ in (*curve, *others)))
    axes.axhline(baseline_bytes / scale, linestyle="--", color="0.5", linewidth=1)
    axes.plot(
        [x for x, _, _ in curve], [size / scale for _, size, _ in curve], "-o", color="black", markersize=5,
        drawstyle="steps-pre", label="frontier",
    )  # fmt: skip
    if others:
        axes.plot(
            [x for x, _, _ in others], [size / scale for _, size, _ in others], "x", color="0.45", markersize=6,
            label="beaten by the frontier",
        )  # fmt: skip
    for (x, size), names in _named((*curve, *others)).items():
        axes.annotate(", ".join(names), (x, size / scale), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.annotate(
        f"no rematerialization, {human_bytes(baseline_bytes)}", (1, baseline_bytes / scale),
        xycoords=axes.get_yaxis_transform(), xytext=(0, -3), textcoords="offset points", ha="right", va="top", fontsize=8,
    )  # fmt: skip
    axes.set_ylim(0, None)
    axes.margins(x=0.12)
    axes.set_xlabel("recomputed, as a part of one forward pass")
    axes.set_ylabel(f"{title} ({unit})")
    axes.xaxis.set_major_formatter(lambda part, _: f"{100 * part:.0f} %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    partial = path.with_name(f".{path.stem}.part{path.suffix}")
    # Names stay text in an SVG, and the same figures give the same file.
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxremat"}):
            figure.savefig(partial, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _named(marks: Sequence[Mark]) -> dict[tuple[float, int], list[str]]:
    """The names at every place, those at almost the same place together."""
    widest, highest = max(x for x, _, _ in marks) or 1.0, max(size for _, size, _ in marks)
    places = dict[tuple[int, int], tuple[float, int]]()
    names = dict[tuple[float, int], list[str]]()
    for x, size, name in marks:
        cell = round(_CELLS * x / widest), round(_CELLS * size / highest)
        found = names.setdefault(places.setdefault(cell, (x, size)), [])
        if name and name not in found:
            found.append(name)
    return names


def _unit(largest: int) -> tuple[str, int]:
    """The unit of the axis, and its bytes."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next(((unit, size) for unit, size in units if largest >= size), ("B", 1))
