"""A generated text inside a marked block of a Markdown file, which regenerates byte for byte."""

import os
from pathlib import Path

from experiments.errors import ExperimentError


def marks(name: str) -> tuple[str, str]:
    """Returns the lines between which the block of a name stands.

    Example:
        >>> marks("compare")
        ('<!-- compare:begin -->', '<!-- compare:end -->')
    """
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def update_block(path: Path, name: str, text: str, *, write: bool) -> bool:
    """Puts a text between the marks of a file, and returns whether it was there already.

    Args:
        path: the file, with one pair of marks.
        name: of the block.
        text: of any lines.
        write: whether to change the file; an unchanged file is not touched.

    Raises:
        ExperimentError: the file cannot be read or written, or has no pair of marks.
    """
    try:
        found = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(
            f"--readme must name a text file; {path}: {getattr(error, 'strerror', None) or error}."
        ) from None
    begin, end = marks(name)
    before, has_begin, rest = found.partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end) or begin in after:
        raise ExperimentError(
            f"{path} must hold one block that begins with {begin} and ends with {end}; put it where the table belongs."
        )
    wanted = f"{before}{begin}\n{text}\n{end}{after}"
    if wanted == found:
        return True
    if write:
        partial = path.with_name(f".{path.name}.part")
        try:
            partial.write_text(wanted, encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            raise ExperimentError(f"{path} cannot be written: {error.strerror or error}.") from None
    return False
