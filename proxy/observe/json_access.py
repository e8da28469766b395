"""Reads JSON in which any part may be missing or of another type, and formats it in columns.

Commands write pages from the answer of a daemon that may be of an older or a newer version. Many texts in it
come from pods and from files of other programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def as_map(value: object) -> Mapping[str, object]:
    """Return a mapping as it is, and an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: object) -> Sequence[object]:
    """Return a list as it is, and an empty one for anything else."""
    return value if isinstance(value, list | tuple) else []


def one_line(value: object) -> str:
    """Return a value as one line without control characters; nothing for None."""
    return "" if value is None else "".join(c if c.isprintable() else " " for c in str(value))


def cut(text: str, width: int) -> str:
    """Return a text in at most this many columns, with dots if it was longer."""
    return text if len(text) <= width else text[: width - 3] + "..."


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns, two blanks apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
