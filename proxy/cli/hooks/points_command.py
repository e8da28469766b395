"""``topoproxy hooks points``: shows the reference of hook points in the terminal."""

from __future__ import annotations

import json
import shutil

import click

from proxy.model.errors import UsageError

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
    from proxy.cli.hooks.points_text import overview, point_lines, points_data
    from proxy.hooks.reference import reference

    if markdown:
        if names or as_json:
            raise UsageError("cannot print one point or JSON as Markdown: leave out --markdown or the rest")
        click.echo(reference(), nl=False)
        return
    if as_json:
        click.echo(json.dumps(points_data(names), indent=1))
        return
    width = shutil.get_terminal_size((120, 24)).columns
    lines = list(overview(width)) if not names else []
    for name in names:
        lines += (
            ["", *point_lines(name, min(width, WIDEST))] if lines else point_lines(name, min(width, WIDEST))
        )
    click.echo("\n".join(lines))
