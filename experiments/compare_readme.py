"""The table of the committed records inside a marked block of a Markdown file, which regenerates byte for byte."""

import os
from collections.abc import Sequence
from pathlib import Path

from experiments import compare_records
from experiments.compare_records import Result
from experiments.compare_table import markdown
from experiments.errors import ExperimentError

BEGIN, END = "<!-- compare:begin -->", "<!-- compare:end -->"
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
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(
            f"--readme must name a text file; {path}: {getattr(error, 'strerror', None) or error}."
        ) from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after:
        raise ExperimentError(
            f"{path} must hold one block that begins with {BEGIN} and ends with {END}; put it where the table belongs."
        )
    wanted = f"{before}{BEGIN}\n{markdown(results)}\n{END}{after}"
    if wanted == text:
        return True
    if write:
        partial = path.with_name(f".{path.name}.part")
        try:
            partial.write_text(wanted, encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            raise ExperimentError(f"{path} cannot be written: {error.strerror or error}.") from None
    return False
