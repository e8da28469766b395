"""A small HTTP/1.1 server for kube-scheduler, kubelet's probes and Prometheus, with persistent connections.

Go's client keeps connections open and sends one request at a time on each. A connection whose answer is an
error of the extender itself (503 and above) is closed after it, so that the next request may reach another
replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Struct

from proxy.model.errors import CannotCreateError, InputError
from proxy.telemetry.port import Telemetry

HEAD_LIMIT = 32 << 10
BODY_LIMIT = 16 << 20
IDLE_S = 120.0
REQUEST_S = 20.0
CONNECTIONS = 256
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"}
_REASONS |= {413: "Content Too Large", 500: "Internal Server Error", 503: "Service Unavailable"}


class HttpAnswer(Struct, frozen=True):
    """An answer: a text, or anything that JSON can hold."""

    value: object
    status: int = 200


Handler = Callable[[str, str, bytes, bool], Awaitable[HttpAnswer]]
"""A function of the method, the path with its query, the body, and whether the client is trusted."""


class HttpServer:
    """Serves one handler.

    Attributes:
        port: The port on which it listens.
    """

    def __init__(self, handler: Handler, telemetry: Telemetry) -> None:
        self._handler = handler
        self._telemetry = telemetry
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], bool] = {}
        self._draining = False
        self.port = 0

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Listen.

        Raises:
            CannotCreateError: The address is taken, or may not be used.
        """
        try:
            self._server = await asyncio.start_server(
                self._connection, host or None, port, ssl=tls, limit=HEAD_LIMIT
            )
        except OSError as error:
            raise CannotCreateError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self, seconds: float) -> None:
        """Stop listening, let requests in flight end, and close other connections after some seconds."""
        if self._server is None:
            return
        self._server.close()
        self._draining = True
        for task, busy in list(self._connections.items()):
            if not busy:
                task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=seconds)
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = False
        try:
            if len(self._connections) <= CONNECTIONS:
                while not self._draining and await self._exchange(reader, writer, task):
                    pass
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # the client went away, or does not speak HTTP
        except asyncio.CancelledError:
            if not self._draining:
                raise
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), 1.0)
            self._connections.pop(task, None)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> bool:
        """Answer one request; returns whether the connection stays open."""
        async with asyncio.timeout(IDLE_S):
            head = await reader.readuntil(b"\r\n\r\n")
        self._connections[task] = True
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
        async with asyncio.timeout(REQUEST_S):
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await reader.readexactly(length) if length else b""
            answer = await self._answer(method, path, body, trusted=_is_trusted(writer))
            wants = headers.get("connection", "").lower() != "close" and version == "HTTP/1.1"
            keep = wants and answer.status < 500 and not self._draining
            await _send(writer, answer, keep=keep)
        self._connections[task] = False
        return keep

    async def _answer(self, method: str, path: str, body: bytes, *, trusted: bool) -> HttpAnswer:
        try:
            return await self._handler(method, path, body, trusted)
        except Exception as error:  # noqa: BLE001 - a fault in one answer must not end the process
            self._telemetry.fault(error)
            return HttpAnswer(f"internal error: {type(error).__name__}\n", 500)


def _is_trusted(writer: asyncio.StreamWriter) -> bool:
    """Return whether a client has a certificate of the authority; without TLS every client is trusted."""
    return writer.get_extra_info("ssl_object") is None or bool(writer.get_extra_info("peercert"))


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
    """Return the TLS settings of the server; a certificate of a client must be of the authority.

    Raises:
        InputError: A file cannot be read, or has invalid content.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # kube-scheduler keeps none, and opens many connections
    for files, load in (
        ((certificate, key), context.load_cert_chain),
        ((client_ca,), context.load_verify_locations),
    ):
        try:
            load(*files)
        except OSError as error:  # ssl.SSLError is one
            cause = error.strerror or str(error)
            raise InputError(f"cannot use the certificate of {' and '.join(files)}: {cause}") from error
    context.verify_mode = ssl.CERT_OPTIONAL  # probes of kubelet have none
    return context
