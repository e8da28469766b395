"""The reference of hook points, made from the dataclasses: docs/hook-points.md.

Pure: it returns the text and reads only the classes, so the page agrees with the code. ``make hook-points``
writes it, ``topoproxy hooks points`` prints it, and a test compares the committed file with it.

A docstring of a dataclass is prose, then a section ``Attributes:`` with one entry for one or several fields
(``cpu_period, cpu_quota: Microseconds; ...``), then perhaps more prose. A field that no entry names is an
error, so the generated page is complete.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from proxy.hooks.answers import FIELDS, MAPS, Adjustment, Update, Veto
from proxy.hooks.events import POINTS, VALIDATES, Point
from proxy.hooks.facts import ContainerFacts, Decision, Device, Mount, PodFacts, Pools, Resources, Running
from proxy.model.machine import Cpu, Machine, NumaNode

FACTS: tuple[type, ...] = (
    PodFacts, ContainerFacts, Resources, Decision, Pools, Running, Mount, Device, Machine, NumaNode, Cpu,
)  # fmt: skip
ANSWERS: tuple[type, ...] = (Adjustment, Update, Veto)
_SECTIONS = {cls.__name__ for cls in (*FACTS, *ANSWERS)} | {cls.__name__ for cls in POINTS.values()}

_INTRO = """\
# Hook points

Generated from `proxy/hooks/{events,facts,answers}.py` by `make hook-points`; edit those files, not this page.
[hooks.md](hooks.md) is the guide. `topoproxy hooks points NAME` prints one point of this page.

A hook is a file with functions of these names; each is given one event and answers with an
[`Adjustment`](#adjustment), with a [`Veto`](#veto) if the call may be refused, or with `None`. Everything
that is named here is imported from `proxy.hooks.api`, the classes of the machine from `proxy.model.machine`.

- Points **before** a call (`pre_...`) hold it until all their hooks have answered or timed out.
- Points **after** a call (`post_...`) run alongside it, and only if the call succeeded.
- Points that **validate** receive what all hooks together want before any of it is applied, and may only
  veto.
- Points of the **node** and of the **hook** itself belong to no call.

The QoS classes are Koordinator's: LSE (latency-sensitive exclusive), LSR (latency-sensitive reserved), LS
(latency-sensitive), BE (best effort) and SYSTEM ([koordinator.md](koordinator.md)).
"""
_GROUPS = ("Of a call", "That validate", "Of the node", "Of the hook")
_ANSWERS = """\
For each field an answer has nothing (`LEAVE`, the default), a value, or `CLEAR`: as if the client had not
requested it. In maps a missing key is left as it is, and a key whose value is `CLEAR` is removed. Two hooks
that set the same field, or the same key of a map, are in conflict.
"""
_SETS = """\
`CpuSet` and `Mask` are sets of CPUs and of NUMA nodes that cannot be changed. They are made by
`CpuSet([0, 1])` or `CpuSet.parse("0-3,8")`, and `str(cpus)` is a Linux list again. They know `|`, `&`, `-`,
`<=`, `==`, `in`, `len()`, `bool()`, iteration in ascending order, `isdisjoint(other)` and `first()`.

A `Machine` gives such sets by its parts: `machine.groups("core")` is a map of a core's name (its lowest CPU)
to its CPUs, and so for `package`, `die`, `cluster`, `llc` and `numa`. `machine.by_id` has each `Cpu` by its
id.
"""

_ENTRY = re.compile(r"((?:\w+, )*\w+): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FieldDocs:
    """One entry: the fields that it describes, their types as written, and the description."""

    names: tuple[str, ...]
    types: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class ClassDocs:
    """A class: its prose in paragraphs, its fields in the docstring's order, and the text after them."""

    name: str
    prose: tuple[str, ...]
    rows: tuple[FieldDocs, ...]
    after: tuple[str, ...] = ()


def class_docs_of(cls: type) -> ClassDocs:
    """Parse a dataclass's docstring.

    Raises:
        ValueError: A field is not documented, an entry names no field, or there is no prose.
    """
    before, _, rest = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")
    entries, after = _split(rest)
    types = _types(cls)
    rows = [_row(cls, text, types) for text in entries]
    described = [name for row in rows for name in row.names]
    if missing := types.keys() - described:
        raise ValueError(f"cannot describe {cls.__name__}: {', '.join(sorted(missing))} not documented")
    prose = _joined(before.split("\n\n"))
    if not prose or prose[0].startswith(f"{cls.__name__}("):  # the docstring that dataclass generates
        raise ValueError(f"cannot describe {cls.__name__}: its docstring does not say what it is")
    return ClassDocs(cls.__name__, prose, tuple(rows), _joined(after))


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


def _row(cls: type, text: str, types: Mapping[str, str]) -> FieldDocs:
    found = _ENTRY.fullmatch(text)
    if found is None:
        raise ValueError(f"cannot describe {cls.__name__}: no entry of its docstring is {text!r}")
    names = tuple(found[1].split(", "))
    for name in names:
        if name not in types and not hasattr(cls, name):
            raise ValueError(f"cannot describe {cls.__name__}: it has no {name}")
    return FieldDocs(names, tuple(types.get(name, "") for name in names), found[2])


def type_text(text: str, link: Callable[[str], str]) -> str:
    """Describe an annotation: ``Mapping[str, Mount | _Clear]`` is ``map of str to Mount or CLEAR``.

    Args:
        text: The annotation as it is written.
        link: Formats the name of a type.

    Raises:
        ValueError: The annotation has a form that is not supported.
    """
    return _type_text(ast.parse(text, mode="eval").body, link)


def _type_text(node: ast.expr, link: Callable[[str], str]) -> str:
    match node:
        case ast.Name(id="_LeaveOrClear" | "_Clear"):
            return link("CLEAR")
        case ast.Name(id=name):
            return link(name)
        case ast.Constant(value=None):
            return link("None")
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{_type_text(left, link)} or {_type_text(right, link)}"
        case ast.Subscript(value=ast.Name(id="Mapping"), slice=ast.Tuple(elts=[key, value])):
            return f"map of {_type_text(key, link)} to {_type_text(value, link)}"
        case ast.Subscript(value=ast.Name(id="Sequence"), slice=item):
            return f"list of {_type_text(item, link)}"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[item, ast.Constant(value=v)])):
            assert v is ...
            return f"list of {_type_text(item, link)}"
    raise ValueError(f"cannot describe the type {ast.unparse(node)!r}")


def reference() -> str:
    """Write the whole page."""
    parts = [_INTRO, *_overview()]
    for group in _GROUPS:
        parts.append(f"\n## {group}\n")
        parts += [point_text(point) for name, point in POINTS.items() if _group(name) == group]
    parts.append("\n## What hooks receive\n")
    parts += [_class_text(cls, "") for cls in FACTS]
    parts += ["\n## What may be answered\n\n", _ANSWERS]
    parts += [_class_text(cls, "") for cls in ANSWERS[:1]]
    parts += ["\n", *_table_of_fields()]
    parts += [_class_text(cls, "") for cls in ANSWERS[1:]]
    parts += ["\n## Sets\n\n", _SETS]
    return "".join(parts)


def point_text(point: type[Point]) -> str:
    """Write the section of a point."""
    return _class_text(point, point.NAME) + _paragraph(answers_at(point))


def _group(name: str) -> str:
    """Return the section of a point."""
    if name.startswith(("pre_", "post_")):
        return "Of a call"
    if name.startswith("validate_"):
        return "That validate"
    return "Of the hook" if name in ("configure", "shutdown") else "Of the node"


def _overview() -> Iterator[str]:
    shown = sorted(POINTS, key=lambda name: _GROUPS.index(_group(name)))
    yield "\n| handler | when | may answer |\n|---|---|---|\n"
    for name in shown:
        point = POINTS[name]
        when = _text(class_docs_of(point).prose[0])
        yield f"| [`{name}`](#{name}) | {when} | {short_answer(point)} |\n"


def short_answer(point: type[Point]) -> str:
    """Describe in a few words the answers that a point takes."""
    kinds = ["adjustment"] if point.TAKES - {"updates"} else []
    kinds += ["updates"] if "updates" in point.TAKES else []
    kinds += ["veto"] if point.VETO else []
    return ", ".join(kinds) or "nothing"


def answers_at(point: type[Point]) -> str:
    """Describe the fields that a point takes, in the order of ``Adjustment``, and whether it takes a veto."""
    taken = [f"`{name}`" for name in FIELDS if name in point.TAKES]
    veto = "may be vetoed" if point.VETO else "cannot be vetoed"
    message = f"**Takes** {', '.join(taken)}" if taken else "**Takes** nothing"
    message = f"{message}; {veto}."
    if validating := VALIDATES.get(point.NAME):
        message += f" What all hooks want together is shown to [`{validating}`](#{validating})."
    return message


def _class_text(cls: type, title: str) -> str:
    reported = class_docs_of(cls)
    first, *more = reported.prose
    opening = f"`{reported.name}`: {first}" if title else first
    lines = [f"\n### {title or reported.name}\n", *map(_paragraph, [opening, *more])]
    if reported.rows:
        lines.append("\n| field | type | |\n|---|---|---|\n")
        for row in reported.rows:
            names = ", ".join(f"`{name}`" for name in row.names)
            lines.append(f"| {names} | {types_of(row, _linked)} | {_text(row.text)} |\n")
    return "".join([*lines, *map(_paragraph, reported.after)])


def types_of(row: FieldDocs, link: Callable[[str], str]) -> str:
    """Write a row's types: one for all its fields, or one each in their order."""
    types = [type_text(text, link) for text in row.types if text]
    return "; ".join(types if len(set(types)) > 1 else types[:1])


def _paragraph(text: str) -> str:
    return "\n" + textwrap.fill(_text(text), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _table_of_fields() -> Iterator[str]:
    """One row for fields of an adjustment that the same points take."""
    yield "| fields | taken at |\n|---|---|\n"
    everywhere = [name for name, point in POINTS.items() if point.TAKES]
    rows: dict[tuple[str, ...], list[str]] = {}
    for field in FIELDS:
        at = tuple(name for name in everywhere if field in POINTS[name].TAKES)
        rows.setdefault(at, []).append(f"`{field}`{' (by key)' if field in MAPS else ''}")
    for at, names in rows.items():
        message = "every point that takes anything" if list(at) == everywhere else _links(at)
        yield f"| {', '.join(names)} | {message} |\n"


def _links(names: Sequence[str]) -> str:
    return ", ".join(f"[`{name}`](#{name})" for name in names)


def _linked(name: str) -> str:
    """Show a type's name, as a link if this page has a section for it."""
    points = {point.__name__: key for key, point in POINTS.items()}
    anchor = points.get(name, name.lower())
    return f"[`{name}`](#{anchor})" if name in _SECTIONS else f"`{name}`"


def _text(text: str) -> str:
    """Convert a docstring's markup to Markdown, and keep it in one cell of a table."""
    return text.replace("``", "`").replace("|", "\\|")
