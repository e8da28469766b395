"""HTTP/2 frames (RFC 9113): numbers, the few frames that we write, the padding of those that we read."""

from __future__ import annotations

from struct import Struct
from typing import Final

from proxy.relay.events import RelayError

DATA: Final = 0
HEADERS: Final = 1
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5

NO_ERROR: Final = 0
CANCEL: Final = 8

BEHIND_GOAWAY: Final = b"topo-end"
"""Content of the PING that follows a GOAWAY of ours."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW: Final = 65_535
DEFAULT_FRAME: Final = 16_384
LARGEST_FRAME: Final = (1 << 24) - 1
LARGEST_WINDOW: Final = (1 << 31) - 1
UNACKNOWLEDGED: Final = 1024  # SETTINGS that may be on their way; a peer that acknowledges none is cut off
STREAM_ID: Final = 0x7FFF_FFFF

HEAD: Final = Struct(">IBI")  # length << 8 | type, flags, stream
WORD: Final = Struct(">I")
SETTING: Final = Struct(">HI")
PREFIX: Final = Struct(">BI")  # gRPC: compressed flag, message length
_WHOLE: Final = Struct(">IBIBI")
_LONG: Final = Struct(">IBII")
_GOAWAY: Final = Struct(">IBIII")
_PING: Final = Struct(">IBI8s")

_GRPC_STATUS: Final = b"\x00\x0bgrpc-status"
_GRPC_MESSAGE: Final = b"\x00\x0cgrpc-message"
# ":status 200" by static index; content-type as a literal that no table keeps, its name by static index 31.
_OPENING: Final = b"\x88\x0f\x10\x10application/grpc"
_MESSAGE_BYTES: Final = 4096
_PLAIN: Final = frozenset(range(0x20, 0x7F)) - {0x25}


def head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """Write a frame's 9 leading bytes."""
    return HEAD.pack(length << 8 | kind, flags, stream)


def window_update(stream: int, increment: int) -> bytes:
    """Write a WINDOW_UPDATE; ``increment`` is at least 1."""
    return _LONG.pack(4 << 8 | WINDOW_UPDATE, 0, stream, increment)


def whole(stream: int, message: bytes, suffix: bytes = b"") -> bytes:
    """Write a gRPC message in two parts as one DATA frame that ends its stream."""
    size = len(message) + len(suffix)
    head = _WHOLE.pack((size + PREFIX.size) << 8 | DATA, END_STREAM, stream, 0, size)
    return b"".join((head, message, suffix))


def rst_stream(stream: int, code: int) -> bytes:
    """Write a RST_STREAM."""
    return _LONG.pack(4 << 8 | RST_STREAM, 0, stream, code)


def goaway(last: int, code: int = NO_ERROR) -> bytes:
    """Write a GOAWAY with an HTTP/2 error code."""
    return _GOAWAY.pack(8 << 8 | GOAWAY, 0, 0, last, code)


def ping(content: bytes) -> bytes:
    """Write a PING with 8 bytes of content."""
    return _PING.pack(8 << 8 | PING, 0, 0, content)


def refusal(stream: int, code: int, message: str, *, answered: bool, resize: int | None) -> bytes:
    """Write the HEADERS frame that ends a call with a gRPC status.

    It uses static indices and literals without indexing only, so the receiver's header table stays as the
    runtime believes it to be.

    Args:
        stream: HTTP/2 stream id.
        code: grpc-status.
        message: grpc-message; percent-encoded here, cut after 4 KiB.
        answered: The client has the opening headers already; these are the trailers.
        resize: A table size that the next header block must announce (RFC 7541, 4.2), or None.
    """
    text = bytearray()
    for byte in message.encode("utf-8", "replace"):
        text += bytes((byte,)) if byte in _PLAIN else b"%%%02X" % byte
        if len(text) >= _MESSAGE_BYTES:
            break
    status = b"%d" % code
    block = b"".join(
        (
            b"" if resize is None else integer(0x20, 0x1F, resize),
            b"" if answered else _OPENING,
            _GRPC_STATUS + integer(0, 0x7F, len(status)) + status,
            _GRPC_MESSAGE + integer(0, 0x7F, len(text)) + text,
        )
    )
    return head(HEADERS, END_HEADERS | END_STREAM, stream, len(block)) + block


def integer(pattern: int, mask: int, value: int) -> bytes:
    """Write an HPACK integer (RFC 7541, 5.1); ``pattern`` fills the first byte above the bits of ``mask``."""
    if value < mask:
        return bytes((pattern | value,))
    out = bytearray((pattern | mask,))
    value -= mask
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def unpad(flags: int, data: bytes, start: int, end: int) -> tuple[int, int]:
    """Find the payload of a frame that may be padded.

    Raises:
        RelayError: There is more padding than frame.
    """
    if not flags & PADDED:
        return start, end
    if start == end or start + 1 + data[start] > end:
        raise RelayError("cannot read a frame: it is shorter than its padding")
    return start + 1, end - data[start]


def settings(flags: int, stream: int, data: bytes, start: int, end: int) -> list[tuple[int, int]]:
    """Read the pairs of a SETTINGS frame.

    Raises:
        RelayError: The frame is not valid, or a value that matters here is out of bounds.
    """
    if stream or (end - start) % 6 or (flags & ACK and end > start):
        raise RelayError("cannot read SETTINGS: wrong stream or size")
    pairs = list(SETTING.iter_unpack(data[start:end]))
    for key, value in pairs:
        if key == INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
            raise RelayError(f"cannot obey SETTINGS: initial window {value} is out of bounds")
        if key == MAX_FRAME_SIZE and not DEFAULT_FRAME <= value <= LARGEST_FRAME:
            raise RelayError(f"cannot obey SETTINGS: frame size {value} is out of bounds")
    return pairs
