"""The peak alone beside the whole compilation, for chips that are not here: the same bytes, in how much of the time?

    python -m experiments.bench peak
    python -m experiments.bench peak --nets resnet50 --targets v5e

Each network's gradient is compiled twice, with a cache of its own that is empty: by `jaxremat.peak`, which waits for the compiler
to assign memory, and by `jaxremat.cost`, which waits for its code as well. The exit status is 1 where they differ.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import jax
import tyro
from rich.table import Table

import jaxremat
from experiments.bench import output
from experiments.bench.nets import Net
from experiments.bench.plan import Options as PlanOptions
from experiments.bench.plan import contests
from experiments.errors import ExperimentError
from experiments.records import versions


@dataclass(frozen=True)
class Options:
    """What to compile."""

    nets: Annotated[tuple[str, ...], tyro.conf.arg(help="networks, with another batch as in resnet18:32")] = (
        "chain16",
        "resnet18",
        "gpt2_scanned:4",
    )
    targets: Annotated[tuple[str, ...], tyro.conf.arg(help="chips that are not here")] = ("h100", "v5e")


def timed(measure: Callable[..., Any], net: Net, target: str) -> tuple[tuple[int, int] | None, float]:
    """Returns the peak and the bytes of the arguments of a network's gradient, and the seconds that they took.

    None for the bytes where the compiler refuses the program for its size.
    """
    with tempfile.TemporaryDirectory() as directory:
        os.environ["JAXREMAT_CACHE_DIR"] = directory
        start = time.perf_counter()
        try:
            found = measure(jax.value_and_grad(net.loss), *net.args, target=target)
        except jaxremat.CompileError as error:
            if error.wanted_bytes is None:
                raise
            return None, time.perf_counter() - start
        return (found.peak_bytes, found.argument_bytes), time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and a line of JSON; returns 0, 1 where figures differ, 2 for bad input."""
    options = tyro.cli(Options, prog="python -m experiments.bench peak", args=argv)
    try:
        asked = contests(PlanOptions(options.nets, options.targets, ("per block: nothing",)))
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    kept = os.environ.get("JAXREMAT_CACHE_DIR")
    rows, differs = list[dict[str, Any]](), False
    try:
        for contest in asked:
            # The first program of a kind of chip starts its compiler; that is not timed.
            jaxremat.peak(lambda x: x + 1, jax.ShapeDtypeStruct((1,), "float32"), target=contest.target)
            (alone, seconds), (whole, whole_seconds) = (
                timed(measure, contest.net, contest.target) for measure in (jaxremat.peak, jaxremat.cost)
            )
            differs |= None not in (alone, whole) and alone != whole
            rows.append(
                {
                    "net": contest.name,
                    "target": contest.target,
                    "peak_bytes": alone and alone[0],
                    "whole_peak_bytes": whole and whole[0],
                    "seconds": round(seconds, 2),
                    "whole_seconds": round(whole_seconds, 2),
                    "times": whole_seconds / seconds,
                }
            )
    finally:
        if kept is None:
            os.environ.pop("JAXREMAT_CACHE_DIR", None)
        else:
            os.environ["JAXREMAT_CACHE_DIR"] = kept
    table = Table("net", "target", "peak, MiB", "peak alone, s", "whole, s", "times")
    for row in rows:
        table.add_row(
            row["net"],
            row["target"],
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.1f}",
            f"{row['seconds']:.1f}",
            f"{row['whole_seconds']:.1f}",
            f"{row['times']:.1f}",
        )
    output.show(
        table, {"bench": "peak", "options": asdict(options), "differs": differs, "rows": rows, "versions": versions()}
    )
    return 1 if differs else 0
