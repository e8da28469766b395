"""``topoproxy hooks list`` and ``validate``: list hooks, and show their errors."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from proxy.cli.admin_query import config_for, query_daemon, query_options
from proxy.cli.hooks.file_commands import shipped
from proxy.cli.settings import PATH, config_option, read_config
from proxy.model import schema_ids
from proxy.model.errors import InputError, UnavailableError
from proxy.observe.json_access import as_list, as_map, cut, one_line, table

if TYPE_CHECKING:
    from proxy.config import Config


def json_text(data: Any) -> str:
    """Write data as JSON that every output can take: invalid text (lone surrogates) is escaped."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(data, indent=1)
    return text


NOT_ENABLED = "not enabled"
_POINTS = 44
"""Columns for points, if not all of them are shown."""


@click.command("list", short_help="List hooks and their errors.")
@click.option(
    "--all", "everything", is_flag=True, help="Show also those that come with topoproxy and are not enabled."
)
@click.option("--wide", is_flag=True, help="Show all points, times, and where each hook comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@query_options()
def list_hooks(
    file: Path | None, admin: str | None, timeout: float, everything: bool, wide: bool, as_json: bool
) -> None:
    """List hooks in the order in which they are called, with their errors.

    STATE: running; old version running (the new one is refused); broken and untrusted (nothing of it runs,
    the line below says why); masked (a file of the same name takes precedence); disabled (empty, or a link to
    /dev/null); being read; not enabled (comes with topoproxy).

    If no daemon runs, the files are loaded as the daemon would load them, which runs them: then STATE is
    loads.

    Ends with 0 even if hooks have errors.
    """
    config = config_for(file, admin)
    try:
        answer = _reported(config, timeout)
    except UnavailableError as error:
        from proxy.cli.hooks.offline import from_directories

        # With --admin the configuration was not checked; now its directories are read, so it must be valid.
        if admin is not None:
            config = read_config(file, {})
        rows, ignored_files = from_directories(config.hooks)
        for message in (str(error), *ignored_files):
            click.echo(f"note: {one_line(message)}", err=True)
        answer = {"schema": schema_ids.HOOKS_LIST, "daemon": False, "hooks": rows}
    entries = [as_map(entry) for entry in as_list(answer.get("hooks"))]
    entries += _not_enabled(entries) if everything else []
    if as_json:
        click.echo(json_text({"schema": schema_ids.HOOKS_LIST, "daemon": True, **answer, "hooks": entries}))
        return
    if note := one_line(answer.get("note")):
        click.echo(f"note: {note}", err=True)
    elif not config.hooks.enabled:
        effect = (
            "no hook runs" if answer.get("daemon") is False else "it takes effect at the next reload or start"
        )
        click.echo(f"hooks.enabled is false in the configuration: {effect}.")
    width = shutil.get_terminal_size((120, 24)).columns
    click.echo("\n".join(_lines(entries, width, wide=wide)))


def _reported(config: Config, timeout: float) -> Mapping[str, object]:
    """Query the daemon.

    Raises:
        UnavailableError: The daemon does not answer, or has no hooks.
    """
    hint = "so this is the state of the directories"
    answer = as_map(query_daemon(config, "/hooks", timeout, hint=hint))
    if not isinstance(answer.get("hooks"), list):
        what = "the process at this socket reports no hooks"
        raise UnavailableError(f"cannot query the daemon at {config.admin_path}: {what} ({hint})")
    return answer


def _not_enabled(entries: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the shipped hooks that have no file in the directories."""
    names = {entry.get("name") for entry in entries}
    return [
        {"name": name, "state": NOT_ENABLED, "path": str(path)}
        for name, path in shipped().items()
        if name not in names
    ]


def _lines(entries: Sequence[Mapping[str, object]], width: int, *, wide: bool) -> Iterator[str]:
    from proxy.admin.status_sections import last_error

    if not entries:
        yield "No hooks. topoproxy hooks list --all shows those that come with topoproxy."
        return
    head = [
        "NAME",
        "STATE",
        "POLICY",
        "TIMEOUT",
        "CALLS",
        "FAILED",
        *(["P50", "MAX"] if wide else []),
        "POINTS",
    ]
    header, *rows = table([head, *(_row(entry, wide=wide) for entry in entries)])
    yield cut(header, width)
    for entry, row in zip(entries, rows, strict=True):
        yield row if wide else cut(row, width)
        if wide:
            yield f"    {one_line(entry.get('source') or entry.get('path'))}"
        for text in (
            one_line(entry.get("error")),
            _retry_text(entry),
            _threads_text(entry),
            last_error(entry),
        ):
            if text:
                yield from _wrapped(text, width) if sys.stdout.isatty() else [f"    {text}"]


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap an error to the width of a terminal; it is never cut off, because its end gives the remedy."""
    indent = "    "
    return textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _retry_text(entry: Mapping[str, object]) -> str:
    """Return a text that a hook is not called now, and when it will be."""
    state, again = entry.get("asked"), entry.get("retry_in")
    if state == "open" and isinstance(again, int | float):
        return f"not called after failures in a row; tried again in {again:.0f} s"
    return {"probing": "tried again now", "hangs": "not called: its calls hang"}.get(str(state), "")


def _threads_text(entry: Mapping[str, object]) -> str:
    """Return a text that a PURE hook is not called on the daemon's loop."""
    if entry.get("in_threads") is not True:
        return ""
    return (
        f"PURE, but called in threads: {one_line(entry.get('interrupted'))} calls took too long on the loop"
    )


def _row(entry: Mapping[str, object], *, wide: bool) -> list[str]:
    points = [one_line(point) for point in as_list(entry.get("points"))]
    shown = ", ".join(points)
    if not wide and len(shown) > _POINTS:
        shown = f"{len(points)}: {cut(shown, _POINTS)}"
    timeout, failures = entry.get("timeout"), as_map(entry.get("failures"))
    failed = sum(n for n in failures.values() if isinstance(n, int))
    cells = [
        one_line(entry.get("name")) or "?",
        one_line(entry.get("state")) or "?",
        one_line(entry.get("policy")) or "-",
        duration_or_dash(timeout),
        one_line(entry.get("calls")) or "-",
        str(failed) if "calls" in entry else "-",
    ]
    cells += [duration_or_dash(entry.get("p50_s")), duration_or_dash(entry.get("max_s"))] if wide else []
    return [*cells, shown or "-"]


def duration_or_dash(seconds: Any) -> str:
    """Format a time; ``-`` for none."""
    if not isinstance(seconds, int | float) or not seconds:
        return "-"
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return "0 us"


@click.command(short_help="Check hook files as the daemon would.")
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="FILE...")
@click.option("--untrusted", is_flag=True, help="Do not check the owner and the permissions of the file.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@config_option
def validate(files: tuple[Path, ...], file: Path | None, untrusted: bool, as_json: bool) -> None:
    """Check hook files as the daemon would: name, owner and mode, content, handlers, settings.

    FILE is a hook (NN-name.py), which is loaded but not called, or names a hook server (*json). The output of
    a hook goes to standard error. Its settings are those that the configuration has for a hook of its name.
    Only root may be able to write a hook file and the directories that contain it; --untrusted skips this
    check.

    Ends with 0 when all files are valid, with 65 and the reasons when one is not.
    """
    from proxy.hooks.loader.examination import check_file_in_child

    config = read_config(file, {}).hooks
    pages = [check_file_in_child(path, config, trusted=not untrusted) for path in files]
    if as_json:
        click.echo(json_text({"schema": schema_ids.HOOKS_VALIDATE, "files": pages}))
    else:
        for page in pages:
            click.echo("\n".join(_checked_lines(page)))
    if bad := [str(page["path"]) for page in pages if page["error"]]:
        subject = f"{len(bad)} of {len(files)} hook files" if len(files) > 1 else "the hook file"
        raise InputError(f"cannot use {subject}: see above")


def _checked_lines(page: dict[str, Any]) -> Iterator[str]:
    valid = not page["error"] and bool(page.get("points"))
    yield f"{page['path']}: {'valid' if valid else page['state']}"
    if page["error"]:
        yield f"  {page['error']}"
        return
    if not page.get("points"):
        yield f"  it disables a hook {page['name']} of hooks.vendorDirectory"
        return
    yield from textwrap.wrap(
        ", ".join(page["points"]), 100, initial_indent="  handles   ", subsequent_indent=" " * 12
    )
    yield f"  timeout   {duration_or_dash(page['timeout'])}"
    yield f"  policy    {page['policy']}"
    for at, key in enumerate(page["settings"]):
        title = "settings" if not at else ""
        wants = ": ".join(part for part in (key["wants"], key["help"]) if part)
        yield f"  {title:9} {key['name']}={key['value']}  ({wants})"
