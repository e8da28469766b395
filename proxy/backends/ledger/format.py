"""The ledger's file format, as pure functions between bytes and values.

The file is a journal of lines, each

    CRC32 (8 hex digits) SPACE JSON NEWLINE

in which the JSON is ``{"n": 7, "set": {"key": {...}, "gone": null}}``. One line is one atomic batch: it is
appended in one write, and it counts only if it ends with a newline, its checksum is correct and its number
follows the number of the line before. Line 0 is the header, ``{"n": 0, "format": 1, "machine": "..."}``. The
state is the result of all lines in their order; a compacted file has the state in one line.

Two kinds of damage are possible:

* The end is unfinished or unreadable, and no valid line follows: the process crashed during a write. All
  lines before the end are used.
* A damaged line is followed by valid lines, a number is missing, or the header is not ours: this is not the
  file that we wrote. It is not used at all, because a state with a gap could give CPUs away twice.

No content makes a batch fail. A lone surrogate, which UTF-8 cannot encode, is stored as text: the six
characters of its escape, which every reader of this format accepts. If JSON cannot express a record, or the
record is too long, only this record is left out, and an older record under its key is deleted too. The
reason: a missing record is rebuilt from the runtime, but an outdated record would be used.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from proxy.model.workload import CONTAINER_RECORD, CREATE_RECORD, POD_RECORD

FORMAT = 1
RECORD_BYTES = 64 * 1024
"""Length of the longest record of one pod or container."""
_BOUNDED = (POD_RECORD, CONTAINER_RECORD, CREATE_RECORD)
"""Key prefixes of such records. Records of the node have no limit: that of a takeover contains kubelet's
checkpoint."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_QUOTED_CHARACTERS = 80
"""A message repeats at most this many characters of a key or of an error's text."""

Entries = dict[str, dict[str, Any]]
"""State: key to value, as JSON objects."""

Packed = dict[str, bytes]
"""The state in the form that is kept in memory: each value as JSON text, which has a fifth of the size of the
objects."""


class PackedView(Mapping[str, dict[str, Any]]):
    """Packed state, read as objects; a value is decoded each time it is requested."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def __getitem__(self, key: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self._packed[key])
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


def pack(
    changes: Mapping[str, Mapping[str, object] | None], limit: int = RECORD_BYTES
) -> tuple[dict[str, bytes | None], dict[str, str]]:
    """Return changes in the form that is kept in memory and on disk.

    Args:
        changes: Key to new value; None to delete.
        limit: Length of the longest record of a pod or container.

    Returns:
        The packed changes, in which records that cannot be stored are deleted; and the reasons, by key.
    """
    packed: dict[str, bytes | None] = {}
    rejected: dict[str, str] = {}
    for key, value in changes.items():
        if not isinstance(key, str) or _SURROGATE.search(key):
            rejected[short_text(key)] = "its key is not valid text"
            continue
        try:
            packed[key] = None if value is None else _pack_one(key, value, limit)
        except (TypeError, ValueError, RecursionError) as error:
            packed[key] = None
            rejected[key] = short_text(error)
    return packed, rejected


def _pack_one(key: str, value: object, limit: int) -> bytes:
    """Return one record in the form that is kept.

    Raises:
        TypeError, ValueError, RecursionError: The record cannot be stored.
    """
    packed = _dump(value)
    if not packed.startswith(b"{"):
        raise TypeError(f"it is a {type(value).__name__}, not an object")
    if len(packed) > limit and key.startswith(_BOUNDED):
        raise ValueError(f"it is longer than {limit} bytes")
    return packed


def short_text(value: object) -> str:
    """Return a key or an error as short printable text."""
    text = str(value) if isinstance(value, str | Exception) else type(value).__name__
    cut = text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "..."
    return cut if cut.isprintable() else ascii(cut)[1:-1]


def _dump(value: object) -> bytes:
    """Return a value as JSON without blanks.

    Raises:
        TypeError, ValueError, RecursionError: The value cannot be written as JSON (NaN included, because
            readers do not agree on it).
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Surrogates occur only within strings. Their JSON escape (one backslash) would read back as a
        # surrogate, which earlier versions of this format's reader cannot store again.
        return _SURROGATE.sub(lambda match: f"\\\\u{ord(match[0]):04x}", text).encode()


def _checked_changes(changes: object) -> dict[str, dict[str, Any] | None] | None:
    """Return an object that was read if it has the form of a batch's changes, otherwise None."""
    if not isinstance(changes, dict):
        return None
    good = all(isinstance(k, str) and (v is None or isinstance(v, dict)) for k, v in changes.items())
    return changes if good else None


class Recovered(Struct, frozen=True):
    """The contents of a file.

    Attributes:
        entries: The state; empty if the file is refused.
        number: Number of the last valid line.
        good_bytes: Length of the valid part.
        cut_bytes: Length of the unfinished end.
        refused: Why the file is not used at all, as text; empty if the file is used.
    """

    entries: Entries = field(default_factory=dict)
    number: int = 0
    good_bytes: int = 0
    cut_bytes: int = 0
    refused: str = ""


def header(machine: str) -> bytes:
    """Return the first line of a file."""
    return _line(_dump({"n": 0, "format": FORMAT, "machine": machine}))


def batch(number: int, changes: Mapping[str, bytes | None]) -> bytes:
    """Return the line of one batch.

    Args:
        number: One more than the number of the last line.
        changes: Key to new value, packed; None to delete.
    """
    pairs = b",".join(_dump(key) + b":" + (value or b"null") for key, value in changes.items())
    return _line(b'{"n":%d,"set":{%s}}' % (number, pairs))


def _line(body: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _body(line: bytes) -> bytes | None:
    """Return the content of a line (without its newline), or None if its checksum is wrong."""
    body = line[9:]
    return body if line[:9] == b"%08x " % zlib.crc32(body) else None


def apply(entries: Packed, changes: Mapping[str, bytes | None]) -> Packed:
    """Return the state after a batch; the given state is not changed."""
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
        machine: Fingerprint of the machine on which the file is read.
    """
    lines = data.split(b"\n")[:-1]  # text after the last newline was never finished
    refused = _refuse_header(lines[0] if lines else None, machine)
    if refused:
        return Recovered(refused=refused)
    entries: Entries = {}
    number, good = 0, len(lines[0]) + 1
    for index, line in enumerate(lines[1:], start=1):
        batch = _batch(line)
        if batch is None:
            if any(_batch(later) is not None for later in lines[index + 1 :]):
                return Recovered(refused=f"line {index + 1} is damaged and valid lines follow it")
            break
        line_number, changes = batch
        if line_number != number + 1:
            return Recovered(refused=f"line {index + 1} has number {line_number} where {number + 1} belongs")
        for key, value in changes.items():
            if value is None:
                entries.pop(key, None)
            else:
                entries[key] = value
        number, good = line_number, good + len(line) + 1
    return Recovered(entries, number, good, len(data) - good)


def _object_of_line(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line, or None if the line is damaged or contains no object."""
    body = _body(line)
    if body is None:
        return None
    try:
        entry = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _batch(line: bytes) -> tuple[int, dict[str, dict[str, Any] | None]] | None:
    entry = _object_of_line(line)
    if entry is None or not isinstance(entry.get("n"), int):
        return None
    changes = _checked_changes(entry.get("set"))
    return None if changes is None else (entry["n"], changes)


def _refuse_header(line: bytes | None, machine: str) -> str:
    if line is None or _body(line) is None:
        return "its first line is damaged"
    header = _object_of_line(line)
    if header is None or not isinstance(header.get("format"), int):
        return "its first line is not a header"
    if header["format"] != FORMAT:
        return f"it has format {header['format']}, and this version reads {FORMAT}"
    if header.get("machine") != machine:
        return f"it belongs to another machine ({header.get('machine')}, this one is {machine})"
    return ""
