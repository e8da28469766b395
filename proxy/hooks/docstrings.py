"""The docstrings of dataclasses, parsed into prose and one entry for each field.

A docstring is prose, then a section ``Attributes:`` with one entry for one or several fields
(``cpu_period, cpu_quota: Microseconds; ...``), then perhaps more prose. A field that no entry names is an
error: so the generated page is complete.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

_ENTRY = re.compile(r"((?:\w+, )*\w+): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DocumentedFields:
    """One entry: the fields that it is about, their types as written, and what it says of them."""

    names: tuple[str, ...]
    types: tuple[str, ...]
    words: str


@dataclass(frozen=True, slots=True)
class Documented:
    """A class: its prose in paragraphs, its fields in the docstring's order, and the text after them."""

    name: str
    prose: tuple[str, ...]
    rows: tuple[DocumentedFields, ...]
    after: tuple[str, ...] = ()


def documented(cls: type) -> Documented:
    """Take a dataclass's docstring apart.

    Raises:
        ValueError: A field is not documented, something is documented that is no field, or there is no prose.
    """
    before, _, rest = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")
    entries, after = _split(rest)
    types = _types(cls)
    rows = [_row(cls, text, types) for text in entries]
    documented = [name for row in rows for name in row.names]
    if missing := types.keys() - documented:
        raise ValueError(f"cannot describe {cls.__name__}: {', '.join(sorted(missing))} not documented")
    prose = _joined(before.split("\n\n"))
    if not prose or prose[0].startswith(f"{cls.__name__}("):  # the docstring that dataclass generates
        raise ValueError(f"cannot describe {cls.__name__}: its docstring does not say what it is")
    return Documented(cls.__name__, prose, tuple(rows), _joined(after))


def _types(cls: Any) -> dict[str, str]:
    """Return the types of a dataclass's or struct's fields, as written."""
    if issubclass(cls, Struct):
        return {name: str(cls.__annotations__[name]) for name in cls.__struct_fields__}
    return {item.name: str(item.type) for item in dataclasses.fields(cls)}


def _joined(paragraphs: Iterable[str]) -> tuple[str, ...]:
    return tuple(" ".join(text.split()) for text in paragraphs if text.strip())


def _split(section: str) -> tuple[list[str], list[str]]:
    """Return the entries of a section, and the paragraphs that follow it."""
    inside, after = [], section.split("\n\n")
    while after and after[0].startswith("    "):
        inside.append(after.pop(0))
    entries = re.split(r"\n(?=    \S)", "\n".join(inside)) if inside else []
    return [" ".join(entry.split()) for entry in entries], after


def _row(cls: type, text: str, types: Mapping[str, str]) -> DocumentedFields:
    found = _ENTRY.fullmatch(text)
    if found is None:
        raise ValueError(f"cannot describe {cls.__name__}: no entry of its docstring is {text!r}")
    names = tuple(found[1].split(", "))
    for name in names:
        if name not in types and not hasattr(cls, name):
            raise ValueError(f"cannot describe {cls.__name__}: it has no {name}")
    return DocumentedFields(names, tuple(types.get(name, "") for name in names), found[2])


def type_words(text: str, link: Callable[[str], str]) -> str:
    """Describe an annotation: ``Mapping[str, Mount | _Clear]`` is ``map of str to Mount or CLEAR``.

    Args:
        text: The annotation as it is written.
        link: Formats the name of a type.

    Raises:
        ValueError: The annotation has a form that is not supported.
    """
    return _said(ast.parse(text, mode="eval").body, link)


def _said(node: ast.expr, link: Callable[[str], str]) -> str:
    match node:
        case ast.Name(id="_None" | "_Clear"):
            return link("CLEAR")
        case ast.Name(id=name):
            return link(name)
        case ast.Constant(value=None):
            return link("None")
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{_said(left, link)} or {_said(right, link)}"
        case ast.Subscript(value=ast.Name(id="Mapping"), slice=ast.Tuple(elts=[key, value])):
            return f"map of {_said(key, link)} to {_said(value, link)}"
        case ast.Subscript(value=ast.Name(id="Sequence"), slice=item):
            return f"list of {_said(item, link)}"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[item, ast.Constant(value=v)])):
            assert v is ...
            return f"list of {_said(item, link)}"
    raise ValueError(f"cannot describe the type {ast.unparse(node)!r}")
