"""``topoproxy hooks run``: events for a rehearsal, from files or examples, and what hooks make of them."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from proxy.cli.hooks.list_command import in_json
from proxy.cli.settings import config_option, read_config
from proxy.model import schema_ids
from proxy.model.errors import ConfigError, HookError, InputError, UsageError

if TYPE_CHECKING:
    from proxy.cli.hooks.dry_run import AskedAbout, Rehearsed
    from proxy.config.schema import HooksConfig
    from proxy.hooks.engine.stats import HookReport
    from proxy.hooks.events import Point
    from proxy.hooks.loader.loading import Loaded


MOST_BYTES = 16 << 20
"""No event is larger than what the CRI lets through in one message."""


def example(point: str) -> dict[str, Any]:
    """Return the example of a hook point.

    Raises:
        UsageError: There is no such point.
    """
    from proxy.hooks.events import POINTS
    from proxy.hooks.serialize import example as example_of

    if point not in POINTS:
        close = difflib.get_close_matches(point, POINTS, n=1)
        meant = f"did you mean {close[0]}?" if close else "topoproxy hooks points lists them"
        raise UsageError(f"cannot give an example of {point}: there is no such hook point; {meant}")
    return example_of(point)


def events(files: Sequence[str], examples: Sequence[str]) -> list[Point]:
    """Read the events that are meant; a file has one, or a list of them.

    Raises:
        InputError: One is none, or cannot be read; with the file.
        UsageError: There is no such point.
    """
    from proxy.hooks.serialize import event_from

    if examples:
        return [event_from(example(point)) for point in examples]
    found = []
    for file in files:
        data = _read(file)
        for at, entry in enumerate(data if isinstance(data, list) else [data]):
            try:
                found.append(event_from(entry))
            except InputError as error:
                which = f"event {at + 1} of {_named(file)}" if isinstance(data, list) else _named(file)
                raise InputError(f"{error} (in {which})") from error
    return found


def _named(file: str) -> str:
    return "standard input" if file == "-" else file


def _read(file: str) -> object:
    name = _named(file)
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with Path(file).open("rb") as stream:
                data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read the event {name}: {error.strerror or error}") from error
    if len(data) > MOST_BYTES:
        raise InputError(f"cannot read the event {name}: it is larger than {MOST_BYTES} bytes")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot use the event {name}: it is not JSON: {error}") from error


QUOTES = '""'
"""An empty text in YAML."""
_KEY = re.compile(r"[A-Za-z_]\w*")


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="FILE...")
@click.option(
    "--event",
    "event_files",
    multiple=True,
    metavar="EVENT.json",
    help="What happens, as JSON; - for standard input. May be given again: one happens after the other.",
)
@click.option(
    "--example",
    "examples",
    multiple=True,
    metavar="POINT",
    help="Take the example of a hook point; may be given again.",
)
@click.option(
    "--print-example", metavar="POINT", help="Print that example, to start from, and do nothing else."
)
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of the hook's Settings, as in the configuration: a list is [a, b], keys with texts are"
    " {a: b}. May be given again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@config_option
def run(
    files: tuple[Path, ...],
    event_files: tuple[str, ...],
    examples: tuple[str, ...],
    print_example: str | None,
    pairs: tuple[str, ...],
    file: Path | None,
    as_json: bool,
) -> None:
    """Ask hooks about events, and show what they want together.

    The hooks run here, as the user of this command: configure, then the events, then shutdown, with their
    deadlines. Their answers are shown and not applied; their own effects, such as writing files, do happen.
    Settings come from the configuration, and --set goes before. Several FILEs are called in the order of
    their names, so conflicts show.

    \b
    Try a hook on an event of your own, and on what happens one after the other:
      topoproxy hooks run --print-example pre_create_container > event.json
      topoproxy hooks run 50-mine.py --event event.json
      topoproxy hooks run 50-mine.py --example synchronize --example pools_changed

    Ends with 0 when all hooks answered, also where one refuses the call; with 1 when one failed; with 2
    where none of them handles such events; with 65 when a file or an event is not what it should be.
    """  # noqa: D301 - click wants the real backspace
    from proxy.cli.hooks.run_command import example

    if print_example is not None:
        click.echo(in_json(example(print_example)))
        return
    if not files:
        raise UsageError("cannot run hooks: name a file (NN-name.py)")
    hooks = _load(files, pairs, read_config(file, {}).hooks)
    happens = _events(event_files, examples, hooks)
    import asyncio

    from proxy.cli.hooks.dry_run import rehearse

    done = asyncio.run(rehearse(hooks, happens))
    if as_json:
        click.echo(in_json(_data(done)))
    else:
        click.echo("\n".join(_lines(done)))
    if done.failed:
        click.get_current_context().exit(1)


def _load(files: Sequence[Path], pairs: Sequence[str], config: HooksConfig) -> list[Loaded]:
    """Load all files, whatever their owner.

    Raises:
        InputError: One is not good.
        UsageError: A setting is invalid.
    """
    from proxy.hooks.loader.loading import load_file

    for path in files:
        if not path.name.endswith(".py"):
            raise UsageError(
                f"cannot run {path}: it is not named NN-name.py; topoproxy hooks validate shows more"
            )
    if pairs and len(files) > 1:
        raise UsageError("cannot use --set with several files: it is ambiguous which one is meant")
    if pairs:
        config = _with(config, files[0].name.removesuffix(".py"), pairs)
    try:
        return [load_file(path, config, trusted=False) for path in files]
    except HookError as error:
        raise InputError(str(error)) from error


def _with(config: HooksConfig, name: str, pairs: Sequence[str]) -> HooksConfig:
    """Set keys of one hook's settings, as if they stood in the configuration.

    Raises:
        UsageError: A pair is none, or a value is none that a configuration can have.
    """
    from proxy.config.frozen_mapping import FrozenMapping
    from proxy.config.hooks import HookSettings
    from proxy.config.load import parse

    known = config.settings.get(name, HookSettings())
    values: dict[str, Any] = dict(known.config or {})
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not _KEY.fullmatch(key) or len(value.splitlines()) > 1:
            raise UsageError(f"cannot use --set {pair}: it must be KEY=VALUE, and KEY a field of Settings")
        text = f"hooks:\n settings:\n  x:\n   config:\n    {key}: {value or QUOTES}\n"
        try:
            read = parse(text, "").hooks.settings["x"].config
        except ConfigError as error:
            raise UsageError(f"cannot use --set {pair}: {_cause(error)}") from error
        values |= dict(read or {})
    changed = replace(known, config=FrozenMapping(values))
    return replace(config, settings=FrozenMapping({**config.settings, name: changed}))


def _cause(error: ConfigError) -> str:
    """Describe what is wrong with a value, without a position in a text that does not exist."""
    message = re.sub(r"^line [0-9]+: ", "", str(error).partition(": ")[2])
    cause = message.removeprefix("hooks.settings.x.config.")
    return f"{cause} (a text with signs of YAML in it is put in quotes)"


def _events(files: Sequence[str], examples: Sequence[str], hooks: Sequence[Loaded]) -> list[Point]:
    """Read the events that are meant.

    Raises:
        UsageError: It is not clear which, or none of the hooks handles any.
        InputError: One is none.
    """
    from proxy.cli.hooks.dry_run import handled
    from proxy.cli.hooks.run_command import events

    points = ", ".join(sorted({name for loaded in hooks for name in loaded.hook.handlers}))
    if bool(files) == bool(examples):
        raise UsageError(f"cannot run hooks: give --event or --example, one of them ({points} is handled)")
    found = events(files, examples)
    if not any(handled(hooks, event) for event in found):
        names = ", ".join(dict.fromkeys(event.NAME for event in found)) or "no event"
        raise UsageError(f"cannot run hooks at {names}: {points} is handled")
    return found


def _data(done: Rehearsed) -> dict[str, Any]:
    from proxy.hooks.serialize import event_to, outcome_to
    from proxy.hooks.status_data import hooks_page

    asked = [{"event": event_to(one.event), "outcome": outcome_to(one.outcome)} for one in done.asked]
    return {"schema": schema_ids.HOOKS_RUN, "asked": asked, "hooks": hooks_page((), done.reports)}


def _lines(done: Rehearsed) -> Iterator[str]:
    for one in done.asked:
        yield from _of_event(one)
        for report in one.failed:
            yield from _failure(report)
    # what failed at configure or shutdown was no event's
    shown = {report.name for one in done.asked for report in one.failed}
    for report in done.failed:
        if report.name not in shown:
            yield from _failure(report)


def _of_event(one: AskedAbout) -> Iterator[str]:
    from proxy.cli.hooks.dry_run import fields_of
    from proxy.hooks.engine.errors import subject
    from proxy.observe.json_access import one_line, table

    about = one_line(subject(one.event))
    title = f"{one.event.NAME}, {about}" if about.strip("/") else one.event.NAME
    fields = list(fields_of(one.outcome.adjustment))
    if one.outcome.refusal:
        yield f"{title}: refused"
        yield f"  {one_line(one.outcome.refusal)}"
    elif not one.handled:
        yield f"{title}: no hook handles it"
    elif not fields:
        yield f"{title}: nothing to change"
    else:
        yield f"{title}:"
        rows = [(one_line(name), one_line(value), one.outcome.owners.get(name, "")) for name, value in fields]
        yield from (f"  {line}" for line in table([("FIELD", "VALUE", "HOOK"), *rows]))


def _failure(report: HookReport) -> Iterator[str]:
    from proxy.observe.json_access import one_line

    yield f"FAILED {report.name} (policy {report.policy}): {one_line(report.last_error)}"
    yield from (f"  {one_line(line)}" for line in report.last_trace.splitlines())
