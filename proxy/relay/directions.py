"""The meaning of the frames of each direction of a connection.

``Requests`` goes from the client to the runtime: it finds methods and holds bodies. ``Responses`` goes from
the runtime to the client: it reads ids and results while they pass. Both validate the parts of frames that
this relay uses (``Direction``). An invalid frame (wrong size or stream, an increment of 0, a header in the
wrong place) ends the connection with RelayError. An open header block is gathered until it is complete; its
size is checked before anything in it is decoded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from proxy.relay import frames
from proxy.relay.events import ENHANCE_YOUR_CALM, RelayError, RequestAnomaly
from proxy.relay.flow import Outgoing
from proxy.relay.frames import (
    DROP,
    LARGEST_BLOCK,
    PASS,
    PASS_AFTER_OWN_FRAMES,
    STREAM_ID,
    FrameReader,
    block_too_long,
)
from proxy.relay.headers import HpackTracker
from proxy.relay.streams import ARRIVING, ENDED, REFUSED, Stream, Streams

MOST_EMPTY: Final = 1000
"""Limit of consecutive frames without content, of which one would suffice."""


class Direction(FrameReader):
    """A reader that knows the frame types; subclasses define the meaning of the frames."""

    __slots__ = ()

    def __init__(self, greeting: bytes = b"") -> None:
        super().__init__(greeting)
        self.handlers = {
            frames.DATA: self.on_data,
            frames.HEADERS: self._headers,
            frames.RST_STREAM: self._rst_stream,
            frames.SETTINGS: self._settings,
            frames.PUSH_PROMISE: self._push_promise,
            frames.GOAWAY: self._goaway,
            frames.WINDOW_UPDATE: self._window_update,
            frames.CONTINUATION: self._continuation,
        }

    # Complete frames that do not simply pass; ``start`` and ``end`` delimit the payload.

    def _window_update(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        if end - start != 4:
            raise RelayError(f"cannot read WINDOW_UPDATE: its size is {end - start}")
        increment = frames.WORD.unpack_from(data, start)[0] & STREAM_ID
        if not increment:
            raise RelayError("cannot widen a window: the increment is 0")
        return self.on_window(stream, increment)

    def _rst_stream(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        if end - start != 4 or not stream:
            raise RelayError("cannot read RST_STREAM: wrong stream or size")
        return self.on_reset(stream)

    def _settings(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        pairs = frames.settings(flags, stream, data, start, end)
        self.begun = True
        return self.on_settings(acknowledged=bool(flags & frames.ACK), pairs=pairs)

    def _goaway(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        if stream or end - start < 8:
            raise RelayError("cannot read GOAWAY: wrong stream or size")
        self.on_goaway(frames.WORD.unpack_from(data, start)[0] & STREAM_ID)
        return PASS

    def _push_promise(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        self.on_promise()
        start, end = frames.unpad(flags, data, start, end)
        return self._start_block(flags & ~frames.END_STREAM, stream, data, start + 4, end)

    def _headers(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        start, end = frames.unpad(flags, data, start, end)
        verdict = self.on_headers(flags, stream) if stream else PASS
        self._start_block(flags, stream, data, start + 5 if flags & frames.PRIORITY else start, end)
        return verdict

    def _start_block(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        """Begin a header block; it is handled when it is complete."""
        if not stream or start > end:
            raise RelayError("cannot read a header: wrong stream or size")
        self._block_stream, self._block_flags = stream, flags
        self._block, self._empties = bytearray(), 0
        self._gather(flags, data[start:end])
        return PASS

    def _continuation(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        if self._block is None or stream != self._block_stream:
            raise RelayError("cannot read CONTINUATION: no header is open on its stream")
        self._gather(flags, data[start:end])
        return PASS

    def _gather(self, flags: int, piece: bytes) -> None:
        block = self._block
        assert block is not None
        if len(block) + len(piece) > LARGEST_BLOCK:
            raise block_too_long()
        if not piece:
            self.empty()
        block += piece
        if flags & frames.END_HEADERS:
            self._block = None
            self._empties = 0
            self.on_block(self._block_flags, self._block_stream, bytes(block))

    def empty(self) -> None:
        """Count a frame without content.

        Raises:
            RelayError: There were too many in a row.
        """
        self._empties += 1
        if self._empties > MOST_EMPTY:
            raise RelayError(
                f"cannot continue to read: more than {MOST_EMPTY} empty frames in a row", ENHANCE_YOUR_CALM
            )

    # The meaning of the frames of this direction. A method that returns a number returns PASS, DROP or
    # PASS_AFTER_OWN_FRAMES.

    @abstractmethod
    def on_data(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        """Handle a complete DATA frame for which ``passes`` has returned False."""

    @abstractmethod
    def on_promise(self) -> None:
        """Record a PUSH_PROMISE; its block follows with END_STREAM cleared."""

    @abstractmethod
    def on_window(self, stream: int, increment: int) -> int:
        """Handle a WINDOW_UPDATE."""

    @abstractmethod
    def on_reset(self, stream: int) -> int:
        """Handle a RST_STREAM."""

    @abstractmethod
    def on_settings(self, *, acknowledged: bool, pairs: list[tuple[int, int]]) -> int:
        """Handle a SETTINGS frame."""

    @abstractmethod
    def on_goaway(self, last: int) -> None:
        """Handle a GOAWAY, which always passes."""


MOST_STREAMS: Final = 1 << 14
"""Streams that may be open on one connection; kubelet has some dozens."""


class Requests(Direction):
    """The request direction.

    Attributes:
        tracker: The request header table.
        last_stream: The highest stream that the client has opened.
        saw_goaway: The client has seen our GOAWAY: it opens no more streams.
        announced: For each SETTINGS of the client that is not yet acknowledged, the header table size in it
            or None.
    """

    __slots__ = (
        "_client_settings", "_intercepts", "announced", "last_stream", "saw_goaway", "streams", "tracker",
    )  # fmt: skip

    streams: Streams
    _client_settings: Callable[[int, int], None]

    def __init__(self, intercepts: Callable[[str], bool]) -> None:
        super().__init__(frames.PREFACE)
        self._intercepts = intercepts
        self.last_stream = 0
        self.saw_goaway = False
        self.tracker = HpackTracker(b":path", {4: "/", 5: "/index.html"})
        self.announced: deque[int | None] = deque()

    def join(self, streams: Streams, client_settings: Callable[[int, int], None]) -> None:
        """Connect with the rest of the session.

        Args:
            streams: The state that both directions share.
            client_settings: Called with each pair that the client announces.
        """
        self.streams = streams
        self._client_settings = client_settings

    def passes(self, flags: int, stream: int, length: int) -> bool:
        """Count DATA of a stream that is not ours, if the runtime has window for it."""
        streams = self.streams
        flow = streams.flow
        if stream in streams.tracked or stream in streams.dead or stream in flow.queue or not stream:
            return False
        if length > flow.server_window or length > flow.client_window:
            return False
        flow.client_window -= length
        flow.server_window -= length
        return True

    def on_data(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        """Hold DATA of tracked streams, drop DATA of dead ones, let DATA of others wait for window."""
        streams, length = self.streams, end - start
        flow = streams.flow
        flow.add_received(length)
        if flags & frames.PADDED:
            start, end = frames.unpad(flags, data, start, end)
        tracked = streams.tracked.get(stream)
        if tracked is not None:
            if tracked.phase != ARRIVING:
                raise RelayError("cannot take DATA: the client has ended the stream")
            if start < end:
                self._empties = 0
            if flags & frames.END_STREAM:
                flow.credits.pop(stream, None)
                streams.end_body(tracked, data[start:end])
            elif start == end:
                self.empty()
                flow.credit(stream, length)
            elif streams.hold(tracked, data[start:end]):
                streams.grant_for_body(tracked, length)
        elif stream in streams.dead:
            if not length:
                self.empty()
            # Nothing may follow a reset that the client was sent (RFC 9113, 5.1).
            if not flags & frames.END_STREAM and streams.dead[stream] == ENDED:
                flow.credit(stream, length)
        elif not stream:
            raise RelayError("cannot read DATA: it belongs to no stream")
        else:
            self._queue(flags, stream, data[start:end], length)
        return DROP

    def on_headers(self, flags: int, stream: int) -> int:
        """Send the held bytes of a stream before its trailers, because header blocks cannot wait."""
        streams = self.streams
        tracked = streams.tracked.get(stream)
        if tracked is None and stream not in streams.flow.queue:
            return PASS
        if tracked is not None:
            if tracked.phase != ARRIVING:
                raise RelayError("cannot take a header: the client has ended the stream")
            streams.pass_through(tracked)
        if stream in streams.flow.queue:
            raise RelayError("cannot pass trailers: the data before them finds no window")
        return PASS_AFTER_OWN_FRAMES

    def on_block(self, flags: int, stream: int, block: bytes) -> None:
        """Begin to track the stream of an intercepted method."""
        path = self.tracker.feed(block)
        if stream <= self.last_stream:
            return
        self.last_stream = stream
        streams = self.streams
        if stream > streams.last_accepted:
            streams.mark_dead(stream, ENDED)
            return
        streams.open_ids.add(stream)
        if len(streams.open_ids) > MOST_STREAMS:
            raise RelayError(
                f"cannot relay more streams: {MOST_STREAMS} are open on this connection", ENHANCE_YOUR_CALM
            )
        if path is not None and self._intercepts(path):
            if flags & frames.END_STREAM:
                streams.handler.anomaly(path, RequestAnomaly.EMPTY)
            else:
                streams.tracked[stream] = Stream(stream, path, streams.flow.initial_window)

    def on_promise(self) -> None:
        """Clients do not push."""
        raise RelayError("cannot take PUSH_PROMISE: it came from the client")

    def on_window(self, stream: int, increment: int) -> int:
        """Windows of the response direction pass, except for streams that the runtime has ended."""
        return DROP if stream in self.streams.dead else PASS

    def on_reset(self, stream: int) -> int:
        """The client has reset a stream."""
        streams = self.streams
        streams.open_ids.discard(stream)
        tracked = streams.tracked.get(stream)
        if tracked is not None:
            streams.forget(tracked, None)
        else:
            streams.flow.drop(stream)
        return DROP if stream in streams.dead else PASS

    def on_settings(self, *, acknowledged: bool, pairs: list[tuple[int, int]]) -> int:
        """Pass the client's limits to the response direction; apply the limits of the runtime."""
        if acknowledged:
            flow = self.streams.flow
            if flow.must_hold_ack():
                flow.held_acks += 1
                return DROP
            self.pass_held_acks()
            self.streams.resize_windows(flow.on_settings_ack())
            return PASS
        sizes = [value for key, value in pairs if key == frames.HEADER_TABLE_SIZE]
        if len(self.announced) >= frames.MOST_UNACKNOWLEDGED:
            raise RelayError("cannot keep SETTINGS: too many are not acknowledged")
        self.announced.append(sizes[-1] if sizes else None)
        for key, value in pairs:
            self._client_settings(key, value)
        return PASS

    def pass_held_acks(self) -> None:
        """Send the acknowledgements that were waiting."""
        flow = self.streams.flow
        while flow.held_acks:
            flow.held_acks -= 1
            self.inject(frames.SETTINGS_ACK)
            self.streams.resize_windows(flow.on_settings_ack())

    def on_ping(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        """Take the answer to the PING that followed our GOAWAY."""
        if flags & frames.ACK and data[start:end] == frames.GOAWAY_PING:
            self.saw_goaway = True
            return DROP
        return PASS

    def on_goaway(self, last: int) -> None:
        """Do nothing: the client continues with the streams that it has."""

    def _queue(self, flags: int, stream: int, piece: bytes, length: int) -> None:
        """Let DATA of a passing stream wait for the runtime's window."""
        streams = self.streams
        flow = streams.flow
        item = flow.queue.get(stream) or Outgoing(stream, passing=True)
        item.add(piece)
        item.end = bool(flags & frames.END_STREAM)
        flow.waiting += len(piece)
        flow.credit(stream, length - len(piece))  # padding is not sent on, so the runtime will not return it
        flow.enqueue(item)
        streams.pump()


TEE_BYTES: Final = 1 << 20  # answers of intercepted methods are ids; a longer answer is not read


class Responses(Direction):
    """The response direction.

    Attributes:
        tracker: The response header table.
    """

    __slots__ = ("_limit", "_requests", "streams", "tracker")

    streams: Streams

    def __init__(self, requests: Requests) -> None:
        super().__init__()
        self.tracker = HpackTracker(b"grpc-status", {})
        self._requests = requests
        self._limit = self.tracker.size

    def join(self, streams: Streams) -> None:
        """Connect with the state that both directions share."""
        self.streams = streams

    def client_settings(self, key: int, value: int) -> None:
        """Record the limits that the client sets for the runtime."""
        if key == frames.HEADER_TABLE_SIZE:
            self.tracker.allow(value)
        elif key == frames.MAX_FRAME_SIZE:
            self.largest_frame = max(self.largest_frame, value)

    def resize(self) -> int | None:
        """The table size that the next header block must announce, or None (RFC 7541, 4.2)."""
        return self._limit if self.tracker.size > self._limit else None

    def passes(self, flags: int, stream: int, length: int) -> bool:
        """Let DATA pass that is not read here; its windows are end to end."""
        streams = self.streams
        if stream in streams.tracked or stream in streams.dead:
            return False
        if flags & frames.END_STREAM:
            streams.open_ids.discard(stream)
        return True

    def on_data(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        """Read the first message of an answer; drop DATA for refused streams."""
        streams = self.streams
        tracked = streams.tracked.get(stream)
        if tracked is None:
            if streams.dead[stream] != REFUSED:
                return PASS
            if end > start:
                self._requests.inject(frames.window_update(0, end - start))
            return DROP
        if flags & frames.PADDED:
            start, end = frames.unpad(flags, data, start, end)
        tracked.answered = True
        if tracked.tee is not None and tracked.reported:
            self._read(tracked, data[start:end])
        if flags & frames.END_STREAM:
            streams.server_ended(stream, None, reset=False)
        return PASS

    def on_headers(self, flags: int, stream: int) -> int:
        """Record that the answer began: a later refusal must not send opening headers."""
        tracked = self.streams.tracked.get(stream)
        if tracked is not None:
            tracked.answered = True
            tracked.closing = bool(flags & frames.END_STREAM)
        return PASS

    def on_block(self, flags: int, stream: int, block: bytes) -> None:
        """Follow the header table; read the result of intercepted calls."""
        if not flags & frames.END_STREAM:
            self.tracker.skip_block(block)
        elif stream in self.streams.tracked:
            self.streams.server_ended(stream, _status(self.tracker.feed(block)), reset=False)
        else:
            self.tracker.skip_block(block)
            self.streams.open_ids.discard(stream)

    def on_promise(self) -> None:
        """Do nothing: a push that the client allowed concerns only the client and the runtime."""

    def on_window(self, stream: int, increment: int) -> int:
        """Spend the window that the runtime grants, or pass it on."""
        streams = self.streams
        flow = streams.flow
        if not stream:
            flow.on_server_window(increment)
            streams.pump()
            if flow.try_forward(increment):
                return PASS
            if grant := flow.take_due_grant() if flow.queue else flow.take_grant():
                self.inject(frames.window_update(0, grant))
            return DROP
        tracked = streams.tracked.get(stream)
        if tracked is None:
            return DROP if stream in streams.dead else PASS
        tracked.window += increment
        if tracked.window > frames.LARGEST_WINDOW:
            raise RelayError("cannot widen a stream's window: it is above 2^31 - 1")
        streams.pump()
        # If the initial window is 0, the client too depends on the runtime's first grant.
        return PASS if tracked.phase == ARRIVING else DROP

    def on_reset(self, stream: int) -> int:
        """The runtime has reset a stream."""
        streams = self.streams
        if streams.dead.get(stream) == REFUSED:
            return DROP
        if stream in streams.flow.queue and stream not in streams.tracked:
            streams.flow.drop(stream)
            if grant := streams.flow.take_grant():
                self.inject(frames.window_update(0, grant))
        streams.server_ended(stream, None, reset=True)
        return PASS

    def on_settings(self, *, acknowledged: bool, pairs: list[tuple[int, int]]) -> int:
        """Apply the limits of the runtime; the frame itself continues to the client."""
        if acknowledged:
            if self._requests.announced and (size := self._requests.announced.popleft()) is not None:
                self._limit = size
            return PASS
        for key, value in pairs:
            if key == frames.HEADER_TABLE_SIZE:
                self._requests.tracker.allow(value)
            elif key == frames.MAX_FRAME_SIZE:
                self._requests.largest_frame = max(self._requests.largest_frame, value)
        self.streams.resize_windows(self.streams.flow.on_server_settings(pairs))
        return PASS

    def on_goaway(self, last: int) -> None:
        """End the streams that the runtime will not take."""
        self.streams.on_server_goaway(last)
        if grant := self.streams.flow.take_grant():
            self.inject(frames.window_update(0, grant))

    def _read(self, tracked: Stream, piece: bytes) -> None:
        tee = tracked.tee
        assert tee is not None
        tee += piece
        if len(tee) < frames.PREFIX.size:
            return
        compressed, size = frames.PREFIX.unpack_from(tee)
        if compressed or size > TEE_BYTES:
            tracked.tee = None
        elif len(tee) >= size + frames.PREFIX.size:
            tracked.tee = None
            self.streams.handler.response(
                tracked.id, bytes(tee[frames.PREFIX.size : size + frames.PREFIX.size])
            )


def _status(text: str | None) -> int | None:
    """Read grpc-status; None if it is missing or not a number."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= 9 else None
