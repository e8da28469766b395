"""Text and colours on a terminal: plain ANSI codes, or none if colours are off."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TextIO

CLASS_COLOURS = {
    "LSE": "35",
    "LSR": "33",
    "Guaranteed": "34",
    "LS": "32",
    "Burstable": "32",
    "BE": "36",
    "BestEffort": "36",
}
"""ANSI colours by class: exclusive CPUs magenta, yellow, blue; shared pool green; BE (best effort) pool
cyan."""


class Screen:
    """The terminal on which the demonstration is shown.

    Args:
        out: The stream.
        colour: False for none; None for colours if ``out`` is a terminal and NO_COLOR is unset or empty.
        width: Columns; None: the terminal's, at most 120.
    """

    def __init__(
        self, out: TextIO | None = None, *, colour: bool | None = None, width: int | None = None
    ) -> None:
        self._out = out if out is not None else sys.stdout
        if colour is None:
            # https://no-color.org: any value that is not empty turns colours off.
            colour = (
                self._out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
            )
        self.colour = colour
        self.width = max(60, min(120, width or shutil.get_terminal_size().columns))
        encoding = (getattr(self._out, "encoding", None) or "ascii").lower().replace("-", "")
        self.unicode = encoding.startswith("utf")

    def paint(self, text: str, *codes: str) -> str:
        """Wrap a text in ANSI codes, if colours are on."""
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if self.colour and codes and text else text

    def glyph(self, nice: str, plain: str) -> str:
        """Choose a character that the stream can show."""
        return nice if self.unicode else plain

    def line(self, text: str = "") -> None:
        """Write one line, and flush it."""
        shown = text.rstrip()
        if not self.unicode:
            shown = shown.encode("ascii", "replace").decode()
        self._out.write(shown + "\n")
        self._out.flush()

    def paragraph(self, text: str, indent: int = 2, *codes: str) -> None:
        """Write running text, folded to the width (at most 96 columns, for legibility)."""
        pad = " " * indent
        for row in textwrap.wrap(text, min(self.width, 96) - indent, break_on_hyphens=False):
            self.line(pad + self.paint(row, *codes))

    def title(self, number: int, text: str) -> None:
        """Begin a step."""
        bar = self.glyph("━", "=")
        head = f" {number} " if number else " "
        rows = textwrap.wrap(text, self.width - len(head) - 3, break_on_hyphens=False)
        self.line()
        for at, row in enumerate(rows):
            rest = max(0, self.width - len(head) - len(row) - 3) if at == 0 else 0
            self.line(
                self.paint(bar * 2 if at == 0 else "  ", "2")
                + self.paint(head if at == 0 else " " * len(head), "1")
                + self.paint(row, "1")
                + " "
                + self.paint(bar * rest, "2")
            )

    def success(self, text: str) -> None:
        """Print a check that succeeded."""
        mark = self.glyph("✓", "ok")
        pad = " " * (len(mark) + 3)
        rows = textwrap.wrap(text, min(self.width, 96) - len(pad), break_on_hyphens=False)
        for at, row in enumerate(rows):
            self.line(("  " + self.paint(mark, "1", "32") + " " if at == 0 else pad) + row)

    def failure(self, text: str) -> None:
        """Print a check that failed."""
        self.line("  " + self.paint(self.glyph("✗", "FAILED:"), "1", "31") + " " + text)
