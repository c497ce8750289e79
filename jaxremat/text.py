"""Plain-text tables and sizes, for everything in the library that prints."""

from collections.abc import Collection, Sequence


def human_bytes(size_bytes: int) -> str:
    """Returns a size for people, in binary units.

    Example:
        >>> human_bytes(3 * 2**20), human_bytes(96), human_bytes(1536)
        ('3.0 MiB', '96 B', '1.5 KiB')
    """
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Returns rows of text in aligned columns under a ruled header; columns that are empty throughout are left out.

    Args:
        header: a title per column.
        rows: the cells, as many per row as there are titles.
        right: the columns that are aligned to the right.

    Example:
        >>> print(table(("op", "n"), [("dot", "2"), ("conv", "10")], right=(1,)))
        op     n
        ----  --
        dot    2
        conv  10
    """
    shown = [i for i in range(len(header)) if not rows or any(row[i] for row in rows)]
    widths = {i: max(len(line[i]) for line in (header, *rows)) for i in shown}

    def line(cells: Sequence[str]) -> str:
        parts = [cells[i].rjust(widths[i]) if i in right else cells[i].ljust(widths[i]) for i in shown]
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), "  ".join("-" * widths[i] for i in shown), *map(line, rows)])
