"""From the runtime to the client: reading ids and results in passing."""

from __future__ import annotations

from typing import Final

from proxy.relay import frames
from proxy.relay.direction import Direction
from proxy.relay.events import RelayError
from proxy.relay.frame_reader import CUT, KEEP
from proxy.relay.headers import HpackTracker
from proxy.relay.requests import Requests
from proxy.relay.stream import ARRIVING, Stream
from proxy.relay.streams import Streams

TEE_BYTES: Final = 1 << 20  # answers of intercepted methods are ids; a longer one is not read


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
        """Connect with what both directions share."""
        self.streams = streams

    def client_settings(self, key: int, value: int) -> None:
        """Record what the client allows the runtime."""
        if key == frames.HEADER_TABLE_SIZE:
            self.tracker.allow(value)
        elif key == frames.MAX_FRAME_SIZE:
            self.largest = max(self.largest, value)

    def resize(self) -> int | None:
        """The table size that the next header block must announce, or None (RFC 7541, 4.2)."""
        return self._limit if self.tracker.size > self._limit else None

    def passes(self, flags: int, stream: int, length: int) -> bool:
        """Let DATA pass that is not observed; its windows are end to end."""
        streams = self.streams
        if stream in streams.tracked or stream in streams.dead:
            return False
        if flags & frames.END_STREAM:
            streams.open.discard(stream)
        return True

    def on_data(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        """Read the first message of an answer; drop what comes for refused streams."""
        streams = self.streams
        tracked = streams.tracked.get(stream)
        if tracked is None:
            if not streams.dead[stream]:
                return KEEP
            if end > start:
                self._requests.inject(frames.window_update(0, end - start))
            return CUT
        if flags & frames.PADDED:
            start, end = frames.unpad(flags, data, start, end)
        tracked.answered = True
        if tracked.tee is not None and tracked.reported:
            self._read(tracked, data[start:end])
        if flags & frames.END_STREAM:
            streams.server_ended(stream, None, reset=False)
        return KEEP

    def on_headers(self, flags: int, stream: int) -> int:
        """Note that the answer began: from now on a refusal has no opening of its own."""
        tracked = self.streams.tracked.get(stream)
        if tracked is not None:
            tracked.answered = True
            tracked.closing = bool(flags & frames.END_STREAM)
        return KEEP

    def on_block(self, flags: int, stream: int, block: bytes) -> None:
        """Follow the header table; read the result of intercepted calls."""
        if not flags & frames.END_STREAM:
            self.tracker.skim(block)
        elif stream in self.streams.tracked:
            self.streams.server_ended(stream, _status(self.tracker.feed(block)), reset=False)
        else:
            self.tracker.skim(block)
            self.streams.open.discard(stream)

    def on_promise(self) -> None:
        """A push that the client allowed is between it and the runtime."""

    def on_window(self, stream: int, increment: int) -> int:
        """Spend or pass on what the runtime grants."""
        streams = self.streams
        flow = streams.flow
        if not stream:
            flow.on_server_window(increment)
            streams.pump()
            if flow.try_forward(increment):
                return KEEP
            if grant := flow.take_due_grant() if flow.queue else flow.take_grant():
                self.inject(frames.window_update(0, grant))
            return CUT
        tracked = streams.tracked.get(stream)
        if tracked is None:
            return CUT if stream in streams.dead else KEEP
        tracked.window += increment
        if tracked.window > frames.LARGEST_WINDOW:
            raise RelayError("cannot widen a stream's window: it is above 2^31 - 1")
        streams.pump()
        # Where the initial window is 0 the client, too, depends on the runtime's first grant.
        return KEEP if tracked.phase == ARRIVING else CUT

    def on_reset(self, stream: int) -> int:
        """The runtime gave up a stream."""
        streams = self.streams
        if streams.dead.get(stream):
            return CUT
        streams.server_ended(stream, None, reset=True)
        return KEEP

    def on_settings(self, *, acknowledged: bool, pairs: list[tuple[int, int]]) -> None:
        """Obey what the runtime allows; the frame itself continues to the client."""
        if acknowledged:
            if self._requests.announced and (size := self._requests.announced.popleft()) is not None:
                self._limit = size
            return
        for key, value in pairs:
            if key == frames.HEADER_TABLE_SIZE:
                self._requests.tracker.allow(value)
            elif key == frames.MAX_FRAME_SIZE:
                self._requests.largest = max(self._requests.largest, value)
        self.streams.resize_windows(self.streams.flow.on_server_settings(pairs))

    def on_goaway(self, last: int) -> None:
        """Streams that the runtime will not take are over."""
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
    """Read grpc-status; None where it is missing or no number."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= 9 else None
