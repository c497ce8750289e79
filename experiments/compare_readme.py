"""The table of the committed records inside a marked block of a Markdown file, which regenerates byte for byte."""

from collections.abc import Sequence
from pathlib import Path

from experiments import compare_records
from experiments.compare_records import Result
from experiments.compare_table import markdown
from experiments.errors import ExperimentError
from experiments.marked import marks, update_block

BEGIN, END = marks("compare")
RESULTS = Path(__file__).parent / "results"


def committed_results() -> list[Result]:
    """Returns the results that are committed beside this file, files in order of their names.

    Raises:
        ExperimentError: there are none, or one is damaged.
    """
    files = sorted(RESULTS.glob("compare*.jsonl"))
    if not files:
        raise ExperimentError(f"experiments/{RESULTS.name} must hold records, compare*.jsonl; it holds none.")
    return compare_records.read(files)


def update_readme(path: Path, results: Sequence[Result], *, write: bool) -> bool:
    """Puts the table of `results` between the marks of a file, and returns whether it was there already.

    Args:
        path: the file, with one pair of marks.
        results: of the comparison.
        write: whether to change the file; an unchanged file is not touched.

    Raises:
        ExperimentError: the file cannot be read or written, or has no pair of marks.
    """
    return update_block(path, "compare", markdown(results), write=write)
