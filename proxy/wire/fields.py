"""Encoding single fields of a protobuf message."""

from __future__ import annotations


def varint(number: int) -> bytes:
    """Encode a number that is not negative."""
    found = b""
    while number > 0x7F:
        found += bytes((number & 0x7F | 0x80,))
        number >>= 7
    return found + bytes((number,))


def field(number: int, payload: bytes) -> bytes:
    """Encode a field that is a text or a message; numbers up to 15."""
    size = len(payload)
    if size < 0x80:  # most are
        return bytes((number << 3 | 2, size)) + payload
    return bytes((number << 3 | 2,)) + varint(size) + payload
