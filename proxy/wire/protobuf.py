r"""Reading and writing bytes of protobuf messages without the generated classes.

protobuf requires that a string is UTF-8, but the runtimes' Go code does not check it. Bytes that are not
UTF-8 become escapes such as ``\xff``: different texts stay different, which they would not with U+FFFD, and
all later output is plain text. In JSON such an escape is a syntax error, so an annotation with such bytes
counts as malformed.

A proto3 decoder rejects the whole message for one such string. Nearly all messages have none, so
``decode_message`` first decodes a message as it is. If that fails, it decodes a copy in which such strings
are replaced. Only facts are read from the copy; the message to the runtime is made from the original bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from proxy.api.cri import api_pb2 as pb

ENTRY_COUNT_LIMIT, ENTRY_LIMIT_BYTES = 1000, 4096
"""Limits for a map of labels: entries, and bytes of one entry; labels of Kubernetes are much shorter."""


def decode_text(raw: bytes) -> str:
    """Decode bytes; never raises."""
    try:
        return raw.decode()  # without arguments it takes half as long
    except UnicodeDecodeError:
        return raw.decode("utf-8", "backslashreplace")


def decode_name(raw: bytes) -> str:
    """Decode a name that must match exactly, such as an id or a path.

    Returns:
        An empty string if the bytes are not UTF-8. No call of the daemon could name such a container.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""


class WantedKeys:
    """Reads those entries of a map whose keys are wanted.

    A pod may have hundreds of kilobytes of annotations, and most pods have no wanted ones. So all bytes are
    searched first, in one pass in C, and only entries that may contain a wanted key are decoded.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        """Prepare to look for some keys; each has a prefix and a slash, as in ``koordinator.sh/qosClass``."""
        self._keys = frozenset(key.encode() for key in keys)
        prefixes = {key.partition(b"/")[0] + b"/" for key in self._keys}
        self._marks = tuple(
            sorted(p for p in prefixes if not any(other != p and other in p for other in prefixes))
        )

    def wanted_entries(self, entries: Sequence[bytes]) -> dict[str, str]:
        """Return the wanted entries of a map; for a key that occurs twice, the last value, as in protobuf."""
        if not entries:
            return {}
        joined = b"".join(entries[:])  # one call each; iteration costs three times that
        for mark in self._marks:
            if mark in joined:
                return self._found(entries)
        return {}

    def all_entries(self, entries: Sequence[bytes]) -> dict[str, str]:
        """Return all entries of a map of labels; if there are too many for labels, only the wanted ones."""
        if not entries:
            return {}
        if len(entries) > ENTRY_COUNT_LIMIT:
            return self.wanted_entries(entries)
        read = (decode_entry(raw) for raw in entries[:] if len(raw) <= ENTRY_LIMIT_BYTES)
        return {decode_text(entry.key): decode_text(entry.value) for entry in read if entry is not None}

    def _found(self, entries: Sequence[bytes]) -> dict[str, str]:
        wanted: dict[str, str] = {}
        for raw in entries:
            if any(mark in raw for mark in self._marks):
                entry = decode_entry(raw)
                if entry is not None and entry.key in self._keys:
                    wanted[entry.key.decode()] = decode_text(entry.value)
        return wanted


def decode_entry(raw: bytes) -> pb.Entry | None:
    """Decode one entry of a map; None if it is not a message; the runtime refuses it then."""
    try:
        return pb.Entry.FromString(raw)
    except DecodeError:
        return None


def encode_varint(number: int) -> bytes:
    """Encode a number that is not negative."""
    encoded = b""
    while number > 0x7F:
        encoded += bytes((number & 0x7F | 0x80,))
        number >>= 7
    return encoded + bytes((number,))


ONE_BYTE_VARINT_LIMIT = 0x80
"""Numbers below are varints of one byte."""


def encode_field(number: int, payload: bytes) -> bytes:
    """Encode a field that is a text or a message; numbers up to 15."""
    size = len(payload)
    if size < ONE_BYTE_VARINT_LIMIT:  # most payloads are
        return bytes((number << 3 | 2, size)) + payload
    return bytes((number << 3 | 2,)) + encode_varint(size) + payload


_M = TypeVar("_M", bound=Message)

FIELDS_LIMIT = 20_000
"""Fields that are walked in pure Python. A message with more fields and a non-UTF-8 string is not read."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}
_VARINT_LIMIT_BYTES = 10
"""Bytes of a varint."""


class TooManyFieldsError(DecodeError):
    """A message has strings that are not UTF-8 and too many fields to replace these."""


def decode_message(kind: type[_M], raw: bytes) -> _M:
    """Decode a message.

    Args:
        kind: Its class.
        raw: Its bytes.

    Raises:
        DecodeError: It is not a message of this type.
        TooManyFieldsError: It has strings that are not UTF-8, and too many fields to replace them.
    """
    try:
        return kind.FromString(raw)
    except DecodeError:
        return kind.FromString(_sanitized(kind.DESCRIPTOR, raw, [FIELDS_LIMIT]))


def _sanitized(kind: Any, raw: bytes, budget: list[int]) -> bytes:
    """Return a message with only its declared fields, and with strings that are UTF-8.

    Args:
        kind: Its descriptor.
        raw: Its bytes.
        budget: One number: how many more fields may be walked.
    """
    pieces: list[bytes] = []
    for start, number, wire, payload, end in _fields(raw):
        budget[0] -= 1
        if budget[0] < 0:
            raise TooManyFieldsError(f"strings are not UTF-8 in a message of more than {FIELDS_LIMIT} fields")
        field = kind.fields_by_number.get(number)
        if field is None:
            continue
        if wire != _BYTES:
            pieces.append(raw[start:end])
            continue
        content = raw[payload:end]
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            content = _sanitized(field.message_type, content, budget)
        elif field.type == FieldDescriptor.TYPE_STRING:
            content = decode_text(content).encode()
        pieces.append(encode_varint(number << 3 | _BYTES) + encode_varint(len(content)) + content)
    return b"".join(pieces)


def _fields(raw: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Walk the fields of a message: where each begins, number, wire type, where its value begins and ends.

    Groups, which proto3 does not have, are not walked.
    """
    at = 0
    while at < len(raw):
        start = at
        key, at = _decode_varint(raw, at)
        number, wire = key >> 3, key & 7
        payload = at
        if wire == _VARINT:
            _, at = _decode_varint(raw, at)
        elif wire == _BYTES:
            size, payload = _decode_varint(raw, at)
            at = payload + size
        elif wire in _SIZES:
            at += _SIZES[wire]
        else:
            raise DecodeError(f"it has a field of wire type {wire}")
        if number == 0 or at > len(raw):
            raise DecodeError("it is not a message")
        yield start, number, wire, payload, at


def _decode_varint(raw: bytes, at: int) -> tuple[int, int]:
    """Read a number; return it and the position after it."""
    value = shift = 0
    for index in range(at, min(len(raw), at + _VARINT_LIMIT_BYTES)):
        byte = raw[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise DecodeError("it is not a message")
