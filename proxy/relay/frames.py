"""HTTP/2 frames (RFC 9113): writing our own, and splitting one direction of a connection into frames.

Bytes that only pass are not copied.

Theory of operation. ``feed`` takes bytes as they were read and appends the bytes that must leave to ``out``.
It reads the 9 leading bytes of each frame and decides:

* DATA that only passes is counted (``passes``) and skipped, even if only its beginning has arrived;
* every other frame is given to a method of the subclass when it is complete. The method decides whether the
  frame passes (``PASS``), is removed (``DROP``), or passes after frames that we had to write first
  (``PASS_AFTER_OWN_FRAMES``).

Consecutive frames that pass leave as one piece. If all frames of a read pass, it leaves as the same bytes
object.

Frames of our own (``inject``) may only stand between two frames, and never between HEADERS and their
CONTINUATION. So they wait in ``_deferred`` until the sender has begun with its SETTINGS, while a frame is
being handled, while passing DATA is incomplete, and while a header block is open; the order on the wire is
then the order of events.

Memory: an incomplete frame is at most as long as the receiver allows (SETTINGS_MAX_FRAME_SIZE), and a header
block at most ``LARGEST_BLOCK``; a longer one raises RelayError before it is decoded. Each is gathered in one
buffer, so that pieces of a few bytes cost a few bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from struct import Struct
from typing import Final

from proxy.relay.events import ENHANCE_YOUR_CALM, RelayError

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

GOAWAY_PING: Final = b"topo-end"
"""Content of the PING that follows a GOAWAY of the relay."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW: Final = 65_535
DEFAULT_FRAME: Final = 16_384
LARGEST_FRAME: Final = (1 << 24) - 1
LARGEST_WINDOW: Final = (1 << 31) - 1
MOST_UNACKNOWLEDGED: Final = 1024  # SETTINGS without acknowledgement, after which a peer is disconnected
STREAM_ID: Final = 0x7FFF_FFFF

HEAD: Final = Struct(">IBI")  # length << 8 | type, flags, stream
WORD: Final = Struct(">I")
SETTING: Final = Struct(">HI")
PREFIX: Final = Struct(">BI")  # gRPC: compressed flag, message length
_LAST_MESSAGE: Final = Struct(">IBIBI")
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


def last_message(stream: int, message: bytes, suffix: bytes = b"") -> bytes:
    """Write a gRPC message in two parts as one DATA frame that ends its stream."""
    size = len(message) + len(suffix)
    head = _LAST_MESSAGE.pack((size + PREFIX.size) << 8 | DATA, END_STREAM, stream, 0, size)
    return b"".join((head, message, suffix))


def rst_stream(stream: int, code: int) -> bytes:
    """Write a RST_STREAM."""
    return _LONG.pack(4 << 8 | RST_STREAM, 0, stream, code)


SETTINGS_ACK: Final = HEAD.pack(SETTINGS, ACK, 0)
"""A SETTINGS frame that acknowledges one of the other side."""


def goaway(last: int, code: int = NO_ERROR) -> bytes:
    """Write a GOAWAY with an HTTP/2 error code."""
    return _GOAWAY.pack(8 << 8 | GOAWAY, 0, 0, last, code)


def ping(content: bytes) -> bytes:
    """Write a PING with 8 bytes of content."""
    return _PING.pack(8 << 8 | PING, 0, 0, content)


def _percent_encoded(character: str) -> bytes:
    """Encode a character of a grpc-message (gRPC over HTTP/2, Responses)."""
    content = character.encode("utf-8", "replace")
    return b"".join(bytes((byte,)) if byte in _PLAIN else b"%%%02X" % byte for byte in content)


def refusal(stream: int, code: int, message: str, *, answered: bool, resize: int | None) -> bytes:
    """Write the HEADERS frame that ends a call with a gRPC status.

    It uses only static indices and literals without indexing, so the receiver's header table stays as the
    runtime expects it to be.

    Args:
        stream: HTTP/2 stream id.
        code: grpc-status.
        message: grpc-message; percent-encoded here, cut after 4 KiB, between two characters.
        answered: The client has the opening headers already; these are the trailers.
        resize: A table size that the next header block must announce (RFC 7541, 4.2), or None.
    """
    text = b""
    for character in message:  # a client may reject a text that is not UTF-8 after decoding
        longer = text + _percent_encoded(character)
        if len(longer) > _MESSAGE_BYTES:
            break
        text = longer
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
        RelayError: The padding is longer than the frame.
    """
    if not flags & PADDED:
        return start, end
    if start == end or start + 1 + data[start] > end:
        raise RelayError("cannot read a frame: it is shorter than its padding")
    return start + 1, end - data[start]


def settings(flags: int, stream: int, data: bytes, start: int, end: int) -> list[tuple[int, int]]:
    """Read the pairs of a SETTINGS frame.

    Raises:
        RelayError: The frame is invalid, or a value that this relay uses is out of bounds.
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


PASS: Final = 0
DROP: Final = 1
PASS_AFTER_OWN_FRAMES: Final = 2
LARGEST_BLOCK: Final = 256 << 10
"""Bytes of a header block, HEADERS and CONTINUATION together; kubelet sends a few hundred."""
_HEAD: Final = 9
_SHAPE: Final = END_HEADERS | PADDED | PRIORITY
_WITH_BLOCK: Final = (HEADERS, CONTINUATION, PUSH_PROMISE)


def block_too_long() -> RelayError:
    """Return the error for a header block above ``LARGEST_BLOCK``."""
    return RelayError(f"cannot read a header: it is longer than {LARGEST_BLOCK} bytes", ENHANCE_YOUR_CALM)


class FrameReader(ABC):
    """Reads the frames of one direction of a connection; subclasses define what each frame means.

    Attributes:
        out: The bytes that must leave, in order.
        handlers: The handlers of complete frames, by type; other types pass. Each is called with flags,
            stream, data, and the positions where the payload begins and ends; it returns PASS, DROP or
            PASS_AFTER_OWN_FRAMES.
        begun: The sender's SETTINGS have passed, which must be the first frame of a direction.
        largest_frame: The longest frame that the receiver allows.
    """

    __slots__ = (
        "_block",
        "_block_flags",
        "_block_stream",
        "_busy",
        "_deferred",
        "_empties",
        "_need",
        "_passing",
        "_preface",
        "_rest",
        "begun",
        "handlers",
        "largest_frame",
        "out",
    )  # fmt: skip

    def __init__(self, greeting: bytes = b"") -> None:
        """Begin.

        Args:
            greeting: The bytes that must come before the first frame.
        """
        self.out: list[bytes | memoryview] = []
        self.handlers: dict[int, Callable[[int, int, bytes, int, int], int]] = {}
        self._preface = greeting
        self.begun = False
        self.largest_frame = DEFAULT_FRAME
        self._busy = False
        self._deferred: list[bytes | memoryview] = []
        self._passing = 0  # bytes of a passing DATA frame that are still to come
        self._rest: bytes | bytearray = b""  # an incomplete frame
        self._need = 0
        self._block: bytearray | None = None  # an open header block
        self._block_stream = self._block_flags = 0
        self._empties = 0

    def drain(self) -> list[bytes | memoryview]:
        """Take the bytes that must leave."""
        out = self.out
        if out:
            self.out = []
        return out

    def send_last(self, frame: bytes) -> None:
        """Send a last frame of our own if a frame may begin here: the reader may have failed inside one."""
        if self.begun and not self._passing and self._block is None:
            self.out.append(frame)

    def inject(self, *own: bytes | memoryview) -> None:
        """Send frames of our own at the next place where they are allowed."""
        if self._busy or self._passing or self._block is not None or not self.begun:
            self._deferred.extend(own)
        else:
            self.out.extend(own)

    def feed(self, data: bytes) -> None:
        """Take bytes of any length.

        Raises:
            RelayError: The peer broke the protocol; the reader cannot be used after this.
        """
        mark = pos = 0
        self._busy = True
        if self._preface:
            pos = self._pass_preface(data)
        elif self._passing:
            pos = self._pass_on(data)
        elif self._rest:
            if len(self._rest) + len(data) < self._need:
                self._gather_rest(data)
                self._busy = False
                return
            if self._need > _HEAD:
                mark = pos = self._end_rest(data)
            else:
                data = b"".join((self._rest, data))
                self._rest = b""
        mark, pos = self._walk(data, mark, pos)
        self._busy = False
        size = len(data)
        if mark == 0 and pos == size:
            if size:
                self.out.append(data)
        else:
            if pos > mark:
                self.out.append(data[mark:pos])
            if pos < size:
                self._keep_rest(data, pos, size)
        if self._deferred and self.begun and not self._passing and self._block is None:
            self._flush_deferred()

    def _end_rest(self, data: bytes) -> int:
        """Complete and handle the incomplete frame; return the position where the next one begins."""
        missing = self._need - len(self._rest)
        frame = b"".join((self._rest, data[:missing]))
        self._rest = b""
        mark, pos = self._walk(frame, 0, 0)
        if pos > mark:
            self.out.append(frame[mark:pos])
        return missing

    def _walk(self, data: bytes, mark: int, pos: int) -> tuple[int, int]:
        """Handle all complete frames; return where the unsent stretch begins and where it ends.

        The bytes between ``mark`` and ``pos`` pass.
        """
        head, passes, handlers = HEAD.unpack_from, self.passes, self.handlers
        size = len(data)
        if pos > mark and self._deferred and not self._passing:
            mark = self._flush(data, mark, pos)
        while pos + _HEAD <= size:
            word, flags, stream = head(data, pos)
            stream &= STREAM_ID
            end = pos + _HEAD + (word >> 8)
            kind = word & 0xFF
            if word >> 8 > self.largest_frame or (self._block is not None and kind != CONTINUATION):
                raise RelayError(
                    f"cannot read a frame: type {kind} with {word >> 8} bytes may not stand here "
                    f"(at most {self.largest_frame} bytes, and an open header goes first)"
                )
            if kind == DATA and passes(flags, stream, word >> 8):
                if end > size:
                    self._passing = end - size
                    return mark, size
                pos = end
                continue
            if end > size:
                break
            verdict = PASS
            if kind == HEADERS and flags & _SHAPE == END_HEADERS and stream:
                if word >> 8 > LARGEST_BLOCK:
                    raise block_too_long()
                verdict = self.on_headers(flags, stream)
                self.on_block(flags, stream, data[pos + _HEAD : end])
            elif kind in handlers:
                verdict = handlers[kind](flags, stream, data, pos + _HEAD, end)
            if verdict != PASS:
                mark = self._split_at(verdict, data, mark, pos, end)
            pos = end
            if self._deferred and self.begun and self._block is None:
                mark = self._flush(data, mark, pos)
        return mark, pos

    def _split_at(self, verdict: int, data: bytes, mark: int, pos: int, end: int) -> int:
        """Send the bytes before a frame that does not simply pass; return where the next stretch begins."""
        if pos > mark:
            self.out.append(data[mark:pos])
        if verdict == DROP:
            return end
        self._flush_deferred()
        return pos

    def _flush(self, data: bytes, mark: int, pos: int) -> int:
        """Send the stretch from ``mark`` to ``pos`` and then our own frames."""
        if pos > mark:
            self.out.append(data[mark:pos])
        self._flush_deferred()
        return pos

    def _pass_preface(self, data: bytes) -> int:
        """Pass the connection preface on; return where its received part ends."""
        count = min(len(self._preface), len(data))
        if data[:count] != self._preface[:count]:
            raise RelayError("cannot serve the client: it does not speak HTTP/2")
        self._preface = self._preface[count:]
        return count

    def _pass_on(self, data: bytes) -> int:
        """Let the rest of a DATA frame pass; return where it ends."""
        rest = min(self._passing, len(data))
        self._passing -= rest
        return rest

    def _flush_deferred(self) -> None:
        self.out += self._deferred
        self._deferred.clear()

    def _keep_rest(self, data: bytes, pos: int, size: int) -> None:
        self._rest = data[pos:]
        self._need = _HEAD
        if size - pos >= _HEAD:
            word = HEAD.unpack_from(data, pos)[0]
            self._need += word >> 8
            if word >> 8 > LARGEST_BLOCK and word & 0xFF in _WITH_BLOCK:
                raise block_too_long()

    def _gather_rest(self, data: bytes) -> None:
        rest = self._rest
        if not isinstance(rest, bytearray):
            rest = self._rest = bytearray(rest)
        rest += data

    # Subclasses define the meaning of the frames of their direction.

    @abstractmethod
    def passes(self, flags: int, stream: int, length: int) -> bool:
        """Count a DATA frame that only passes; return False if ``on_data`` must handle it."""

    @abstractmethod
    def on_headers(self, flags: int, stream: int) -> int:
        """Record that a header begins."""

    @abstractmethod
    def on_block(self, flags: int, stream: int, block: bytes) -> None:
        """Handle a complete header block; ``flags`` are those of its first frame."""
