"""The events that ``topoproxy hooks run`` sends to hooks."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.model.errors import InputError, UsageError

if TYPE_CHECKING:
    from proxy.hooks.events import Point

MOST_BYTES = 16 << 20
"""No event is larger than what the CRI lets through in one message."""


def example(point: str) -> dict[str, Any]:
    """Return the example of a hook point.

    Raises:
        UsageError: There is no such point.
    """
    from proxy.hooks.described import example as example_of
    from proxy.hooks.events import POINTS

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
    from proxy.hooks.described import event_from

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
