"""One client connection, its connection to the runtime, and the session between them.

Theory of operation. Two pipes feed one sans-IO session. What a read makes leave goes out in one
write for each side before the loop turns. Back-pressure: when one side's write buffer is above the high-water
mark, reading from the other side stops until it is below the low one; what is held in the session is bounded
by the session itself.

Ends. The runtime's end of file ends everything, as it would for a client that talks to it directly: what is
pending goes to the client, then its connection is closed. The client's end of file is passed on behind its
pending bytes, and the runtime may still answer what it has; calls that wait for a decision are over. Where a
side is gone (or a peer broke the protocol), the other is closed behind its pending bytes, or, if it does not
read them, after a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from proxy.cri.call import Call, Interceptor
from proxy.cri.pipe import Pipe
from proxy.relay.events import RelayError
from proxy.relay.session import Session


class Link:
    """The relay between one client and the runtime; also the session's handler.

    Attributes:
        client, server: The two ends.
        closed: The link is over.
    """

    __slots__ = (
        "_busy", "_calls", "_eof", "_gone", "_interceptor", "_log", "_news", "_session", "client", "closed",
        "server",
    )  # fmt: skip

    def __init__(
        self,
        interceptor: Interceptor,
        intercepts: Callable[[str], bool],
        gone: Callable[[Link], None],
        log: Callable[[str], None],
    ) -> None:
        """Begin a relay.

        Args:
            interceptor: Who decides.
            intercepts: Says which paths are intercepted.
            gone: Called once, when the link is over.
            log: Takes a line about a peer that misbehaves or a fault of the interceptor.
        """
        self._session = Session(self, intercepts)
        self._interceptor = interceptor
        self._gone = gone
        self._log = log
        self._calls: dict[int, Call] = {}
        self._news: list[tuple[Call, bytes | int | None]] = []
        self._busy = False
        self._eof = False
        self.closed = False
        self.client = Pipe(partial(self.received, self._session.from_client), self._client_ended, self.lost)
        self.server = Pipe(partial(self.received, self._session.from_server), self.lost, self.lost)
        self.client.other, self.server.other = self.server, self.client

    # -- what the pipes tell -------------------------------------------------------------------------

    def received(self, feed: Callable[[bytes], None], data: bytes) -> None:
        """Give bytes to the session and send what it makes of them.

        Args:
            feed: The session's side that the bytes come from.
            data: What was read.
        """
        if self.closed:
            return
        self._busy = True
        try:
            feed(data)
        except RelayError as error:
            peer = "client" if feed == self._session.from_client else "runtime"
            self._log(f"cannot go on with a {peer} connection: {error}")
            self.lost()
        self._busy = False
        self.flush()
        if self._news:
            self._tell()

    def _client_ended(self) -> None:
        """The client sends no more; the runtime may still answer what it has."""
        self._eof = True
        self._session.client_closed()
        self.flush()

    def lost(self) -> None:
        """One side is gone, or nothing good can come any more: end everything."""
        if self.closed:
            return
        self._session.lost()
        self.flush()
        self._tell()
        self.closed = True
        self.client.close()
        self.server.close()
        self._gone(self)
        self._session.untie()  # it refers to us, too: see Pipe

    def flush(self) -> None:
        """Send what the session has ready, unless a read is being handled, which ends with this anyway."""
        if self._busy or self.closed:
            return
        session = self._session
        # A side that is not attached yet gets what is ready for it when it is: some runtimes speak first.
        if self.server.attached and (chunks := session.to_server()):
            self.server.write(chunks)
        if self.client.attached and (chunks := session.to_client()):
            self.client.write(chunks)
        if self._eof and not session.unsent:
            self.server.end()

    # -- what the owner asks ------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._session.open_streams and not self.client.waiting

    def goaway(self) -> None:
        """Ask the client to begin nothing more on this connection."""
        self._session.goaway()
        self.flush()

    def release(self, stream: int, body: bytes | None) -> None:
        """See ``Call.release``."""
        if not self.closed:
            self._session.release(stream, body)
            self.flush()

    def refuse(self, stream: int, code: int, message: str) -> None:
        """See ``Call.refuse``."""
        if not self.closed:
            self._session.refuse(stream, code, message)
            self.flush()

    # -- what the session tells ---------------------------------------------------------------------------

    def request(self, stream: int, path: str, message: bytes) -> None:
        """Ask the interceptor."""
        call = self._calls[stream] = Call(self, stream, path, message)
        try:
            self._interceptor.request(call)
        except Exception as error:  # noqa: BLE001  a fault of ours must not stop the node: the call passes
            self._fault(call, "decide on", error)
            call.release()

    def response(self, stream: int, message: bytes) -> None:
        """Remember the answer."""
        self._news.append((self._calls[stream], message))
        if not self._busy:
            self._tell()

    def finished(self, stream: int, status: int | None) -> None:
        """Remember the end."""
        call = self._calls.pop(stream)
        call.decided = call.done = True
        self._news.append((call, status))
        if not self._busy:
            self._tell()

    def _tell(self) -> None:
        """Tell the interceptor what was read in passing.

        That is after the bytes have been sent, so the client does not wait for it, and before anything else
        is read, so what the client does next meets an interceptor that knows.
        """
        while self._news:
            news, self._news = self._news, []
            for call, what in news:
                try:
                    if isinstance(what, bytes):
                        self._interceptor.response(call, what)
                    else:
                        self._interceptor.finished(call, what)
                except Exception as error:  # noqa: BLE001  the answer is the runtime's, it passes all the same
                    self._fault(call, "note the answer to", error)

    def _fault(self, call: Call, what: str, error: Exception) -> None:
        self._log(f"cannot {what} {call.path}: {type(error).__name__}: {error}")
