"""Requests to the API server: files of credentials that change, answers that do not end, refused tokens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import pytest
from lightkube import KubeConfig
from lightkube.config.models import User

from proxy.agent import api_client
from proxy.agent.api_client import ApiClient, ApiServerError, ApiUnreachableError, retry_after
from proxy.agent.credentials import read_credentials
from proxy.config.cluster import ClusterConfig
from proxy.extender.http_server import server_context
from tests.agent.kubeconfig import CLUSTERS, CONTEXT
from tests.cluster.extender_process import make_certificates
from tests.testkit.waiting import until


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return tmp_path / "kubeconfig"


class ServerWithTls:
    """An API server that answers a list, and a watch that stays open; with a CA of its own."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.directory = directory / name
        self.directory.mkdir()
        make_certificates(self.directory)
        self.tokens: list[str] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, port: int = 0) -> None:
        certificate, key, ca = (str(self.directory / name) for name in ("server.crt", "server.key", "ca.crt"))
        tls = server_context(certificate, key, ca)
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.tokens += [line[22:] for line in head.split("\r\n") if line.startswith("Authorization:")]
                if "watch=true" in head:
                    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}\n")
                    await asyncio.sleep(0.3)
                    writer.write(b"{}\n")
                    break
                body = b'{"name": "%s"}' % self.name.encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()


def with_two_servers(
    directory: Path, test: Callable[[ApiClient, ServerWithTls, ServerWithTls], Awaitable[None]]
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    async def run() -> None:
        servers = ServerWithTls(directory, "former"), ServerWithTls(directory, "new")
        client = ApiClient(lambda: read_credentials(ClusterConfig(kubeconfig=directory / "kubeconfig")))
        shutil.copy(directory / "former/ca.crt", directory / "ca.crt")
        (directory / "token").write_text("token-1")
        try:
            for server in servers:
                await server.start()
            write_kubeconfig(directory, servers[0].port)
            async with asyncio.timeout(20):
                await test(client, *servers)
        finally:
            await client.close()
            for server in servers:
                await server.stop()

    asyncio.run(run())


def write_kubeconfig(directory: Path, port: int) -> None:
    cluster = f"{{server: 'https://127.0.0.1:{port}', certificate-authority: ca.crt}}"
    user = f"{{tokenFile: {directory}/token}}"
    (directory / "kubeconfig").write_text(
        f"clusters: [{{name: c, cluster: {cluster}}}]\nusers: [{{name: u, user: {user}}}]\n{CONTEXT}"
    )


async def name_of(client: ApiClient) -> str:
    while True:
        try:
            return str((await client.get("/apis"))["name"])
        except ApiUnreachableError:
            await asyncio.sleep(0.01)


def test_a_ca_that_is_replaced_needs_no_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "COMPARE_S", 0.05)

    async def test(client: ApiClient, former: ServerWithTls, new: ServerWithTls) -> None:
        assert await name_of(client) == "former"
        port = former.port
        await former.stop()
        await new.stop()
        await new.start(port)
        with pytest.raises(ApiUnreachableError):
            await client.get("/apis")
        (tmp_path / "ca.crt").write_text("-----BEGIN CERTIFICATE-----\nMIIB")  # it is being written
        await asyncio.sleep(0.06)
        with pytest.raises(ApiUnreachableError):
            await client.get("/apis")
        shutil.copy(tmp_path / "new/ca.crt", tmp_path / "ca.crt")
        assert await name_of(client) == "new"

    with_two_servers(tmp_path, test)


def test_an_address_that_changes_needs_no_restart_and_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_client, "COMPARE_S", 0.05)

    async def test(client: ApiClient, former: ServerWithTls, new: ServerWithTls) -> None:
        async with client.watch("/api/v1/pods", {}, 10) as lines:
            assert await anext(lines) == b"{}"
            shutil.copy(tmp_path / "new/ca.crt", tmp_path / "ca.crt")
            write_kubeconfig(tmp_path, new.port)
            await asyncio.sleep(0.06)
            assert await name_of(client) == "new"
            assert [line async for line in lines] == [b"{}"]

    with_two_servers(tmp_path, test)


def test_a_new_token_is_used_before_the_former_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_client, "COMPARE_S", 0.05)
    monkeypatch.setattr(api_client, "RETIRE_S", 2.0)

    async def test(client: ApiClient, former: ServerWithTls, new: ServerWithTls) -> None:
        await client.get("/apis")
        (tmp_path / "token").write_text("token-22")
        await asyncio.sleep(0.06)
        await client.get("/apis")
        assert former.tokens == ["token-1", "token-22"]
        assert len(client._retiring) == 1
        await until(lambda: not client._retiring)

    with_two_servers(tmp_path, test)


def test_an_answer_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "REQUEST_TIMEOUT_S", 0.3)

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.01)
        writer.close()
        ended.set()

    ended = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(trickle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        cluster = KubeConfig.from_server(url).clusters["default"]
        found = KubeConfig.from_one(cluster=cluster, user=User()).get()
        assert found is not None
        client = ApiClient(lambda: found)
        try:
            async with asyncio.timeout(10):
                with pytest.raises(ApiUnreachableError, match=r"the API server: TimeoutError$"):
                    await client.get("/apis")
                await ended.wait()
        finally:
            await client.close()
            server.close()

    asyncio.run(run())


# -- answers that ask for another attempt ------------------------------------------------------------------


class StrictServer(httpx2.AsyncBaseTransport):
    """An API server that accepts one token.

    Attributes:
        token: The token.
        bodies: The bodies of the requests.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.bodies: list[bytes] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        self.bodies.append(b"".join([piece async for piece in request.stream]))
        if request.headers["Authorization"] != f"Bearer {self.token}":
            return httpx2.Response(401, json={"message": "Unauthorized"})
        return httpx2.Response(200, json={"kind": "Status"})


@pytest.mark.parametrize("in_file", [True, False])
def test_a_request_is_repeated_with_a_token_that_was_replaced(file: Path, in_file: bool) -> None:
    def write(token: str) -> None:
        file.with_name("token").write_text(token)
        user = f"{{tokenFile: {file.with_name('token')}}}" if in_file else f"{{token: {token}}}"
        file.write_text(f"{CLUSTERS}users: [{{name: u, user: {user}}}]\n{CONTEXT}")

    async def run() -> None:
        server, checks = StrictServer("token-1"), [0]
        client = ApiClient(lambda: read_credentials(ClusterConfig(kubeconfig=file)), server)

        def check() -> None:
            checks[0] += 1

        write("token-1")
        await client.get("/apis")
        for number in range(2, 5):
            server.token = f"token-{number}"
            write(server.token)
            os.utime(file, (number, number))
            os.utime(file.with_name("token"), (number, number))
            server.bodies.clear()
            if number == 2:
                await client.get("/apis")
            elif number == 3:
                await client.create("/api/v1/namespaces/a/pods/p/binding", {"a": 1}, check=check)
                assert server.bodies == [b'{"a":1}', b'{"a":1}']
                assert checks == [2], "it is checked each time before it is sent"
            else:
                async with client.watch("/api/v1/pods", {}, 10.0):
                    pass
            assert len(server.bodies) == 2
        server.token = "other"
        for _ in range(2):
            server.bodies.clear()
            with pytest.raises(ApiServerError) as raised:
                await client.get("/apis")
            assert raised.value.status == 401
        assert len(server.bodies) <= 2, "the credentials are the same"
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "text", "seconds"),
    [
        (429, "1", 1.0),
        (503, "7", 7.0),
        (503, "86400", api_client.LONGEST_RETRY_AFTER_S),
        (404, "7", 0.0),
        (503, "Fri, 31 Dec 1999 23:59:59 GMT", 0.0),
        (503, "-1", 0.0),
        (503, "\u00b2", 0.0),
        (503, None, 0.0),
    ],
)
def test_the_delay_that_the_api_server_requests(status: int, text: str | None, seconds: float) -> None:
    class Busy(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            headers = {} if text is None else {"Retry-After": text.encode()}
            return httpx2.Response(status, headers=headers, json={"message": "busy"})

    async def run() -> None:
        cluster = KubeConfig.from_server("http://api").clusters["default"]
        found = KubeConfig.from_one(cluster=cluster, user=User()).get()
        assert found is not None
        client = ApiClient(lambda: found, Busy())
        for attempt in (client.get("/apis"), client.watch("/apis", {}, 1.0).__aenter__()):
            with pytest.raises(ApiServerError) as raised:
                await attempt
            assert retry_after(raised.value) == seconds
        await client.close()

    asyncio.run(run())
