"""Records: what a run was, what it cost and what came out, as one JSON object a line."""

import json
import platform
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError

SCHEMA = 1
PACKAGES = ("jaxremat", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")


@dataclass(frozen=True)
class Record:
    """One run. `residual_bytes` comes from the trace, `compiled_temp_bytes` from the compiler, times from the run.

    `losses` holds the training loss at the steps `loss_steps`: of every step for short runs, of a hundred for long ones.
    Values that were not taken are None.
    """

    config: dict[str, Any]
    policy_asked: str
    policy: str
    regions: str
    model: str
    dataset: str
    dataset_origin: str
    device: dict[str, Any]
    versions: dict[str, str]
    date: str
    first_step: int
    last_step: int
    test_accuracy: float
    test_accuracies: list[float]
    loss_steps: list[int]
    losses: list[float]
    step_seconds: float | None
    residual_bytes: int
    compiled_temp_bytes: int | None
    params_sha256: str
    schema: int = SCHEMA
    framework: str = "jax"
    peak_bytes: int | None = None  # of a step, measured
    note: str = ""
    plan: dict[str, Any] | None = None  # of a budget: the figures of what was planned for it

    def to_json(self) -> str:
        """Returns the record as one line of JSON."""
        return json.dumps(asdict(self), allow_nan=False)


def thin(values: list[float], first_step: int, most: int = 100) -> tuple[list[int], list[float]]:
    """Returns at most `most` of the values of the steps after `first_step`, evenly spread, with their steps' numbers.

    Example:
        >>> from experiments.records import thin
        >>> thin([3.0, 2.0, 1.0], first_step=10)
        ([11, 12, 13], [3.0, 2.0, 1.0])
        >>> thin([4.0, 3.0, 2.0, 1.0, 0.0], first_step=0, most=3)
        ([1, 3, 5], [4.0, 2.0, 0.0])
    """
    if len(values) <= most:
        picked = list(range(len(values)))
    else:
        picked = [round(i * (len(values) - 1) / (most - 1)) for i in range(most)]
    return [first_step + 1 + i for i in picked], [values[i] for i in picked]


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            found[package] = "source"
    return found


def now() -> str:
    """Returns the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def require_appendable(path: str, option: str = "--out") -> None:
    """Makes sure, before hours of work, that `path`, which `option` named, can be written to.

    Raises:
        ExperimentError: it cannot.
    """
    target = Path(path).expanduser()
    existed = target.exists()
    try:
        with target.open("a"):
            pass
    except OSError as error:
        raise ExperimentError(
            f"{option} must name a file that can be written; {path}: {error.strerror or error}."
        ) from error
    if not existed:
        target.unlink(missing_ok=True)


def require_outputs(out: str | None, checkpoint_dir: str | None) -> None:
    """Makes sure, before anything is fetched or computed, that a run can write what it was asked to. Leaves nothing behind.

    Raises:
        ExperimentError: `out` is no file that can be written, or `checkpoint_dir` cannot be made or written to.
    """
    if out is not None:
        require_appendable(out)
    if checkpoint_dir is None:
        return
    directory = Path(checkpoint_dir).expanduser().absolute()
    try:
        nearest = next(path for path in (directory, *directory.parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ExperimentError(
            f"--checkpoint-dir must be a directory that can be written; {checkpoint_dir}: {error.strerror or error}."
        ) from error


def append(path: str, record: Record) -> None:
    """Appends a record to a file of JSON lines.

    Raises:
        ExperimentError: the file cannot be written.
    """
    try:
        with Path(path).expanduser().open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
    except OSError as error:
        raise ExperimentError(f"The record could not be appended to {path}: {error.strerror or error}.") from error
