"""The report of the comparison: `report.md`, `report.html` and the pictures, written whole or not at all."""

import os
from collections.abc import Sequence
from pathlib import Path

from experiments.compare_claims import HOW_TAKEN, POLICIES, findings
from experiments.compare_html import page
from experiments.compare_plots import kept_by_layer, memory_against_time
from experiments.compare_records import Result
from experiments.compare_table import groups, markdown
from experiments.errors import ExperimentError


def write_report(results: Sequence[Result], directory: Path, relu: Sequence[tuple[str, int, int]] = ()) -> list[Path]:
    """Writes the report into a directory, which is made if need be, and returns its files.

    Args:
        results: of the comparison, in any order.
        directory: files of the same names are replaced.
        relu: rows of model, bytes kept with PyTorch's own ReLU, bytes kept with bit masks.

    Raises:
        ExperimentError: the directory cannot be written.
    """
    texts = {"report.html": page(results, relu)}
    pictures = list[str]()
    for number, group in enumerate(groups(results), start=1):
        for name, picture in (("memory", memory_against_time(group)), ("layers", kept_by_layer(group))):
            file = f"{number}-{group.model}-{name}.svg"
            texts[file] = picture
            pictures.append(f"![{group.model}: {name}]({file})")
    claims = [f"- {finding.claim}. {finding.where}: {finding.measured}." for finding in findings(results)]
    how = [f"- {name}: {text}" for name, text in HOW_TAKEN]
    sections = [
        "# Rematerialization in JAX and PyTorch",
        markdown(results),
        "\n".join(pictures),
        "## What is said, and what was measured\n\n" + "\n".join(claims),
        "## What the policies store\n\n" + "\n".join(f"- {name}: {text}" for name, text in POLICIES),
        "## How each figure was taken\n\n" + "\n".join(how),
        "The stored sets layer by layer are in `report.html`.",
    ]
    texts["report.md"] = "\n\n".join(sections) + "\n"
    files = list[Path]()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            partial, file = directory / f".{name}.part", directory / name
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, file)
            files.append(file)
    except OSError as error:
        raise ExperimentError(
            f"--report must name a directory that can be written; {directory}: {error.strerror or error}."
        ) from None
    return files
