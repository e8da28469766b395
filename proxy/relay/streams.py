"""The intercepted streams of one connection, and what may happen to each.

Theory of operation. A stream is tracked from the HEADERS of an intercepted method until its end. Its request
goes through

    ARRIVING --END_STREAM--> WAITING --release--> SENDING --all sent--> (answered by the runtime) --> gone
        |                       |
        |                       +--refuse--> gone (dead)
        +--END_STREAM, not one plain message: SENDING, untouched, nobody is asked

``WAITING`` is the only state in which ``release`` and ``refuse`` do something; anywhere else they come too
late and are ignored. From every state the stream can end early: the runtime answers or resets it before it
has the request, the client resets it, the runtime goes away (GOAWAY), the connection is lost. ``finished`` is
then told, once, if ``request`` was.

A stream that ended while the client may still be sending is *dead*: the client's DATA for it is dropped (the
window comes back by the rule in ``flow``). If it was we who refused it, what the runtime still sends for it
is dropped too, DATA against window for the runtime; its HEADERS must pass, because both header tables depend
on them, and find a stream that we have reset before.

A connection holds at most 64 MiB of request bodies, waiting or not yet sent. The stream that would exceed
this is refused with RESOURCE_EXHAUSTED: to let it pass would be to let a container start unplaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from proxy.relay import frames
from proxy.relay.events import Handler, RelayError
from proxy.relay.flow import Books, joined
from proxy.relay.stream import SENDING, WAITING, Stream

HELD_BYTES: Final = 64 << 20
_DEAD_STREAMS: Final = 1024
_RESOURCE_EXHAUSTED: Final = 8


class Streams:
    """All that both directions of a connection share.

    Attributes:
        open: Ids of all streams that are open, intercepted or not.
        tracked: The intercepted ones.
        dead: Ended streams that the client may still be sending on; True where we refused it.
        books: Flow control.
        goaway: The last stream that the runtime will take.
    """

    __slots__ = (
        "_resize",
        "books",
        "dead",
        "goaway",
        "handler",
        "held",
        "open",
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
    ) -> None:
        """Wire a connection's state.

        Args:
            handler: Whom to tell.
            to_client: Sends frames of our own to the client.
            to_server: The same to the runtime.
            resize: The header table size that a refusal must announce, if any.
        """
        self.handler = handler
        self.to_client = to_client
        self.to_server = to_server
        self.open: set[int] = set()
        self.tracked: dict[int, Stream] = {}
        self.dead: dict[int, bool] = {}
        self.books = Books()
        self.goaway = frames.STREAM_ID
        self.held = 0
        self._resize = resize

    def hold(self, stream: Stream, piece: bytes) -> bool:
        """Count a piece of a body; False where the connection holds too much and the stream was refused."""
        stream.size += len(piece)
        self.held += len(piece)
        if self.held > HELD_BYTES:
            cause = f"more than {HELD_BYTES >> 20} MiB wait on this connection"
            self._refuse(stream, _RESOURCE_EXHAUSTED, f"cannot hold the request of {stream.path}: {cause}")
            return False
        stream.body.append(piece)
        return True

    def complete(self, stream: Stream) -> None:
        """Ask about a request whose last byte has come, if it is one plain message."""
        body = stream.body[0] if len(stream.body) == 1 else b"".join(stream.body)
        stream.body.clear()
        if len(body) >= 5 and frames.PREFIX.unpack_from(body) == (0, len(body) - 5):
            stream.message = message = body[5:]
            del body
            stream.phase = WAITING
            stream.asked = True
            self.handler.request(stream.id, stream.path, message)
        else:
            self._send(stream, (body,))

    def release(self, stream_id: int, message: bytes | None) -> None:
        """Send a waiting request to the runtime, rewritten or (None) as it came."""
        stream = self.tracked.get(stream_id)
        if stream is None or stream.phase != WAITING or stream.closing:
            return
        body = stream.message if message is None else message
        assert body is not None
        if not self._send_at_once(stream, body):
            self._send(stream, joined(frames.PREFIX.pack(0, len(body)), body))

    def refuse(self, stream_id: int, code: int, message: str) -> None:
        """Answer a waiting request with a status."""
        stream = self.tracked.get(stream_id)
        if stream is not None and stream.phase == WAITING and not stream.closing:
            self._refuse(stream, code, message)

    def untouched(self, stream: Stream) -> None:
        """Let go of a stream whose client sends trailers: what came passes as it is, nobody is asked."""
        for piece in stream.body:
            stream.add(piece)
        stream.body.clear()
        self.books.credits.pop(stream.id, None)
        del self.tracked[stream.id]
        if stream.left:
            self.books.enqueue(stream)
            self.pump()
        self._uncount(stream)

    def pump(self) -> None:
        """Send what the windows allow."""
        queue = self.books.queue
        if not queue:
            return
        before = list(queue)
        self.to_server(*self.books.pump())
        for stream_id in before:
            if stream_id not in queue and (stream := self.tracked.get(stream_id)) is not None:
                self._uncount(stream)

    def resize_windows(self, delta: int) -> None:
        """Change the runtime's window of every stream, and send what may be sent now.

        Raises:
            RelayError: A window is above 2^31 - 1.
        """
        if delta:
            for stream in self.tracked.values():
                stream.window += delta
                if stream.window > frames.LARGEST_WINDOW:
                    raise RelayError("cannot widen a stream's window: it is above 2^31 - 1")
        self.pump()

    def ended(self, stream_id: int, status: int | None, *, reset: bool) -> None:
        """The runtime ended a stream, by its answer or by a reset."""
        self.open.discard(stream_id)
        stream = self.tracked.get(stream_id)
        if stream is None:
            return
        if not stream.sent:
            if not reset:
                self.to_server(frames.rst_stream(stream_id, frames.CANCEL))
            self.bury(stream_id, refused=False)
        self.forget(stream, status)

    def forget(self, stream: Stream, status: int | None) -> None:
        """Stop tracking a stream and say so."""
        del self.tracked[stream.id]
        self.books.drop(stream.id)
        stream.body.clear()
        stream.chunks.clear()
        self._uncount(stream)
        if stream.asked:
            self.handler.finished(stream.id, status)

    def beyond(self, last: int) -> None:
        """The runtime takes no stream above ``last``."""
        self.goaway = min(self.goaway, last)
        for stream in [s for s in self.tracked.values() if s.id > last]:
            self.bury(stream.id, refused=False)
            self.forget(stream, None)
        for stream_id in [s for s in self.books.queue if s > last]:
            self.books.drop(stream_id)
        self.open = {s for s in self.open if s <= last}

    def undecided(self) -> list[Stream]:
        """List the streams whose request has not been let go."""
        return [stream for stream in self.tracked.values() if stream.phase != SENDING]

    def _send_at_once(self, stream: Stream, message: bytes) -> bool:
        """Send a message as one frame, past the queue; False where it needs the queue."""
        books = self.books
        size = len(message) + frames.PREFIX.size
        if size > books.largest or size > books.server or size > stream.window:
            return False
        books.server -= size
        stream.window -= size
        stream.phase = SENDING
        stream.sent = True
        self._uncount(stream)
        self.to_server(frames.whole(stream.id, message))
        return True

    def _send(self, stream: Stream, chunks: tuple[bytes, ...]) -> None:
        stream.phase = SENDING
        stream.message = None
        for chunk in chunks:
            stream.add(chunk)
        self.held += stream.left - stream.size
        stream.size = stream.left
        stream.end = True
        self.books.enqueue(stream)
        self.pump()

    def _refuse(self, stream: Stream, code: int, message: str) -> None:
        self.bury(stream.id, refused=True)
        self.open.discard(stream.id)
        resize = self._resize()
        answer = frames.refusal(stream.id, code, message, answered=stream.answered, resize=resize)
        # The reset tells a client that still sends to stop, and makes late frames of the runtime legal.
        self.to_client(answer, frames.rst_stream(stream.id, frames.NO_ERROR))
        self.to_server(frames.rst_stream(stream.id, frames.CANCEL))
        self.forget(stream, None)

    def bury(self, stream_id: int, *, refused: bool) -> None:
        """Drop from now on what the client sends on a stream."""
        self.dead[stream_id] = refused
        if len(self.dead) > _DEAD_STREAMS:
            del self.dead[next(iter(self.dead))]

    def _uncount(self, stream: Stream) -> None:
        stream.message = None
        self.held -= stream.size
        stream.size = 0
