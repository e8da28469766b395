"""``topoproxy hooks run``: what does a hook do with an event."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from proxy.cli.settings import config_option, read_config
from proxy.model.errors import HookError, InputError, UsageError

if TYPE_CHECKING:
    from proxy.cli.hooks.rehearsal import Rehearsed
    from proxy.config.schema import HooksConfig
    from proxy.hooks.engine.standing import HookReport
    from proxy.hooks.files.loading import Loaded
    from proxy.hooks.points import Point

_KEY = re.compile(r"[A-Za-z_]\w*")


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="FILE...")
@click.option(
    "--event", "event_file", metavar="EVENT.json", help="What happens, as JSON; - for standard input."
)
@click.option("--example", metavar="POINT", help="Take the example of a hook point.")
@click.option(
    "--print-example", metavar="POINT", help="Print that example, to start from, and do nothing else."
)
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of the hook's Settings; may be given again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@config_option
def run(
    files: tuple[Path, ...],
    event_file: str | None,
    example: str | None,
    print_example: str | None,
    pairs: tuple[str, ...],
    file: Path | None,
    as_json: bool,
) -> None:
    """Ask hooks about one event, and show what they want together.

    The hooks run here, as whoever runs this command: configure, then the event, then shutdown, with their
    deadlines. What they want is shown and done to nobody; what they do themselves, such as writing files, is
    done. Settings come from the configuration, and --set goes before. Several FILEs are asked in the order of
    their names, so conflicts show.

    \b
    Try a hook on an event of your own:
      topoproxy hooks run --print-example pre_create_container > event.json
      topoproxy hooks run 50-mine.py --event event.json

    Ends with 0 when all hooks answered, also where one refuses the call; with 1 when one failed; with 2
    where none of them handles such events; with 65 when a file or the event is not what it should be.
    """  # noqa: D301 - click wants the real backspace
    from proxy.hooks.described import example as example_of

    if print_example is not None:
        click.echo(json.dumps(example_of(print_example), indent=1, ensure_ascii=False))
        return
    if not files:
        raise UsageError("cannot run hooks: name a file (NN-name.py)")
    hooks = _load(files, pairs, read_config(file, {}).hooks)
    event = _event(event_file, example, hooks)
    from proxy.cli.hooks.rehearsal import rehearse

    done = asyncio.run(rehearse(hooks, event))
    if as_json:
        click.echo(json.dumps(_data(event, done), indent=1, ensure_ascii=False))
    else:
        click.echo("\n".join(_lines(event, done)))
    if done.failed:
        click.get_current_context().exit(1)


def _load(files: Sequence[Path], pairs: Sequence[str], config: HooksConfig) -> list[Loaded]:
    """Load all files, whoever may write them.

    Raises:
        InputError: One is not good.
        UsageError: What is to be set cannot be.
    """
    from proxy.hooks.files.loading import load_file

    if pairs and len(files) > 1:
        raise UsageError("cannot use --set with several files: whose setting is meant?")
    if pairs:
        config = _with(config, files[0].name.removesuffix(".py"), pairs)
    try:
        return [load_file(path, config, trusted=False) for path in files]
    except HookError as error:
        raise InputError(str(error)) from error


def _with(config: HooksConfig, name: str, pairs: Sequence[str]) -> HooksConfig:
    """Set keys of one hook's settings, as if they stood in the configuration.

    Raises:
        UsageError: A pair is none.
        ConfigError: A value is none that a configuration can have.
    """
    from proxy.config.fixed import Fixed
    from proxy.config.hooks import HookSettings
    from proxy.config.load import parse

    known = config.settings.get(name, HookSettings())
    values: dict[str, Any] = dict(known.config or {})
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not _KEY.fullmatch(key) or "\n" in value:
            raise UsageError(f"cannot use --set {pair}: it must be KEY=VALUE")
        text = "hooks: {settings: {x: {config: {%s: %s}}}}\n" % (key, value or '""')  # noqa: UP031
        read = parse(text, f"--set {key}").hooks.settings["x"].config
        values |= dict(read or {})
    changed = replace(known, config=Fixed(values))
    return replace(config, settings=Fixed({**config.settings, name: changed}))


def _event(file: str | None, example: str | None, hooks: Sequence[Loaded]) -> Point:
    """Read the event that is meant.

    Raises:
        UsageError: It is not clear which one, or none of the hooks handles it.
        InputError: It is none.
    """
    from proxy.cli.hooks.rehearsal import handled
    from proxy.hooks.described import event_from
    from proxy.hooks.described import example as example_of

    points = sorted({name for loaded in hooks for name in loaded.hook.handlers})
    if (file is None) == (example is None):
        raise UsageError(
            f"cannot run hooks: give --event or --example, one of them ({', '.join(points)} is handled)"
        )
    event = event_from(example_of(example) if example is not None else _read(file or "-"))
    if not handled(hooks, event):
        raise UsageError(f"cannot run hooks at {event.NAME}: {', '.join(points)} is handled")
    return event


def _read(file: str) -> object:
    name = "standard input" if file == "-" else file
    try:
        with click.open_file(file, encoding="utf-8") as stream:
            return json.load(stream)
    except OSError as error:
        raise InputError(f"cannot read the event {name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot use the event {name}: it is not JSON: {error}") from error


def _data(event: Point, done: Rehearsed) -> dict[str, Any]:
    from proxy.hooks.described import event_to, outcome_to
    from proxy.hooks.page import hooks_page

    return {
        "event": event_to(event),
        "outcome": outcome_to(done.outcome),
        "hooks": hooks_page((), done.reports),
    }


def _lines(event: Point, done: Rehearsed) -> Iterator[str]:
    from proxy.cli.hooks.rehearsal import fields_of
    from proxy.hooks.engine.words import whom
    from proxy.report.parts import one_line, table

    title = ", ".join(part for part in (event.NAME, whom(event)) if part)
    fields = list(fields_of(done.outcome.adjustment))
    if done.outcome.refusal:
        yield f"{title}: refused"
        yield f"  {done.outcome.refusal}"
    elif not fields:
        yield f"{title}: nothing to change"
    else:
        yield f"{title}:"
        rows = [(name, one_line(value), done.outcome.owners.get(name, "")) for name, value in fields]
        yield from (f"  {line}" for line in table([("FIELD", "VALUE", "HOOK"), *rows]))
    for report in done.failed:
        yield from _failure(report)


def _failure(report: HookReport) -> Iterator[str]:
    yield f"FAILED {report.name} (policy {report.policy}): {report.last_error}"
    yield from (f"  {line}" for line in report.last_trace.splitlines())
