"""The admin socket with valid, slow, silent and faulty clients."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from proxy.admin import server as module
from proxy.admin.client import query_admin
from proxy.admin.server import AdminServer
from proxy.model.errors import CannotCreateError, InputError, PermissionDeniedError, UnavailableError


async def later() -> dict[str, str]:
    await asyncio.sleep(0)
    return {"late": "yes"}


def broken() -> object:
    raise ValueError("no page")


def echo(params: Mapping[str, str]) -> object:
    if "no" in params:
        raise InputError("cannot say no")
    return dict(params)


async def echo_later(params: Mapping[str, str]) -> object:
    await asyncio.sleep(0)
    return dict(params)


def optional(more: str = "default") -> object:
    return {"more": more}


ROUTES = {"/status": lambda: {"mode": "enforce", "path": Path("/x")}, "/late": later, "/broken": broken}
ROUTES |= {"/surrogate": lambda: "a\udcff\n"}
ROUTES |= {"/echo": echo, "/echo-later": echo_later, "/optional": optional}


def with_server(path: Path, check: Callable[[], Awaitable[None]]) -> None:
    """Run a check while a server is up, and assert that no socket file remains."""

    async def body() -> None:
        server = AdminServer(path, ROUTES)
        await server.start()
        try:
            async with asyncio.timeout(60):
                await check()
        finally:
            await server.stop()
            await server.stop()
        assert not path.exists()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(body())


async def send(path: Path, data: bytes, end: bool = False) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        return await reader.read()
    finally:
        writer.close()


@pytest.fixture
def at(tmp_path: Path) -> Path:
    return tmp_path / "admin.sock"


def test_the_client_receives_the_results_of_the_routes(at: Path) -> None:
    async def check() -> None:
        assert stat.S_IMODE(at.stat().st_mode) == 0o600
        assert await asyncio.to_thread(query_admin, at, "/status") == {"mode": "enforce", "path": "/x"}
        assert await asyncio.to_thread(query_admin, at, "/status?x=1") == {"mode": "enforce", "path": "/x"}
        assert await asyncio.to_thread(query_admin, at, "/late") == {"late": "yes"}
        assert await asyncio.to_thread(query_admin, at, "/healthz") == "ok\n"
        assert await asyncio.to_thread(query_admin, at, "/livez") == "ok\n"
        with pytest.raises(
            UnavailableError,
            match=r"for /no: there is /broken, /echo, /echo-later, /healthz, /late, /livez, /optional, /stat",
        ):
            await asyncio.to_thread(query_admin, at, "/no")
        with pytest.raises(UnavailableError, match="for /broken: cannot answer: ValueError: no page"):
            await asyncio.to_thread(query_admin, at, "/broken")

    with_server(at, check)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /status HTTP/1.1\r\n\r\n", 200),
        (b"GET /status HTTP/1.0\r\nX: " + b"a" * 4000 + b"\r\n\r\n", 200),
        (b"POST /status HTTP/1.1\r\n\r\n", 405),
        (b"GET /../status HTTP/1.1\r\n\r\n", 404),
        (b"GET /echo HTTP/1.1\r\n\r\n", 200),
        (b"GET /echo? HTTP/1.1\r\n\r\n", 200),
        (b"GET /echo?a=" + b"%41" * 340 + b" HTTP/1.1\r\n\r\n", 200),
        (b"GET /echo?a=" + b"%41" * 341 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /echo?a HTTP/1.1\r\n\r\n", 400),
        (b"GET /echo?a=1&a=2 HTTP/1.1\r\n\r\n", 400),
        (b"GET /echo?a=%ff HTTP/1.1\r\n\r\n", 400),
        (b"GET /echo?" + b"&".join(b"%d=1" % i for i in range(8)) + b" HTTP/1.1\r\n\r\n", 200),
        (b"GET /echo?" + b"&".join(b"%d=1" % i for i in range(9)) + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET /echo?no=1 HTTP/1.1\r\n\r\n", 400),
        (b"GET /status?a&a=%ff HTTP/1.1\r\n\r\n", 200),
        (b"GET /status\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x00\xff\r\n\r\n", 400),
        (b"GET /status HTTP/1.1\r\n" + b"X" * 20000, 431),
    ],
)
def test_each_request_is_answered_with_its_status_and_a_body(at: Path, data: bytes, status: int) -> None:
    async def check() -> None:
        head, _, body = (await send(at, data)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
        assert int(length.split()[1]) == len(body) > 0

    with_server(at, check)


def test_parameters_reach_the_routes_that_accept_them(at: Path) -> None:
    async def check() -> None:
        odd = {"query": "ns/pod name&x=1%2F+\u00e9\r\n", "empty": ""}
        for route in ("/echo", "/echo-later"):
            assert await asyncio.to_thread(query_admin, at, route, 5, odd) == odd
        assert await asyncio.to_thread(query_admin, at, "/echo") == {}
        assert await asyncio.to_thread(query_admin, at, "/echo", 5, {}) == {}
        assert await asyncio.to_thread(query_admin, at, "/optional", 5, {"more": "x"}) == {"more": "default"}
        raw = await send(at, b"GET /echo?q=a%20b+c%2Fd HTTP/1.1\r\n\r\n")
        assert json.loads(raw.partition(b"\r\n\r\n")[2]) == {"q": "a b c/d"}

    with_server(at, check)


def test_a_bad_request_is_answered_with_the_reason(at: Path) -> None:
    async def check() -> None:
        with pytest.raises(InputError, match=r"^cannot say no"):
            await asyncio.to_thread(query_admin, at, "/echo", 5, {"no": "1"})
        with pytest.raises(InputError, match="for /echo: the parameters are longer than 1024 bytes"):
            await asyncio.to_thread(query_admin, at, "/echo", 5, {"a": "x" * 2000})
        assert await asyncio.to_thread(query_admin, at, "/echo", 5, {"a": "x" * 1022}) == {"a": "x" * 1022}
        assert b"one is there twice" in await send(at, b"GET /echo?a=1&a=2 HTTP/1.1\r\n\r\n")

    with_server(at, check)


@pytest.mark.parametrize("count", [1023, 9000, 1_000_000])
def test_parameters_that_no_daemon_reads_are_not_sent(at: Path, count: int) -> None:
    """A daemon would close the connection before it has read such a request, as if no daemon were there."""
    with pytest.raises(InputError) as refused:
        query_admin(at, "/echo", 5, {"a": "x" * count})
    assert str(refused.value) == (
        "cannot query the daemon for /echo: the parameters are longer than 1024 bytes"
    )


def test_a_page_that_cannot_be_encoded_is_escaped(at: Path) -> None:
    async def check() -> None:
        assert (await send(at, b"GET /surrogate HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\na\\udcff\n")

    with_server(at, check)


def test_a_fault_of_a_page_is_logged_without_the_page(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty() -> str:
        return ("x" * 100_000 + "\udcff").encode().decode()

    monkeypatch.setitem(ROUTES, "/broken", faulty)
    logged: list[object] = []
    monkeypatch.setattr(module.log, "say_once", lambda *_, err, **__: logged.append(err))

    async def check() -> None:
        answer = await send(at, b"GET /broken HTTP/1.1\r\n\r\n")
        assert b" 500 " in answer.splitlines()[0]

    with_server(at, check)
    (err,) = logged
    assert isinstance(err, str)
    assert err.startswith("UnicodeEncodeError: ")
    assert len(err) < 200


def test_a_truncated_request_is_closed(at: Path) -> None:
    async def check() -> None:
        assert b" 400 " in (await send(at, b"GET /sta", end=True)).splitlines()[0]

    with_server(at, check)


def test_a_silent_client_is_disconnected(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENT_SECONDS", 2.0)

    async def check() -> None:
        assert b" 408 " in (await send(at, b"GET /")).splitlines()[0]

    with_server(at, check)


def test_a_slow_page_times_out(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENT_SECONDS", 2.0)
    monkeypatch.setitem(ROUTES, "/slow", lambda: asyncio.sleep(60))

    async def check() -> None:
        assert b" 504 " in (await send(at, b"GET /slow HTTP/1.1\r\n\r\n")).splitlines()[0]

    with_server(at, check)


def test_a_client_that_does_not_read_is_disconnected(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENT_SECONDS", 1.0)
    received_request = asyncio.Event()

    def big() -> str:
        received_request.set()
        return "x" * (8 << 20)

    monkeypatch.setitem(ROUTES, "/big", big)

    async def check() -> None:
        tasks = len(asyncio.all_tasks())
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(at))
            client.sendall(b"GET /big HTTP/1.1\r\n\r\n")
            await received_request.wait()
            while len(asyncio.all_tasks()) > tasks:  # until no task serves the connection any more
                await asyncio.sleep(0.02)
            client.settimeout(20)
            received = 0
            with pytest.raises(ConnectionResetError):  # noqa: PT012
                while piece := await asyncio.to_thread(client.recv, 1 << 20):
                    received += len(piece)
                raise ConnectionResetError
            assert received < 8 << 20

    with_server(at, check)


def test_too_many_clients(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENT_LIMIT", 2)
    wait, entered = asyncio.Event(), asyncio.Semaphore(0)

    async def hold() -> object:
        entered.release()
        return await wait.wait()

    monkeypatch.setitem(ROUTES, "/late", hold)

    async def check() -> None:
        busy = [asyncio.create_task(send(at, b"GET /late HTTP/1.1\r\n\r\n")) for _ in range(2)]
        for _ in busy:
            await entered.acquire()
        assert b" 503 " in (await send(at, b"GET /status HTTP/1.1\r\n\r\n")).splitlines()[0]
        wait.set()
        await asyncio.gather(*busy)
        assert b" 200 " in (await send(at, b"GET /status HTTP/1.1\r\n\r\n")).splitlines()[0]

    with_server(at, check)


def test_a_silent_client_gives_way_to_a_new_one(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENT_LIMIT", 2)

    async def check() -> None:
        silent = [await asyncio.open_unix_connection(str(at)) for _ in range(4)]
        for _ in range(3):
            assert b" 200 " in (await send(at, b"GET /status HTTP/1.1\r\n\r\n")).splitlines()[0]
        assert await silent[0][0].read() == b"", "the oldest one is gone"
        for _, writer in silent:
            writer.close()

    with_server(at, check)


def test_a_stale_socket_is_replaced_and_an_active_one_is_not(at: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(at))

    async def check() -> None:
        with pytest.raises(CannotCreateError, match="another process answers there"):
            await AdminServer(at, {}).start()
        assert await asyncio.to_thread(query_admin, at, "/healthz") == "ok\n"

    with_server(at, check)


class TestClient:
    def test_a_socket_on_which_no_process_listens_is_named(self, at: Path) -> None:
        with pytest.raises(
            UnavailableError, match=f"cannot query the daemon at {at}: no process listens there"
        ):
            query_admin(at, "/status")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(at))
        with pytest.raises(UnavailableError, match="no process listens there"):
            query_admin(at, "/status")
        with pytest.raises(UnavailableError, match=f"at {at.parent}: it is not a socket"):
            query_admin(at.parent, "/status")

    def test_no_answer_in_time(self, at: Path) -> None:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(at))
            silent.listen()
            with pytest.raises(UnavailableError, match=r"no answer in 0\.1 seconds"):
                query_admin(at, "/status", timeout=0.1)

    def test_a_user_without_permission_is_refused(self, at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("proxy.admin.client._exchange", refuse)
        with pytest.raises(PermissionDeniedError, match="Permission denied"):
            query_admin(at, "/status")

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (b"", "what answers there is not an admin socket"),
            (b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", "what answers there is not an admin socket"),
            (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{", "the answer is not JSON"),
            (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + b"[" * 9000, "is not JSON"),
            (b"HTTP/1.1 500 Oops\r\n\r\nno page\n", "for /status: no page"),
            (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nIt works!", "the answer is not JSON"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nContent-Type: text/plain\r\n\r\ncut", "cut off"),
        ],
    )
    def test_an_answer_that_cannot_be_read_is_reported(
        self, monkeypatch: pytest.MonkeyPatch, at: Path, answer: bytes, message: str
    ) -> None:
        monkeypatch.setattr("proxy.admin.client._exchange", lambda *_: answer)
        with pytest.raises(UnavailableError, match=message):
            query_admin(at, "/status")

    def test_json_is_decoded(self, monkeypatch: pytest.MonkeyPatch, at: Path) -> None:
        body = json.dumps({"a": [1]}).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
        monkeypatch.setattr("proxy.admin.client._exchange", lambda *_: head + body)
        assert query_admin(at, "/x") == {"a": [1]}


def test_actions_are_for_post_and_for_the_owner(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    async def act(params: Mapping[str, str]) -> object:
        done.append(params["what"])
        return {"done": True}

    async def body() -> None:
        server = AdminServer(at, {"/status": dict}, {"/do": act})
        await server.start()
        try:
            response = await send(at, b"GET /do?what=x HTTP/1.1\r\n\r\n")
            assert b" 405 " in response.splitlines()[0]
            assert b"Allow: POST\r\n" in response
            assert b" 405 " in (await send(at, b"POST /status HTTP/1.1\r\n\r\n")).splitlines()[0]
            assert done == []
            answer = await asyncio.to_thread(query_admin, at, "/do", 20.0, {"what": "it"}, act=True)
            assert (answer, done) == ({"done": True}, ["it"])
            monkeypatch.setattr(struct, "unpack", lambda form, data: (1, 12345, 12345))
            with pytest.raises(PermissionDeniedError, match="only root and the daemon's own user may act"):
                await asyncio.to_thread(query_admin, at, "/do", 20.0, {"what": "again"}, act=True)
            assert done == ["it"]
        finally:
            await server.stop()

    asyncio.run(body())


def test_a_slow_page_may_take_as_long_as_an_action(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENT_SECONDS", 2.0)

    async def slow() -> object:
        await asyncio.sleep(2.5)
        return {"slow": True}

    async def body() -> None:
        server = AdminServer(at, {"/slow": slow, "/patient": slow}, {"/do": slow}, slow_routes=["/patient"])
        await server.start()
        try:
            requests = (b"GET /slow", b"GET /patient", b"POST /do")
            answers = await asyncio.gather(*(send(at, line + b" HTTP/1.1\r\n\r\n") for line in requests))
            assert [answer.split()[1] for answer in answers] == [b"504", b"200", b"200"]
        finally:
            await server.stop()

    asyncio.run(body())


def test_an_action_continues_after_its_client_disconnects(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACTION_SECONDS", 0.2)

    async def body() -> None:
        go, done = asyncio.Event(), asyncio.Event()

        async def act() -> object:
            await go.wait()
            done.set()
            return {}

        server = AdminServer(at, {}, {"/do": act})
        await server.start()
        try:
            assert b" 504 " in (await send(at, b"POST /do HTTP/1.1\r\n\r\n")).splitlines()[0]
        finally:
            await server.stop()
        go.set()
        async with asyncio.timeout(60):
            await done.wait()

    asyncio.run(body())
