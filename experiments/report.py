"""The table that a person reads at the end of a run."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

import jaxremat
from experiments.records import Record
from jaxremat.plan.result import short


def bytes_text(size: int | None) -> str:
    """Returns a size for people, or a dash where it is not known.

    Example:
        >>> from experiments.report import bytes_text
        >>> bytes_text(3 * 2**20), bytes_text(1536), bytes_text(None)
        ('3.0 MiB', '1.5 KiB', '-')
    """
    if size is None:
        return "-"
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def seconds_text(seconds: float | None) -> str:
    """Returns a duration for people, or a dash where it is not known."""
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def summary(record: Record) -> Table:
    """Returns the record's table: each cost says whether it was traced, compiled or measured."""
    table = Table(title=f"{record.model} on {record.dataset}", show_header=False)
    where = f"{record.device['devices']} x {record.device['kind']}"
    if record.device["processes"] > 1:
        where += f" in {record.device['processes']} processes"
    rows = [
        ("policy", _policy(record)),
        ("test accuracy", f"{record.test_accuracy:.2%}"),
        *([] if record.plan is None else _plan_rows(record.plan)),
        *_memory_rows(record),
        ("median step (measured)", seconds_text(record.step_seconds)),
        ("steps", f"{record.first_step} to {record.last_step}"),
        ("device", where),
        ("parameters, SHA-256", record.params_sha256[:16]),
    ]
    if record.note:
        rows.append(("note", record.note))
    for label, value in rows:
        table.add_row(label, value)
    return table


def _policy(record: Record) -> str:
    where = " (each block)" if record.regions == "block" else " (whole loss)"
    if record.plan is None:
        return record.policy + where
    # What was found may be a list of hundreds of positions; the record has them all.
    return f"{jaxremat.parse(record.policy_asked)}: {short(jaxremat.parse(record.policy))}{where}"


def _plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    again = plan["recomputed_flops"] / max(plan["forward_flops"], 1)
    return [
        ("budget of a step", f"{bytes_text(plan['budget_bytes'])}, planned for {plan['target']}"),
        (
            "peak of a step (compiled)",
            f"{bytes_text(plan['peak_bytes'])}; without rematerialization {bytes_text(plan['without_remat_bytes'])}",
        ),
        ("recomputed (counted)", f"{plan['recomputed_flops'] / 1e9:,.2f} GFLOP, {again:.1%} of the forward pass"),
    ]


def _memory_rows(record: Record) -> list[tuple[str, str]]:
    if record.framework == "torch":
        return [
            ("stored for the backward pass (saved tensors)", bytes_text(record.residual_bytes)),
            ("peak of a step, above parameters and batch (measured)", bytes_text(record.peak_bytes)),
        ]
    return [
        ("stored for the backward pass (traced)", bytes_text(record.residual_bytes)),
        ("temporary memory of a step (compiled)", bytes_text(record.compiled_temp_bytes)),
    ]
