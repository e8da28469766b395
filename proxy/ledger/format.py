"""The ledger's file format, as bytes in and values out. Pure.

Theory. The file is a journal of lines, each

    CRC32 (8 hex digits) SPACE JSON NEWLINE

where the JSON is ``{"n": 7, "set": {"key": {...}, "gone": null}}``. One line is one atomic batch: it is
appended in one write, and it counts only if its newline is there, its checksum is right and its number
follows the last one. Line 0 is the header, ``{"n": 0, "format": 1, "machine": "..."}``. State is what the
lines say one after the other; a compacted file says it in one line.

What can be wrong, and what it means:

* the end is unfinished or unreadable, and nothing good follows: a crash while writing. Everything before it
  holds.
* a bad line with good ones behind it, a number missing, a header that is not ours: the file is not what we
  wrote. It is not used at all, because a state with a hole may give CPUs away twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

FORMAT = 1

Entries = dict[str, dict[str, Any]]
"""State: key to value, as JSON objects."""


class _Header(msgspec.Struct):
    n: int
    format: int
    machine: str


class _Batch(msgspec.Struct):
    n: int
    set: dict[str, dict[str, Any] | None]


_header_decoder = msgspec.json.Decoder(_Header)
_batch_decoder = msgspec.json.Decoder(_Batch)
_changes_decoder = msgspec.json.Decoder(dict[str, dict[str, Any] | None])


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a file holds.

    Attributes:
        entries: The state; empty where the file is refused.
        number: Number of the last good line.
        good_bytes: Length of the good part.
        cut_bytes: Length of the unfinished end.
        refused: Why the file is not used at all, in words; empty if it is.
    """

    entries: Entries = field(default_factory=dict)
    number: int = 0
    good_bytes: int = 0
    cut_bytes: int = 0
    refused: str = ""


def plain(changes: Mapping[str, Mapping[str, object] | None]) -> dict[str, dict[str, Any] | None]:
    """Give changes as a restart would read them (tuples become lists, and so on).

    Raises:
        TypeError: A value cannot be said in JSON.
    """
    try:
        return _changes_decoder.decode(msgspec.json.encode(changes))
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise TypeError(f"cannot keep {changes!r}: {error}") from None


def header(machine: str) -> bytes:
    """Give the first line of a file."""
    return _line(_Header(0, FORMAT, machine))


def batch(number: int, changes: Mapping[str, Mapping[str, object] | None]) -> bytes:
    """Give the line of one batch.

    Args:
        number: One more than the last line's.
        changes: Key to new value, None to delete.
    """
    return _line({"n": number, "set": changes})


def _line(value: object) -> bytes:
    body = msgspec.json.encode(value)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _body(line: bytes) -> bytes | None:
    """Give what a line says, or None where its checksum is wrong. ``line`` is without its newline."""
    body = line[9:]
    return body if line[:9] == b"%08x " % zlib.crc32(body) else None


def apply(entries: Entries, changes: Mapping[str, dict[str, Any] | None]) -> Entries:
    """Give the state after a batch; the state given is left as it is."""
    after = dict(entries)
    for key, value in changes.items():
        if value is None:
            after.pop(key, None)
        else:
            after[key] = value
    return after


def recover(data: bytes, machine: str) -> Recovered:
    """Read a file.

    Args:
        data: Its whole content.
        machine: Fingerprint of the machine that reads.
    """
    lines = data.split(b"\n")[:-1]  # what follows the last newline was never finished
    refused = _refuse_header(lines[0] if lines else None, machine)
    if refused:
        return Recovered(refused=refused)
    entries: Entries = {}
    number, good = 0, len(lines[0]) + 1
    for index, line in enumerate(lines[1:], start=1):
        found = _batch(line)
        if found is None:
            if any(_batch(later) is not None for later in lines[index + 1 :]):
                return Recovered(refused=f"line {index + 1} is damaged and good ones follow it")
            break
        if found.n != number + 1:
            return Recovered(refused=f"line {index + 1} has number {found.n} where {number + 1} belongs")
        for key, value in found.set.items():
            if value is None:
                entries.pop(key, None)
            else:
                entries[key] = value
        number, good = found.n, good + len(line) + 1
    return Recovered(entries, number, good, len(data) - good)


def _batch(line: bytes) -> _Batch | None:
    body = _body(line)
    if body is None:
        return None
    try:
        return _batch_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None


def _refuse_header(line: bytes | None, machine: str) -> str:
    body = None if line is None else _body(line)
    if body is None:
        return "its first line is damaged"
    try:
        found = _header_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return "its first line is not a header"
    if found.format != FORMAT:
        return f"it has format {found.format}, and this version reads {FORMAT}"
    if found.machine != machine:
        return f"it belongs to another machine ({found.machine}, this one is {machine})"
    return ""
