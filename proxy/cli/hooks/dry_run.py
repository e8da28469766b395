"""Calls hooks with the real engine, without a daemon."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.hooks import HooksConfig, HookSettings
from proxy.config.load import parse
from proxy.hooks import serialize
from proxy.hooks.answers import CLEAR, LEAVE, MAPS, Adjustment, Update
from proxy.hooks.engine.engine import HookEngine, least_seconds
from proxy.hooks.engine.errors import subject
from proxy.hooks.engine.stats import HookReport
from proxy.hooks.events import POINTS, VALIDATES, Configure, Point, Shutdown
from proxy.hooks.facts import Device, Mount
from proxy.hooks.hook import Outcome
from proxy.hooks.loader.loading import Loaded, load_file
from proxy.hooks.serialize import event_to_data, outcome_to_data
from proxy.hooks.status_data import hooks_page
from proxy.model import schema_ids
from proxy.model.errors import ConfigError, HookError, InputError, PermissionDeniedError, UsageError
from proxy.model.strict_json import StrictJsonError, read_json
from proxy.observe.json_access import one_line, table
from proxy.open_file import open_file
from proxy.telemetry.port import silent

MOST_BYTES = 16 << 20
"""No event is larger than the largest CRI message."""
QUOTES = '""'
"""An empty text in YAML."""
_KEY = re.compile(r"[A-Za-z_]\w*")


def example(point: str) -> dict[str, Any]:
    """Return the example of a hook point.

    Raises:
        UsageError: There is no such point.
    """
    if point not in POINTS:
        close = difflib.get_close_matches(point, POINTS, n=1)
        meant = f"did you mean {close[0]}?" if close else "topoproxy hooks points lists them"
        raise UsageError(f"cannot give an example of {point}: there is no such hook point; {meant}")
    return serialize.example(point)


def load_hooks(files: Sequence[Path], pairs: Sequence[str], config: HooksConfig) -> list[Loaded]:
    """Load all files, whatever their owner.

    Raises:
        InputError: One is invalid.
        UsageError: A setting is invalid.
    """
    for path in files:
        if not path.name.endswith(".py"):
            raise UsageError(
                f"cannot run {path}: it is not named NN-name.py; topoproxy hooks validate shows more"
            )
    if pairs and len(files) > 1:
        raise UsageError("cannot use --set with several files: the setting is of one hook")
    if pairs:
        config = _with_settings(config, files[0].name.removesuffix(".py"), pairs)
    try:
        return [load_file(path, config, trusted=False) for path in files]
    except HookError as error:
        raise InputError(str(error)) from error


def _with_settings(config: HooksConfig, name: str, pairs: Sequence[str]) -> HooksConfig:
    """Set keys of one hook's settings, as if they were in the configuration.

    Raises:
        UsageError: A text is not NAME=VALUE, or a value cannot be used in a configuration.
    """
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
    """Describe why a value is invalid, without the position, because there is no file."""
    message = re.sub(r"^line [0-9]+: ", "", str(error).partition(": ")[2])
    cause = message.removeprefix("hooks.settings.x.config.")
    return f"{cause} (a text with special characters of YAML needs quotes)"


def events_for(files: Sequence[str], examples: Sequence[str], hooks: Sequence[Loaded]) -> list[Point]:
    """Read the events that the command line names.

    Raises:
        UsageError: It names no events, or files and examples, or none of the hooks handles any of the events.
        InputError: One of them is not an event.
    """
    points = ", ".join(sorted({name for loaded in hooks for name in loaded.hook.handlers}))
    if bool(files) == bool(examples):
        raise UsageError(f"cannot run hooks: give either --event or --example (the files handle {points})")
    events = _read_events(files, examples)
    if not any(handled(hooks, event) for event in events):
        names = ", ".join(dict.fromkeys(event.NAME for event in events)) or "no event"
        raise UsageError(f"cannot run hooks at {names}: the files handle {points}")
    return events


def _read_events(files: Sequence[str], examples: Sequence[str]) -> list[Point]:
    """Read the events from files and examples; a file contains one event or a list of events.

    Raises:
        InputError: A file contains no event, or cannot be read; the message names the file.
        UsageError: There is no such point.
    """
    if examples:
        return [serialize.event_from_data(example(point)) for point in examples]
    events = []
    for file in files:
        data = _read(file)
        for at, entry in enumerate(data if isinstance(data, list) else [data]):
            try:
                events.append(serialize.event_from_data(entry))
            except InputError as error:
                which = f"event {at + 1} of {_named(file)}" if isinstance(data, list) else _named(file)
                raise InputError(f"{error} (in {which})") from error
    return events


def _named(file: str) -> str:
    return "standard input" if file == "-" else file


def _read(file: str) -> object:
    name = _named(file)
    try:
        if file == "-":
            if sys.stdin is None:
                raise InputError("cannot read the event: standard input is closed")
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with open_file(Path(file)) as stream:
                data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        kind = PermissionDeniedError if isinstance(error, PermissionError) else InputError
        raise kind(f"cannot read the event {name}: {error.strerror or error}") from error
    if len(data) > MOST_BYTES:
        raise InputError(f"cannot read the event {name}: it is larger than {MOST_BYTES} bytes")
    try:
        return read_json(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"cannot use the event {name}: byte {error.start} is not UTF-8") from error
    except RecursionError:
        raise InputError(f"cannot use the event {name}: it is nested too deeply") from None
    except StrictJsonError as error:
        raise InputError(f"cannot use the event {name}: {error}") from None
    except ValueError as error:
        raise InputError(f"cannot use the event {name}: it is not JSON: {error}") from error


def run_data(done: DryRunResult) -> dict[str, Any]:
    """Return the changes that hooks requested as plain data."""
    requested = [
        {"event": event_to_data(result.event), "outcome": outcome_to_data(result.outcome)}
        for result in done.results
    ]
    return {"schema": schema_ids.HOOKS_RUN, "asked": requested, "hooks": hooks_page((), done.reports)}


def run_lines(done: DryRunResult) -> Iterator[str]:
    """Yield the changes that hooks requested, as text."""
    for result in done.results:
        yield from _of_event(result)
        for report in result.failed:
            yield from _failure(report)
    # failures at configure or shutdown belong to no event
    shown = {report.name for result in done.results for report in result.failed}
    for report in done.failed:
        if report.name not in shown:
            yield from _failure(report)


def _of_event(result: EventResult) -> Iterator[str]:
    about = one_line(subject(result.event))
    title = f"{result.event.NAME}, {about}" if about.strip("/") else result.event.NAME
    fields = list(fields_of(result.outcome.adjustment))
    if result.outcome.refusal:
        yield f"{title}: refused"
        yield f"  {one_line(result.outcome.refusal)}"
    elif not result.handled:
        yield f"{title}: no hook handles it"
    elif not fields:
        yield f"{title}: nothing to change"
    else:
        yield f"{title}:"
        rows = [
            (one_line(name), one_line(value), result.outcome.owners.get(name, "")) for name, value in fields
        ]
        yield from (f"  {line}" for line in table([("FIELD", "VALUE", "HOOK"), *rows]))


def _failure(report: HookReport) -> Iterator[str]:
    yield f"FAILED {report.name} (policy {report.policy}): {one_line(report.last_error)}"
    yield from (f"  {one_line(line)}" for line in report.last_trace.splitlines())


@dataclass(frozen=True, slots=True)
class EventResult:
    """The result of one event.

    Attributes:
        event: The event.
        outcome: The outcome of the call.
        failed: The reports of the hooks that failed.
        handled: A hook was called.
    """

    event: Point
    outcome: Outcome
    failed: Sequence[HookReport]
    handled: bool


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """The result of a dry run.

    Attributes:
        results: The events, in order.
        reports: The report of each hook.
    """

    results: Sequence[EventResult]
    reports: Sequence[HookReport]

    @property
    def failed(self) -> list[HookReport]:
        """The reports of the hooks that failed."""
        return [report for report in self.reports if report.failures]


async def dry_run(hooks: Sequence[Loaded], events: Sequence[Point]) -> DryRunResult:
    """Configure hooks, send them events one after the other, and shut them down.

    Args:
        hooks: The loaded hooks.
        events: The events. ``configure`` and ``shutdown`` are always sent too.

    Raises:
        HookError: One cannot be configured; the daemon would not use it.
    """
    engine = HookEngine(silent, lambda _, __: None)
    try:
        for loaded in hooks:
            error = await engine.notify_one(loaded.hook, Configure(loaded.settings, loaded.hook.name))
            if error is not None:
                raise HookError(f"cannot configure hook {loaded.hook.source}: {error}")
        engine.use([loaded.hook for loaded in hooks])
        rows = []
        for event in events:
            before = _failures(engine)
            outcome = Outcome()
            if not isinstance(event, Configure | Shutdown):
                answers = engine.call_hooks(event, least_seconds(event))
                outcome = answers.outcome or await answers.wait()
            failed = [report for report in engine.report() if _count(report) > before.get(report.name, 0)]
            rows.append(EventResult(event, outcome, failed, handled(hooks, event)))
        for loaded in hooks:
            await engine.notify_one(loaded.hook, Shutdown("stop"))
        reports = engine.report()
    finally:
        engine.close()
    return DryRunResult(rows, reports)


def _failures(engine: HookEngine) -> dict[str, int]:
    return {report.name: _count(report) for report in engine.report()}


def _count(report: HookReport) -> int:
    return sum(report.failures.values())


def handled(hooks: Sequence[Loaded], event: Point) -> bool:
    """Return whether any of the hooks handles an event."""
    names = {event.NAME, VALIDATES.get(event.NAME)}
    return any(names & loaded.hook.handlers.keys() for loaded in hooks)


def fields_of(adjustment: Adjustment) -> Iterator[tuple[str, str]]:
    """Iterate over the fields of an adjustment: the field as it is owned, and the value as text."""
    for name, value in adjustment.set_fields():
        if name == "updates":
            for container_id, update in value.items():  # type: ignore[attr-defined]
                for field, text in _of_update(update):
                    yield f"updates[{container_id}].{field}", text
        elif name in MAPS:
            for key, entry in value.items():  # type: ignore[attr-defined]
                yield f"{name}[{key}]", _shown(entry)
        else:
            yield name, _shown(value)


def _of_update(update: Update) -> Iterator[tuple[str, str]]:
    for name in Update.__slots__:
        value = getattr(update, name)
        if isinstance(value, Mapping):
            for key, entry in value.items():
                yield f"{name}[{key}]", _shown(entry)
        elif value is not LEAVE:
            yield name, _shown(value)


def _shown(value: Any) -> str:
    if value is CLEAR:
        return "cleared"
    if isinstance(value, Mount):
        return f"{value.host_path}{' (read-only)' if value.readonly else ''}"
    if isinstance(value, Device):
        return f"{value.host_path} ({value.permissions})"
    return str(value)
