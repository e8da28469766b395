"""Messages whose strings may not be UTF-8, for facts about them.

A proto3 decoder rejects the whole message for one such string. Nearly all messages have none, so a message
is decoded as it is first. Where that fails, a copy is made in which such strings are replaced as in
``proxy.wire.lenient_text``, and that is decoded. Only facts are read from the copy; what goes to the
runtime is made from the bytes that came.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from proxy.wire.fields import varint
from proxy.wire.lenient_text import text

_M = TypeVar("_M", bound=Message)

MOST = 20_000
"""Fields that are walked, in pure Python. A message with more of them and such a string is not read."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}
_LONGEST = 10
"""Bytes of a varint."""


class TooManyFieldsError(DecodeError):
    """A message has strings that are not UTF-8 and too many fields to replace these."""


def read(kind: type[_M], raw: bytes) -> _M:
    """Decode a message.

    Args:
        kind: Its class.
        raw: Its bytes.

    Raises:
        DecodeError: It is not a message of this type.
        TooManyFieldsError: It is too large to be read with such strings.
    """
    try:
        return kind.FromString(raw)
    except DecodeError:
        return kind.FromString(_mended(kind.DESCRIPTOR, raw, [MOST]))


def _mended(kind: Any, raw: bytes, left: list[int]) -> bytes:
    """Return a message with its declared fields alone, and with strings that are UTF-8.

    Args:
        kind: Its descriptor.
        raw: Its bytes.
        left: One number: how many more fields may be walked.
    """
    pieces: list[bytes] = []
    for start, number, wire, payload, end in _fields(raw):
        left[0] -= 1
        if left[0] < 0:
            raise TooManyFieldsError(f"strings are not UTF-8 in a message of more than {MOST} fields")
        field = kind.fields_by_number.get(number)
        if field is None:
            continue
        if wire != _BYTES:
            pieces.append(raw[start:end])
            continue
        content = raw[payload:end]
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            content = _mended(field.message_type, content, left)
        elif field.type == FieldDescriptor.TYPE_STRING:
            content = text(content).encode()
        pieces.append(varint(number << 3 | _BYTES) + varint(len(content)) + content)
    return b"".join(pieces)


def _fields(raw: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Walk the fields of a message: where each begins, number, wire type, where its value begins and ends.

    Groups, which proto3 has none of, are not walked.
    """
    at = 0
    while at < len(raw):
        start = at
        key, at = _varint(raw, at)
        number, wire = key >> 3, key & 7
        payload = at
        if wire == _VARINT:
            _, at = _varint(raw, at)
        elif wire == _BYTES:
            size, payload = _varint(raw, at)
            at = payload + size
        elif wire in _SIZES:
            at += _SIZES[wire]
        else:
            raise DecodeError(f"it has a field of wire type {wire}")
        if number == 0 or at > len(raw):
            raise DecodeError("it is not a message")
        yield start, number, wire, payload, at


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Read a number; gives it, and where it ends."""
    value = shift = 0
    for index in range(at, min(len(raw), at + _LONGEST)):
        byte = raw[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise DecodeError("it is not a message")
