"""From the client to the runtime: finding methods, holding bodies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from proxy.relay import frames
from proxy.relay.direction import Direction
from proxy.relay.events import ENHANCE_YOUR_CALM, RelayError, RequestAnomaly
from proxy.relay.flow import Outgoing
from proxy.relay.frame_reader import CUT, KEEP, LAST
from proxy.relay.headers import HpackTracker
from proxy.relay.stream import ARRIVING, Stream
from proxy.relay.streams import Streams

MOST_STREAMS: Final = 1 << 14
"""Streams that may be open on one connection; kubelet has some dozens."""


class Requests(Direction):
    """The request direction.

    Attributes:
        tracker: The request header table.
        last: The highest stream that the client has opened.
        saw_goaway: The client has seen our GOAWAY: it opens no more streams.
        announced: For each SETTINGS of the client that is not yet acknowledged, the header table size in it
            or None.
    """

    __slots__ = ("_client_settings", "_intercepts", "announced", "last", "saw_goaway", "streams", "tracker")

    streams: Streams
    _client_settings: Callable[[int, int], None]

    def __init__(self, intercepts: Callable[[str], bool]) -> None:
        super().__init__(frames.PREFACE)
        self._intercepts = intercepts
        self.last = 0
        self.saw_goaway = False
        self.tracker = HpackTracker(b":path", {4: "/", 5: "/index.html"})
        self.announced: deque[int | None] = deque()

    def join(self, streams: Streams, client_settings: Callable[[int, int], None]) -> None:
        """Connect with the rest of the session.

        Args:
            streams: What both directions share.
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
        if length > flow.server or length > flow.client:
            return False
        flow.client -= length
        flow.server -= length
        return True

    def on_data(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        """Hold DATA, drop that of dead streams, let that of others wait for window."""
        streams, length = self.streams, end - start
        flow = streams.flow
        flow.add_received(length)
        if flags & frames.PADDED:
            start, end = frames.unpad(flags, data, start, end)
        tracked = streams.tracked.get(stream)
        if tracked is not None:
            if tracked.phase != ARRIVING:
                raise RelayError("cannot take DATA: the client has ended the stream")
            if flags & frames.END_STREAM:
                flow.credits.pop(stream, None)
                streams.end_body(tracked, data[start:end])
            elif start == end:
                self.empty()
                flow.credit(stream, length)
            else:
                self._empties = 0
                if streams.hold(tracked, data[start:end]):
                    streams.grant_for_body(tracked, length)
        elif stream in streams.dead:
            if not length:
                self.empty()
            if not flags & frames.END_STREAM and not streams.dead[stream]:
                flow.credit(stream, length)
        elif not stream:
            raise RelayError("cannot read DATA: it belongs to no stream")
        else:
            self._queue(flags, stream, data[start:end], length)
        return CUT

    def on_headers(self, flags: int, stream: int) -> int:
        """Send what is held of a stream before its trailers: header blocks cannot wait."""
        streams = self.streams
        tracked = streams.tracked.get(stream)
        if tracked is None and stream not in streams.flow.queue:
            return KEEP
        if tracked is not None:
            if tracked.phase != ARRIVING:
                raise RelayError("cannot take a header: the client has ended the stream")
            streams.pass_through(tracked)
        if stream in streams.flow.queue:
            raise RelayError("cannot pass trailers: the data before them finds no window")
        return LAST

    def on_block(self, flags: int, stream: int, block: bytes) -> None:
        """Begin to track the stream of an intercepted method."""
        path = self.tracker.feed(block)
        if stream <= self.last:
            return
        self.last = stream
        streams = self.streams
        if stream > streams.goaway:
            streams.mark_dead(stream, refused=False)
            return
        streams.open.add(stream)
        if len(streams.open) > MOST_STREAMS:
            raise RelayError(
                f"cannot relay more streams: {MOST_STREAMS} are open on this connection", ENHANCE_YOUR_CALM
            )
        if path is not None and self._intercepts(path):
            if flags & frames.END_STREAM:
                streams.handler.anomaly(path, RequestAnomaly.EMPTY)
            else:
                streams.tracked[stream] = Stream(stream, path, streams.flow.initial)

    def on_promise(self) -> None:
        """Clients do not push."""
        raise RelayError("cannot take PUSH_PROMISE: it came from the client")

    def on_window(self, stream: int, increment: int) -> int:
        """Windows of the response direction pass, except for streams that are over for the runtime."""
        return CUT if stream in self.streams.dead else KEEP

    def on_reset(self, stream: int) -> int:
        """The client gave up a stream."""
        streams = self.streams
        streams.open.discard(stream)
        tracked = streams.tracked.get(stream)
        if tracked is not None:
            streams.forget(tracked, None)
        else:
            streams.flow.drop(stream)
        return CUT if stream in streams.dead else KEEP

    def on_settings(self, *, acknowledged: bool, pairs: list[tuple[int, int]]) -> None:
        """Pass the client's limits to the response direction; apply the limits of the runtime."""
        if acknowledged:
            self.streams.resize_windows(self.streams.flow.on_settings_ack())
            return
        sizes = [value for key, value in pairs if key == frames.HEADER_TABLE_SIZE]
        if len(self.announced) >= frames.UNACKNOWLEDGED:
            raise RelayError("cannot keep SETTINGS: too many are not acknowledged")
        self.announced.append(sizes[-1] if sizes else None)
        for key, value in pairs:
            self._client_settings(key, value)

    def on_ping(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        """Take the answer to the PING that followed our GOAWAY."""
        if flags & frames.ACK and data[start:end] == frames.BEHIND_GOAWAY:
            self.saw_goaway = True
            return CUT
        return KEEP

    def on_goaway(self, last: int) -> None:
        """Nothing of ours depends on it: the client continues with the streams that it has."""

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
