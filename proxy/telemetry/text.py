"""A message and its keys as text, such as ``cannot write the cpuset pod=ns/web err="no space"``.

A message is a constant. Varying facts are values of keys; a value is quoted if it is not one plain word, and
is never used as a format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from proxy.model.errors import TopoproxyError
from proxy.model.quoting import MESSAGE

Plain = str | int | float | bool
Keys = Mapping[str, Plain]
CAUSE = "err"
"""The key of the cause of an error: a problem stays the same if its cause changes."""
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._/:,+@%*~#")


def plain(keys: Mapping[str, object]) -> dict[str, Plain]:
    """Convert values of any type to plain data; a key whose value is None is left out."""
    return {key: _value(value) for key, value in keys.items() if value is not None}


def _value(value: object) -> Plain:
    if isinstance(value, str | bool | int | float):
        return value if type(value) in (str, bool, int, float) else str(value)
    if isinstance(value, BaseException):
        return described(value)
    return str(value)


def described(error: BaseException) -> str:
    """Return the text of an exception; with its type if it is not one of topoproxy's exceptions."""
    return str(error) if isinstance(error, TopoproxyError) else f"{type(error).__name__}: {error}"


def identity(message: str, keys: Mapping[str, object]) -> tuple[object, ...]:
    """Return what distinguishes a message with its keys from others.

    The cause does not, nor does the id of a container whose name is given: a recreated container gets a new
    id.
    """
    passing = (CAUSE, "containerID") if "container" in keys else (CAUSE,)
    return (message, *((key, value) for key, value in keys.items() if key not in passing))


def rendered(message: str, keys: Mapping[str, object]) -> str:
    """Return the message, followed by its keys and values, on one line."""
    return f"{escaped(message)}{pairs(keys)}"


def pairs(keys: Mapping[str, object], *, bare: bool = True) -> str:
    """Return keys and values, a space before each.

    Args:
        keys: Keys and values.
        bare: Whether a value that is one plain word has no quotes (klog quotes all texts).
    """
    return "".join(f" {key}={_shown(value, bare)}" for key, value in keys.items())


def _shown(value: object, bare: bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    text = str(value)
    return text if bare and text and _PLAIN.issuperset(text) else quoted(text)


def quoted(text: str) -> str:
    """Quote as Go's strconv.Quote does for common texts: line breaks and control characters are escaped."""
    return '"' + escaped(text[: MESSAGE + 1].replace("\\", "\\\\").replace('"', '\\"')) + '"'


def escaped(text: str) -> str:
    """Escape every character that cannot be printed, as JSON does."""
    text = text[: 2 * MESSAGE]  # a longer line is cut in the end
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] if c != "\x7f" else "\\x7f" for c in text)
