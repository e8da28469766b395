"""The part of HTTP/2 and HPACK that the load generator and the backend need, small and quick.

It does not use ``proxy.relay`` on purpose: the measuring program must not share a defect with the measured
one. Both sides obey and enforce flow control (RFC 9113, 5.2 and 6.9); header tables are followed, never
guessed (RFC 7541).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from functools import lru_cache

from hpack import Decoder
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 32
DEFAULT_WINDOW = 65_535
MAX_FRAME = 16_384
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5

_HEAD = struct.Struct(">IBI")  # 24 bits of length and 8 of type, flags, stream
_STATIC: tuple[tuple[bytes, bytes], ...] = tuple(HeaderTable.STATIC_TABLE)
_STATIC_INDEX = {entry: index for index, entry in reversed(list(enumerate(_STATIC, 1)))}
_STATIC_NAME = {name: index for index, (name, _) in reversed(list(enumerate(_STATIC, 1)))}


class PeerError(Exception):
    """The other side broke the protocol."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return _HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings_frame(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", key, value) for key, value in values.items()))


def window_frame(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", increment))


def message(body: bytes) -> bytes:
    """A gRPC message: uncompressed flag, length, body."""
    return struct.pack(">BI", 0, len(body)) + body


def one_message(body: bytes) -> bytes:
    """The body of the one gRPC message that a unary call carries; raises PeerError if there is not exactly
    one."""
    if len(body) < 5 or struct.unpack_from(">BI", body) != (0, len(body) - 5):
        raise PeerError("a body that is not one message")
    return body[5:]


def unpadded(flags: int, payload: memoryview | bytes, kind: int) -> memoryview | bytes:
    """The payload of DATA or HEADERS without padding and priority."""
    begin, end = 0, len(payload)
    if flags & PADDED:
        begin, end = 1, end - payload[0]
    if kind == HEADERS and flags & PRIORITY:
        begin += 5
    if begin > end:
        raise PeerError("padding is longer than the frame")
    return payload[begin:end]


class Outbox:
    """The data that waits to be sent on one connection; bodies are sent as the peer's windows allow."""

    def __init__(self) -> None:
        self.out: list[bytes | memoryview] = []
        self.window = DEFAULT_WINDOW
        self.initial = DEFAULT_WINDOW
        self.max_frame = MAX_FRAME
        self.streams: dict[int, int] = {}
        self.waiting: dict[int, tuple[memoryview, bytes]] = {}

    def open(self, stream: int) -> None:
        """Begin to follow a stream's window."""
        self.streams[stream] = self.initial

    def close(self, stream: int) -> None:
        """Forget a stream and its waiting data."""
        self.streams.pop(stream, None)
        self.waiting.pop(stream, None)

    def send(self, stream: int, head: bytes, body: bytes, tail: bytes = b"") -> None:
        """Queue header frames, a body and trailer frames; without a tail the body ends the stream.

        This is the last data of the stream, so its window is forgotten after it.
        """
        size = len(body)
        if (
            not self.waiting
            and size <= self.max_frame
            and size <= self.window
            and size <= self.streams[stream]
        ):
            self.window -= size
            del self.streams[stream]
            flags = 0 if tail else END_STREAM
            self.out.append(b"".join((head, _HEAD.pack(size << 8, flags, stream), body, tail)))
            return
        self.out.append(head)
        self.waiting[stream] = (memoryview(body), tail)
        self.flush()

    def flush(self) -> None:
        """Move as much of the waiting bodies to the output as the windows allow."""
        for stream in list(self.waiting):
            body, tail = self.waiting[stream]
            while body and (size := min(len(body), self.max_frame, self.window, self.streams[stream])) > 0:
                self.window -= size
                self.streams[stream] -= size
                flags = END_STREAM if size == len(body) and not tail else 0
                self.out += (_HEAD.pack(size << 8, flags, stream), body[:size])
                body = body[size:]
            if body:
                self.waiting[stream] = (body, tail)
            else:
                self.out.append(tail)
                self.close(stream)
            if self.window <= 0:
                return

    def on_window(self, stream: int, increment: int) -> None:
        if increment == 0:
            raise PeerError("WINDOW_UPDATE with increment 0")
        if stream == 0:
            self.window += increment
        elif stream in self.streams:
            self.streams[stream] += increment
        else:
            return
        if max(self.window, self.streams.get(stream, 0)) > 0x7FFFFFFF:
            raise PeerError("a window beyond 2^31-1")
        if self.waiting:
            self.flush()

    def on_settings(self, flags: int, payload: bytes) -> None:
        if flags & ACK:
            return
        for key, value in struct.iter_unpack(">HI", payload):
            if key == INITIAL_WINDOW_SIZE:
                for stream in self.streams:
                    self.streams[stream] += value - self.initial
                self.initial = value
            elif key == MAX_FRAME_SIZE:
                self.max_frame = value
        self.out.append(frame(SETTINGS, ACK, 0))
        self.flush()

    def take(self) -> bytes:
        """All data that may be sent now."""
        data = b"".join(self.out)
        self.out.clear()
        return data


class Inflow:
    """The windows that this side grants: they are enforced, and renewed when half is used."""

    def __init__(self, outbox: Outbox, stream_window: int, connection_window: int) -> None:
        self.outbox = outbox
        self.limit = stream_window
        self.connection_limit = connection_window
        self.connection_used = 0
        self.used: dict[int, int] = {}
        self.due: set[int] = set()

    def greet(self) -> None:
        """Announce the windows."""
        self.outbox.out.append(settings_frame({INITIAL_WINDOW_SIZE: self.limit}))
        if self.connection_limit > DEFAULT_WINDOW:
            self.outbox.out.append(window_frame(0, self.connection_limit - DEFAULT_WINDOW))

    def on_data(self, stream: int, size: int, *, ended: bool) -> None:
        """Account a DATA frame, padding included."""
        self.connection_used += size
        used = self.used.get(stream, 0) + size
        if self.connection_used > self.connection_limit or used > self.limit:
            raise PeerError(f"stream {stream} sent more than the window")
        if ended:
            self.used.pop(stream, None)
            return
        self.used[stream] = used
        if used * 2 >= self.limit:
            self.due.add(stream)

    def grant(self) -> None:
        """Renew windows; called before queued frames are sent: the peer cannot use a window earlier."""
        if self.connection_used * 2 >= self.connection_limit:
            self.outbox.out.append(window_frame(0, self.connection_used))
            self.connection_used = 0
        while self.due:
            stream = self.due.pop()
            if used := self.used.get(stream):
                self.outbox.out.append(window_frame(stream, used))
                self.used[stream] = 0

    def forget(self, stream: int) -> None:
        self.used.pop(stream, None)


def _prefixed(first: int, bits: int, value: int) -> bytes:
    """An HPACK integer (RFC 7541, 5.1)."""
    top = (1 << bits) - 1
    if value < top:
        return bytes((first | value,))
    out, value = bytearray((first | top,)), value - top
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def literal(name: bytes, value: bytes) -> bytes:
    """A header with its full name that does not change the peer's table."""
    return b"\x00" + _prefixed(0, 7, len(name)) + name + _prefixed(0, 7, len(value)) + value


class Encoder:
    """An HPACK encoder that enters every header into the table, as grpc-go's does; no Huffman code."""

    def __init__(self, limit: int = 4096) -> None:
        self.limit = limit
        self.size = self.added = self.gone = 0
        self.order: deque[tuple[bytes, bytes]] = deque()
        self.number: dict[tuple[bytes, bytes], int] = {}
        self.name_number: dict[bytes, int] = {}

    def encode(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        return b"".join(self._one(header) for header in headers)

    def _one(self, header: tuple[bytes, bytes]) -> bytes:
        index = _STATIC_INDEX.get(header)
        number = self.number.get(header, 0)
        if index is None and number > self.gone:
            index = 62 + self.added - number
        if index is not None:
            return _prefixed(0x80, 7, index)
        name, value = header
        index = _STATIC_NAME.get(name, 0)
        number = self.name_number.get(name, 0)
        if not index and number > self.gone:
            index = 62 + self.added - number
        out = _prefixed(0x40, 6, index)
        if not index:
            out += _prefixed(0, 7, len(name)) + name
        out += _prefixed(0, 7, len(value)) + value
        self._add(header)
        return out

    def _add(self, header: tuple[bytes, bytes]) -> None:
        self.size += 32 + len(header[0]) + len(header[1])
        while self.size > self.limit:
            name, value = self.order.popleft()
            self.size -= 32 + len(name) + len(value)
            self.gone += 1
        self.added += 1
        self.order.append(header)
        self.number[header] = self.name_number[header[0]] = self.added


@lru_cache(maxsize=65_536)
def _unhuffman(data: bytes) -> bytes:
    return bytes(decode_huffman(data))


class PathReader:
    """Follows a client's header table and names ``:path`` of every block."""

    def __init__(self) -> None:
        self.table: deque[tuple[bytes, bytes]] = deque()
        self.size = 0
        self.limit = 4096

    def path(self, block: bytes) -> bytes:
        """Decode one header block; raises PeerError if it names no path."""
        found, pos, end = b"", 0, len(block)
        try:
            while pos < end:
                first = block[pos]
                if first & 0x80:
                    index, pos = self._integer(block, pos, 7)
                    name, value = self._entry(index)
                elif first & 0xE0 == 0x20:
                    self.limit, pos = self._integer(block, pos, 5)
                    self._shrink()
                    continue
                else:
                    index, pos = self._integer(block, pos, 6 if first & 0x40 else 4)
                    if index:
                        name = self._entry(index)[0]
                    else:
                        name, pos = self._string(block, pos)
                    value, pos = self._string(block, pos)
                    if first & 0x40:
                        self.table.appendleft((name, value))
                        self.size += 32 + len(name) + len(value)
                        self._shrink()
                if name == b":path":
                    found = value
        except IndexError:
            raise PeerError("a header block that ends early or names no entry") from None
        if not found:
            raise PeerError("a request without :path")
        return found

    def _entry(self, index: int) -> tuple[bytes, bytes]:
        return _STATIC[index - 1] if index < 62 else self.table[index - 62]

    def _shrink(self) -> None:
        while self.size > self.limit:
            name, value = self.table.pop()
            self.size -= 32 + len(name) + len(value)

    @staticmethod
    def _integer(block: bytes, pos: int, bits: int) -> tuple[int, int]:
        top = (1 << bits) - 1
        value = block[pos] & top
        pos += 1
        shift = 0
        if value == top:
            while True:
                value += (block[pos] & 127) << shift
                shift += 7
                pos += 1
                if block[pos - 1] < 128:
                    break
        return value, pos

    def _string(self, block: bytes, pos: int) -> tuple[bytes, int]:
        packed = block[pos] & 0x80
        size, pos = self._integer(block, pos, 7)
        data = block[pos : pos + size]
        return (_unhuffman(data) if packed else data), pos + size


class AnswerReader:
    """Decodes answer header blocks; blocks seen since the table last changed come from a cache."""

    def __init__(self) -> None:
        self.decoder = Decoder()
        self.seen: dict[bytes, dict[bytes, bytes]] = {}

    def headers(self, block: bytes) -> dict[bytes, bytes]:
        known = self.seen.get(block)
        if known is not None:
            return known
        entries = self.decoder.header_table.dynamic_entries
        before = entries[0] if entries else None
        decoded = {bytes(name): bytes(value) for name, value in self.decoder.decode(block, raw=True)}
        entries = self.decoder.header_table.dynamic_entries
        if (entries[0] if entries else None) is not before:
            self.seen.clear()  # the indices change here: the same bytes would mean something else
        else:
            self.seen[block] = decoded
        return decoded
