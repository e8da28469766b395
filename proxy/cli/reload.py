"""``topoproxy reload``: makes the running daemon read its configuration again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from proxy.cli.admin_query import query_daemon, query_options
from proxy.model.errors import ConfigError
from proxy.model.phrases import counted
from proxy.observe.json_access import as_list, as_map, one_line

if TYPE_CHECKING:
    from proxy.config import Config


@click.command()
@query_options(60.0)
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON.")
def reload(file: Path | None, admin: str | None, as_json: bool, timeout: float) -> None:
    """Make the running daemon reread its configuration; SIGHUP does the same.

    The daemon validates the file and its drop-ins as a whole. If they are refused, nothing changes. Otherwise
    all changed settings that need no restart take effect together, and the others are named. Options of
    topoproxy serve still take precedence over the file.

    Ends with 0 when the configuration was accepted, even if some settings need a restart; 78 with the
    reasons when it was refused, 69 when the daemon does not answer, 77 without permission. After 69, the
    daemon still finishes a reload that it has begun; a daemon that does not run reads the files when it
    starts.
    """
    page = as_map(query_daemon(_config_with_socket(file, admin), "/reload", timeout, act=True))
    done = as_map(page.get("reload"))
    if as_json:
        click.echo(json.dumps(page, indent=1, ensure_ascii=False))
    if done.get("result") == "refused":
        raise ConfigError(f"{done.get('reason')}\nnothing has changed")
    if not as_json:
        click.echo("\n".join(_lines(page, done)))


def _config_with_socket(file: Path | None, admin: str | None) -> Config:
    """Find the admin socket; the default one if the configuration is invalid, as the daemon will report."""
    from proxy.config import DEFAULT_FILE, Config, load, override

    if admin is not None:
        return override(Config(), {"adminSocket": ("--admin", admin)})
    try:
        return load(file)
    except ConfigError:
        if file is not None and file != DEFAULT_FILE:
            raise
        return Config()


def _lines(page: Mapping[str, object], done: Mapping[str, object]) -> Iterator[str]:
    applied, waiting = as_list(done.get("applied")), as_list(page.get("restart"))
    yield f"reloaded {one_line(page.get('source'))}: {counted(len(applied), 'setting')} changed"
    yield from (f"  {_change(as_map(row))}" for row in applied)
    if waiting:
        yield "a restart is needed for:"
        yield from (f"  {_change(as_map(row))}" for row in waiting)
    yield from (f"note: {one_line(note)}" for note in as_list(done.get("notes")))


def _change(row: Mapping[str, object]) -> str:
    before, after = one_line(row.get("before")), one_line(row.get("after"))
    key = one_line(row.get("key"))
    return f"{key}: {before or 'empty'} -> {after or 'empty'}" if before or after else key
