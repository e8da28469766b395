"""Tables for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def render(head: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False) -> str:
    """Format a table: first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        laid = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(laid)} |" if markdown else "  ".join(laid).rstrip()

    if markdown:
        rule = "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"
    else:
        rule = "  ".join("-" * width for width in widths)
    return "\n".join((line(head), rule, *(line(row) for row in rows)))


def percentile(samples: Sequence[float], part: float) -> float:
    """The sample below which this part of all samples lies: 0.99 for p99."""
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * part))]


def number(value: float | None, unit: str = "") -> str:
    """A number with a sensible number of digits; a dash if there is none."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}{' ' + unit if unit else ''}"
