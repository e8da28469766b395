"""The socket of the hook server, and the registration file that names it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.config.load import parse
from proxy.frontends.hookserver.registration import STAGES, registration
from proxy.frontends.hookserver.server import CANNOT_LISTEN, HookServerRunner, rpc_methods
from proxy.model.backoff import Backoff
from proxy.model.errors import CannotCreateError, ConfigError
from proxy.sockets.grpc_socket import SocketPath
from tests.testkit.captured_log import telemetry


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tp-") as path:
        yield Path(path)


def binder(held: list[socket.socket]) -> Callable[[str], int]:
    """Bind as gRPC does: at once, with the default mode of new files."""

    def bind(path: str) -> int:
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].bind(path)
        held[-1].listen()
        mode = stat.S_IMODE(Path(path).parent.stat().st_mode)
        assert mode == 0o700, "other users could connect before the socket has its mode"
        return 1

    return bind


@pytest.fixture
def bind() -> Iterator[Callable[[str], int]]:
    held: list[socket.socket] = []
    yield binder(held)
    for listener in held:
        listener.close()


def reach(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_has_its_mode_from_the_first_moment(directory: Path, bind: Any) -> None:
    socket_path = SocketPath(directory / "hooks.sock", "serve hooks")
    socket_path.bind(bind)
    assert stat.S_IMODE((directory / "hooks.sock").stat().st_mode) == 0o600
    reach(directory / "hooks.sock")
    assert os.listdir(directory) == ["hooks.sock"]
    socket_path.unbind()
    assert not os.listdir(directory)


def test_a_dead_socket_is_replaced_and_other_files_are_kept(directory: Path, bind: Any) -> None:
    path = directory / "hooks.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    socket_path = SocketPath(path, "serve hooks")
    socket_path.bind(bind)
    with pytest.raises(CannotCreateError, match="another process answers there"):
        SocketPath(path, "serve hooks").bind(bind)
    reach(path)
    path.unlink()
    path.write_text("another's")
    socket_path.unbind()
    assert path.read_text() == "another's"
    with pytest.raises(CannotCreateError, match="a file is there"):
        SocketPath(path, "serve hooks").bind(bind)
    assert os.listdir(directory) == ["hooks.sock"]


def test_the_error_names_why_a_socket_cannot_be_created(directory: Path, bind: Any) -> None:
    with pytest.raises(CannotCreateError, match=r"cannot serve hooks on .*No such file"):
        SocketPath(directory / "no" / "hooks.sock", "serve hooks").bind(bind)
    deep = directory / ("d" * (98 - len(str(directory))))
    deep.mkdir()
    with pytest.raises(CannotCreateError, match="too long"):
        SocketPath(deep / "s", "serve hooks").bind(bind)

    def broken(_: str) -> int:
        raise RuntimeError("no luck")

    with pytest.raises(CannotCreateError, match="cannot be bound: no luck"):
        SocketPath(directory / "s", "serve hooks").bind(broken)
    with pytest.raises(CannotCreateError, match=r"cannot be bound$"):
        SocketPath(directory / "s", "serve hooks").bind(lambda _: 0)
    assert os.listdir(directory) == [deep.name]


def test_a_second_hook_server_waits_for_the_socket(node: Any, run_scenario: Callable[..., None]) -> None:
    async def scenario(node: Any) -> None:
        assert stat.S_IMODE(node.socket.stat().st_mode) == 0o600
        second = type(node.serving)(node.socket, node.executor, None)
        with pytest.raises(CannotCreateError, match="another process answers there"):
            await second.start()
        trying = asyncio.create_task(second.run())
        await node.until(
            lambda: any("another process answers" in p["what"] for p in node.executor.telemetry.problems())
        )
        await node.serving.stop()
        await trying
        assert second.listening
        await asyncio.to_thread(reach, node.socket)
        check_task = second._task
        await second.stop()
        assert check_task is not None
        assert check_task.cancelled()
        assert not node.socket.exists()
        await node.serving.start()
        await asyncio.to_thread(reach, node.socket)

    run_scenario(scenario)
    assert not node.socket.exists()


def test_a_server_that_cannot_start_leaves_no_socket(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("no more threads")

    async def scenario(node: Any) -> None:
        other = node.directory / "other.sock"
        second = HookServerRunner(other, node.executor, node.serving.servicer._flow)
        with monkeypatch.context() as patched:
            patched.setattr("grpc._server._Server.start", fail)
            with pytest.raises(RuntimeError, match="no more threads"):
                await second.start()
        assert not other.exists()
        node.executor.telemetry.problem(CANNOT_LISTEN, path=other, err="it is taken")
        await second.start()
        assert CANNOT_LISTEN not in str(node.executor.telemetry.problems())
        await asyncio.to_thread(reach, other)
        await second.stop()

    run_scenario(scenario)


def test_a_socket_that_is_in_use_is_retried_with_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[float] = []
    reported: list[str] = []

    class Late(HookServerRunner):
        async def start(self) -> None:
            attempts.append(time.monotonic())
            if len(attempts) < 4:
                raise CannotCreateError("it is taken")

    late = Late.__new__(Late)
    late._executor = SimpleNamespace(telemetry=telemetry(reported))  # type: ignore[assignment]
    late.path = Path("/s")
    monkeypatch.setattr("proxy.sockets.grpc_socket.OPEN_RETRY", Backoff(0.02, 0.06))
    asyncio.run(late.run())
    assert reported == ['cannot listen as a hook server path=/s err="it is taken"']
    assert [problem["count"] for problem in late._executor.telemetry.problems()] == [3]
    pauses = [later - sooner for sooner, later in pairwise(attempts)]
    assert all(pause > minimum for pause, minimum in zip(pauses, (0.01, 0.03, 0.05), strict=True))


def test_the_registration_names_the_socket_and_all_stages() -> None:
    config = parse("hooks: {serve: /run/topoproxy/hooks.sock}", "test")
    entry = json.loads(registration(config))
    assert entry == {
        "remote-endpoint": "/run/topoproxy/hooks.sock",
        "failure-policy": "Fail",
        "runtime-hooks": list(STAGES),
    }


def test_there_is_no_registration_without_a_socket() -> None:
    with pytest.raises(ConfigError, match=r"hooks\.serve"):
        registration(parse("", "test"))


def test_every_stage_has_an_rpc_method() -> None:
    class AnyServicer:
        def __getattr__(self, name: str) -> str:
            return name

    servicer: Any = AnyServicer()
    assert {name.removesuffix("Hook") for name in rpc_methods(servicer)} == set(STAGES)
