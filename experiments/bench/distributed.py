"""Loss curves of several processes and devices beside that of one device: the same run within rounding.

    python -m experiments.bench distributed
    python -m experiments.bench distributed --model wrn16_4 --batch-size 16 --steps 3

The processes run on this machine, on forced CPU devices, and talk through gloo. The exit status is 1 where a curve leaves
that of one device by more than 1e-5, relative.

More devices add up in another order, so that losses differ in the last bit; a network with ReLU and max pooling turns such a
bit into more where a value lies on a kink and its derivative changes sides. Of seeds 0, 1 and 2, no curve of `net` leaves that of one
device by more than 1.4e-6.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro
from rich.table import Table

from experiments.bench import output
from experiments.bench.processes import train_together
from experiments.errors import ExperimentError
from experiments.models import ModelName

TOLERANCE = 1e-5
LAYOUTS = ((1, 1), (1, 2), (2, 2))  # processes, devices of each


@dataclass(frozen=True)
class Options:
    """What to train."""

    model: ModelName = "net"
    policy: str = "everything"
    batch_size: int = 128
    steps: int = 20
    seed: int = 1


def compare(options: Options) -> list[dict[str, Any]]:
    """Returns a row for each layout: its losses, and the largest relative difference from one device's."""
    if not 1 <= options.steps <= 50:
        raise ExperimentError(f"--steps must be 1 to 50: records hold every loss of short runs; got {options.steps}.")
    arguments = [
        "--data=sample", f"--model={options.model}", f"--policy={options.policy}",
        f"--batch-size={options.batch_size}", f"--max-steps={options.steps}", "--epochs=50", f"--seed={options.seed}",
    ]  # fmt: skip
    rows = list[dict[str, Any]]()
    for processes, devices in LAYOUTS:
        record = train_together(arguments, processes=processes, devices=devices)
        reference = rows[0]["losses"] if rows else record["losses"]
        apart = max(abs(loss - other) / abs(other) for loss, other in zip(record["losses"], reference, strict=True))
        rows.append({"processes": processes, "devices": devices, "difference": apart, "losses": record["losses"]})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows; returns 0 where all curves agree, 1 where not, 2 for bad input."""
    options = tyro.cli(Options, prog="python -m experiments.bench distributed", args=argv)
    try:
        rows = compare(options)
    except (ExperimentError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table(title=f"{options.model}, {options.policy}, {options.steps} steps, float32")
    for column in ("processes x devices", "last loss", "largest relative difference"):
        table.add_column(column)
    for row in rows:
        table.add_row(f"{row['processes']} x {row['devices']}", f"{row['losses'][-1]:.7f}", f"{row['difference']:.1e}")
    agree = all(row["difference"] <= TOLERANCE for row in rows)
    output.show(table, {"bench": "distributed", "options": vars(options), "agree": agree, "rows": rows})
    return 0 if agree else 1
