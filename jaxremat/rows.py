"""Rows of the ledger, and the table that they print as: values that repeat from block to block share a line.

A deep network makes the same values in every block. Rows that differ in nothing but numbers within their module path, tags and
reason, and that one line of code made, become one line, with `*` for the numbers in which they differ: a glob that `names:` and
`paths:` understand.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxremat.text import human_bytes, table

Decision = Literal["stored", "offloaded", "recomputed", "free"]

# The table shows recomputed values down to this part of the largest one.
_SHOWN_FRACTION = 128
_HEADER = ("#", "n", "decision", "op", "path", "name", "value", "bytes", "source", "why")
_RIGHT = (0, 1, 7)


@dataclass(frozen=True)
class Row:
    """One value of the forward pass, or one input that the backward pass reads.

    Attributes:
        position: its number among the forward values, as `values:` policies count them; None for inputs.
        op: the operation that made it, `input` for inputs.
        path: the module path.
        names: its tags.
        source: file and line of the user's code that made it; of a library's where none of the user's is known.
        shape: its shape, the leading axis of a scan included.
        dtype: its type.
        size_bytes: its size; 0 for broadcast constants.
        decision: stored or offloaded: kept for the backward pass; recomputed: computed again there; free: neither.
        why: the reason.
    """

    position: int | None
    op: str
    path: str
    names: tuple[str, ...]
    source: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    decision: Decision
    why: str

    @property
    def kept_bytes(self) -> int:
        """What the value occupies from the forward to the backward pass."""
        return self.size_bytes if self.decision in ("stored", "offloaded") else 0


def render(rows: Sequence[Row], every_row: bool) -> str:
    """Returns a table of rows, with a note of what it leaves out.

    Args:
        rows: in the order of the table.
        every_row: a line for each, also for small and free ones. Else what is kept, and what is large and recomputed, and
            one line for values that repeat.
    """
    if every_row:
        return table(_HEADER, [_cells([row]) for row in rows], _RIGHT)
    limit = max((row.size_bytes for row in rows), default=0) // _SHOWN_FRACTION
    shown = [row for row in rows if row.kept_bytes or (row.size_bytes > limit and row.decision != "free")]
    groups = _repeated(shown)
    lines = [table(_HEADER, [_cells(group) for group in groups], _RIGHT)]
    if len(groups) < len(shown):
        lines.append(
            "A line of n values stands for all of them: their first and last position, and the sum of their bytes."
        )
    if left_out := sum(row.position is not None for row in rows) - len(shown):
        lines.append(f"{left_out} values that are small, or free, are not shown.")
    if len(lines) > 1:
        lines.append("to_text(every_row=True) shows each value, and so does to_json.")
    return "\n".join(lines)


def _repeated(rows: Iterable[Row]) -> list[list[Row]]:
    groups = dict[object, list[Row]]()
    for row in rows:
        labels = tuple(re.sub(r"\d+", "*", label) for label in (row.path, *row.names, row.why))
        key = (row.decision, row.op, labels, row.dtype, row.shape, row.source, row.position is None)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _cells(group: Sequence[Row]) -> tuple[str, ...]:
    first, last = group[0], group[-1]
    position = "-" if first.position is None else str(first.position)
    if len(group) > 1 and first.position is not None:
        position += f"…{last.position}"
    return (
        position,
        str(len(group)) if len(group) > 1 else "",
        first.decision,
        first.op,
        common(row.path for row in group),
        common(",".join(row.names) for row in group),
        f"{first.dtype}[{','.join(map(str, first.shape))}]",
        human_bytes(sum(row.size_bytes for row in group)),
        first.source.rpartition("/")[2],
        common(row.why for row in group),
    )


def common(labels: Iterable[str]) -> str:
    """Returns labels that differ in numbers alone as one, with `*` for each number in which they differ.

    Example:
        >>> from jaxremat.rows import common
        >>> common(["block_0/conv1", "block_1/conv1", "block_7/conv1"])
        'block_*/conv1'
    """
    parts = zip(*(re.split(r"(\d+)", label) for label in labels))
    return "".join(same[0] if len(set(same)) == 1 else "*" for same in parts)
