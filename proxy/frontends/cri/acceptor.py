"""Accept clients, connect each to the runtime, and drain connections at the end.

For each accepted connection, a connection to the runtime is made before the first byte of the client is read;
until then the kernel's socket buffer holds the client's bytes. If the runtime cannot be reached, the accepted
connection is closed at once, which looks to a client as if the runtime itself were absent. ``link`` relays
between the two connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection
from typing import Final

from proxy.frontends.cri.call import InterceptedCall, Interceptor
from proxy.frontends.cri.link import CallTimes, Link, RelayContext
from proxy.model.errnos import NO_DESCRIPTORS
from proxy.relay.body_budget import BodyBudget
from proxy.telemetry.port import Report, silent

__all__ = ["Acceptor", "InterceptedCall", "Interceptor"]

_SO_SNDBUFFORCE: Final = 32  # Linux; above the system's limit with CAP_NET_ADMIN
_SEND_BUFFER: Final = 1 << 20
_ACCEPTS_AT_ONCE: Final = 64
_ACCEPT_PAUSE_S: Final = 0.2
_DIAL_RETRY_S: Final = 0.005
_DIAL_LIMIT_S: Final = 1.0
_DRAIN_STEP_S: Final = 0.02
_QUIET_STEP_S: Final = 0.002
_GOAWAY_GRACE_S: Final = 0.1
PLACEMENT_METHODS: Final = frozenset(
    ("RunPodSandbox", "CreateContainer", "StartContainer", "UpdateContainerResources")
)
"""Calls whose answers decide the placement of containers."""
UNREACHABLE: Final = "cannot connect a client to the runtime"
NOT_ACCEPTED: Final = "cannot accept a connection"
UNREAD_BYTES: Final = 128 << 20
"""Bytes that may wait on all connections for peers that do not read."""


class Acceptor:
    """Accepts clients and relays each to the runtime.

    Attributes:
        budget: The memory limit for request bodies, over all connections.
        times: When calls came last.
    """

    def __init__(
        self,
        upstream_path: str,
        interceptor: Interceptor,
        methods: Collection[str],
        *,
        report: Report = silent,
        resolved: Report = silent,
        fault: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Prepare; nothing is opened.

        Args:
            upstream_path: The runtime's unix socket.
            interceptor: Decides on intercepted calls.
            methods: Full paths of the intercepted methods.
            report: Called when one connection has failed.
            resolved: Called when a reported failure is over.
            fault: Called with an exception that has ended a connection.
        """
        self._upstream = upstream_path
        self._report = report
        self._resolved = resolved
        self._fault = fault
        self._links: set[Link] = set()
        self.budget = BodyBudget()
        self.times = CallTimes()
        self._context = RelayContext(
            interceptor,
            _spellings(methods).__contains__,
            self._links.discard,
            report,
            fault,
            self._end_largest,
            self.budget,
            self.times,
        )
        self._opening: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._fd = -1
        self._down = False
        self._failure = ""
        self._accept_fails = False

    def is_down(self) -> bool:
        """Return whether the last client could not be connected to the runtime, which still fails."""
        if self._down:
            with contextlib.suppress(OSError), _unix_socket() as probe:
                probe.connect(self._upstream)
                self._reached()
        return self._down

    def _reached(self) -> None:
        """Record that the runtime can be connected to."""
        self._down = False
        if self._failure:
            self._failure = ""
            self._resolved(UNREACHABLE)

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._links)

    def clients(self) -> list[tuple[int, float | None]]:
        """Return for each client its process, and when its last call came on the monotonic clock."""
        return [(link.client.peer_pid(), link.last) for link in self._links]

    async def start(self, listen_socket: socket.socket) -> None:
        """Begin to accept on a listening socket, which stays the caller's to close."""
        listen_socket.setblocking(False)
        self._listener = listen_socket
        self._fd = listen_socket.fileno()
        asyncio.get_running_loop().add_reader(self._fd, self._accept)

    async def drain(self, limit_s: float) -> None:
        """Stop accepting, let calls in flight end, then close.

        A GOAWAY makes clients continue on another connection. A connection closes when no call is open on it.
        After ``limit_s`` seconds all close; calls that are still held then fail with a lost connection.
        """
        self.stop_accepting()
        loop = asyncio.get_running_loop()
        start = loop.time()
        while self._links or self._opening:
            self._send_goaway()
            past = loop.time() - start
            if past >= limit_s:
                break
            late = past >= min(_GOAWAY_GRACE_S, limit_s / 2)
            for link in [link for link in self._links if link.idle and (late or link.saw_goaway)]:
                link.lost()
            await asyncio.sleep(min(_DRAIN_STEP_S, limit_s - past))
        self.close()
        await asyncio.sleep(0)

    def is_placing(self) -> bool:
        """Return whether a call that decides the placement of containers is open."""
        return any(
            path.rpartition("/")[2] in PLACEMENT_METHODS
            for link in self._links
            for path in link.intercepted()
        )

    async def retire(self, limit_s: float) -> None:
        """Stop accepting, and wait until each client has seen the GOAWAY to continue on another connection.

        Calls in flight continue. After ``limit_s`` seconds, clients that do not read are not waited for.
        """
        self.stop_accepting()
        end = asyncio.get_running_loop().time() + limit_s
        while self._opening or any(not link.saw_goaway for link in self._links):
            self._send_goaway()
            if asyncio.get_running_loop().time() >= end:
                return
            await asyncio.sleep(_QUIET_STEP_S)

    def refuse_undecided(self, code: int, message: str) -> None:
        """Refuse the calls that are not decided yet."""
        for link in list(self._links):
            link.refuse_undecided(code, message)

    def calls(self) -> list[InterceptedCall]:
        """Return the intercepted calls that are open on all connections."""
        return [call for link in self._links for call in link.calls()]

    def _send_goaway(self) -> None:
        for link in list(self._links):
            link.goaway()

    def close(self) -> None:
        """Stop accepting and close each connection once its pending bytes are written."""
        self.stop_accepting()
        for task in list(self._opening):
            task.cancel()
        for link in list(self._links):
            link.lost()

    def _end_largest(self) -> None:
        """End the connection with the most unread bytes if all connections together exceed the limit."""
        if sum(link.unread for link in self._links) > UNREAD_BYTES:
            worst = max(self._links, key=_unread)
            asyncio.get_running_loop().call_soon(
                worst.abort, "its peer does not read, and too many bytes wait"
            )

    # -- accepting ----------------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """Accept no further client; call this before the listening socket is closed.

        If systemd also holds the socket, it stays readable for epoll after it was closed here.
        """
        if self._listener is not None:
            self._listener = None
            asyncio.get_running_loop().remove_reader(self._fd)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if self._listener is None:
                return
            try:
                client = self._listener.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except (OSError, MemoryError) as error:  # out of descriptors or memory: others may give some back
                loop = asyncio.get_running_loop()
                loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)
                loop.remove_reader(self._fd)
                with contextlib.suppress(MemoryError):
                    cause = getattr(error, "strerror", "out of memory")
                    self._report(NOT_ACCEPTED, err=cause)
                    self._accept_fails = True
                return
            if self._accept_fails:
                self._accept_fails = False
                self._resolved(NOT_ACCEPTED)
            task = asyncio.get_running_loop().create_task(self._open(client))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _resume_accepting(self) -> None:
        if self._listener is not None and self._listener.fileno() == self._fd:
            asyncio.get_running_loop().add_reader(self._fd, self._accept)

    async def _open(self, client: socket.socket) -> None:
        """Connect one client with the runtime."""
        client.setblocking(False)
        server: socket.socket | None = None
        link = Link(self._context)
        try:
            server = await self._dial()
            self._reached()
            _enlarge(client)
            _enlarge(server)
            self._links.add(link)
            link.server.attach(server)
            link.client.attach(client)
        except BaseException as error:
            link.lost()
            client.close()
            if server is not None:
                server.close()
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, OSError):
                self._report("cannot relay a connection", err=error)
                self._fault(error)
                return
            self._down = self._down or error.errno not in NO_DESCRIPTORS
            failure = error.strerror or str(error)
            if failure != self._failure:  # report once for each outage: a client tries many times a second
                self._failure = failure
                self._report(UNREACHABLE, path=self._upstream, err=failure)

    async def _dial(self) -> socket.socket:
        """Connect to the runtime without ever waiting in the kernel.

        Raises:
            OSError: It cannot be reached.
        """
        loop = asyncio.get_running_loop()
        limit = loop.time() + _DIAL_LIMIT_S
        server = _unix_socket()
        try:
            while True:
                try:
                    server.connect(self._upstream)
                except BlockingIOError:  # its backlog is full (a unix socket is never "in progress")
                    if loop.time() > limit:
                        raise
                    await asyncio.sleep(_DIAL_RETRY_S)
                else:
                    return server
        except BaseException:
            server.close()
            raise


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def _unread(link: Link) -> int:
    return link.unread


def _spellings(methods: Collection[str]) -> frozenset[str]:
    """Return all values of ``:path`` for which a server would run one of these methods.

    A server written in Go takes a path without its first slash (grpc-go, ``Server.handleStream``; since 1.79
    only with GRPC_GO_EXPERIMENTAL_DISABLE_STRICT_PATH_CHECKING). It strips one slash and nothing else.
    """
    return frozenset(methods) | {path.removeprefix("/") for path in methods}


def _enlarge(end: socket.socket) -> None:
    """Give a socket room for large answers: the default holds 208 KiB."""
    try:
        end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BUFFER)
    except OSError:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
