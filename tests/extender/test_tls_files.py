"""Certificates that are replaced while the extender runs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path

import pytest

from proxy.extender import tls_files
from proxy.extender.http_server import HttpAnswer, HttpServer
from proxy.extender.tls_files import CANNOT, TlsFiles, follow_tls_files
from proxy.model.errors import InputError
from tests.cluster.extender_process import make_certificates
from tests.testkit.captured_log import telemetry
from tests.testkit.waiting import until

NAMES = ("server.crt", "server.key", "ca.crt")


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two directories of certificates; each has a CA of its own."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("issued")
    for name in ("former", "new"):
        (directory / name).mkdir()
        make_certificates(directory / name)
    return directory


async def handler(method: str, path: str, body: bytes, trusted: bool) -> HttpAnswer:
    return HttpAnswer("trusted" if trusted else "not trusted")


class ReloadingTlsServer:
    """A server whose files can be replaced, and clients that have a certificate."""

    def __init__(self, issued: Path, directory: Path) -> None:
        self.issued = issued
        self.directory = directory
        self.files = TlsFiles(*(str(directory / name) for name in NAMES))
        self.lines: list[str] = []
        self.server = HttpServer(handler, telemetry(self.lines))
        self.writers: list[asyncio.StreamWriter] = []

    def replace(self, by: str, *names: str) -> None:
        for name in names or NAMES:
            shutil.copy(self.issued / by / name, self.directory / name)

    async def connect(self, of: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context(cafile=str(self.issued / of / "ca.crt"))
        context.load_cert_chain(self.issued / of / "client.crt", self.issued / of / "client.key")
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, ssl=context)
        self.writers.append(writer)
        return reader, writer

    async def is_served(self, of: str) -> bool:
        """Return whether a client of one of the CAs is served, and trusted."""
        try:
            return await asked(*await self.connect(of))
        except (ssl.SSLError, OSError, asyncio.IncompleteReadError):
            return False


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 200") and await reader.read(7) == b"trusted"


def with_files(issued: Path, directory: Path, test: Callable[[ReloadingTlsServer], Awaitable[None]]) -> None:
    async def run() -> None:
        server = ReloadingTlsServer(issued, directory)
        server.replace("former")
        used = server.files.stamps()
        await server.server.start("127.0.0.1", 0, server.files.context())
        following = asyncio.ensure_future(
            follow_tls_files(server.files, used, server.server.use_tls, telemetry(server.lines))
        )
        try:
            async with asyncio.timeout(20):
                await test(server)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            for writer in server.writers:
                writer.transport.abort()
            await server.server.stop(0)

    asyncio.run(run())


def test_new_files_are_used_and_open_connections_stay(
    issued: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_files, "COMPARE_S", 0.02)

    async def test(server: ReloadingTlsServer) -> None:
        kept = await server.connect("former")
        assert await asked(*kept)
        server.replace("new")
        while not await server.is_served("new"):
            await asyncio.sleep(0.02)
        assert not await server.is_served("former")
        assert await asked(*kept)
        server.replace("former")
        while not await server.is_served("former"):
            await asyncio.sleep(0.02)

    with_files(issued, tmp_path, test)


def test_files_that_do_not_belong_together_are_not_used(
    issued: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_files, "COMPARE_S", 0.02)

    async def test(server: ReloadingTlsServer) -> None:
        server.replace("new", "server.crt")
        await until(lambda: any(line.startswith(CANNOT) for line in server.lines))
        assert await server.is_served("former")
        (tmp_path / "server.key").unlink()
        await asyncio.sleep(0.1)
        assert await server.is_served("former")
        server.replace("new")
        while not await server.is_served("new"):
            await asyncio.sleep(0.02)
        assert any(line.startswith("resolved") for line in server.lines)

    with_files(issued, tmp_path, test)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_removed_while_it_is_read_is_reported(
    issued: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files = TlsFiles(*(str(shutil.copy(issued / "new" / each, tmp_path)) for each in NAMES))

    def removed(path: Path) -> BytesIO:
        (tmp_path / name).unlink(missing_ok=True)
        return BytesIO()

    monkeypatch.setattr("proxy.extender.http_server.open_file", removed)
    with pytest.raises(InputError, match=f"cannot read .*{name}: No such file"):
        files.context()
