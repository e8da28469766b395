"""Hooks from real files on a simulated node, with a runtime that may be unavailable."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proxy import hooks_setup
from proxy.api.cri import api_pb2 as pb
from proxy.config.hooks import HooksConfig
from proxy.engine.node_events import ModeChanged
from proxy.frontends.hook_bridge import backfill
from proxy.frontends.hook_bridge.lifecycle_events import LifecycleEvents
from proxy.hooks_setup import DaemonHooks, may_have_hooks
from proxy.model.backoff import Backoff
from proxy.model.errors import UnavailableError
from proxy.model.mode import NodeMode

HEAD = """
API_VERSION = 1

def record(text):
    with open({!r}, "a") as record:
        print(text, file=record)

"""


class Directories:
    """Directories of hooks, and a file in which the hooks record their calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = HooksConfig(
            directory=root / "a", vendor_directory=root / "b", server_directory=root / "c"
        )
        self.record = root / "record"

    def write(self, body: str, name: str = "10-x.py") -> None:
        self.config.directory.mkdir(mode=0o755, exist_ok=True)
        head = HEAD.format(str(self.record))
        path = self.config.directory / name
        path.write_text(head + textwrap.dedent(body))
        path.chmod(0o644)

    def calls(self) -> list[str]:
        return self.record.read_text().splitlines() if self.record.exists() else []


@pytest.fixture
def directories(tmp_path: Path) -> Directories:
    return Directories(tmp_path)


@contextlib.asynccontextmanager
async def running(world: Any, directories: Directories) -> AsyncIterator[DaemonHooks]:
    made = DaemonHooks(directories.config, world.executor, world.wire)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.stop()


def followers(world: Any) -> list[LifecycleEvents]:
    """The parts that follow the node for hooks."""
    return [observer for observer in world.executor.store._observers if isinstance(observer, LifecycleEvents)]


def test_without_hook_files_calls_do_not_wait_and_no_parts_are_made(
    run_scenario, directories: Directories
) -> None:
    async def scenario(world) -> None:
        async with running(world, directories) as made:
            await world.until(lambda: world.wire.hooks_ready is None)
            assert (await world.begin(await world.pod("ls", "LS"))).refused is None
            assert (made.engine, made.registry, made.page(), followers(world)) == (None, None, {}, [])

    run_scenario(scenario)


def test_calls_wait_for_the_hooks_that_are_there(run_scenario, directories: Directories) -> None:
    directories.write("import time\ntime.sleep(0.3)\ndef pre_run_pod_sandbox(event):\n    record('called')\n")

    async def scenario(world) -> None:
        async with running(world, directories):
            assert world.wire.hooks_ready is not None
            await world.pod("ls", "LS")
            assert directories.calls() == ["called"]
            assert world.wire.hooks_ready is None

    run_scenario(scenario)


def test_calls_wait_for_hooks_for_a_limited_time(run_scenario, directories: Directories, monkeypatch) -> None:
    directories.write("import time\ntime.sleep(2)\ndef pre_run_pod_sandbox(event):\n    record('called')\n")
    monkeypatch.setattr(hooks_setup, "FIRST_SCAN_WAIT_S", 0.2)

    async def scenario(world) -> None:
        async with running(world, directories) as made:
            await world.pod("ls", "LS")
            assert directories.calls() == []
            await world.until(lambda: made.engine.points)

    run_scenario(scenario)


def test_calls_do_not_wait_for_a_directory_that_hangs(
    run_scenario, directories: Directories, monkeypatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(hooks_setup, "FIRST_SCAN_WAIT_S", 0.1)
    monkeypatch.setattr(hooks_setup, "may_have_hooks", lambda config: gate.wait(60))

    async def scenario(world) -> None:
        async with running(world, directories) as made:
            await world.pod("ls", "LS")
            assert made.engine is None
            assert not gate.is_set()
            gate.set()
            await world.until(lambda: made.engine)

    run_scenario(scenario)


def test_existing_containers_are_learned_when_the_runtime_answers(
    run_scenario, directories: Directories, monkeypatch
) -> None:
    monkeypatch.setattr(backfill, "RETRY", Backoff(0.05, 0.05))
    directories.write("def synchronize(event):\n    record([c.container.image for c in event.containers])\n")

    async def scenario(world) -> None:
        one = await world.run(await world.pod("ls", "LS"))
        plain, times = world.runtime.raw_lists, []

        def away() -> Any:
            times.append(time.monotonic())
            if len(times) < 3:
                raise UnavailableError("cannot reach it")
            return plain()

        world.runtime.raw_lists = away
        async with running(world, directories):
            await world.until(lambda: [f for f in followers(world) if f.object_cache.container(one)])
            await world.until(lambda: directories.calls() and directories.calls()[-1] == "['listed']")
            assert len(times) == 3
            before = len(directories.calls())
            assert (
                "cannot show hooks the labels and annotations"
                in world.executor.telemetry.problems()[0]["what"]
            )
            world.executor.store.handle(ModeChanged(NodeMode.RELEASED))
            await world.sync.once()
            world.executor.store.handle(ModeChanged(NodeMode.ENFORCE))
            await world.sync.once()
            await world.until(lambda: len(directories.calls()) > before)
            assert directories.calls()[-1] == "['listed']", (
                "a node that is enforced again is synchronized as a whole"
            )

    run_scenario(scenario)


def test_hooks_are_synchronized_when_the_runtime_becomes_available_late(
    run_scenario, directories: Directories, monkeypatch
) -> None:
    monkeypatch.setattr(hooks_setup, "FIRST_SCAN_WAIT_S", 0.2)
    directories.write("def synchronize(event):\n    record(len(event.containers))\n")

    async def scenario(world) -> None:
        async with running(world, directories) as made:
            await world.until(lambda: made.engine is not None and made.engine.points)
            assert directories.calls() == []
            await world.sync.once()
            await world.until(directories.calls)
            assert directories.calls() == ["0"]

    run_scenario(scenario, reconciled=False)


def test_closing_does_not_wait_long_for_a_hook_that_does_not_end(
    run_scenario, directories: Directories, monkeypatch
) -> None:
    monkeypatch.setattr(hooks_setup, "STOP_S", 2.0)
    directories.write("import time\ndef shutdown(event):\n    record('ends')\n    time.sleep(60)\n")

    async def scenario(world) -> None:
        async with running(world, directories) as made:
            await world.until(lambda: made.engine is not None and made.engine.points)
        assert directories.calls() == ["ends"]
        call = await world.call("StopContainer", pb.StopContainerRequest(container_id="x"))
        assert call.refused is None

    run_scenario(scenario)


def test_only_valid_files_are_hooks(directories: Directories) -> None:
    config = directories.config
    assert not may_have_hooks(config)
    config.vendor_directory.mkdir()
    (config.vendor_directory / "README").touch()
    assert not may_have_hooks(config)
    assert config.server_directory is not None
    config.server_directory.mkdir()
    (config.server_directory / "koordlet.json").touch()
    assert may_have_hooks(config)
    (config.server_directory / "koordlet.json").unlink()
    (config.vendor_directory / "10-x.py").touch()
    assert may_have_hooks(config)
