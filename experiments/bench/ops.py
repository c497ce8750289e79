"""The operations that keep less beside their counterparts: bytes, errors, time, and what two networks gain.

    python -m experiments.bench ops
    python -m experiments.bench ops --only relu log_softmax --no-programs

Bytes are those that plain reverse mode keeps, for each element of the input. Errors are root mean squares against
float64, in ulps of the largest number. Both forms of an operation take turns; times are of forward and backward pass
together in one compiled function, and the ratio is that of the lower quartiles over the turns (other load only slows), by
the clock and by the processor's time.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from jaxremat.errors import did_you_mean

CHIPS = ("h100", "v5e")
ULP = 2.0**-23
TURN_SECONDS = 0.03


@dataclass(frozen=True)
class Options:
    """What to measure."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(help="names of operations; none for all")] = ()
    turns: Annotated[int, tyro.conf.arg(help="turns of each form of an operation")] = 15
    programs: Annotated[bool, tyro.conf.arg(help="compile the two networks too")] = True
    depth: Annotated[int, tyro.conf.arg(help="layers of the chain")] = 16
    batch_size: Annotated[int, tyro.conf.arg(help="images in the networks")] = 64


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
    clock_ratio: float
    processor_ratio: float

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


def measure(name: str, case: Case, turns: int) -> Measured:
    """Returns what one operation and its counterpart keep, how far off they are and how long they take."""
    args, cotangent = arguments(case)
    forms = {"lean": _both_passes(case.op), "standard": _both_passes(case.counterpart)}
    results = {form: f(cotangent, *args) for form, f in forms.items()}
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in (cotangent, *args)]
        exact = jax.tree.map(np.asarray, _both_passes(case.counterpart)(*wide))
    on_device = jax.device_put((cotangent, *args))
    begun = time.perf_counter()
    jax.block_until_ready(forms["standard"](*on_device))
    calls = max(1, round(TURN_SECONDS / (time.perf_counter() - begun)))
    clock = {form: list[float]() for form in forms}
    processor = {form: list[float]() for form in forms}
    for turn in range(turns):
        for form in sorted(forms, reverse=turn % 2 == 1):
            begun, begun_processor = time.perf_counter(), time.process_time()
            for _ in range(calls):
                jax.block_until_ready(forms[form](*on_device))
            clock[form].append((time.perf_counter() - begun) / calls)
            processor[form].append((time.process_time() - begun_processor) / calls)
    lean, standard, lean_processor, standard_processor = (
        float(np.quantile(seconds[form], 0.25)) for seconds in (clock, processor) for form in ("lean", "standard")
    )
    return Measured(
        name,
        kept(case.op, *args),
        kept(case.counterpart, *args),
        args[0].size,
        bool(np.array_equal(jax.jit(case.op)(*args), jax.jit(case.counterpart)(*args))),
        _error(results["lean"][0], exact[0]),
        _error(results["lean"][1], exact[1]),
        _error(results["standard"][1], exact[1]),
        lean,
        standard,
        lean / standard,
        lean_processor / standard_processor,
    )


def _shown(found: Kept, elements: int) -> str:
    """Returns bytes an element beyond the output, `y` for the output itself."""
    beyond = (found.inputs + found.made) / elements
    return "y" if found.outputs and not beyond else f"{beyond:.3g}{' + y' if found.outputs else ''}"


def _operations_table(rows: Sequence[Measured]) -> Table:
    table = Table(title="kept: bytes an element, y: the output; gradient error in ulps", box=None)
    columns = ("op", "kept", "standard", "same", "error", "standard", "ms", "ratio", "cpu")
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
            f"{row.clock_ratio:.2f}",
            f"{row.processor_ratio:.2f}",
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
    known = cases()
    for name in options.only:
        if name not in known:
            hint = did_you_mean(name, known)
            print(f"error: --only names operations: {', '.join(known)}; got {name!r}.{hint}", file=sys.stderr)
            return 2
    for field in ("turns", "depth", "batch_size"):
        if getattr(options, field) < 1:
            print(
                f"error: --{field.replace('_', '-')} must be at least 1; got {getattr(options, field)}.",
                file=sys.stderr,
            )
            return 2
    measured = [measure(name, known[name], options.turns) for name in options.only or known]
    table = _operations_table(measured)
    result = {"bench": "ops", "options": asdict(options), "operations": [row.as_json() for row in measured]}
    if options.programs:
        Console().print(table)
        available = jaxremat.targets()
        targets = ["local", *(chip for chip in CHIPS if available[chip].available)]
        rows = op_programs.measure(options.depth, options.batch_size, targets)
        table = _programs_table(rows, targets)
        result["programs"] = [row.as_json() for row in rows]
    output.show(table, result | {"versions": records.versions()})
    return 0
