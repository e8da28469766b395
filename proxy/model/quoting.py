"""Quotes input in messages: escapes it, so that it can be printed and encoded, and limits its length.

Names, labels and annotations of pods, and strings of the runtime, may hold line breaks, escape sequences of
terminals, characters that reverse the direction of writing, and halves of surrogate pairs, which cannot be
encoded at all. Only characters that Python calls printable are passed through.

The work depends on the length of the output, not of the input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

QUOTED = 60
"""Characters of a quoted value that are shown."""
SENTENCE = 300
"""Characters of a sentence about one value."""
MESSAGE = 2000
"""Bytes of any message."""
NAME = 253
"""Characters of a name (a DNS subdomain)."""
_CUT = "..."
_HASHED = 16
"""Digits of a hash that stand for the rest of a name."""


def escaped(text: str) -> str:
    r"""Escape every character that cannot be printed, as Python writes it: ``\n``, ``\u202e``, ``\ud800``."""
    return text if text.isprintable() else "".join(map(_escape, text))


def printable(text: str, limit: int = SENTENCE) -> str:
    """Return a text for use in a message: escaped, and truncated."""
    if len(text) <= limit and text.isprintable():
        return text
    head = text[: limit - len(_CUT)]
    if len(text) > limit and head.isprintable():
        return head + _CUT
    shown, whole = _escaped_prefix(text, limit, _escape)
    return shown if whole else _escaped_prefix(text, limit - len(_CUT), _escape)[0] + _CUT


def quoted(text: str, limit: int = QUOTED) -> str:
    """Quote a value in a message: in quotes as Python writes them, escaped and cut.

    Args:
        text: The value.
        limit: Characters between the quotes.
    """
    if len(text) <= limit and text.isprintable():
        return repr(text)
    mark = repr(text[:limit])[0]
    shown, whole = _escaped_prefix(
        text, limit, lambda char: f"\\{char}" if char in (mark, "\\") else _escape(char)
    )
    return f"{mark}{shown}{mark}{'' if whole else _CUT}"


def shown(value: object, limit: int = QUOTED) -> str:
    """Return a value of a JSON document for a message: a text or number, truncated; otherwise its kind."""
    if isinstance(value, str):
        return quoted(value, limit)
    if isinstance(value, list | tuple):
        return "a list"
    return "an object" if isinstance(value, dict) else printable(repr(value), limit)


def storable_name(text: str) -> str:
    """Return a name that can be stored: encodable, and cut with a hash at the end if it is too long.

    A name that Kubernetes allows is returned unchanged.
    """
    if len(text) <= NAME and text.isascii():
        return text
    data = text.encode(errors="backslashreplace")
    text = data.decode()
    if len(text) <= NAME:
        return text
    return f"{text[: NAME - _HASHED - 1]}~{hashlib.sha256(data).hexdigest()[:_HASHED]}"


def message(text: str) -> str:
    """Return a text for use as a message: printable, and at most ``MESSAGE`` bytes in UTF-8."""
    text = printable(text, MESSAGE)
    if text.isascii():
        return text
    data = text.encode()
    if len(data) <= MESSAGE:
        return text
    return data[: MESSAGE - len(_CUT)].decode(errors="ignore") + _CUT


def _escape(char: str) -> str:
    return char if char.isprintable() else repr(char)[1:-1]


def _escaped_prefix(text: str, limit: int, escape: Callable[[str], str]) -> tuple[str, bool]:
    """Escape as much of a text as fits, without cutting an escape; return it, and whether it is complete."""
    pieces: list[str] = []
    room = limit
    for char in text[: limit + 1]:
        piece = escape(char)
        if len(piece) > room:
            return "".join(pieces), False
        room -= len(piece)
        pieces.append(piece)
    return "".join(pieces), True
