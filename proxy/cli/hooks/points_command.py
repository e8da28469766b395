"""``topoproxy hooks points``: the reference of hook points, in the terminal."""

from __future__ import annotations

import difflib
import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from proxy.model import schema_ids
from proxy.model.errors import UsageError

if TYPE_CHECKING:
    from proxy.hooks.events import Point

WIDEST = 100
"""Columns of prose."""


@click.command(short_help="Show what hooks receive, and may answer.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--markdown", is_flag=True, help="Print the whole reference, as in docs/hook-points.md.")
@click.option("--json", "as_json", is_flag=True, help="Print the points and classes as JSON.")
def points(names: tuple[str, ...], markdown: bool, as_json: bool) -> None:
    """Show what hooks receive at each point, and what they may answer.

    Without a NAME: all points in one line each. NAME is a point (pre_create_container), or a class of an
    event or an answer (Decision, Adjustment).
    """
    from proxy.hooks.reference import reference

    if markdown:
        if names or as_json:
            raise UsageError("cannot print one point or JSON as Markdown: leave --markdown or the rest away")
        click.echo(reference(), nl=False)
        return
    if as_json:
        click.echo(json.dumps(_data(names), indent=1))
        return
    width = shutil.get_terminal_size((120, 24)).columns
    lines = list(_overview(width)) if not names else []
    for name in names:
        lines += (
            ["", *_described(name, min(width, WIDEST))] if lines else _described(name, min(width, WIDEST))
        )
    click.echo("\n".join(lines))


def _overview(width: int) -> Iterator[str]:
    from proxy.hooks.docstrings import documented
    from proxy.hooks.events import POINTS
    from proxy.hooks.reference import short_answer
    from proxy.observe.json_access import cut, table

    rows = [("POINT", "MAY ANSWER", "WHEN")]
    for name, point in POINTS.items():
        rows.append((name, short_answer(point), documented(point).prose[0]))
    yield from (cut(line, width) for line in table(rows))


def _described(name: str, width: int) -> list[str]:
    """Return the lines about a point or a class.

    Raises:
        UsageError: There is none of this name.
    """
    from proxy.hooks.docstrings import documented
    from proxy.hooks.reference import answers_at, types_of

    point, cls = _named(name)
    reported = documented(cls)
    lines = [f"{point.NAME}(event: {point.__name__})" if point else reported.name]
    for words in reported.prose:
        lines += _wrapped(words, width, "  ")
    for row in reported.rows:
        lines += ["", f"  {', '.join(row.names)}: {types_of(row, str)}"]
        lines += _wrapped(row.words, width, "      ")
    rest = [*reported.after, *([answers_at(point)] if point else [])]
    for words in rest:
        lines += ["", *_wrapped(words, width, "  ")]
    return lines


def _named(name: str) -> tuple[type[Point] | None, type]:
    """Find a point, or a class, by its name; a point is its own class.

    Raises:
        UsageError: There is none of this name.
    """
    from proxy.hooks.events import POINTS
    from proxy.hooks.reference import ANSWERS, FACTS

    classes: dict[str, type] = {cls.__name__: cls for cls in (*FACTS, *ANSWERS)}
    point = POINTS.get(name) or next((p for p in POINTS.values() if p.__name__ == name), None)
    cls = point or classes.get(name)
    if cls is None:
        close = difflib.get_close_matches(name, [*POINTS, *classes], n=1)
        meant = f"; did you mean {close[0]}?" if close else "; topoproxy hooks points lists them"
        raise UsageError(f"cannot describe {name}: there is no such hook point{meant}")
    return point, cls


def _data(names: Sequence[str]) -> dict[str, object]:
    """Return points and classes as plain data: all of them where no name is given."""
    from proxy.hooks.answers import FIELDS
    from proxy.hooks.events import POINTS, VALIDATES
    from proxy.hooks.reference import ANSWERS, FACTS

    found = [_named(name) for name in names]
    if not found:
        found = [(point, point) for point in POINTS.values()] + [(None, cls) for cls in (*FACTS, *ANSWERS)]
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
            for point, _ in found
            if point is not None
        ],
        "classes": [_class_data(cls) for point, cls in found if point is None],
    }


def _class_data(cls: type) -> dict[str, object]:
    from proxy.hooks.docstrings import documented, type_words

    reported = documented(cls)
    fields = [
        {"name": name, "type": type_words(text, str) if text else "", "help": row.words}
        for row in reported.rows
        for name, text in zip(row.names, row.types, strict=True)
    ]
    return {"name": reported.name, "help": [*reported.prose, *reported.after], "fields": fields}


def _wrapped(words: str, width: int, margin: str) -> list[str]:
    import re

    plain = re.sub(r"\[([^]]*)\]\(#[^)]*\)", r"\1", words).replace("`", "").replace("**", "")
    return textwrap.wrap(
        plain,
        width,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
