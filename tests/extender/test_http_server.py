"""HTTP: persistent connections, limits, and shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from proxy import logs
from proxy.extender.http_server import HttpAnswer, HttpServer, server_context
from proxy.model.errors import InputError

Client = Callable[[bytes], Awaitable[bytes]]


async def handler(method: str, path: str, body: bytes, trusted: bool) -> HttpAnswer:
    assert trusted, "there is no TLS"
    if path == "/fault":
        raise ZeroDivisionError
    if path == "/slow":
        await asyncio.sleep(0.2)
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
            async with asyncio.timeout(5):
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
        await asyncio.sleep(0.05)
        stopping = asyncio.ensure_future(server.stop(2))
        head, _ = await answer(reader)
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"Connection: close" in head
        await stopping

    served(test)


def test_an_unusable_certificate_is_reported(tmp_path: Path) -> None:
    none, wrong = tmp_path / "none.pem", tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    with pytest.raises(InputError, match=f"^cannot use the certificate of {none} and {none}: No such file"):
        server_context(str(none), str(none), str(none))
    with pytest.raises(InputError, match=f"^cannot use the certificate of {wrong} and {wrong}: "):
        server_context(str(wrong), str(wrong), str(wrong))
