"""One cell of the planner's bench: a competitor, or a budget given to the planner, for one network and target; as JSON lines."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import jax

import jaxremat
from experiments import records
from experiments.bench import gradients
from experiments.bench.nets import Net
from experiments.bench.recomputed import recomputed_flops
from experiments.compare_records import hardware
from experiments.errors import ExperimentError
from jaxremat import CompileError, PolicyError
from jaxremat.flops import count_flops
from jaxremat.policy import Policy
from jaxremat.targets import package_versions

Kind = Literal["competitor", "plan"]
Status = Literal["found", "no plan", "failed"]
NO_REMAT = "no remat"


@dataclass(frozen=True)
class Cell:
    """What was asked.

    Attributes:
        kind: whether a competitor was compiled or the planner was asked.
        net: as it is spelt at `--nets`, with its batch where that is not the benchmark's.
        target: the chip.
        asked: the competitor's name, or the budget in bytes.
    """

    kind: Kind
    net: str
    target: str
    asked: str | int


@dataclass(frozen=True)
class Figures:
    """What one program needs. Sizes in bytes, by the target's compiler; operations, of the jaxpr, two for a multiply-add.

    Attributes:
        peak_bytes: the most in use at any time, arguments and results included.
        temp_bytes: of it, what is neither argument nor result; None where the compiler refused the program for its size, or was
            asked for the peak alone, as the fields below.
        convolutions: in the compiled program, each loop body once.
        dots: likewise.
        recomputed_flops: of convolutions and matrix products, beyond those of the program without rematerialization.
        kept_bytes: from the forward to the backward pass, parameters and arguments left out, by the trace; None where it was
            not asked for.
    """

    peak_bytes: int
    recomputed_flops: int
    temp_bytes: int | None = None
    convolutions: int | None = None
    dots: int | None = None
    kept_bytes: int | None = None


@dataclass(frozen=True)
class Step:
    """The work of one step without rematerialization: all operations, and those of contractions."""

    flops: int
    contraction_flops: int


@dataclass(frozen=True)
class Planned:
    """What a plan says of itself, beside the figures of its program. Costs in operations of all kinds.

    Attributes:
        policy: its kind: `values` for a stored set of the planner's own, `values/values` for one of two levels, `loops:` for
            one with scans, else the standard policy that won.
        told_peak_bytes: the compiled peak that the plan reports.
        told_flops: the recomputed contractions that the plan reports.
        cost_flops: all that the plan recomputes.
        bound_flops: no schedule within the budget recomputes less.
        forward_flops: of one forward pass.
        seconds: of planning, compilations included.
        search_seconds: of the search alone.
        attempts: the predicted and the compiled peak of all that was compiled.
        gradient_difference: of the program's gradient from that without rematerialization, both run on this machine, as
            `gradients.largest_difference`: 0 where all bits are the same; None where they were not run.
    """

    policy: str
    told_peak_bytes: int
    told_flops: int
    cost_flops: float
    bound_flops: float
    forward_flops: int
    seconds: float
    search_seconds: float
    attempts: tuple[tuple[int, int], ...]
    gradient_difference: float | None = None


@dataclass(frozen=True)
class Result:
    """What came out of a cell, with the day, the machine and the versions; one JSON line."""

    cell: Cell
    status: Status
    why: str = ""
    figures: Figures | None = None
    step: Step | None = None
    planned: Planned | None = None
    seconds: float = 0.0
    date: str = field(default_factory=records.now)
    hardware: dict[str, Any] = field(default_factory=hardware)
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the result as one line of JSON."""
        return json.dumps(asdict(self), allow_nan=False)


def compete(cell: Cell, net: Net, loss: Any) -> Result:
    """Compiles a competitor's loss; a failure is a result that says why."""

    def work() -> dict[str, Any]:
        count = count_flops(jax.make_jaxpr(jax.value_and_grad(net.loss))(*net.args))
        step = Step(count.dot_flops + count.conv_flops + count.elementwise_flops, count.dot_flops + count.conv_flops)
        kept = jaxremat.residuals(loss, *net.args).total_bytes if cell.asked == NO_REMAT else None
        return {"figures": replace(figures(net, loss, cell.target, is_early(cell)), kept_bytes=kept), "step": step}

    return _result(cell, work)


def is_early(cell: Cell) -> bool:
    """Returns whether a program is compiled until its memory is known, and no further: those for TPUs take minutes else.

    Claims want to know the temporaries of no remat for GPUs.
    """
    kind = jaxremat.targets()[cell.target].kind
    return kind == "tpu" or (kind == "gpu" and cell.asked != NO_REMAT)


def plan(cell: Cell, net: Net, planner: Callable[[], jaxremat.Planner], early: bool = False) -> Result:
    """Asks the planner for the budget of a cell, and compiles what it found once more; a failure is a result that says why.

    On `local` the gradient is run, too, and compared with that without rematerialization, where this fits into the memory.

    Args:
        cell: the network, target and budget.
        net: the network.
        planner: returns the planner of its loss for the target; the first call may take long.
        early: as for `figures`.
    """

    def work() -> dict[str, Any]:
        found = planner().plan(int(cell.asked))
        planned_loss = jaxremat.remat(net.loss, found)
        kept = jaxremat.residuals(planned_loss, *net.args).total_bytes
        counted = replace(figures(net, planned_loss, cell.target, early), kept_bytes=kept)
        assert found.peak_bytes is not None
        planned = Planned(
            kind_of(found.resolved()),
            found.peak_bytes,
            found.recomputed_contraction_flops,
            found.cost,
            found.bound,
            found.forward_flops,
            found.seconds,
            found.search_seconds,
            tuple((a.predicted_bytes, a.peak_bytes) for a in found.attempts if a.peak_bytes is not None),
            gradients.difference(net, planned_loss) if cell.target == "local" and gradients.fits(net) else None,
        )
        return {"figures": counted, "planned": planned}

    return _result(cell, work)


def kind_of(policy: Policy) -> str:
    """Returns a policy's spelling, of lists of positions the word `values` alone, once for every level.

    Example:
        >>> import jaxremat
        >>> [kind_of(jaxremat.parse(text)) for text in ("dots", "values:1,2@ab", "values:1/3/5,6", "loops:dots|4*values:1")]
        ['dots', 'values', 'values/values/values', 'loops:dots|4*values']
    """
    return re.sub(
        r"values:([\d,/^]+)(@[0-9a-f]+)?", lambda found: "/".join(["values"] * (found[1].count("/") + 1)), str(policy)
    )


def figures(net: Net, loss: Any, target: str, early: bool = False) -> Figures:
    """Returns what the gradient of `loss`, which is the loss of `net` under some rematerialization, needs; `early`: at its peak.

    Raises:
        CompileError: the compiler refused it for another reason than its size.
    """
    repeated = 0 if loss is net.loss else recomputed_flops(loss, net.loss, net.args)
    if early:
        return Figures(jaxremat.peak(jax.value_and_grad(loss), *net.args, target=target).peak_bytes, repeated)
    try:
        found = jaxremat.cost(jax.value_and_grad(loss), *net.args, target=target)
    except CompileError as error:
        if error.wanted_bytes is None:
            raise
        return Figures(error.wanted_bytes, repeated)
    return Figures(found.peak_bytes, repeated, found.temp_bytes, found.convolutions, found.dots)


def _result(cell: Cell, work: Any) -> Result:
    began = time.perf_counter()
    try:
        status, why, parts = "found", "", work()
    except PolicyError as error:
        status, why, parts = "no plan", str(error), {}
    except Exception as error:  # one cell must not cost the others, and whatever went wrong is a row of the table
        status, why, parts = "failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}", {}
    kind = jaxremat.targets()[cell.target].kind
    packages = records.versions() | ({} if kind == "local" else package_versions(kind))
    seconds = time.perf_counter() - began
    return Result(cell, status, why, **parts, seconds=seconds, versions=packages | _revision())


def _revision() -> dict[str, str]:
    """Returns the commit of the source tree that runs; nothing for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"revision": done.stdout.strip()}


def read(paths: Sequence[Path]) -> dict[Cell, Result]:
    """Returns the last result of each cell in files of JSON lines, in order of first appearance.

    Raises:
        ExperimentError: a file cannot be read, or a line of it is no result; the message names the line.
    """
    results = dict[Cell, Result]()
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ExperimentError(
                f"{path} must be a file of results: {getattr(error, 'strerror', None) or error}."
            ) from None
        for number, line in enumerate(lines, start=1):
            try:
                result = from_json(line)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ExperimentError(
                    f"{path}, line {number} must be a result of this benchmark; {error}. Delete the line: its cell is then "
                    "run again."
                ) from None
            results[result.cell] = result
    return results


def from_json(line: str) -> Result:
    """Returns the result that a line of JSON holds.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it holds none.
    """
    document = json.loads(line)
    if missing := {f.name for f in fields(Result)} - document.keys():
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    document["cell"] = Cell(**document["cell"])
    if document["planned"] is not None:
        attempts = tuple((predicted, compiled) for predicted, compiled in document["planned"].pop("attempts"))
        document["planned"] = Planned(**document["planned"], attempts=attempts)
    for name, kind in (("figures", Figures), ("step", Step)):
        if document[name] is not None:
            document[name] = kind(**document[name])
    return Result(**document)


def append(path: Path, result: Result) -> None:
    """Appends a line to a file.

    Raises:
        ExperimentError: the file cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(result.to_json() + "\n")
    except OSError as error:
        raise ExperimentError(
            f"--out must name a file that can be written; {path}: {error.strerror or error}."
        ) from None
