"""The operations that keep less beside their counterparts: bytes, errors, time, and what two networks gain.

    python -m experiments.bench ops
    python -m experiments.bench ops --only relu log_softmax --no-programs
    python -m experiments.bench ops --targets local h100 --out ops.jsonl
    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 0 python -m experiments.bench ops --no-programs

Bytes are those that plain reverse mode keeps, for each element of the input. Errors are root mean squares against
float64, in ulps of the largest number. Times are of forward and backward pass together in one compiled function. The
operation, its counterpart and the counterpart once more take turns, and a time is the least of all calls, since other
load only slows. `ratio` is the operation's over the counterpart's; `clock` is the counterpart's second over its first, as
far from 1 as the clock is from the truth. Turns go on until that is within 2 %, or `--turns` are over. Where other work
shares the machine, one thread on one core (last line above) finds undisturbed moments that several together do not.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import jaxremat
from experiments import records
from experiments.bench import op_programs, output
from experiments.bench.kept import Kept, kept
from experiments.bench.op_cases import Case, arguments, cases
from experiments.compare_records import hardware
from experiments.errors import ExperimentError
from jaxremat import TargetError
from jaxremat.errors import did_you_mean

TARGETS = ("local", "h100", "v5e")
ULP = 2.0**-23
TURN_SECONDS = 0.03
LEAST_TURNS = 15
CLOCK_TOLERANCE = 0.02


@dataclass(frozen=True)
class Options:
    """What to measure."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(help="names of operations; none for all")] = ()
    turns: Annotated[int, tyro.conf.arg(help="most turns of each form of an operation")] = 120
    programs: Annotated[bool, tyro.conf.arg(help="compile the two networks too")] = True
    targets: Annotated[
        tuple[str, ...], tyro.conf.arg(help="what to compile them for; none for local, h100 and v5e")
    ] = ()
    depth: Annotated[int, tyro.conf.arg(help="layers of the chain")] = 16
    batch_size: Annotated[int, tyro.conf.arg(help="images in the networks")] = 64
    out: Annotated[str | None, tyro.conf.arg(help="file to which the line of JSON is appended")] = None


@dataclass(frozen=True)
class Measured:
    """One operation (`lean_`) beside its counterpart (`standard_`). Errors are in ulps."""

    op: str
    lean_kept: Kept
    standard_kept: Kept
    elements: int
    same_values: bool
    value_error: float
    lean_gradient_error: float
    standard_gradient_error: float
    lean_seconds: float
    standard_seconds: float
    ratio: float
    clock: float
    turns: int

    def as_json(self) -> dict[str, Any]:
        """Returns all fields, kept bytes by name."""
        return asdict(self) | {"lean_kept": self.lean_kept._asdict(), "standard_kept": self.standard_kept._asdict()}


def _both_passes(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(cotangent: Any, *args: Any) -> Any:
        out, vjp = jax.vjp(f, *args)
        return out, vjp(cotangent)

    return jax.jit(run, compiler_options=jaxremat.compiler_options())


def _error(found: Any, exact: Any) -> float:
    """Returns the largest over the arrays."""
    return max(
        float(np.sqrt(np.mean(np.square(np.asarray(f, np.float64) - e))) / np.abs(e).max() / ULP)
        for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    )


def _least_seconds(
    forms: dict[str, Callable[..., Any]], args: tuple[Any, ...], most_turns: int
) -> tuple[dict[str, float], int]:
    """Returns the seconds of a call of each form and of `standard again`, and how many turns it took."""
    forms = forms | {"standard again": forms["standard"]}
    on_device = jax.device_put(args)

    def turn(form: str, calls: int) -> float:
        least = float("inf")
        for _ in range(calls):
            begun = time.perf_counter()
            jax.block_until_ready(forms[form](*on_device))
            least = min(least, time.perf_counter() - begun)
        return least

    calls = max(1, round(TURN_SECONDS / turn("standard", 3)))
    least = dict.fromkeys(forms, float("inf"))
    order = list(forms)
    for taken in range(1, most_turns + 1):
        order.append(order.pop(0))  # each form comes after each other one
        for form in order if taken % 2 else reversed(order):
            least[form] = min(least[form], turn(form, calls))
        agree = abs(least["standard again"] / least["standard"] - 1) <= CLOCK_TOLERANCE
        if taken >= LEAST_TURNS and agree:
            return least, taken
    return least, most_turns


def measure(name: str, case: Case, turns: int) -> Measured:
    """Returns what one operation and its counterpart keep, how far off they are and how long they take."""
    args, cotangent = arguments(case)
    forms = {"lean": _both_passes(case.op), "standard": _both_passes(case.counterpart)}
    results = {form: f(cotangent, *args) for form, f in forms.items()}
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in (cotangent, *args)]
        exact = jax.tree.map(np.asarray, _both_passes(case.counterpart)(*wide))
    seconds, taken = _least_seconds(forms, (cotangent, *args), turns)
    return Measured(
        name,
        kept(case.op, *args),
        kept(case.counterpart, *args),
        args[0].size,
        bool(np.array_equal(jax.jit(case.op)(*args), jax.jit(case.counterpart)(*args))),
        _error(results["lean"][0], exact[0]),
        _error(results["lean"][1], exact[1]),
        _error(results["standard"][1], exact[1]),
        seconds["lean"],
        seconds["standard"],
        seconds["lean"] / seconds["standard"],
        seconds["standard again"] / seconds["standard"],
        taken,
    )


def _shown(found: Kept, elements: int) -> str:
    """Returns bytes an element beyond the output, `y` for the output itself."""
    beyond = (found.inputs + found.made) / elements
    return "y" if found.outputs and not beyond else f"{beyond:.3g}{' + y' if found.outputs else ''}"


def _operations_table(rows: Sequence[Measured]) -> Table:
    table = Table(title="kept: bytes an element, y: the output; gradient error in ulps", box=None)
    columns = ("op", "kept", "standard", "same", "error", "standard", "ms", "ratio", "clock")
    for column in columns:
        table.add_column(column, justify="left" if column == "op" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.op,
            _shown(row.lean_kept, row.elements),
            _shown(row.standard_kept, row.elements),
            "yes" if row.same_values else "no",
            f"{row.lean_gradient_error:.3f}",
            f"{row.standard_gradient_error:.3f}",
            f"{row.lean_seconds * 1000:.2f}",
            f"{row.ratio:.3f}",
            f"{row.clock:.3f}",
        )
    return table


def _programs_table(rows: Sequence[op_programs.Row], targets: Sequence[str]) -> Table:
    table = Table(title="networks: kept bytes, the same in activations a layer, convolutions run again, temp", box=None)
    for column in ("network", "ops", "policy", "kept", "a layer", "again", *targets):
        table.add_column(column, justify="left" if column in ("network", "ops", "policy") else "right")
    for row in rows:
        table.add_row(
            row.program,
            row.ops,
            row.policy,
            f"{row.residual_bytes / 2**20:.1f} MiB",
            "-" if row.activations is None else f"{row.activations:.3f}",
            str(row.recomputed_convolutions),
            *(f"{row.temp_bytes[target] / 2**20:.1f} MiB" for target in targets),
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and a line of JSON; returns the exit status."""
    options = tyro.cli(Options, prog="python -m experiments.bench ops", args=argv)
    try:
        targets = _check(options)
    except (TargetError, ExperimentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    known = cases()
    measured = [measure(name, known[name], options.turns) for name in options.only or known]
    table = _operations_table(measured)
    result = {
        "bench": "ops",
        "date": records.now(),
        "hardware": hardware(),
        "versions": records.versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "options": asdict(options),
        "operations": [row.as_json() for row in measured],
    }
    if options.programs:
        Console().print(table)
        rows = list[op_programs.Row]()
        for row in op_programs.measure(options.depth, options.batch_size, targets):
            print(f"compiled: {row.program}, {row.ops}, {row.policy}", file=sys.stderr, flush=True)
            rows.append(row)
        table = _programs_table(rows, targets)
        result["programs"] = [row.as_json() for row in rows]
    output.show(table, result)
    if options.out is not None:
        with Path(options.out).open("a", encoding="utf-8") as file:
            file.write(json.dumps(result, allow_nan=False) + "\n")
    return 0


def _check(options: Options) -> list[str]:
    """Returns the targets to compile for.

    Raises:
        ExperimentError: an option that cannot be.
        TargetError: a target that does not exist or that nothing here compiles for.
    """
    known = cases()
    for name in options.only:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ExperimentError(f"--only names operations: {', '.join(known)}; got {name!r}.{hint}")
    for field in ("turns", "depth", "batch_size"):
        if getattr(options, field) < 1:
            raise ExperimentError(f"--{field.replace('_', '-')} must be at least 1; got {getattr(options, field)}.")
    if options.out is not None:
        records.require_appendable(options.out)
    available = jaxremat.targets()
    for target in options.targets:
        jaxremat.cost(lambda: 0.0, target=target)
    return list(options.targets or (target for target in TARGETS if available[target].available))
