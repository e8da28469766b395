"""A small HTTP/1.1 server for kube-scheduler, kubelet's probes and Prometheus, with persistent connections.

Go's client keeps connections open and sends one request at a time on each. A connection is closed after an
answer that is an error of the extender itself (503 and above), so that the next request may reach another
replica.

Any client that reaches the port may connect without a certificate, as probes do. So clients with a
certificate and clients without one have separate limits. If a limit is reached, the connection that has been
idle for longest gives way to the new one, so idle connections keep out neither probes nor schedulers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from proxy.model.errors import CannotCreateError, InputError
from proxy.open_file import open_file
from proxy.telemetry.port import Telemetry

HEAD_LIMIT = 32 << 10
BODY_LIMIT = 16 << 20
IDLE_S = 120.0
REQUEST_S = 20.0
CONNECTION_LIMIT = 256
ANONYMOUS_CONNECTION_LIMIT = 32
"""The most connections of clients without a certificate."""
ANONYMOUS_S = 5.0
"""Seconds for a handshake; also, for a client without a certificate, for its first request and each body."""
ANONYMOUS_BODY_LIMIT = 64 << 10
"""The most bytes that are read of such a client's body; its requests need no body."""
CLOSE_S = 1.0
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"}
_REASONS |= {413: "Content Too Large", 500: "Internal Server Error", 503: "Service Unavailable"}


class HttpAnswer(Struct, frozen=True):
    """An answer: a text, or a value for JSON."""

    value: object
    status: int = 200


Handler = Callable[[str, str, bytes, bool], Awaitable[HttpAnswer]]
"""A function of the method, the path with its query, the body, and whether the client is trusted."""


@dataclass(slots=True)
class _Connection:
    """A connection.

    Attributes:
        writer: Writes to it.
        trusted: Whether the client has a certificate, or needs none.
        busy: Whether a request is being answered.
        served: Whether there was a request.
    """

    writer: asyncio.StreamWriter
    trusted: bool
    busy: bool = False
    served: bool = False


class HttpServer:
    """Serves one handler.

    Attributes:
        port: The port on which it listens.
    """

    def __init__(self, handler: Handler, telemetry: Telemetry) -> None:
        self._handler = handler
        self._telemetry = telemetry
        self._servers: list[asyncio.Server] = []
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        """The open connections, in the order in which they have become idle."""
        self._draining = False
        self.port = 0

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Listen.

        Raises:
            CannotCreateError: The address is taken, or may not be used.
        """
        try:
            server = await asyncio.start_server(
                self._serve_connection, host or None, port, ssl=tls, limit=HEAD_LIMIT, **_limits(tls)
            )
        except OSError as error:
            raise CannotCreateError(f"cannot listen on {host}:{port}: {_cause(error)}") from error
        self._servers = [server]
        self.port = server.sockets[0].getsockname()[1]

    async def use_tls(self, tls: ssl.SSLContext) -> None:
        """Use other TLS settings for new connections; open connections stay."""
        former = self._servers
        # The old and the new server share the sockets for a moment, so that no connection is refused.
        sockets = [os.dup(each.fileno()) for server in former for each in server.sockets]
        self._servers = [
            await asyncio.start_server(
                self._serve_connection,
                sock=socket.socket(fileno=each),
                ssl=tls,
                limit=HEAD_LIMIT,
                **_limits(tls),
            )
            for each in sockets
        ]
        for server in former:
            server.close()

    async def stop(self, seconds: float) -> None:
        """Stop listening, let requests in flight end, and close other connections after some seconds."""
        for server in self._servers:
            server.close()
        self._draining = True
        for task, connection in list(self._connections.items()):
            if not connection.busy:
                task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=seconds)
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(writer, _is_trusted(writer))
        is_admitted = self._make_room(trusted=connection.trusted)
        self._connections[task] = connection
        try:
            while is_admitted and not self._draining and await self._exchange(reader, connection):
                self._connections[task] = self._connections.pop(task)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # the client went away, or does not speak HTTP
        except asyncio.CancelledError:
            if not self._draining:
                raise
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), CLOSE_S)
            self._connections.pop(task, None)

    def _make_room(self, *, trusted: bool) -> bool:
        """Make room for one more connection; return False if all are busy."""
        open_ones = [each for each in self._connections.values() if not each.writer.is_closing()]
        same_kind = [each for each in open_ones if each.trusted == trusted]
        if len(same_kind) < (CONNECTION_LIMIT if trusted else ANONYMOUS_CONNECTION_LIMIT):
            return True
        for each in same_kind:
            if not each.busy:
                each.writer.transport.abort()
                return True
        return False

    async def _exchange(self, reader: asyncio.StreamReader, connection: _Connection) -> bool:
        """Answer one request; returns whether the connection stays open."""
        writer, trusted = connection.writer, connection.trusted
        async with asyncio.timeout(IDLE_S if trusted or connection.served else ANONYMOUS_S):
            head = await reader.readuntil(b"\r\n\r\n")
        connection.busy, connection.served = trusted, True
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, path, version = first.split(" ")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        length = int(headers.get("content-length", "0"))
        if not 0 <= length <= BODY_LIMIT or "transfer-encoding" in headers:
            await _send(
                writer, HttpAnswer("the body is too large, or of no stated length\n", 413), keep=False
            )
            return False
        is_read = trusted or length <= ANONYMOUS_BODY_LIMIT
        async with asyncio.timeout(REQUEST_S if trusted else ANONYMOUS_S):
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await reader.readexactly(length) if length and is_read else b""
            connection.busy = True  # for a client without a certificate only now: it must not hold a place
            answer = await self._answer(method, path, body, trusted=trusted)
            wants = headers.get("connection", "").lower() != "close" and version == "HTTP/1.1"
            keep = wants and is_read and answer.status < 500 and not self._draining
            await _send(writer, answer, keep=keep)
        connection.busy = False
        return keep

    async def _answer(self, method: str, path: str, body: bytes, *, trusted: bool) -> HttpAnswer:
        try:
            return await self._handler(method, path, body, trusted)
        except Exception as error:  # noqa: BLE001 - a fault in one answer must not end the process
            self._telemetry.fault(error)
            return HttpAnswer(f"internal error: {type(error).__name__}\n", 500)


def _is_trusted(writer: asyncio.StreamWriter) -> bool:
    """Return whether a client has a certificate signed by the CA; without TLS every client is trusted."""
    return writer.get_extra_info("ssl_object") is None or bool(writer.get_extra_info("peercert"))


def _limits(tls: ssl.SSLContext | None) -> dict[str, Any]:
    """Return how long a client may take to open and to close a connection."""
    return {"ssl_handshake_timeout": ANONYMOUS_S, "ssl_shutdown_timeout": CLOSE_S} if tls is not None else {}


def _cause(error: OSError) -> str:
    """Return why an address cannot be used; asyncio wraps the system's text in a sentence of its own."""
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)


async def _send(writer: asyncio.StreamWriter, answer: HttpAnswer, *, keep: bool) -> None:
    if isinstance(answer.value, str):
        kind, body = "text/plain; charset=utf-8", answer.value.encode()
    else:
        kind, body = "application/json", msgspec.json.encode(answer.value)
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Error')}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: {'keep-alive' if keep else 'close'}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()


def server_context(certificate: str, key: str, client_ca: str) -> ssl.SSLContext:
    """Return the TLS settings of the server; a client's certificate must be signed by the CA.

    Raises:
        InputError: A file cannot be read, or has invalid content.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # kube-scheduler stores no tickets, and opens many connections
    for file in (certificate, key, client_ca):
        try:
            open_file(Path(file)).close()
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}") from error
    for file in (certificate, client_ca):
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), file)
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        is_other = error.reason == "KEY_VALUES_MISMATCH"
        cause = f"it is not the key of {certificate}" if is_other else "it is not a PEM key"
        raise InputError(f"cannot use the key {key}: {cause}") from error
    except OSError as error:  # removed since it was opened
        raise InputError(f"cannot read {certificate} and {key}: {error.strerror}") from error
    _load_authorities(context, client_ca)
    context.verify_mode = ssl.CERT_OPTIONAL  # kubelet's probes have no certificate
    return context


def _load_authorities(context: ssl.SSLContext, file: str) -> None:
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise InputError(f"cannot use the certificate {file}: it is not a PEM certificate") from error
    except OSError as error:  # removed since it was opened
        raise InputError(f"cannot read {file}: {error.strerror}") from error
