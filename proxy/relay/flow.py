"""Flow control accounting of the request direction (RFC 9113, 5.2).

Theory. While the body of a request is held, the runtime sees none of it and grants nothing, so the proxy must
grant window to the client itself; later it sends a body, perhaps of another length, out of a window that only
the runtime grants. So for the request direction the proxy keeps the connection-level windows of both sides:

* ``client_window``: bytes that the client may still send us = 65,535 + all that we granted - all DATA that
  came;
* ``server_window``: bytes that we may still send the runtime = 65,535 + all that it granted - all DATA that
  left.

One rule keeps all streams moving: *when ``server_window`` is above ``client_window``, grant the difference.*
The following cases are error-prone, but the rule covers them without further state:

* DATA that is held is granted back, because ``server_window`` did not change. It is granted when the client
  has less than half of the 65,535 bytes left, regardless of the streams on which it spent them (with a
  threshold for each stream, many held streams could starve each other). It is not granted earlier: most
  bodies leave again at once, and a frame to the client for each of them would cost more than the rest of the
  relay;
* a body that is sent makes ``server_window`` fall below ``client_window``. The runtime's next updates repay
  that debt before anything is granted; there is no debt while the body is still held;
* a body that is rewritten, refused, reset or cancelled needs no correction: only bytes that left were
  counted;
* DATA that only passes lowers both windows, and the runtime's update for it passes unchanged.

Once a body was longer than a stream's window, the client has ``ahead`` bytes of window more than the rule
gives. With 65,535 bytes, a body of 200 kB would take four round trips to the client, with a frame of the
relay and a read for each. Before that the client gets no more than the runtime gives, because smaller bodies
would only wait here.

While there is a debt, the client may have more window than the runtime gave. So DATA of a passing stream for
which there is no window waits in ``queue``. It counts as not granted back (``waiting``), so the client's
window limits it.

Stream-level windows pass end to end, except for streams whose body we hold. For these, the client is granted
the window that its message still needs, up to a limit, and later the window of the bytes that we took
(``credits``). We spend the runtime's window for the stream.

The runtime applies its own SETTINGS when the client's acknowledgement has reached it, which passes through us
in order. So we obey a smaller window or frame size at once, and use a larger one only behind the
acknowledgement: grpc's C core widens and narrows its frame size at any time and accepts neither too early.

DATA of passing streams that the client sent before it acknowledged a smaller window, and that still waits
here, may exceed that window. So the acknowledgement waits behind this DATA. Later acknowledgements wait with
it, in order; all other frames overtake them. But an acknowledgement that allows anything larger than what the
runtime knows to be acknowledged must not wait, because header blocks that use a larger table or frame cannot
wait. It is sent at once, and so are the acknowledgements before it. If it allows a larger window, there is
room for the DATA that waits. If it allows only a larger table or frame, the DATA may exceed the smaller
window. containerd and CRI-O never announce a smaller one: grpc-go only widens its window (grpc-go v1.80
``internal/transport/bdp_estimator.go``).

The queue is served in order of release, and a stream that has no window of its own is skipped. Finishing one
body before the next begins lets the runtime answer early, and give back window early.
"""

from __future__ import annotations

from collections import deque
from operator import le
from typing import Final, TypeAlias

from proxy.relay import frames
from proxy.relay.events import RelayError
from proxy.relay.headers import DEFAULT_TABLE_SIZE

_LOW_WINDOW: Final = 32_768
AHEAD_BYTES: Final = 256 << 10
"""The connection's window that a client may have beyond the runtime's; as much as one read takes."""
STREAM_AHEAD_BYTES: Final = 1 << 20
"""The same for a stream's window, for the rest of a held message."""
_WIDE_WINDOW: Final = 1 << 30  # a wider one is not extended: 2^31 - 1 is the limit
_ENDLESS: Final = 1 << 62
_JOINED_BYTES: Final = 65_536
_Limits: TypeAlias = tuple[int, int, int]
"""The window of streams, the frame size and the header table size that the runtime allows."""
_SMALL_BYTES: Final = 4096  # pieces below are gathered: each object costs some sixty bytes more than it holds


class Outgoing:
    """Bytes of one stream on their way to the runtime.

    Attributes:
        id: HTTP/2 stream id.
        window: The runtime's stream-level window.
        chunks: The bytes to send; ``offset`` bytes of the first chunk have been sent.
        remaining: The number of bytes to send.
        end: The stream ends behind them.
        sent: Everything has been sent.
        passing: The bytes belong to a stream that only passes (its stream-level window is not ours to watch).
    """

    __slots__ = ("chunks", "end", "id", "offset", "passing", "remaining", "sent", "window")

    def __init__(self, stream: int, window: int = _ENDLESS, *, passing: bool = False) -> None:
        self.id = stream
        self.window = window
        self.chunks: deque[bytes | bytearray] = deque()
        self.offset = 0
        self.remaining = 0
        self.end = False
        self.sent = False
        self.passing = passing

    def add(self, piece: bytes) -> None:
        """Append bytes."""
        if not piece:
            return
        self.remaining += len(piece)
        if len(piece) >= _SMALL_BYTES or not self.chunks:
            self.chunks.append(piece)
            return
        last = self.chunks[-1]
        if isinstance(last, bytearray) and len(last) < _JOINED_BYTES:
            last += piece
        else:
            self.chunks.append(bytearray(piece))

    def take(self, count: int) -> bytes | memoryview:
        """Take the next ``count`` bytes, which must exist; those of a large chunk are not copied."""
        self.remaining -= count
        first = self.chunks[0] if self.chunks else b""
        begin, end = self.offset, self.offset + count
        if end < len(first) and type(first) is bytes:
            self.offset = end
            return memoryview(first)[begin:end]
        pieces: list[bytes | bytearray] = []
        while count:
            first = self.chunks[0]
            piece = first[self.offset : self.offset + count]
            pieces.append(piece)
            count -= len(piece)
            self.offset += len(piece)
            if self.offset == len(first):
                self.chunks.popleft()
                self.offset = 0
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)


class FlowControl:
    """Windows, credits and the queue of one connection.

    Attributes:
        client_window, server_window: The two connection-level windows of the request direction.
        ahead: The window that the client may have beyond the runtime's.
        waiting: Bytes of passing streams in the queue.
        initial_window: The runtime's SETTINGS_INITIAL_WINDOW_SIZE that may be used now.
        largest_frame: The runtime's SETTINGS_MAX_FRAME_SIZE that may be used now.
        credits: The window to grant to the client, by stream.
        queue: The bytes that wait to be sent, by stream, in order.
        held_acks: Acknowledgements of the client that wait behind DATA in the queue.
    """

    __slots__ = (
        "_limits", "ahead", "client_window", "credits", "held_acks", "initial_window", "largest_frame",
        "queue", "server_window", "waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.client_window = frames.DEFAULT_WINDOW
        self.server_window = frames.DEFAULT_WINDOW
        self.ahead = self.waiting = 0
        self.initial_window = frames.DEFAULT_WINDOW
        self.largest_frame = frames.DEFAULT_FRAME
        # The limits in effect, then those that each SETTINGS without an acknowledgement will set.
        self._limits: deque[_Limits] = deque([(self.initial_window, self.largest_frame, DEFAULT_TABLE_SIZE)])
        self.held_acks = 0
        self.credits: dict[int, int] = {}
        self.queue: dict[int, Outgoing] = {}

    def add_received(self, length: int) -> None:
        """Record DATA from the client that does not leave at once.

        Raises:
            RelayError: The client sent more than it was granted.
        """
        self.client_window -= length
        if self.client_window < 0:
            raise RelayError("cannot take DATA: the client exceeded the connection's flow-control window")

    def credit(self, stream: int, length: int) -> None:
        """Let the client send ``length`` bytes more on a stream."""
        if length:
            self.credits[stream] = self.credits.get(stream, 0) + length

    def grant_ahead(self, size: int) -> int:
        """Let the client send a message of ``size`` bytes at once; return the window for its stream."""
        if size <= self.initial_window or max(limits[0] for limits in self._limits) > _WIDE_WINDOW:
            return 0
        self.ahead = AHEAD_BYTES
        return min(size, STREAM_AHEAD_BYTES)

    def try_forward(self, increment: int) -> bool:
        """Record that the runtime's update continues to the client, if exactly that much can be granted."""
        if self._grantable() != increment:
            return False
        self.client_window += increment
        return True

    def take_due_grant(self) -> int:
        """Record and return the window to grant before the client runs out of it; 0 for none."""
        return self.take_grant() if self.client_window < _LOW_WINDOW + self.ahead // 2 else 0

    def take_grant(self) -> int:
        """Record and return the window that the client can be granted on the connection; 0 for none."""
        extra = self._grantable()
        if extra <= 0:
            return 0
        self.client_window += extra
        return extra

    def _grantable(self) -> int:
        return min(self.server_window + self.ahead, frames.LARGEST_WINDOW) - self.waiting - self.client_window

    def on_server_window(self, increment: int) -> None:
        """Record a connection-level update of the runtime.

        Raises:
            RelayError: The window is above 2^31 - 1.
        """
        self.server_window += increment
        if self.server_window > frames.LARGEST_WINDOW:
            raise RelayError("cannot widen the connection's window: it is above 2^31 - 1")

    def on_server_settings(self, pairs: list[tuple[int, int]]) -> int:
        """Record SETTINGS of the runtime; return by how much the windows of streams change now.

        Raises:
            RelayError: The client acknowledges none of them.
        """
        initial, largest, table = self._limits[-1]
        for key, value in pairs:
            if key == frames.INITIAL_WINDOW_SIZE:
                initial = value
            elif key == frames.MAX_FRAME_SIZE:
                largest = value
            elif key == frames.HEADER_TABLE_SIZE:
                table = value
        if len(self._limits) > frames.MOST_UNACKNOWLEDGED:
            raise RelayError("cannot keep SETTINGS: too many are not acknowledged")
        self._limits.append((initial, largest, table))
        return self._apply_limits()

    def must_hold_ack(self) -> bool:
        """Return whether an acknowledgement of the client has to wait for waiting DATA of passing streams."""
        held = self.held_acks
        if not self.waiting or held + 1 >= len(self._limits):
            return False
        before, after = self._limits[0], self._limits[held + 1]
        return all(map(le, after, before)) and (held > 0 or after[0] < before[0])

    def on_settings_ack(self) -> int:
        """Record that the client acknowledged; return by how much the windows of streams change now."""
        if len(self._limits) > 1:
            self._limits.popleft()
        return self._apply_limits()

    def _apply_limits(self) -> int:
        before = self.initial_window
        self.initial_window = min(initial for initial, _, _ in self._limits)
        self.largest_frame = min(largest for _, largest, _ in self._limits)
        return self.initial_window - before

    def enqueue(self, item: Outgoing) -> None:
        """Put a stream at the end of the queue, if it is not in it."""
        self.queue.setdefault(item.id, item)

    def drop(self, stream: int) -> None:
        """Forget the waiting bytes of a stream, and its credit."""
        self.credits.pop(stream, None)
        item = self.queue.pop(stream, None)
        if item is not None and item.passing:
            self.waiting -= item.remaining

    def pump(self) -> tuple[list[bytes | memoryview], list[int]]:
        """Take from the queue the frames for which there is window.

        Returns:
            The frames in pieces, and the streams that have no waiting bytes any more.
        """
        out: list[bytes | memoryview] = []
        done: list[int] = []
        for item in self.queue.values():
            while True:
                count = min(item.remaining, self.largest_frame, self.server_window, item.window)
                if count <= 0 < item.remaining:
                    break
                self.server_window -= count
                item.window -= count
                piece = item.take(count)
                if item.passing:
                    self.waiting -= count
                last = item.end and not item.remaining
                if piece or last:
                    flags = frames.END_STREAM if last else 0
                    out.append(frames.head(frames.DATA, flags, item.id, count))
                    out.append(piece)
                if not item.remaining:
                    item.sent = last
                    done.append(item.id)
                    break
            if self.server_window <= 0:
                break
        for stream in done:
            del self.queue[stream]
        return out, done


def joined(prefix: bytes, message: bytes) -> tuple[bytes, ...]:
    """Put the gRPC prefix before a message; a large message is not copied for it."""
    return (prefix + message,) if len(message) < _JOINED_BYTES else (prefix, message)
