"""Relay one client connection to its connection to the runtime, through a session.

Theory of operation. Two pipes feed one sans-IO session. All bytes that one read causes to be sent are sent in
one write for each side, before the loop's next turn. Back-pressure: when one side's write buffer is above the
high-water mark, reading from the other side stops until the buffer is below the low-water mark. The session
limits the bytes that it holds.

Ends. The runtime's end of file ends everything, as for a client that talks to the runtime directly: the
pending bytes are sent to the client, then its connection is closed. The client's end of file is passed on
behind its pending bytes. The runtime may still answer the calls that it has, but calls that wait for a
decision are over. If one side is gone (or a peer broke the protocol), the other side is closed after its
pending bytes are sent, or after a few seconds if it does not read them. A peer that broke the protocol is
sent GOAWAY with the reason.

Faults. An unforeseen exception, even a MemoryError, ends only this link: its calls are over, its sockets are
closed, its memory is freed, and the exception is reported. So each entry point of a link (a read, a write, a
decision, a timer) has an ``except`` at its top.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial

from msgspec import Struct, field

from proxy.frontends.cri.call import InterceptedCall, Interceptor
from proxy.frontends.cri.pipe import OWN_HIGH_WATER, Pipe, PipeCallbacks
from proxy.relay.body_budget import BodyBudget
from proxy.relay.events import RelayError, RequestAnomaly
from proxy.relay.session import Session
from proxy.relay.streams import HELD_BYTES
from proxy.telemetry.port import Report

SERVER_OWN_HIGH_WATER = HELD_BYTES + OWN_HIGH_WATER
"""Like ``OWN_HIGH_WATER``, for the runtime's side, where held bodies may wait too."""


def _nothing(*_: object, **keys: object) -> None:
    """Ignore a notification."""


class CallTimes:
    """When calls came last, on the monotonic clock.

    Attributes:
        last: The last call on any connection; None before the first one.
        by_path: The last call of each intercepted method.
    """

    __slots__ = ("by_path", "last")

    def __init__(self) -> None:
        self.last: float | None = None
        self.by_path: dict[str, float] = {}


class RelayContext(Struct, frozen=True):
    """The shared parts of all links.

    Attributes:
        interceptor: The handler of intercepted calls.
        intercepts: Returns whether a path is intercepted.
        on_end: Called once for each link, when it has ended.
        report: Called if a peer misbehaves or the interceptor fails.
        fault: Called with an exception that has ended a link.
        over_limit: Called when many bytes of a link wait for a peer that does not read.
        budget: The memory limit for bodies, over all links.
        times: The times of the last calls.
    """

    interceptor: Interceptor
    intercepts: Callable[[str], bool]
    on_end: Callable[[Link], None] = _nothing
    report: Report = _nothing
    fault: Callable[[Exception], None] = _nothing
    over_limit: Callable[[], None] = _nothing
    budget: BodyBudget = field(default_factory=BodyBudget)
    times: CallTimes = field(default_factory=CallTimes)


class Link:
    """The relay between one client and the runtime; also the session's handler.

    Attributes:
        client, server: The two ends.
        closed: The link has ended.
        last: When its last call came, on the monotonic clock; None before the first one.
    """

    __slots__ = (
        "_busy", "_calls", "_context", "_ending", "_eof", "_interceptor", "_newest_stream", "_pending_events",
        "_report_problem", "_session", "client", "closed", "last", "server",
    )  # fmt: skip

    def __init__(self, context: RelayContext) -> None:
        """Begin a relay.

        Args:
            context: The shared parts of all links.
        """
        self._session = Session(self, context.intercepts, context.budget)
        self._context = context
        self._interceptor = context.interceptor
        self._report_problem = context.report
        self._calls: dict[int, InterceptedCall] = {}
        self._pending_events: list[tuple[InterceptedCall, bytes | int | None]] = []
        self._busy = False
        self._newest_stream = 0
        self._eof = self._ending = False
        self.closed = False
        self.last: float | None = None
        from_client, from_server = self._session.from_client, self._session.from_server
        faults = PipeCallbacks(self.failed, context.budget.refuse_largest, context.over_limit)
        self.client = Pipe(partial(self.received, from_client), self._client_ended, self.lost, faults)
        self.server = Pipe(
            partial(self.received, from_server),
            self.lost,
            self.lost,
            faults,
            own_high_water=SERVER_OWN_HIGH_WATER,
        )
        self.client.other, self.server.other = self.server, self.client

    # -- called by the pipes --------------------------------------------------------------------------

    def received(self, feed: Callable[[bytes], None], data: bytes) -> None:
        """Pass bytes to the session, and send the bytes that it returns.

        Args:
            feed: The session's side that the bytes come from.
            data: The bytes that were read.
        """
        if self.closed:
            return
        self._busy = True
        try:
            feed(data)
            self._busy = False
            self._send()
            if self._pending_events:
                self._pass_on()
            if (newest := self._session.newest_stream) != self._newest_stream:
                self._newest_stream = newest
                self._context.times.last = self.last = time.monotonic()
        except RelayError as error:
            self._protocol_violated(error, client=feed == self._session.from_client)
        except Exception as error:  # noqa: BLE001  whatever it is, it must not affect other links
            self.failed(error)

    def _protocol_violated(self, error: RelayError, *, client: bool) -> None:
        """End a link whose peer broke the protocol."""
        self._busy = False
        try:
            peer = "client" if client else "runtime"
            self._report_problem("cannot continue a connection", peer=peer, err=str(error))
            self._session.end_with_goaway(error.code, client=client)
        except Exception as fault:  # noqa: BLE001  as in ``received``
            self.failed(fault)
        else:
            self.lost()

    def _client_ended(self) -> None:
        """The client sends no more; the runtime may still answer the calls that it has."""
        self._eof = True
        self._session.client_closed()
        self._send()

    def lost(self) -> None:
        """Handle that one side is gone, or the session has failed: end everything."""
        if self.closed or self._ending:
            return
        self._ending = True
        self._busy = False
        fault = None
        try:
            self._session.lost()
            self._send()
            self._pass_on()
        except Exception as error:  # noqa: BLE001  the link ends anyway
            fault = error
        self._close()
        if fault is not None:
            self._report(fault)

    def failed(self, error: Exception) -> None:
        """An unforeseen exception: end this link, and no other one."""
        if self.closed:  # its sockets may still be open behind pending bytes
            self.client.abort()
            self.server.abort()
        else:
            self.lost()
        self._report(error)

    def _close(self) -> None:
        self.closed = True
        for end in (self.client, self.server):
            try:
                end.close()
            except Exception:  # noqa: BLE001  it must not stay open
                end.abort()
        self._context.on_end(self)
        try:
            self._session.break_cycles()  # the session refers to us too: see Pipe
            for stream in list(self._calls):  # there are none, except after a fault
                self.finished(stream, None)
            self._pass_on()
        except Exception as error:  # noqa: BLE001  nothing is left to end
            self._report(error)

    def _report(self, error: Exception) -> None:
        # A report that fails must not end the other links.
        with contextlib.suppress(Exception):
            self._report_problem("ended a connection because of an internal error", err=error)
            self._context.fault(error)

    def abort(self, reason: str) -> None:
        """End the link without sending the waiting bytes."""
        if not self.closed:
            self._report_problem("ended a connection", reason=reason)
            self.client.abort()
            self.server.abort()
            self.lost()

    @property
    def unread(self) -> int:
        """Bytes that wait to be written to both sides."""
        return self.client.waiting + self.server.waiting

    def flush(self) -> None:
        """Send the bytes that the session has ready, unless a read is being handled, which ends with this."""
        try:
            self._send()
        except Exception as error:  # noqa: BLE001  as in ``received``
            self.failed(error)

    def _send(self) -> None:
        if self._busy or self.closed:
            return
        session = self._session
        # A side that is not attached yet gets its bytes later: some runtimes send first.
        if self.server.attached and (chunks := session.to_server()):
            self.server.write(chunks)
        if self.client.attached and (chunks := session.to_client()):
            self.client.write(chunks)
        if self._eof and not session.unsent:
            self.server.end()

    # -- called by the acceptor ---------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no call is in flight."""
        return not self._session.open_streams and not self.client.waiting

    @property
    def saw_goaway(self) -> bool:
        """Whether the client begins no more calls on this connection, after ``goaway``."""
        return self._session.saw_goaway

    def intercepted(self) -> list[str]:
        """Return the paths of the intercepted calls that are open."""
        return self._session.intercepted()

    def calls(self) -> list[InterceptedCall]:
        """Return the intercepted calls that are open."""
        return list(self._calls.values())

    def goaway(self) -> None:
        """Request that the client begins no more calls on this connection; a second request does nothing."""
        try:
            self._session.goaway()
            self._send()
        except Exception as error:  # noqa: BLE001  as in ``received``
            self.failed(error)

    def refuse_undecided(self, code: int, message: str) -> None:
        """Refuse the calls that are not decided yet; later decisions about them have no effect."""
        for call in list(self._calls.values()):
            call.refuse(code, message)

    def release(self, stream: int, body: bytes | None, suffix: bytes = b"") -> None:
        """See ``InterceptedCall.release`` and ``InterceptedCall.place``."""
        if not self.closed:
            try:
                self._session.release(stream, body, suffix)
                self._send()
            except Exception as error:  # noqa: BLE001  as in ``received``
                self._failed_within(error)

    def refuse(self, stream: int, code: int, message: str) -> None:
        """See ``InterceptedCall.refuse``."""
        if not self.closed:
            try:
                self._session.refuse(stream, code, message)
                self._send()
            except Exception as error:  # noqa: BLE001  as in ``received``
                self._failed_within(error)

    def _failed_within(self, error: Exception) -> None:
        """End the link now, or right after a read that is being handled."""
        if self._busy:
            asyncio.get_running_loop().call_soon(self.failed, error)
        else:
            self.failed(error)

    # -- called by the session ----------------------------------------------------------------------------

    def request(self, stream: int, path: str, message: bytes) -> None:
        """Pass a request to the interceptor."""
        call = self._calls[stream] = InterceptedCall(self, stream, path, message)
        self._context.times.by_path[path] = time.monotonic()
        try:
            self._interceptor.request(call)
        except Exception as error:  # noqa: BLE001  an internal error must not stop the node: the call passes
            self._fault(call, "decide", error)
            call.release()

    def anomaly(self, path: str, kind: RequestAnomaly) -> tuple[int, str] | None:
        """Report an anomaly to the interceptor."""
        return self._interceptor.anomaly(path, kind)

    def refused_for_memory(self, path: str, message: str) -> None:
        """Report the refusal, and send it after the work in progress."""
        self._report_problem("cannot hold a call", method=path, err=message)
        if not self._busy:
            asyncio.get_running_loop().call_soon(self.flush)

    def response(self, stream: int, message: bytes) -> None:
        """Queue the answer for the interceptor."""
        self._pending_events.append((self._calls[stream], message))
        if not self._busy:
            self._pass_on()

    def finished(self, stream: int, status: int | None) -> None:
        """Queue the end for the interceptor."""
        call = self._calls.pop(stream)
        call.decided = call.done = True
        self._pending_events.append((call, status))
        if not self._busy:
            self._pass_on()

    def _pass_on(self) -> None:
        """Pass the queued answers and ends of calls on to the interceptor.

        This happens after the bytes have been sent, so the client does not wait for it, and before anything
        else is read, so the interceptor knows the answer before the client's next call.
        """
        while self._pending_events:
            events, self._pending_events = self._pending_events, []
            for call, outcome in events:
                try:
                    if isinstance(outcome, bytes):
                        self._interceptor.response(call, outcome)
                    else:
                        self._interceptor.finished(call, outcome)
                except Exception as error:  # noqa: BLE001  the answer is the runtime's and passes anyway
                    self._fault(call, "record the answer", error)

    def _fault(self, call: InterceptedCall, step: str, error: Exception) -> None:
        self._report_problem("cannot handle a call", step=step, method=call.path, err=error)
