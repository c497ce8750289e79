"""Compare rematerialization in JAX and PyTorch: the same networks, weights, batches and policies, side by side.

    python -m experiments.compare --quick
    python -m experiments.compare --models resnet18,vit --policies everything dots names:*_out --records mine.jsonl
    python -m experiments.compare --readme README.md            # the table of the committed records, written into it
    python -m experiments.compare --readme README.md --check    # or only compared with what is there

Every cell of models x policies x frameworks runs in its own process. A cell that the records file has figures for is not run
again; one that failed or was refused is. The report (`report.md`, `report.html`, plots) is written from the records file.
Progress goes to standard error; standard output gets the table and, as its last line, a JSON object that says what was done.
The exit status is 0; 1 when a cell failed (its row says why) or a check found a difference; 2 with one message for bad input.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import jaxremat
from experiments import compare_records, data
from experiments.cifar_torch import require_torch
from experiments.command import exit_status
from experiments.compare_readme import committed_results, update_readme
from experiments.compare_records import Cell, Framework, Result
from experiments.compare_report import write_report
from experiments.compare_run import Timing, run_group
from experiments.compare_table import markdown
from experiments.errors import ExperimentError
from experiments.models import ModelName

# The table of the article that began this, for models that have all three operations.
ARTICLES_TABLE = "ops:conv=store,relu=recompute,batch_norm=store"
DEFAULT_POLICIES = (
    "everything", "nothing", "dots", "names:*_out", "ops:conv=store,*=recompute", ARTICLES_TABLE, "segments:sqrt", "budget:50%",
)  # fmt: skip
QUICK: dict[str, Any] = {
    "models": "net", "policies": ("everything", "nothing", "dots", "segments:sqrt"), "steps": 10, "rounds": 3,
    "data": "sample", "data_dir": None,
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Compare policies in JAX and PyTorch: what they keep, recompute, allocate and cost."""

    policies: tuple[str, ...] = DEFAULT_POLICIES
    """Spellings of policies, separated by spaces, as commas belong to some of them."""
    models: str = "net,resnet18,wrn16_4,vit"
    """Models, separated by commas."""
    frameworks: str = "jax,torch"
    """Frameworks, separated by commas."""
    batch_size: int = 16
    """Images per step."""
    steps: int = 10
    """Steps of training before accuracy is taken."""
    rounds: int = 5
    """Rounds of timing: in each, every policy of a model and framework has its turn."""
    round_steps: int = 1
    """Timed steps of each turn."""
    seed: int = 0
    """Decides initial weights, data order, augmentation and dropout."""
    data: Literal["cifar10", "sample"] = "sample"
    """The full data set or the embedded sample."""
    data_dir: str | None = None
    """Where the full data set lies."""
    records: str = "compare.jsonl"
    """File of JSON lines that results are appended to and read from."""
    report: str = "compare_report"
    """Directory for the report."""
    quick: bool = False
    """The smallest comparison that shows something: `net` on the sample under four policies, a few minutes."""
    readme: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Run nothing; write the table of the committed records into the marked block of this file."""
    check: bool = False
    """With --readme: change nothing, and end with status 1 if the block differs."""


def cells_of(config: Config) -> list[Cell]:
    """Returns the cells that are asked for, those of one model and framework together.

    Raises:
        ExperimentError: a name or number that no cell can have.
        PolicyError: a policy that is none.
    """
    models = _listed("--models", config.models, get_args(ModelName))
    frameworks: list[Any] = _listed("--frameworks", config.frameworks, get_args(Framework))
    if not config.policies:
        raise ExperimentError("--policies needs at least one policy, such as everything; got none.")
    policies = list(dict.fromkeys(str(jaxremat.parse(policy)) for policy in config.policies))
    for field in ("batch_size", "steps", "rounds", "round_steps"):
        if getattr(config, field) < 1:
            raise ExperimentError(f"--{field.replace('_', '-')} must be at least 1; got {getattr(config, field)}.")
    if not 0 <= config.seed < 2**32:
        raise ExperimentError(f"--seed must be from 0 to 2**32 - 1; got {config.seed}.")
    return [
        Cell(framework, model, policy, config.batch_size, config.data, config.steps, config.seed)
        for model in models
        for framework in frameworks
        for policy in policies
    ]


def _listed(flag: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ExperimentError(f"{flag} takes {', '.join(known)}, separated by commas; got {name!r}.")
    return list(dict.fromkeys(names))


def run(config: Config, console: Console) -> tuple[list[Result], int]:
    """Runs the cells that the records file lacks and returns all asked results and how many were run.

    Raises:
        ExperimentError: something asked for cannot be done; the message says what, and the remedy.
        PolicyError: a policy that is none.
    """
    cells = cells_of(config)
    if any(cell.framework == "torch" for cell in cells):
        require_torch()
    path = Path(config.records).expanduser()
    known = {result.cell.key: result for result in (compare_records.read([path]) if path.exists() else [])}
    dataset = data.load(config.data, None if config.data_dir is None else Path(config.data_dir).expanduser())
    if config.batch_size > len(dataset.train_labels):
        raise ExperimentError(
            f"--batch-size must be at most the number of training images, {len(dataset.train_labels)}; got {config.batch_size}."
        )
    # What was refused is asked again, which takes seconds: another version may be able to.
    missing = [cell for cell in cells if cell.key not in known or known[cell.key].status != "measured"]
    timing = Timing(config.rounds, config.round_steps)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _opened(path) as file, Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("cells", total=len(cells), completed=len(cells) - len(missing))

        def done(result: Result) -> None:
            known[result.cell.key] = result
            file.write(result.to_json() + "\n")
            file.flush()
            bar.advance(task)
            if not console.is_terminal:
                cell = result.cell
                tail = f": {result.why}" if result.why else ""
                console.print(
                    f"{cell.framework} {cell.model} {cell.policy}: {result.status}{tail}",
                    soft_wrap=True,
                    highlight=False,
                )

        for _, group in groupby(missing, key=lambda cell: (cell.model, cell.framework)):
            run_group(
                list(group), config.data_dir, timing, done=done, say=lambda text: bar.update(task, description=text)
            )
    return [known[cell.key] for cell in cells], len(missing)


def _require_default(config: Config, why: str, names: set[str]) -> None:
    for field in fields(Config):
        if field.name in names and getattr(config, field.name) != field.default:
            raise ExperimentError(f"{why}: leave --{field.name.replace('_', '-')} out.")


def relu_rows(results: Sequence[Result]) -> list[tuple[str, int, int]]:
    """Returns for each model with ReLUs that PyTorch measured: its name, and what is kept with `F.relu` and with bit masks."""
    models = dict.fromkeys(
        (result.cell.model, result.cell.batch_size)
        for result in results
        if result.cell.framework == "torch" and result.status == "measured" and result.cell.model != "vit"
    )
    if not models:
        return []
    from experiments.compare_torch import relu_bytes

    return [(model, relu_bytes(model, "native", batch), relu_bytes(model, "mask", batch)) for model, batch in models]


def _opened(path: Path) -> Any:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise ExperimentError(
            f"--records must name a file that can be written; {path}: {error.strerror or error}."
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    config = tyro.cli(Config, prog="python -m experiments.compare", args=argv)
    goes_on = f"The same command goes on with the cells that {config.records} lacks."
    return exit_status(partial(_run, config, Console(stderr=True)), interrupted=goes_on)


def _run(config: Config, console: Console) -> int:
    if config.check and config.readme is None:
        raise ExperimentError("--check compares the table in a file: name it with --readme.")
    if config.readme is not None:
        _require_default(
            config, "--readme runs nothing", {field.name for field in fields(Config)} - {"readme", "check"}
        )
        same = update_readme(Path(config.readme), committed_results(), write=not config.check)
        if config.check and not same:
            print(
                f"error: the table in {config.readme} is not that of the records: run this without --check.",
                file=sys.stderr,
            )
        print(json.dumps({"readme": config.readme, "changed": not same and not config.check, "same": same}))
        return 1 if config.check and not same else 0
    if config.quick:
        _require_default(config, "--quick chooses it", set(QUICK))
        config = replace(config, **QUICK)
    results, ran = run(config, console)
    files = write_report(results, Path(config.report).expanduser(), relu_rows(results))
    failed = [result for result in results if result.status == "failed"]
    print(markdown(results))
    counts = {status: sum(r.status == status for r in results) for status in get_args(compare_records.Status)}
    print(json.dumps({"cells": len(results), "ran": ran, **counts, "files": [str(file) for file in files]}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
