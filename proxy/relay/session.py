"""One proxied HTTP/2 connection: bytes in, bytes out.

Theory of operation. For each connection that a client makes there is one to the runtime, and nothing
terminates in between: stream ids, SETTINGS, PING, GOAWAY, header tables and the flow control of the response
direction are end to end, and requests that are not intercepted leave as the bytes that came. The parts:
``frames`` splits a direction into frames, ``directions`` checks and interprets them, ``headers`` follows the
header tables, ``streams`` keeps the intercepted streams, and ``flow`` does the flow control of the request
direction.

For an intercepted method, HEADERS continue at once (so the deadline begins to run, and the order of header
blocks is kept), and the body is held until it is complete. Then the handler is called (``Handler.request``).
It releases the request, rewritten or not, or refuses it, at once or later. Answers are read while they pass,
and never held.

A session has no clock and no socket: after every call, the bytes that must leave are fetched with
``to_client`` and ``to_server``. After RelayError only ``lost`` may be called.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.relay import frames
from proxy.relay.body_budget import BodyBudget
from proxy.relay.directions import Requests, Responses
from proxy.relay.events import Handler
from proxy.relay.streams import Streams


class Session:
    """The relay of one connection.

    Attributes:
        to_client, to_server: Call to take the bytes that must leave, in order; empty if there are none.
        release: Call to let a waiting request go to the runtime; see ``Streams.release``.
    """

    __slots__ = ("_requests", "_responses", "_streams", "release", "to_client", "to_server")

    def __init__(
        self, handler: Handler, intercepts: Callable[[str], bool], budget: BodyBudget | None = None
    ) -> None:
        """Begin at the start of a connection.

        Args:
            handler: Decides on requests and is notified of answers.
            intercepts: Returns for a ``:path`` whether its requests are held.
            budget: The memory limit for bodies, over all connections; a separate one if None.
        """
        self._requests = requests = Requests(intercepts)
        self._responses = responses = Responses(requests)
        self._streams = streams = Streams(
            handler, responses.inject, requests.inject, responses.resize, budget or BodyBudget()
        )
        requests.join(streams, responses.client_settings)
        responses.join(streams)
        self.to_client: Callable[[], list[bytes | memoryview]] = responses.drain
        self.to_server: Callable[[], list[bytes | memoryview]] = requests.drain
        self.release = streams.release

    @property
    def open_streams(self) -> int:
        """How many streams are open, intercepted or not."""
        return len(self._streams.open_ids)

    @property
    def newest_stream(self) -> int:
        """The id of the newest stream that the client has opened; 0 for none."""
        return self._requests.last_stream

    @property
    def saw_goaway(self) -> bool:
        """Whether the client has seen our GOAWAY: it opens no more streams."""
        return self._requests.saw_goaway

    def intercepted(self) -> list[str]:
        """Return the paths of the intercepted streams that are open."""
        return [stream.path for stream in self._streams.tracked.values()]

    @property
    def unsent(self) -> bool:
        """Whether bytes wait for the runtime's window."""
        return bool(self._streams.flow.queue)

    def from_client(self, data: bytes) -> None:
        """Process bytes from the client.

        Raises:
            RelayError: The client broke the protocol; this connection must end.
        """
        self._requests.feed(data)
        flow = self._streams.flow
        if flow.credits:
            for stream, length in flow.credits.items():
                self._responses.inject(frames.window_update(stream, length))
            flow.credits.clear()
        if grant := flow.take_due_grant():
            self._responses.inject(frames.window_update(0, grant))
        if flow.held_acks and not flow.waiting:
            self._requests.pass_held_acks()

    def from_server(self, data: bytes) -> None:
        """Process bytes from the runtime.

        Raises:
            RelayError: The runtime broke the protocol; this connection must end.
        """
        self._responses.feed(data)
        flow = self._streams.flow
        if flow.held_acks and not flow.waiting:
            self._requests.pass_held_acks()

    def refuse(self, stream: int, code: int, message: str) -> None:
        """End a waiting call with a gRPC status; do nothing if it does not wait any more."""
        self._streams.refuse(stream, code, message)

    def goaway(self) -> None:
        """Request that the client opens no more streams here; it may finish those that it has.

        A PING follows. Streams that the client opened before it saw the GOAWAY arrive before the answer to
        the PING (``saw_goaway``).
        """
        if frames.PING not in self._requests.handlers:
            self._requests.handlers[frames.PING] = self._requests.on_ping
            # The last stream of a GOAWAY may not be above that of an earlier one (RFC 9113, 6.8).
            last = self._streams.last_accepted
            self._responses.inject(frames.goaway(last), frames.ping(frames.GOAWAY_PING))

    def end_with_goaway(self, code: int, *, client: bool) -> None:
        """Send GOAWAY with the reason why the connection of one side ends; only ``lost`` may follow."""
        reader = self._responses if client else self._requests
        last = min(self._requests.last_stream, self._streams.last_accepted) if client else 0
        reader.send_last(frames.goaway(last, code))

    def client_closed(self) -> None:
        """Handle the end of the client's input: unreleased calls end, others may still be answered."""
        for stream in self._streams.undecided():
            self._requests.inject(frames.rst_stream(stream.id, frames.CANCEL))
            self._streams.open_ids.discard(stream.id)
            self._streams.forget(stream, None)

    def lost(self) -> None:
        """End every open call, after the connection to one side has ended."""
        streams = self._streams
        streams.open_ids.clear()
        for stream in list(streams.tracked.values()):
            if stream.id in streams.tracked:  # the notification of one call may have ended another
                streams.forget(stream, None)
        streams.flow.queue.clear()

    def break_cycles(self) -> None:
        """Break the references between the parts after the end, which frees their memory at once."""
        streams, requests = self._streams, self._requests
        streams.clear()
        requests.handlers.clear()
        self._responses.handlers.clear()
        del streams.handler, streams.to_client, streams.to_server, streams._resize, requests._client_settings
