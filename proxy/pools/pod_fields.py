"""Read the fields of a document, with errors that name the field.

Every reader takes the value and its path, such as ``spec.containers[1].name``, treats null as an absent
value, as Kubernetes does, and raises FieldError for a value of another type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.model.quantity import parse_quantity

CPU = "cpu"
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_LONGEST_SHOWN = 100


class FieldError(ValueError):
    """A field has a value of the wrong kind; the text is ``field: cause``."""

    def __init__(self, at: str, cause: str) -> None:
        super().__init__(f"{at}: {cause}" if at else cause)


def below(at: str, key: str) -> str:
    """Return the path of a key: ``at.key``, or ``at['a.b/c']`` if the key is not a plain word."""
    return f"{at}.{key}" if _PLAIN.fullmatch(key) else f"{at}[{shown(key)}]"


def shown(value: object) -> str:
    """Format a value of the document, truncated if it is long."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def read_object(value: object, at: str) -> Mapping[str, Any]:
    """Read an object."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise FieldError(at, f"{shown(value)} is not an object")
    for key in value:
        if not isinstance(key, str):
            raise FieldError(at, f"the key {shown(key)} is not a string")
    return value


def read_list(value: object, at: str) -> Sequence[object]:
    """Read a list."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise FieldError(at, f"{shown(value)} is not a list")
    return value


def read_text(value: object, at: str) -> str:
    """Read a string."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise FieldError(at, f"{shown(value)} is not a string")
    return value


def read_texts(value: object, at: str) -> dict[str, str]:
    """Read an object whose values are strings, such as labels."""
    return {key: read_text(item, below(at, key)) for key, item in read_object(value, at).items()}


def read_name(value: object, at: str, *, dots: bool = False) -> str:
    """Read a Kubernetes name (a DNS label; with ``dots`` several of them)."""
    name = read_text(value, at)
    if not name:
        raise FieldError(at, "is missing")
    if not _NAME.fullmatch(name) or len(name) > (253 if dots else 63) or ("." in name and not dots):
        raise FieldError(at, f"{shown(name)} is not a name such as 'web-1'")
    return name


def read_amounts(value: object, at: str) -> dict[str, int]:
    """Read an object of amounts: CPU in thousandths, all else in bytes or pieces."""
    amounts = {}
    for name, written in read_object(value, at).items():
        place = below(at, name)
        try:
            amounts[name] = parse_quantity(written, milli=name == CPU)
        except ValueError as error:
            raise FieldError(place, str(error)) from None
        if amounts[name] < 0:
            raise FieldError(place, f"{shown(written)} is negative")
    return amounts
