"""Reads the input of ``topoproxy hooks run``: hook files with their settings, and events."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxy.cli.hooks.dry_run import handled
from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.hooks import HooksConfig, HookSettings
from proxy.config.load import parse
from proxy.hooks import serialize
from proxy.hooks.events import POINTS, Point
from proxy.hooks.loader.loading import Loaded, load_file
from proxy.model.errors import ConfigError, HookError, InputError, UsageError

MOST_BYTES = 16 << 20
"""No event is larger than what the CRI lets through in one message."""
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
        InputError: One is not good.
        UsageError: A setting is invalid.
    """
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
    """Describe what is wrong with a value, without a position in a text that does not exist."""
    message = re.sub(r"^line [0-9]+: ", "", str(error).partition(": ")[2])
    cause = message.removeprefix("hooks.settings.x.config.")
    return f"{cause} (a text with special characters of YAML needs quotes)"


def events_for(files: Sequence[str], examples: Sequence[str], hooks: Sequence[Loaded]) -> list[Point]:
    """Read the events that are meant.

    Raises:
        UsageError: It is not clear which, or none of the hooks handles any.
        InputError: One of them is not an event.
    """
    points = ", ".join(sorted({name for loaded in hooks for name in loaded.hook.handlers}))
    if bool(files) == bool(examples):
        raise UsageError(f"cannot run hooks: give either --event or --example (the files handle {points})")
    found = _read_events(files, examples)
    if not any(handled(hooks, event) for event in found):
        names = ", ".join(dict.fromkeys(event.NAME for event in found)) or "no event"
        raise UsageError(f"cannot run hooks at {names}: the files handle {points}")
    return found


def _read_events(files: Sequence[str], examples: Sequence[str]) -> list[Point]:
    """Read the events that are meant; a file has one, or a list of them.

    Raises:
        InputError: A file holds no event, or cannot be read; the message names the file.
        UsageError: There is no such point.
    """
    if examples:
        return [serialize.event_from(example(point)) for point in examples]
    found = []
    for file in files:
        data = _read(file)
        for at, entry in enumerate(data if isinstance(data, list) else [data]):
            try:
                found.append(serialize.event_from(entry))
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
