"""The socket of the hook server, and the file that names it."""

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
from proxy.frontends.hookserver.server import HookServerRunner, rpc_methods
from proxy.model.backoff import Backoff
from proxy.model.errors import CannotCreateError, ConfigError
from proxy.sockets.grpc_socket import SocketPath
from tests.testkit.captured_log import telemetry


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tp-") as made:
        yield Path(made)


def binder(held: list[socket.socket]) -> Callable[[str], int]:
    """Bind as the library does: at once, with the mode that new files get."""

    def bind(path: str) -> int:
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].bind(path)
        held[-1].listen()
        mode = stat.S_IMODE(Path(path).parent.stat().st_mode)
        assert mode == 0o700, "others could reach it before it has its mode"
        return 1

    return bind


@pytest.fixture
def bind() -> Iterator[Callable[[str], int]]:
    held: list[socket.socket] = []
    yield binder(held)
    for one in held:
        one.close()


def reach(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_it_has_its_mode_from_the_first_moment(directory: Path, bind: Any) -> None:
    place = SocketPath(directory / "hooks.sock", "serve hooks")
    place.take(bind)
    assert stat.S_IMODE((directory / "hooks.sock").stat().st_mode) == 0o600
    reach(directory / "hooks.sock")
    assert os.listdir(directory) == ["hooks.sock"]
    place.give_back()
    assert not os.listdir(directory)


def test_a_dead_socket_is_replaced_and_others_are_left_alone(directory: Path, bind: Any) -> None:
    path = directory / "hooks.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    place = SocketPath(path, "serve hooks")
    place.take(bind)
    with pytest.raises(CannotCreateError, match="another process answers there"):
        SocketPath(path, "serve hooks").take(bind)
    reach(path)
    path.unlink()
    path.write_text("another's")
    place.give_back()
    assert path.read_text() == "another's"
    with pytest.raises(CannotCreateError, match="a file is there"):
        SocketPath(path, "serve hooks").take(bind)
    assert os.listdir(directory) == ["hooks.sock"]


def test_it_says_why_it_cannot(directory: Path, bind: Any) -> None:
    with pytest.raises(CannotCreateError, match=r"cannot serve hooks on .*No such file"):
        SocketPath(directory / "no" / "hooks.sock", "serve hooks").take(bind)
    deep = directory / ("d" * (98 - len(str(directory))))
    deep.mkdir()
    with pytest.raises(CannotCreateError, match="too long"):
        SocketPath(deep / "s", "serve hooks").take(bind)

    def broken(_: str) -> int:
        raise RuntimeError("no luck")

    with pytest.raises(CannotCreateError, match="cannot be bound: no luck"):
        SocketPath(directory / "s", "serve hooks").take(broken)
    with pytest.raises(CannotCreateError, match=r"cannot be bound$"):
        SocketPath(directory / "s", "serve hooks").take(lambda _: 0)
    assert os.listdir(directory) == [deep.name]


def test_a_second_one_waits_for_the_socket(node: Any, run_scenario: Callable[..., None]) -> None:
    async def scenario(node: Any) -> None:
        assert stat.S_IMODE(node.socket.stat().st_mode) == 0o600
        again = type(node.serving)(node.socket, node.executor, node.daemon._start_update, None)
        with pytest.raises(CannotCreateError, match="another process answers there"):
            await again.start()
        trying = asyncio.create_task(again.run())
        await node.until(
            lambda: any("another process answers" in p["what"] for p in node.executor.telemetry.problems())
        )
        await node.serving.stop()
        await trying
        assert again.listening
        await asyncio.to_thread(reach, node.socket)
        looks = again._task
        await again.stop()
        assert looks is not None
        assert looks.cancelled()
        assert not node.socket.exists()
        await node.serving.start()
        await asyncio.to_thread(reach, node.socket)

    run_scenario(scenario)
    assert not node.socket.exists()


def test_nothing_is_left_of_a_server_that_cannot_start(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("no more threads")

    async def scenario(node: Any) -> None:
        other = node.directory / "other.sock"
        again = HookServerRunner(other, node.executor, node.daemon._start_update, node.serving.servicer._flow)
        with monkeypatch.context() as patched:
            patched.setattr("grpc._server._Server.start", fails)
            with pytest.raises(RuntimeError, match="no more threads"):
                await again.start()
        assert not other.exists()
        await again.start()
        await asyncio.to_thread(reach, other)
        await again.stop()

    run_scenario(scenario)


def test_the_socket_is_tried_again_after_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []
    reported: list[str] = []

    class Late(HookServerRunner):
        async def start(self) -> None:
            tries.append(time.monotonic())
            if len(tries) < 4:
                raise CannotCreateError("it is taken")

    late = Late.__new__(Late)
    late._executor = SimpleNamespace(telemetry=telemetry(reported))  # type: ignore[assignment]
    late.path = Path("/s")
    monkeypatch.setattr("proxy.frontends.hookserver.server.RETRY", Backoff(0.02, 0.06))
    asyncio.run(late.run())
    assert reported == ['cannot listen as a hook server path=/s err="it is taken"']
    assert [problem["count"] for problem in late._executor.telemetry.problems()] == [3]
    pauses = [later - sooner for sooner, later in pairwise(tries)]
    assert all(had > wanted for had, wanted in zip(pauses, (0.01, 0.03, 0.05), strict=True))


def test_the_file_names_all_that_is_answered() -> None:
    config = parse("hooks: {serve: /run/topoproxy/hooks.sock}", "test")
    entry = json.loads(registration(config))
    assert entry == {
        "remote-endpoint": "/run/topoproxy/hooks.sock",
        "failure-policy": "Fail",
        "runtime-hooks": list(STAGES),
    }


def test_no_file_without_a_socket() -> None:
    with pytest.raises(ConfigError, match=r"hooks\.serve"):
        registration(parse("", "test"))


def test_every_stage_has_its_answer() -> None:
    class Anybody:
        def __getattr__(self, name: str) -> str:
            return name

    servicer: Any = Anybody()
    assert {name.removesuffix("Hook") for name in rpc_methods(servicer)} == set(STAGES)
