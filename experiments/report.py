"""The table that a person reads at the end of a run."""

from rich.table import Table

from experiments.records import Record


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
        ("policy", record.policy + (" (each block)" if record.regions == "block" else " (whole loss)")),
        ("test accuracy", f"{record.test_accuracy:.2%}"),
        ("stored for the backward pass (traced)", bytes_text(record.residual_bytes)),
        ("temporary memory of a step (compiled)", bytes_text(record.compiled_temp_bytes)),
        ("median step (measured)", seconds_text(record.step_seconds)),
        ("steps", f"{record.first_step} to {record.last_step}"),
        ("device", where),
        ("parameters, SHA-256", record.params_sha256[:16]),
    ]
    for label, value in rows:
        table.add_row(label, value)
    return table
