"""What a dry run shows: a table for people, JSON for programs, a picture for both."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

import jaxremat
from experiments import records
from experiments.config import Config
from experiments.data import TRAINING_IMAGES
from experiments.dry_run import Row
from experiments.errors import ExperimentError
from experiments.plots import NO_REMAT, CostRow, cost_picture
from jaxremat.plan.result import short
from jaxremat.targets import package_versions

BASELINE = "everything"


def table(config: Config, rows: Sequence[Row]) -> Table:
    """Returns the table of a dry run; its heads say which figures come from the trace and which from the compiler."""
    with_batch = any(row.largest_batch is not None for row in rows)
    with_notes = any(row.problem is not None for row in rows)
    result = Table(
        title=f"{config.model}, batch {config.batch_size}, {config.precision}: one training step, compiled and not run",
        box=box.SIMPLE,
    )
    result.add_column("target", no_wrap=True)
    result.add_column("policy", no_wrap=True)
    for head in (
        "residuals\n(trace)",
        "peak\n(compiler)",
        "of the\nmemory",
        "fits",
        "recomputed FLOPs\n(trace)",
        "compile",
    ):
        result.add_column(head, justify="right", no_wrap=True)
    if with_batch:
        result.add_column("largest\nbatch", justify="right", no_wrap=True)
    if with_notes:
        result.add_column("note", overflow="fold")
    for row, above in zip(rows, [None, *rows]):
        if above is not None and above.target != row.target:
            result.add_section()
        cells = [row.target, _policy(row), *_figures(row)]
        cells += [_batch(row)] if with_batch else []
        cells += [row.problem or ""] if with_notes else []
        # Policies and messages may hold square brackets, which are no markup.
        result.add_row(*(cell.replace("[", r"\[") for cell in cells))
    return result


def _policy(row: Row) -> str:
    if row.policy is None:
        return ""
    if row.resolved is not None:
        return f"{row.policy} ({short(jaxremat.parse(row.resolved))})"
    notes = {BASELINE: " (no remat)"}.get(row.policy, "")
    return row.policy + (notes or (" (each block)" if row.regions == "block" else ""))


def _figures(row: Row) -> list[str]:
    if row.policy is None:
        return [""] * 6
    share = "-" if not row.peak_bytes or not row.memory_bytes else f"{row.peak_bytes / row.memory_bytes:.0%}"
    return [
        _mebibytes(row.residual_bytes),
        _mebibytes(row.peak_bytes),
        share,
        {True: "yes", False: "no", None: "?"}[row.fits],
        _recomputed(row),
        "-" if row.compile_seconds is None else f"{row.compile_seconds:.1f} s",
    ]


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f} MiB"


def _recomputed(row: Row) -> str:
    if row.flops is None or row.recomputed_flops is None:
        return "?"
    plain = row.flops - row.recomputed_flops
    return f"{row.recomputed_flops / 1e9:,.1f} G ({row.recomputed_flops / max(plain, 1):.1%})"


def _batch(row: Row) -> str:
    if row.largest_batch is None:
        return "" if row.policy is None else "?"
    if row.largest_batch == 0:
        return "none"
    return f"{row.largest_batch:,}" + (" (all images)" if row.largest_batch_is_limit else "")


def to_json(config: Config, rows: Sequence[Row]) -> str:
    """Returns the outcome as one line of JSON: the run, versions, date and all rows."""
    compilers: dict[str, Any] = package_versions("gpu") | package_versions("tpu")
    document = {
        "schema": 1,
        "kind": "dry run",
        "config": config.as_json(),
        "training_images": TRAINING_IMAGES[config.data],
        "versions": records.versions() | compilers,
        "date": records.now(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    return json.dumps(document, allow_nan=False)


def no_figures(rows: Sequence[Row]) -> str:
    """Returns the message for a dry run in which nothing compiled."""
    problems = dict.fromkeys(row.problem for row in rows if row.problem)
    return "none of the targets gave a figure: " + "; ".join(problem for problem in problems if problem)


def draw(rows: Sequence[Row], path: str) -> None:
    """Writes the picture of peak against recomputation.

    Raises:
        ExperimentError: no row has both figures.
    """
    drawn = [
        CostRow(
            target=row.target,
            policy=NO_REMAT if row.policy == BASELINE else row.policy,
            peak_bytes=row.peak_bytes,
            recomputed_flops=row.recomputed_flops,
            baseline_flops=None
            if row.flops is None or row.recomputed_flops is None
            else row.flops - row.recomputed_flops,
            memory_bytes=row.memory_bytes,
        )
        for row in rows
        if row.policy is not None
    ]
    try:
        cost_picture(drawn, path)
    except (ValueError, OSError) as error:
        raise ExperimentError(f"--plot {path}: {error}") from error
