"""``topoproxy hooks list``: the hooks and their state."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from proxy.cli.asking import ask_daemon, asking_options, config_for
from proxy.cli.hooks.shipped import shipped
from proxy.cli.hooks.written import in_json
from proxy.cli.settings import read_config
from proxy.config import Config
from proxy.model.errors import UnavailableError
from proxy.report.parts import as_list, as_map, cut, one_line, table

NOT_ENABLED = "not enabled"
_POINTS = 44
"""Columns for points, where they are not all shown."""


@click.command("list", short_help="List hooks, and what is wrong with them.")
@click.option(
    "--all", "everything", is_flag=True, help="Show those too that come with topoproxy and do not run."
)
@click.option("--wide", is_flag=True, help="Show all points, times, and where each hook comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@asking_options()
def list_hooks(
    file: Path | None, admin: str | None, timeout: float, everything: bool, wide: bool, as_json: bool
) -> None:
    """List hooks in the order in which they are asked, and say what is wrong with them.

    STATE: running; old version running (the new one is not good); broken and untrusted (nothing of it runs,
    the line below says why); masked (a file of the same name goes first); disabled (empty, or a link to
    /dev/null); being read; not enabled (comes with topoproxy).

    Where no daemon runs, the files are read as it would read them, which runs them: then STATE is loads.

    Ends with 0 whatever is wrong with hooks.
    """
    config = config_for(file, admin)
    try:
        answer = _reported(config, timeout)
    except UnavailableError as error:
        from proxy.cli.hooks.offline import from_directories

        if admin is not None:  # what it took the place of says where the directories are
            config = read_config(file, {})
        found, strange = from_directories(config.hooks)
        for words in (str(error), *strange):
            click.echo(f"note: {one_line(words)}", err=True)
        answer = {"daemon": False, "hooks": found}
    entries = [as_map(entry) for entry in as_list(answer.get("hooks"))]
    entries += _others(entries) if everything else []
    if as_json:
        click.echo(in_json({"daemon": True, **answer, "hooks": entries}))
        return
    if note := one_line(answer.get("note")):
        click.echo(f"note: {note}", err=True)
    width = shutil.get_terminal_size((120, 24)).columns
    click.echo("\n".join(_lines(entries, config, width, wide=wide)))


def _reported(config: Config, timeout: float) -> Mapping[str, object]:
    """Ask the daemon.

    Raises:
        UnavailableError: The daemon does not answer, or has no hooks.
    """
    hint = "so this is the state of the directories"
    answer = as_map(ask_daemon(config, "/hooks", timeout, hint=hint))
    if not isinstance(answer.get("hooks"), list):
        what = "what answers there is no daemon that knows hooks"
        raise UnavailableError(f"cannot ask the daemon at {config.admin_path}: {what} ({hint})")
    return answer


def _others(entries: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the shipped hooks of which no file is in the directories."""
    names = {entry.get("name") for entry in entries}
    return [
        {"name": name, "state": NOT_ENABLED, "path": str(path)}
        for name, path in shipped().items()
        if name not in names
    ]


def _lines(
    entries: Sequence[Mapping[str, object]], config: Config, width: int, *, wide: bool
) -> Iterator[str]:
    from proxy.admin.status_sections import last_error

    if not config.hooks.enabled:
        yield "hooks.enabled is false in the configuration: no hook runs."
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
        for words in (one_line(entry.get("error")), _asked(entry), last_error(entry)):
            if words:
                yield from _wrapped(words, width) if sys.stdout.isatty() else [f"    {words}"]


def _wrapped(words: str, width: int) -> list[str]:
    """Return what is wrong in lines of a terminal; none of it is cut off, as its end says what to do."""
    indent = "    "
    return textwrap.wrap(
        words,
        max(width, 20),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _asked(entry: Mapping[str, object]) -> str:
    """Say that a hook is not asked now, and when it will be."""
    state, again = entry.get("asked"), entry.get("retry_in")
    if state == "open" and isinstance(again, int | float):
        return f"not asked after failures in a row; tried again in {again:.0f} s"
    return {"probing": "tried again now", "hangs": "not asked: its calls hang"}.get(str(state), "")


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
        span(timeout),
        one_line(entry.get("calls")) or "-",
        str(failed) if "calls" in entry else "-",
    ]
    cells += [span(entry.get("p50_s")), span(entry.get("max_s"))] if wide else []
    return [*cells, shown or "-"]


def span(seconds: Any) -> str:
    """Say a time; ``-`` for none."""
    if not isinstance(seconds, int | float) or not seconds:
        return "-"
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return "0 us"
