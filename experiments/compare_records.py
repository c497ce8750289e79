"""The records of the comparison: what was asked of a cell of the matrix, and what came out, one JSON object a line."""

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from experiments.errors import ExperimentError

Framework = Literal["jax", "torch"]
Status = Literal["measured", "refused", "failed"]


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: a model under a policy in a framework, on a batch, trained for some steps.

    `policy` is in its one spelling. `steps` are steps of training from the first on, after which accuracy is taken.
    """

    framework: Framework
    model: str
    policy: str
    batch_size: int
    dataset: str
    steps: int
    seed: int

    @property
    def key(self) -> str:
        """What two runs of the same cell have in common."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Kept:
    """What one layer's operation keeps for the backward pass: `count` values of a type and a size, `size_bytes` together.

    Layers bear Flax's module paths in both frameworks. `how` is `torch_measure.How` in PyTorch. In JAX it is `chosen` by the
    policy, at the `border` of a segment, `small` (always stored), or `autodiff`: asked for where no policy chooses.
    """

    path: str
    op: str
    dtype: str
    how: str
    count: int
    size_bytes: int

    @property
    def unit_bytes(self) -> int:
        """The size of one of the values; 0 where there is none."""
        return self.size_bytes // self.count if self.count else 0

    def times(self, count: int) -> "Kept":
        """Returns the same with another number of values."""
        return replace(self, count=count, size_bytes=count * self.unit_bytes)


@dataclass(frozen=True)
class Result:
    """What was found out about a cell.

    Attributes:
        cell: what was asked.
        status: `measured`; `refused` where the framework cannot express the policy; `failed` where the cell broke.
        why: the reason for one that was not measured.
        note: what a reader of the figures must know.
        kept: what lives from the forward to the backward pass. JAX: traced; PyTorch: saved storages.
        recomputed: how often each operation runs again, or None where nobody can tell. JAX: traced; PyTorch: counted.
        peak_bytes: of a step, above parameters, optimizer state and batch. JAX: the compiler's; PyTorch: measured.
        step_seconds: of the timed steps, in order, without the warm-up.
        losses: of the steps of training.
        test_accuracy: after them.
        date: UTC.
        hardware: processor and cores, and the accelerator where there is one.
        versions: of Python and of the packages that a figure depends on.
    """

    cell: Cell
    status: Status
    why: str = ""
    note: str = ""
    kept: tuple[Kept, ...] = ()
    recomputed: dict[str, int] | None = None
    peak_bytes: int | None = None
    step_seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    test_accuracy: float | None = None
    date: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def kept_bytes(self) -> int:
        """The sum of what is kept."""
        return sum(kept.size_bytes for kept in self.kept)

    def to_json(self) -> str:
        """Returns the result as one line of JSON."""
        document = asdict(self) | {"kept": [[k.path, k.op, k.dtype, k.how, k.count, k.size_bytes] for k in self.kept]}
        return json.dumps(document, allow_nan=False)


def from_json(line: str) -> Result:
    """Returns the result that a line of JSON holds.

    Raises:
        ValueError: it holds none; the message says what is wrong.
    """
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError(f"a record is a JSON object, not {type(document).__name__}")
    wanted = {f.name for f in fields(Result)}
    if missing := sorted(wanted - document.keys()):
        raise ValueError(f"it lacks {', '.join(missing)}")
    values: dict[str, Any] = {name: document[name] for name in wanted}
    try:
        values["cell"] = Cell(**values["cell"])
        values["kept"] = tuple(Kept(*row) for row in values["kept"])
        values |= {name: tuple(values[name]) for name in ("step_seconds", "losses")}
    except TypeError as error:
        raise ValueError(str(error)) from None
    return Result(**values)


def gather(rows: Iterable[tuple[str, str, str, str, int]]) -> tuple[Kept, ...]:
    """Returns rows of (path, op, dtype, how, bytes), equal ones counted together, in order of first appearance.

    Example:
        >>> from experiments.compare_records import gather
        >>> gather([("a", "conv", "float32", "saved", 8), ("a", "conv", "float32", "saved", 8)])
        (Kept(path='a', op='conv', dtype='float32', how='saved', count=2, size_bytes=16),)
    """
    counts = Counter(rows)
    return tuple(
        Kept(path, op, dtype, how, count, count * size_bytes)
        for (path, op, dtype, how, size_bytes), count in counts.items()
    )


def read(paths: Sequence[Path]) -> list[Result]:
    """Returns the results in files of JSON lines, the last one of each cell, in order of first appearance.

    Raises:
        ExperimentError: a file cannot be read, or a line of it is no record; the message names the line.
    """
    results = dict[str, Result]()
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ExperimentError(
                f"{path} must be a file of records: {getattr(error, 'strerror', None) or error}."
            ) from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                result = from_json(line)
            except ValueError as error:
                raise ExperimentError(
                    f"{path}, line {number} must be a record of the comparison; {error}. Delete the line: its cell is then run "
                    "again."
                ) from None
            results[result.cell.key] = result
    return list(results.values())


def hardware() -> dict[str, Any]:
    """Returns the processor's name and the cores that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:  # not Linux: the platform's own word has to do
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": name, "cores": cores}
