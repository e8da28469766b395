"""HTTP: persistent connections, limits, and shutdown."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from proxy import logs
from proxy.extender import http_server as module
from proxy.extender.http_server import HttpAnswer, HttpServer, server_context
from proxy.model.errors import CannotCreateError, InputError
from tests.cluster.extender_process import make_certificates
from tests.testkit.waiting import LIMIT_S

Client = Callable[[bytes], Awaitable[bytes]]


class SlowRoute:
    """Requests of ``/slow``: each waits until it is released."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.released = asyncio.Event()

    async def hold(self) -> None:
        self.reached.set()
        await self.released.wait()


slow_route = SlowRoute()


@pytest.fixture(autouse=True)
def new_slow_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "slow_route", SlowRoute())


async def handler(method: str, path: str, body: bytes, trusted: bool) -> HttpAnswer:
    assert trusted, "there is no TLS"
    if path == "/fault":
        raise ZeroDivisionError
    if path == "/slow":
        await slow_route.hold()
    return HttpAnswer({"method": method, "path": path, "body": body.decode()}, 503 if path == "/no" else 200)


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
    return head, await reader.readexactly(length)


def served(test: Callable[[HttpServer, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
    async def run() -> None:
        server = HttpServer(handler, logs.telemetry())
        await server.start("127.0.0.1", 0, None)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            async with asyncio.timeout(LIMIT_S):
                await test(server, reader, writer)
        finally:
            writer.close()
            await server.stop(0)

    asyncio.run(run())


def test_a_connection_serves_many_requests() -> None:
    async def test(server: HttpServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(3):
            writer.write(b"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nn%d" % number)
            head, body = await answer(reader)
            assert head.startswith(b"HTTP/1.1 200 OK")
            assert body == b'{"method":"POST","path":"/filter","body":"n%d"}' % number

    served(test)


def test_internal_errors_close_the_connection() -> None:
    async def test(server: HttpServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /fault HTTP/1.1\r\n\r\n")
        head, body = await answer(reader)
        assert head.startswith(b"HTTP/1.1 500")
        assert b"Connection: close" in head
        assert body == b"internal error: ZeroDivisionError\n"
        assert await reader.read() == b""

    served(test)


def test_bodies_have_a_limit() -> None:
    async def test(server: HttpServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /filter HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")
        head, _ = await answer(reader)
        assert head.startswith(b"HTTP/1.1 413")

    served(test)


def test_what_is_not_http_ends_the_connection() -> None:
    async def test(server: HttpServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x16\x03\x01\r\n\r\n")
        assert await reader.read() == b""

    served(test)


def test_requests_in_flight_are_answered_at_shutdown() -> None:
    async def test(server: HttpServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /slow HTTP/1.1\r\n\r\n")
        await slow_route.reached.wait()
        stopping = asyncio.ensure_future(server.stop(60))
        await asyncio.sleep(0.05)
        slow_route.released.set()
        head, _ = await answer(reader)
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"Connection: close" in head
        await stopping

    served(test)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory)
    return directory


def context_of(directory: Path, **changed: str) -> ssl.SSLContext:
    files = {"certificate": "server.crt", "key": "server.key", "client_ca": "ca.crt", **changed}
    return server_context(**{name: str(directory / file) for name, file in files.items()})


@pytest.mark.parametrize("file", ["text", "binary", "server.key"])
def test_an_unusable_certificate_is_reported(certificates: Path, file: str) -> None:
    (certificates / "text").write_text("no certificate")
    (certificates / "binary").write_bytes(bytes(range(256)))
    cause = f"^cannot use the certificate {certificates / file}: it is not a PEM certificate$"
    for name in ("certificate", "client_ca"):
        with pytest.raises(InputError, match=cause):
            context_of(certificates, **{name: file})


@pytest.mark.parametrize(("file", "cause"), [("ca.crt", "a PEM key"), ("client.key", "the key of ")])
def test_an_unusable_key_is_reported(certificates: Path, file: str, cause: str) -> None:
    with pytest.raises(InputError, match=f"^cannot use the key {certificates / file}: it is not {cause}"):
        context_of(certificates, key=file)


@pytest.mark.parametrize("name", ["certificate", "key", "client_ca"])
def test_a_missing_file_is_reported(certificates: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"^cannot read {certificates / 'none'}: No such file or directory$"):
        context_of(certificates, **{name: "none"})


@pytest.mark.timeout(30)
def test_a_named_pipe_is_no_key(certificates: Path) -> None:
    os.mkfifo(certificates / "pipe")
    with pytest.raises(InputError, match=f"^cannot read {certificates / 'pipe'}: it is not a regular file$"):
        context_of(certificates, key="pipe")


def test_an_address_that_is_used_is_reported_in_the_words_of_the_system() -> None:
    async def test(server: HttpServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other = HttpServer(handler, logs.telemetry())
        with pytest.raises(CannotCreateError) as raised:
            await other.start("127.0.0.1", server.port, None)
        assert str(raised.value) == f"cannot listen on 127.0.0.1:{server.port}: Address already in use"

    served(test)


# -- limits ------------------------------------------------------------------------------------------------


async def by_trust(method: str, path: str, body: bytes, trusted: bool) -> HttpAnswer:
    if path == "/slow":
        await slow_route.hold()
    return HttpAnswer(f"{len(body)}", 200 if trusted or path == "/livez" else 403)


class TlsServer:
    """A server with TLS, and clients with and without a certificate."""

    def __init__(self, certificates: Path) -> None:
        self.certificates = certificates
        self.server = HttpServer(by_trust, logs.telemetry())
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self, *, trusted: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context(cafile=str(self.certificates / "ca.crt"))
        if trusted:
            context.load_cert_chain(self.certificates / "client.crt", self.certificates / "client.key")
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, ssl=context)
        self.writers.append(writer)
        return reader, writer

    async def get(self, path: str, *, trusted: bool) -> bytes:
        reader, writer = await self.connect(trusted=trusted)
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        return (await answer(reader))[0].split(b"\r\n")[0]


def with_tls(certificates: Path, test: Callable[[TlsServer], Awaitable[None]]) -> None:
    async def run() -> None:
        server = TlsServer(certificates)
        await server.server.start("127.0.0.1", 0, context_of(certificates))
        try:
            async with asyncio.timeout(20):
                await test(server)
        finally:
            for writer in server.writers:
                writer.transport.abort()
            await server.server.stop(0)

    asyncio.run(run())


def test_idle_connections_keep_neither_probes_nor_schedulers_out(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANONYMOUS_CONNECTION_LIMIT", 3)
    monkeypatch.setattr(module, "CONNECTION_LIMIT", 3)

    async def test(server: TlsServer) -> None:
        idle = [await server.connect(trusted=False) for _ in range(5)]
        assert await server.get("/livez", trusted=False) == b"HTTP/1.1 200 OK"
        assert await server.get("/bind", trusted=True) == b"HTTP/1.1 200 OK"
        assert await server.get("/bind", trusted=False) == b"HTTP/1.1 403 Forbidden"
        assert await idle[0][0].read() == b"", "the oldest has given way"
        for _ in range(5):
            await server.connect(trusted=True)
        assert await server.get("/bind", trusted=True) == b"HTTP/1.1 200 OK"
        assert await server.get("/livez", trusted=False) == b"HTTP/1.1 200 OK"

    with_tls(certificates, test)


def test_busy_connections_of_schedulers_stay(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTION_LIMIT", 1)

    async def test(server: TlsServer) -> None:
        slow = asyncio.ensure_future(server.get("/slow", trusted=True))
        await slow_route.reached.wait()
        reader, _ = await server.connect(trusted=True)
        assert await reader.read() == b"", "there is no room"
        slow_route.released.set()
        assert await slow == b"HTTP/1.1 200 OK"

    with_tls(certificates, test)


def test_a_client_without_a_certificate_must_send_a_request_soon(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANONYMOUS_S", 0.3)

    async def test(server: TlsServer) -> None:
        reader, _ = await server.connect(trusted=False)
        kept, writer = await server.connect(trusted=True)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.write(b"GET /bind HTTP/1.1\r\n\r\n")
        assert (await answer(kept))[0].startswith(b"HTTP/1.1 200 OK")

    with_tls(certificates, test)


def test_a_body_that_does_not_come_holds_no_place(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANONYMOUS_CONNECTION_LIMIT", 2)

    async def test(server: TlsServer) -> None:
        for _ in range(4):
            _, writer = await server.connect(trusted=False)
            writer.write(b"POST /filter HTTP/1.1\r\nContent-Length: 5\r\n\r\n")
            await writer.drain()
        await asyncio.sleep(0.1)
        assert await server.get("/livez", trusted=False) == b"HTTP/1.1 200 OK"

    with_tls(certificates, test)


def test_a_large_body_of_a_client_without_a_certificate_is_not_read(certificates: Path) -> None:
    async def test(server: TlsServer) -> None:
        reader, writer = await server.connect(trusted=False)
        writer.write(b"POST /filter HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n")
        head, body = await answer(reader)
        assert head.startswith(b"HTTP/1.1 403 Forbidden")
        assert (body, await reader.read()) == (b"0", b"")

    with_tls(certificates, test)
