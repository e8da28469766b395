"""The intercepted streams of one connection, and the transitions of each.

Theory of operation. A stream is tracked from the HEADERS of an intercepted method until its end. Its request
goes through

    ARRIVING --END_STREAM--> WAITING --release--> SENDING --all sent--> (answered by the runtime) --> gone
        |                       |
        |                       +--refuse--> gone (dead)
        +--END_STREAM, not one plain message: reported as unusual, then SENDING untouched, or refused

Only in state ``WAITING`` do ``release`` and ``refuse`` have an effect; in other states they come too late and
are ignored. In every state the stream can end early: the runtime answers or resets it before it has the
request, the client resets it, the runtime goes away (GOAWAY), or the connection is lost. Then ``finished`` is
called once, if ``request`` was called.

A stream that ended while the client may still be sending is *dead*. So is a stream that only passed and that
the runtime has reset. The client's DATA for a dead stream is dropped. The connection's window comes back by
the rule in ``flow``; the stream's window comes back only if the client was sent no reset, because nothing may
follow a reset (RFC 9113, 5.1). If we refused the stream, the runtime's frames for it are dropped too, and the
relay grants window for the dropped DATA to the runtime. But the runtime's HEADERS must pass, because both
header tables depend on them; the client finds them on a stream that we have already reset.

A gRPC server written in Go executes the first message of a unary call as soon as it is complete, whatever
follows (grpc-go, ``Server.processUnaryRPC``). So if more follows, the decision is made on the first message,
and the rest is sent behind it unchanged.

A connection holds at most 64 MiB of request bodies, waiting or not yet sent; all connections together hold at
most what ``budget`` allows. A stream that would exceed this is refused with RESOURCE_EXHAUSTED: if it passed,
a container could start unplaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from proxy.model.grpc_status import GrpcStatus
from proxy.relay import frames
from proxy.relay.body_budget import BodyBudget
from proxy.relay.events import Handler, RelayError, RequestAnomaly
from proxy.relay.flow import FlowControl, Outgoing, joined

ARRIVING: Final = 0
WAITING: Final = 1
SENDING: Final = 2

# The ways in which a stream became dead.
ENDED: Final = 0
RESET: Final = 1
REFUSED: Final = 2


class Stream(Outgoing):
    """An intercepted stream.

    Attributes:
        path: The method.
        phase: ARRIVING, WAITING or SENDING.
        body: The part of the body that has arrived; small pieces are gathered in buffers.
        tail: The bytes that came behind the message while WAITING.
        size: Bytes that count against the limit of the connection.
        needs: Bytes of the first message with its prefix; 0 while the length is unknown.
        ahead: Window that the client was granted beyond the runtime's, for the rest of the message.
        spent: Window that the client has spent on the body and that was not granted back.
        message: The original message while WAITING.
        reported: The complete request was passed to the interceptor.
        answered: The runtime began to answer.
        closing: The last header of the answer is on its way.
        tee: The part of the answer that has arrived; None once nothing more is read.
    """

    __slots__ = (
        "ahead", "answered", "body", "closing", "message", "needs", "path", "phase", "reported", "size",
        "spent", "tail", "tee",
    )  # fmt: skip

    def __init__(self, stream: int, path: str, window: int) -> None:
        super().__init__(stream, window)
        self.path = path
        self.phase = ARRIVING
        self.body: list[bytes | bytearray] = []
        self.tail = b""
        self.size = self.needs = self.ahead = self.spent = 0
        self.message: bytes | None = None
        self.reported = False
        self.answered = False
        self.closing = False
        self.tee: bytearray | None = bytearray()


HELD_BYTES: Final = 64 << 20
SMALL_BYTES: Final = 1024  # pieces below are gathered: each object costs some sixty bytes more than it holds
_DEAD_STREAMS: Final = 1024
_INCOMPLETE: Final = (RequestAnomaly.EMPTY, RequestAnomaly.CUT)


class Streams:
    """The state that both directions of a connection share.

    Attributes:
        open_ids: Ids of all streams that are open, intercepted or not.
        tracked: The intercepted ones.
        dead: Ended streams that the client may still be sending on: REFUSED if we reset the stream, RESET if
            the runtime did, ENDED otherwise.
        flow: Flow control.
        last_accepted: The last stream that the runtime will take.
        held: Bytes of bodies that are held here.
        budget: The memory limit for bodies, over all connections.
    """

    __slots__ = (
        "_resize",
        "budget",
        "dead",
        "flow",
        "handler",
        "held",
        "last_accepted",
        "open_ids",
        "to_client",
        "to_server",
        "tracked",
    )

    def __init__(
        self,
        handler: Handler,
        to_client: Callable[..., None],
        to_server: Callable[..., None],
        resize: Callable[[], int | None],
        budget: BodyBudget,
    ) -> None:
        """Set up a connection's state.

        Args:
            handler: The handler to notify.
            to_client: Sends our own frames to the client.
            to_server: Sends our own frames to the runtime.
            resize: The header table size that a refusal must announce, if any.
            budget: The memory limit for bodies, over all connections.
        """
        self.handler = handler
        self.to_client = to_client
        self.to_server = to_server
        self.open_ids: set[int] = set()
        self.tracked: dict[int, Stream] = {}
        self.dead: dict[int, int] = {}
        self.flow = FlowControl()
        self.last_accepted = frames.STREAM_ID
        self.held = 0
        self.budget = budget
        budget.holders.add(self)
        self._resize = resize

    def hold(self, stream: Stream, piece: bytes) -> bool:
        """Keep a piece of a body; False if too much is held and the stream was refused."""
        count = len(piece)
        stream.size += count
        self.held += count
        budget = self.budget
        budget.total += count
        if self.held > HELD_BYTES:
            self.refuse_for_memory(stream, f"more than {HELD_BYTES >> 20} MiB wait on this connection")
            return False
        if budget.total > budget.limit and not budget.make_room(self, stream):
            return False
        body = stream.body
        if not body:
            budget.arriving[stream] = self
            body.append(piece)
        elif count >= SMALL_BYTES:
            body.append(piece)
        else:
            last = body[-1]
            if isinstance(last, bytearray):
                last += piece
            else:
                body.append(bytearray(piece))
        return True

    def grant_for_body(self, stream: Stream, length: int) -> None:
        """Grant the client window for the rest of a body; ``length`` bytes of window have been spent on it.

        The window that the message still needs is granted once, when its length is known.
        """
        flow = self.flow
        stream.spent += length
        if not stream.needs and len(stream.body[0]) >= frames.PREFIX.size:
            stream.needs = frames.PREFIX.size + frames.PREFIX.unpack_from(stream.body[0])[1]
            stream.ahead = flow.grant_ahead(stream.needs)
            flow.credit(stream.id, stream.ahead)
        flow.credit(stream.id, self._take_spent(stream))

    def _take_spent(self, stream: Stream) -> int:
        """Record and return the window to grant back if the client has too little for the rest."""
        missing = stream.needs - stream.size
        if 0 < missing <= self.flow.initial_window + stream.ahead - stream.spent:
            return 0
        spent, stream.spent = stream.spent, 0
        return spent

    def end_body(self, stream: Stream, piece: bytes) -> None:
        """Take the last piece of a body, and pass the request to the handler."""
        count, budget = len(piece), self.budget
        if not stream.body and self.held + count <= HELD_BYTES and budget.total + count <= budget.limit:
            size = count - frames.PREFIX.size
            if size >= 0 and frames.PREFIX.unpack_from(piece) == (0, size):
                self._report(stream, piece[5:])
                # Most requests have been released by now. Only those that wait are counted.
                if stream.message is not None:
                    stream.size = count
                    self.held += count
                    budget.total += count
                return
        if self.hold(stream, piece):
            self._complete(stream)

    def _complete(self, stream: Stream) -> None:
        """Pass a request that came in pieces to the handler, or report that it is not one plain message."""
        pieces, stream.body = stream.body, []
        self.budget.arriving.pop(stream, None)
        head = _head(pieces)
        size = stream.size - frames.PREFIX.size
        if size < 0 or frames.PREFIX.unpack_from(head) != (0, size):
            message = self._report_anomaly(stream, b"".join(pieces))
            if message is None:
                return
        else:
            pieces[0] = head[5:]
            message = b"".join(pieces)
        del pieces, head
        self._report(stream, message)

    def _report(self, stream: Stream, message: bytes) -> None:
        stream.message = message
        stream.phase = WAITING
        stream.reported = True
        self.handler.request(stream.id, stream.path, message)

    def _report_anomaly(self, stream: Stream, body: bytes) -> bytes | None:
        """Handle a body that is not one plain message; return the first message if there is one."""
        kind = _anomaly_of(body, len(body))
        refusal = self.handler.anomaly(stream.path, kind)
        if kind is RequestAnomaly.MORE:
            end = frames.PREFIX.size + int(frames.PREFIX.unpack_from(body)[1])
            stream.tail = body[end:]
            return body[frames.PREFIX.size : end]
        if refusal is not None:
            self._refuse(stream, *refusal)
        else:
            self._send(stream, (body,))
        return None

    def release(self, stream_id: int, message: bytes | None = None, suffix: bytes = b"") -> None:
        """Let a waiting request go to the runtime; do nothing if it does not wait any more.

        Args:
            stream_id: HTTP/2 stream id.
            message: The message instead of the original one, without prefix; None: the original, byte for
                byte.
            suffix: Bytes to append to the message.
        """
        stream = self.tracked.get(stream_id)
        if stream is None or stream.phase != WAITING or stream.closing:
            return
        body = stream.message if message is None else message
        assert body is not None
        size = len(body) + len(suffix)
        if stream.tail or not self._send_at_once(stream, size, body, suffix):
            self._send(stream, (*joined(frames.PREFIX.pack(0, size), body), suffix, stream.tail))

    def refuse(self, stream_id: int, code: int, message: str) -> None:
        """Answer a waiting request with a status."""
        stream = self.tracked.get(stream_id)
        if stream is not None and stream.phase == WAITING and not stream.closing:
            self._refuse(stream, code, message)

    def pass_through(self, stream: Stream) -> None:
        """Stop holding a stream whose client sends trailers: its bytes pass unchanged, or it is refused."""
        body, stream.body = stream.body, []
        self.flow.credits.pop(stream.id, None)
        refusal = self.handler.anomaly(stream.path, RequestAnomaly.TRAILERS)
        if refusal is not None:
            self._refuse(stream, *refusal)
            return
        for piece in body:
            stream.add(bytes(piece))
        del self.tracked[stream.id]
        if stream.remaining:
            self.flow.enqueue(stream)
            self.pump()
        self._uncount(stream)

    def pump(self) -> None:
        """Send the bytes that the windows allow."""
        if not self.flow.queue:
            return
        out, done = self.flow.pump()
        self.to_server(*out)
        for stream_id in done:
            if (stream := self.tracked.get(stream_id)) is not None:
                self._uncount(stream)

    def resize_windows(self, delta: int) -> None:
        """Change the runtime's window of every stream, and send what may be sent now.

        A smaller window may stop a client within a held body. Then no DATA comes that would cause a grant.

        Raises:
            RelayError: A window is above 2^31 - 1.
        """
        if delta:
            for stream in self.tracked.values():
                stream.window += delta
                if stream.window > frames.LARGEST_WINDOW:
                    raise RelayError("cannot widen a stream's window: it is above 2^31 - 1")
                if delta < 0 and stream.phase == ARRIVING and (spent := self._take_spent(stream)):
                    self.to_client(frames.window_update(stream.id, spent))
        self.pump()

    def server_ended(self, stream_id: int, status: int | None, *, reset: bool) -> None:
        """The runtime ended a stream, by its answer or by a reset."""
        self.open_ids.discard(stream_id)
        stream = self.tracked.get(stream_id)
        if stream is None:
            if reset:
                self.mark_dead(stream_id, RESET)
            return
        if not stream.sent:
            if not reset:
                self.to_server(frames.rst_stream(stream_id, frames.CANCEL))
            self.mark_dead(stream_id, RESET if reset else ENDED)
        self.forget(stream, status)

    def forget(self, stream: Stream, status: int | None) -> None:
        """Stop tracking a stream, and notify the handler."""
        del self.tracked[stream.id]
        self.flow.drop(stream.id)
        body, stream.body = stream.body, []
        came = stream.size
        stream.chunks.clear()
        stream.message = None
        if came:
            self._uncount(stream)
        if stream.reported:
            self.handler.finished(stream.id, status)
        elif body and _anomaly_of(_head(body), came) not in _INCOMPLETE:
            self.handler.anomaly(stream.path, RequestAnomaly.UNENDED)

    def on_server_goaway(self, last: int) -> None:
        """The runtime takes no stream above ``last``."""
        self.last_accepted = min(self.last_accepted, last)
        for stream in [s for s in self.tracked.values() if s.id > last]:
            self.mark_dead(stream.id, ENDED)
            self.forget(stream, None)
        for stream_id in [s for s in self.flow.queue if s > last]:
            self.flow.drop(stream_id)
        self.open_ids = {s for s in self.open_ids if s <= last}

    def refuse_for_memory(self, stream: Stream, cause: str) -> None:
        """Refuse a held request because too many bytes are held."""
        stream.body = []
        message = f"cannot hold the request of {stream.path}: {cause}"
        self._refuse(stream, GrpcStatus.RESOURCE_EXHAUSTED, message)
        self.handler.refused_for_memory(stream.path, message)

    def largest(self) -> Stream | None:
        """Return the stream that holds the most bytes, if any does."""
        most = max(self.tracked.values(), key=_size, default=None)
        return most if most is not None and most.size else None

    def undecided(self) -> list[Stream]:
        """List the streams whose request has not been released."""
        return [stream for stream in self.tracked.values() if stream.phase != SENDING]

    def _send_at_once(self, stream: Stream, size: int, message: bytes, suffix: bytes) -> bool:
        """Send a message of ``size`` bytes as one frame, past the queue; False if it needs the queue."""
        flow = self.flow
        size += frames.PREFIX.size
        if size > flow.largest_frame or size > flow.server_window or size > stream.window:
            return False
        flow.server_window -= size
        stream.window -= size
        stream.phase = SENDING
        stream.sent = True
        stream.message = None
        if stream.size:
            self._uncount(stream)
        self.to_server(frames.last_message(stream.id, message, suffix))
        return True

    def _send(self, stream: Stream, chunks: tuple[bytes, ...]) -> None:
        stream.phase = SENDING
        stream.message = None
        for chunk in chunks:
            stream.add(chunk)
        stream.tail = b""
        more = stream.remaining - stream.size
        self.held += more
        self.budget.total += more
        stream.size = stream.remaining
        stream.end = True
        self.flow.enqueue(stream)
        self.pump()

    def clear(self) -> None:
        """Drop all streams in any state, without notifying the handler."""
        budget = self.budget
        for stream in self.tracked.values():
            budget.arriving.pop(stream, None)
        budget.total -= self.held
        self.held = 0
        budget.holders.discard(self)
        self.tracked.clear()
        self.flow.queue.clear()

    def _refuse(self, stream: Stream, code: int, message: str) -> None:
        if stream.closing:  # the last header of the runtime's answer is on its way: ours comes too late
            self.open_ids.discard(stream.id)
            self.to_server(frames.rst_stream(stream.id, frames.CANCEL))
            self.mark_dead(stream.id, ENDED)
            self.forget(stream, None)
            return
        self.mark_dead(stream.id, REFUSED)
        self.open_ids.discard(stream.id)
        resize = self._resize()
        answer = frames.refusal(stream.id, code, message, answered=stream.answered, resize=resize)
        # The reset makes a client that still sends stop, and makes late frames of the runtime legal.
        self.to_client(answer, frames.rst_stream(stream.id, frames.NO_ERROR))
        self.to_server(frames.rst_stream(stream.id, frames.CANCEL))
        self.forget(stream, None)

    def mark_dead(self, stream_id: int, how: int) -> None:
        """Drop the client's frames for a stream from now on."""
        self.dead[stream_id] = how
        if len(self.dead) > _DEAD_STREAMS:
            del self.dead[next(iter(self.dead))]

    def _uncount(self, stream: Stream) -> None:
        size = stream.size
        if size:
            self.held -= size
            self.budget.total -= size
            stream.size = 0
            self.budget.arriving.pop(stream, None)


def _head(pieces: list[bytes | bytearray]) -> bytes | bytearray:
    """Return the first piece of a body, which then holds the prefix of the first message if the body does."""
    if len(pieces) > 1 and len(pieces[0]) < frames.PREFIX.size:
        pieces[:] = [b"".join(pieces)]
    return pieces[0] if pieces else b""


def _anomaly_of(head: bytes | bytearray, size: int) -> RequestAnomaly:
    """Return how a body that is not one plain message differs from that.

    Args:
        head: Its beginning, with the first prefix.
        size: Its length.
    """
    if not size:
        return RequestAnomaly.EMPTY
    if head[0]:
        return RequestAnomaly.COMPRESSED
    if size < frames.PREFIX.size:
        return RequestAnomaly.CUT
    return (
        RequestAnomaly.CUT
        if frames.PREFIX.size + frames.PREFIX.unpack_from(head)[1] > size
        else RequestAnomaly.MORE
    )


def _size(stream: Stream) -> int:
    return stream.size
