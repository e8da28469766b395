"""Formats the reference of hook points as lines and as plain data."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator, Sequence

from proxy.hooks.answers import FIELDS
from proxy.hooks.events import POINTS, VALIDATES, Point
from proxy.hooks.reference import ANSWERS, FACTS, answers_at, class_docs_of, short_answer, type_text, types_of
from proxy.model import schema_ids
from proxy.model.errors import UsageError
from proxy.observe.json_access import cut, table


def overview(width: int) -> Iterator[str]:
    """Yield all points in one line each."""
    rows = [("POINT", "MAY ANSWER", "WHEN")]
    for name, point in POINTS.items():
        rows.append((name, short_answer(point), class_docs_of(point).prose[0]))
    yield from (cut(line, width) for line in table(rows))


def point_lines(name: str, width: int) -> list[str]:
    """Return the lines about a point or a class.

    Raises:
        UsageError: There is none of this name.
    """
    point, cls = _named(name)
    documentation = class_docs_of(cls)
    lines = [f"{point.NAME}(event: {point.__name__})" if point else documentation.name]
    for text in documentation.prose:
        lines += _wrapped(text, width, "  ")
    for row in documentation.rows:
        lines += ["", f"  {', '.join(row.names)}: {types_of(row, str)}"]
        lines += _wrapped(row.text, width, "      ")
    rest = [*documentation.after, *([answers_at(point)] if point else [])]
    for text in rest:
        lines += ["", *_wrapped(text, width, "  ")]
    return lines


def _named(name: str) -> tuple[type[Point] | None, type]:
    """Find a point, or a class, by its name; a point is its own class.

    Raises:
        UsageError: There is none of this name.
    """
    classes: dict[str, type] = {cls.__name__: cls for cls in (*FACTS, *ANSWERS)}
    point = POINTS.get(name) or next((p for p in POINTS.values() if p.__name__ == name), None)
    cls = point or classes.get(name)
    if cls is None:
        close = difflib.get_close_matches(name, [*POINTS, *classes], n=1)
        meant = f"; did you mean {close[0]}?" if close else "; topoproxy hooks points lists them"
        raise UsageError(f"cannot describe {name}: there is no such hook point{meant}")
    return point, cls


def points_data(names: Sequence[str]) -> dict[str, object]:
    """Return points and classes as plain data: all of them if no name is given."""
    classes = [_named(name) for name in names]
    if not classes:
        classes = [(point, point) for point in POINTS.values()] + [(None, cls) for cls in (*FACTS, *ANSWERS)]
    return {
        "schema": schema_ids.HOOKS_POINTS,
        "points": [
            {
                "name": point.NAME,
                "takes": [name for name in FIELDS if name in point.TAKES],
                "veto": point.VETO,
                "validated_at": VALIDATES.get(point.NAME, ""),
                "event": _class_data(point),
            }
            for point, _ in classes
            if point is not None
        ],
        "classes": [_class_data(cls) for point, cls in classes if point is None],
    }


def _class_data(cls: type) -> dict[str, object]:
    documentation = class_docs_of(cls)
    fields = [
        {"name": name, "type": type_text(text, str) if text else "", "help": row.text}
        for row in documentation.rows
        for name, text in zip(row.names, row.types, strict=True)
    ]
    return {
        "name": documentation.name,
        "help": [*documentation.prose, *documentation.after],
        "fields": fields,
    }


def _wrapped(text: str, width: int, margin: str) -> list[str]:
    plain = re.sub(r"\[([^]]*)\]\(#[^)]*\)", r"\1", text).replace("`", "").replace("**", "")
    return textwrap.wrap(
        plain,
        width,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
