"""A strict HTTP/2 peer for tests: one end of a connection that reads and returns bytes.

It asserts the requirements of RFC 9113 and RFC 7541 for the other end: frame order and sizes, both windows of
DATA, increments, stream states, header tables (through hpack's own strict decoder). Its SETTINGS apply
exactly from their acknowledgement on. Its output obeys the windows that it was granted. A relay between two
strict peers is therefore checked at both ends.
"""

import random
import struct
from dataclasses import dataclass, field
from typing import ClassVar

from hpack import Decoder, Encoder

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIO = 1, 1, 4, 8, 0x20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CREATE = "/runtime.v1.RuntimeService/CreateContainer"
VERSION = "/runtime.v1.RuntimeService/Version"


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def frames(data):
    """Cut complete frames: (kind, flags, stream, payload)."""
    out, pos = [], 0
    while pos < len(data):
        word, flags, stream = struct.unpack_from(">IBI", data, pos)
        end = pos + 9 + (word >> 8)
        assert end <= len(data), "a frame is incomplete"
        out.append((word & 255, flags, stream, data[pos + 9 : end]))
        pos = end
    return out


def grpc(message, compressed=0):
    return struct.pack(">BI", compressed, len(message)) + message


def settings(*pairs):
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


@dataclass
class Stream:
    """The state of a stream at one end."""

    send: int
    recv: int
    headers: list = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    queue: bytearray = field(default_factory=bytearray)
    queue_ends: bool = False
    local_closed: bool = False
    remote_closed: bool = False
    reset_sent: bool = False
    reset_received: int | None = None
    late_headers: int = 0

    @property
    def over(self):
        return self.remote_closed or self.reset_received is not None


class Peer:
    """One end.

    Attributes:
        consume: Bytes that may be received before window is returned (0: at once); None: never automatically.
    """

    def __init__(self, *, client, rng=None, initial=65535, max_frame=16384, consume=0, fancy=False):
        self.client, self.rng, self.fancy = client, rng or random.Random(1), fancy
        self.encoder, self.decoder = Encoder(), Decoder()
        self.streams = {}
        self.out = bytearray(PREFACE if client else b"")
        self.inp = bytearray()
        self.greeted = client
        self.settings_received = False
        self.send, self.recv = 65535, 65535
        self.my_initial, self.their_initial = 65535, 65535
        self.my_frame, self.their_frame = 16384, 16384
        self.unacked = []
        self.consume, self.eaten, self.stream_eaten = consume, 0, {}
        self.block = None
        self.next = 1
        self.last_seen = 0
        self.goaway = None
        self.resize = []
        self.events = []
        pairs = ([(4, initial)] if initial != 65535 else []) + (
            [(5, max_frame)] if max_frame != 16384 else []
        )
        self.announce(*pairs)

    # -- sending ------------------------------------------------------------------------------------------

    def take(self):
        out = bytes(self.out)
        self.out.clear()
        return out

    def announce(self, *pairs):
        self.out += settings(*pairs)
        self.unacked.append(pairs)

    def _my_initial(self, value):
        for stream in self.streams.values():
            stream.recv += value - self.my_initial
        self.my_initial = value

    def open(self, path, headers=(), end=False):
        sid, self.next = self.next, self.next + 2
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), *headers]
        self.headers(sid, fields, end)
        return sid

    def headers(self, sid, fields, end=False):
        stream = self.streams.setdefault(sid, Stream(self.their_initial, self.my_initial))
        if self.resize:  # the smallest size since the last block, then the one that holds (RFC 7541, 4.2)
            for size in (min(self.resize), self.resize[-1]):
                if size != self.encoder.header_table_size:  # hpack forgets a change that is set twice
                    self.encoder.header_table_size = size
            self.resize.clear()
        block = self.encoder.encode(fields)
        flags, before, after = (END_STREAM if end else 0), b"", b""
        if self.fancy and self.rng.random() < 0.3:
            after = bytes(self.rng.randrange(20))
            flags |= PADDED
            before = bytes([len(after)])
        if self.fancy and self.client and self.rng.random() < 0.3:
            flags |= PRIO
            before += b"\0\0\0\0\x10"
        cut = (
            self.rng.randrange(min(len(block), 16_000) + 1)
            if self.fancy and self.rng.random() < 0.4
            else len(block)
        )
        pieces = [block[cut:][i : i + 16000] for i in range(0, len(block) - cut, 16000)]
        if cut == len(block) and len(block) > 16000:
            cut, pieces = 0, [block[i : i + 16000] for i in range(0, len(block), 16000)]
        self.out += frame(HEADERS, flags | (0 if pieces else END_HEADERS), sid, before + block[:cut] + after)
        for number, piece in enumerate(pieces):
            self.out += frame(CONTINUATION, END_HEADERS if number == len(pieces) - 1 else 0, sid, piece)
        stream.local_closed = stream.local_closed or end
        return sid

    def data(self, sid, body, end=True):
        stream = self.streams[sid]
        stream.queue += body
        stream.queue_ends = stream.queue_ends or end
        self.push()

    def push(self):
        """Send queued DATA as far as both windows allow."""
        order = list(self.streams.items())
        if self.fancy:
            self.rng.shuffle(order)
        for sid, stream in order:
            while (stream.queue or stream.queue_ends) and not (
                stream.local_closed or stream.reset_received is not None
            ):
                pad = self.rng.randrange(9) if self.fancy and self.rng.random() < 0.2 else None
                extra = 0 if pad is None else pad + 1
                count = min(
                    len(stream.queue), stream.send - extra, self.send - extra, self.their_frame - extra
                )
                if self.fancy:
                    count = min(count, self.rng.choice([1, 7, 500, 20000]))
                if count < 0 or (count == 0 and stream.queue):
                    break
                piece = bytes(stream.queue[:count])
                del stream.queue[:count]
                last = stream.queue_ends and not stream.queue
                flags = (END_STREAM if last else 0) | (0 if pad is None else PADDED)
                payload = piece if pad is None else bytes([pad]) + piece + bytes(pad)
                self.out += frame(DATA, flags, sid, payload)
                stream.send -= len(payload)
                self.send -= len(payload)
                stream.local_closed = last
                if not stream.queue:
                    break

    def reset(self, sid, code=8):
        stream = self.streams[sid]
        stream.reset_sent = True
        stream.local_closed = True
        stream.queue.clear()
        self.out += frame(RST, 0, sid, struct.pack(">I", code))

    def take_grant(self, sid, count):
        if count:
            self.out += frame(WINDOW, 0, sid, struct.pack(">I", count))
            if sid:
                self.streams[sid].recv += count
            else:
                self.recv += count

    def call(self, path, message, headers=()):
        sid = self.open(path, headers)
        self.data(sid, grpc(message))
        return sid

    def answer(self, sid, message=b"", status=0, opening=True):
        if opening:
            self.headers(sid, [(":status", "200"), ("content-type", "application/grpc")])
            self.data(sid, grpc(message), end=False)
            assert not self.streams[sid].queue, "an answer did not fit into the window"
        fields = [] if opening else [(":status", "200"), ("content-type", "application/grpc")]
        self.headers(sid, [*fields, ("grpc-status", str(status)), ("grpc-message", "")], end=True)

    # -- receiving ----------------------------------------------------------------------------------------

    def receive(self, data):
        self.inp += data
        if not self.greeted:
            assert PREFACE.startswith(bytes(self.inp[:24]))
            if len(self.inp) < 24:
                return
            del self.inp[:24]
            self.greeted = True
        while len(self.inp) >= 9:
            word, flags, sid = struct.unpack_from(">IBI", self.inp)
            size = word >> 8
            assert size <= self.my_frame, "frame is longer than allowed"
            if len(self.inp) < 9 + size:
                break
            payload = bytes(self.inp[9 : 9 + size])
            del self.inp[: 9 + size]
            kind = word & 255
            assert self.settings_received or kind == SETTINGS, "SETTINGS must come first"
            assert self.block is None or kind == CONTINUATION, "a header block is open"
            handler = self._handlers.get(kind)
            if handler:
                handler(self, flags, sid, payload)
            else:
                self.events.append((kind, flags, sid, payload))
        self.push()

    def _data(self, flags, sid, payload):
        stream = self.streams[sid]
        assert not stream.remote_closed, "DATA after END_STREAM"
        assert stream.reset_received is None, "DATA after RST_STREAM"
        self.recv -= len(payload)
        stream.recv -= len(payload)
        assert self.recv >= 0, "the connection's window is overrun"
        assert stream.recv >= 0, "the stream's window is overrun"
        body = payload
        if flags & PADDED:
            assert payload[0] < len(payload)
            body = payload[1 : len(payload) - payload[0]]
        stream.body += body
        stream.remote_closed = bool(flags & END_STREAM)
        if self.consume is not None:
            self.eaten += len(payload)
            if self.eaten > self.consume:
                self.take_grant(0, self.eaten)
                self.eaten = 0
            eaten = self.stream_eaten[sid] = self.stream_eaten.get(sid, 0) + len(payload)
            if eaten > self.consume and not stream.remote_closed and not stream.reset_sent:
                self.take_grant(sid, eaten)
                self.stream_eaten[sid] = 0

    def _headers(self, flags, sid, payload):
        if flags & PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        if flags & PRIO:
            payload = payload[5:]
        self.block = (sid, flags, bytearray(payload))
        if flags & END_HEADERS:
            self._block_done()

    def _continuation(self, flags, sid, payload):
        assert self.block
        assert self.block[0] == sid
        self.block[2].extend(payload)
        if flags & END_HEADERS:
            self._block_done()

    def _block_done(self):
        sid, flags, block = self.block
        self.block = None
        fields = self.decoder.decode(bytes(block))
        stream = self.streams.get(sid)
        if stream is None:
            assert not self.client, "HEADERS of a stream that was not opened"
            assert sid > self.last_seen
            assert sid % 2
            self.last_seen = sid
            stream = self.streams[sid] = Stream(self.their_initial, self.my_initial)
        elif stream.reset_received is not None or stream.reset_sent:
            stream.late_headers += 1  # a stream error at most, and the header tables need it
            return
        else:
            assert not stream.remote_closed, "HEADERS after END_STREAM"
        names = [name for name, _ in fields]
        if self.client:
            assert (":status" in names) == (not stream.headers), (
                "opening headers must be first, and only once"
            )
        stream.headers.append(dict(fields))
        stream.remote_closed = bool(flags & END_STREAM)

    def _rst(self, flags, sid, payload):
        stream = self.streams[sid]
        assert stream.reset_received is None, "RST_STREAM twice"
        (stream.reset_received,) = struct.unpack(">I", payload)
        stream.queue.clear()

    def _settings(self, flags, sid, payload):
        assert sid == 0
        self.settings_received = True
        if flags & ACK:
            for key, value in self.unacked.pop(0):
                if key == 4:
                    self._my_initial(value)
                if key == 1:
                    self.decoder.max_allowed_table_size = value
                if key == 5:
                    self.my_frame = value
            return
        for key, value in struct.iter_unpack(">HI", payload):
            if key == 1:
                self.resize.append(value)
            elif key == 4:
                for stream in self.streams.values():
                    stream.send += value - self.their_initial
                self.their_initial = value
            elif key == 5:
                self.their_frame = value
        self.out += frame(SETTINGS, ACK, 0)

    def _window(self, flags, sid, payload):
        (count,) = struct.unpack(">I", payload)
        assert count > 0, "WINDOW_UPDATE 0"
        if sid:
            assert self.streams[sid].reset_received is None, "WINDOW_UPDATE after RST_STREAM"
            self.streams[sid].send += count
            assert self.streams[sid].send < 1 << 31
        else:
            self.send += count
            assert self.send < 1 << 31

    def _ping(self, flags, sid, payload):
        self.events.append((PING, flags, sid, payload))
        if not flags & ACK:
            self.out += frame(PING, ACK, 0, payload)

    def _goaway(self, flags, sid, payload):
        self.goaway = struct.unpack_from(">I", payload)[0]

    _handlers: ClassVar = {
        DATA: _data, HEADERS: _headers, CONTINUATION: _continuation, RST: _rst, SETTINGS: _settings,
        WINDOW: _window, PING: _ping, GOAWAY: _goaway,
    }  # fmt: skip


class Owner:
    """A handler that records every call; ``decide`` handles a request (default: it waits)."""

    def __init__(self, decide=None):
        self.decide = decide or (lambda session, stream, message: None)
        self.session = None
        self.requests, self.responses, self.ends = {}, {}, []
        self.odd, self.crowded, self.turn_away = [], [], None

    def anomaly(self, path, kind):
        self.odd.append((path, kind))
        return self.turn_away and self.turn_away(path, kind)

    def refused_for_memory(self, path, message):
        self.crowded.append((path, message))

    def request(self, stream, path, message):
        assert stream not in self.requests
        self.requests[stream] = (path, message)
        self.decide(self.session, stream, message)

    def response(self, stream, message):
        assert stream in self.requests
        assert stream not in self.responses
        self.responses[stream] = message

    def finished(self, stream, status):
        assert stream in self.requests
        assert stream not in [ended for ended, _ in self.ends]
        self.ends.append((stream, status))


def rewrite(session, stream, message):
    session.release(stream, message + b"+cpuset")


def keep(session, stream, message):
    session.release(stream)


def turn_down(session, stream, message):
    session.refuse(stream, 9, "no budget: 100% of node 0 is owned, é")


class Net:
    """A client and a runtime with a session between them."""

    def __init__(self, decide=None, *, rng=None, client=None, server=None, paths=(CREATE,)):
        from proxy.relay.session import Session

        self.rng = rng
        self.client = client or Peer(client=True, rng=rng)
        self.server = server or Peer(client=False, rng=rng)
        self.owner = Owner(decide)
        self.session = self.owner.session = Session(self.owner, frozenset(paths).__contains__)
        self.turns = []  # (from client, bytes): a recording

    def step(self):
        """Pass the output of each end on; return False if neither end has output."""
        moved = False
        for client in (True, False):
            data = (self.client if client else self.server).take()
            if data:
                moved = True
                self.turns.append((client, data))
                for piece in self.pieces(data):
                    (self.session.from_client if client else self.session.from_server)(piece)
                    self.drain()
        return self.drain() or moved

    def pieces(self, data):
        if self.rng is None:
            return [data]
        out = []
        while data:
            count = self.rng.choice([1, 3, 9, 13, 100, 5000, 70000])
            out.append(data[:count])
            data = data[count:]
        return out

    def drain(self):
        up, down = b"".join(self.session.to_server()), b"".join(self.session.to_client())
        self.server.receive(up)
        self.client.receive(down)
        return bool(up or down)

    def run(self, turns=10000):
        for _ in range(turns):
            if not self.step():
                return self
        raise AssertionError("the connection never comes to rest")

    def check_whole(self):
        """Check that the connection's windows are complete: used window was returned to both ends."""
        flow = self.session._streams.flow
        assert flow.client_window == self.client.send, "the flow and the client disagree"
        assert flow.server_window == self.server.recv, "the flow and the runtime disagree"
        assert not flow.queue
        assert not flow.waiting
        assert self.session._streams.held == 0
        assert not self.session._streams.tracked
        self.server.take_grant(
            0, self.server.eaten + 1
        )  # a last frame of the runtime triggers updates that were not urgent
        self.server.eaten = 0
        self.run()
        assert self.client.send == self.server.recv + flow.ahead, "window was lost"
