"""After a start the daemon does not know the sets saved by the runtime: it queries and corrects them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proxy.engine.call_events import RuntimeSyncDue
from proxy.engine.node_events import ModeChanged
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode

REST = "0-7,12-15"


async def again(world: Any, then: Callable[[], Awaitable[None]]) -> list[str]:
    """Start the daemon again, wait until all CPUs are saved, and return the updates of the runtime."""
    await world.close()
    world.boot()
    await world.clear_log()
    runtime_sync = world.make_runtime_sync()
    for _ in range(3):  # by then no call of the previous daemon can be in flight
        await world.sync.once()
        world.now += 3
    task = asyncio.create_task(runtime_sync.run())
    try:
        await then()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        runtime_sync.close()
    return [line for line in world.log if line.startswith("runtime ")]


async def shared_beside_an_owner(world: Any) -> str:
    shared: str = await world.run(await world.pod("ls", qos="LS"), cpu_shares=512)
    await world.run(await world.pod("lse", qos="LSE", cpus="8-11"), cpu_shares=512)
    assert world.on(shared) == REST
    return shared


@pytest.mark.parametrize(
    ("saved", "updates"),
    [("0-15", 1), (REST, 0), ("", 1), ("what", 1)],
    ids=["older", "as it should be", "not saved", "no list"],
)
def test_a_container_with_another_saved_set_is_updated(run_scenario: Any, saved: str, updates: int) -> None:
    async def scenario(world: Any) -> None:
        shared = await shared_beside_an_owner(world)
        for container in world.runtime.containers:
            cpus = saved if container == shared else "8-11"
            world.runtime.details[container] = RuntimeDetail(f"/kubepods/podx/{container}", cpuset_cpus=cpus)

        async def settled() -> None:
            await world.until(lambda: world.executor.state.runtime.saved.get(shared) == CpuSet.parse(REST))
            await world.until(lambda: not world.executor.state.runtime.awaiting_sync)

        reported = await again(world, settled)
        assert reported == [f"runtime {shared} {REST}"] * updates

    run_scenario(scenario, settle_per_second=1000)


@pytest.mark.parametrize(
    "error", [RuntimeCallError("cannot ask: odd", 2), UnavailableError("cannot ask: away")]
)
def test_a_runtime_without_saved_sets_is_updated(run_scenario: Any, error: Exception) -> None:
    async def scenario(world: Any) -> None:
        shared = await shared_beside_an_owner(world)

        def refuse(container_id: str) -> RuntimeDetail:
            raise error

        world.runtime.detail = refuse

        async def settled() -> None:
            await world.until(lambda: world.executor.state.runtime.saved.get(shared) == CpuSet.parse(REST))

        assert f"runtime {shared} {REST}" in await again(world, settled)

    run_scenario(scenario, settle_per_second=1000)


def test_an_update_during_the_query_takes_precedence(run_scenario: Any) -> None:
    """An update passes while the runtime is queried: the answer may predate the update."""

    async def scenario(world: Any) -> None:
        shared = await shared_beside_an_owner(world)
        queried = asyncio.Event()
        loop = asyncio.get_running_loop()
        real = world.runtime.detail

        def slow(container_id: str) -> RuntimeDetail:
            syncs = threading.current_thread().name.startswith("runtime-sync")
            if container_id == shared and syncs and not queried.is_set():
                # To the end: closing the runtime sync waits for this thread, on the loop.
                asyncio.run_coroutine_threadsafe(passed(), loop).result(60)
                loop.call_soon_threadsafe(queried.set)
                return RuntimeDetail("/x", cpuset_cpus="0-15")
            found: RuntimeDetail = real(container_id)
            return found

        async def passed() -> None:
            await world.update(shared, cpu_shares=3)

        world.runtime.detail = slow

        async def settled() -> None:
            await queried.wait()
            await world.until(lambda: not world.executor.state.runtime.awaiting_sync)
            await world.until(lambda: world.executor.state.runtime.saved.get(shared) == CpuSet.parse(REST))

        reported = await again(world, settled)
        assert f"runtime {shared} {REST}" not in reported

    run_scenario(scenario, settle_per_second=1000)


def test_nothing_is_kept_of_a_container_removed_during_the_query(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        shared = await shared_beside_an_owner(world)
        queried = asyncio.Event()
        loop = asyncio.get_running_loop()
        real = world.runtime.detail

        def slow(container_id: str) -> RuntimeDetail:
            if container_id == shared and threading.current_thread().name.startswith("runtime-sync"):
                asyncio.run_coroutine_threadsafe(gone(), loop).result(60)
                loop.call_soon_threadsafe(queried.set)
                return RuntimeDetail("/x", cpuset_cpus="0-15")
            found: RuntimeDetail = real(container_id)
            return found

        async def gone() -> None:
            world.executor.lifecycle.removed([shared])

        world.runtime.detail = slow

        async def settled() -> None:
            await queried.wait()
            await world.until(lambda: not world.executor.state.runtime.awaiting_sync)
            await world.quiet()
            assert shared not in world.executor.state.runtime.saved

        await again(world, settled)

    run_scenario(scenario, settle_per_second=1000)


def test_the_runtime_is_not_queried_if_no_updates_are_sent(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        await shared_beside_an_owner(world)
        queried: list[str] = []
        world.runtime.detail = queried.append

        async def nothing() -> None:
            await world.quiet()

        assert await again(world, nothing) == []
        assert queried == []

    run_scenario(scenario, settle_per_second=0)


def test_nothing_is_sent_for_a_pod_that_was_released_while_a_fence_was_written(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        container = await shared_beside_an_owner(world)
        world.executor.store.handle(RuntimeSyncDue((container,)))
        fencing = world.executor.unit_properties.fencing
        prepare = fencing.fitting
        queried = []

        async def released(self: Any, container_id: str) -> Any:
            queried.append(container_id)
            fence = await prepare(container_id)
            world.executor.store.handle(ModeChanged(NodeMode.RELEASING))
            return fence

        monkeypatch.setattr(type(fencing), "fitting", released)
        await world.clear_log()
        runtime_sync = world.make_runtime_sync()
        await runtime_sync.finish(5)
        runtime_sync.close()
        assert queried == [container]
        assert not [line for line in world.log if line.startswith("runtime ")]

    run_scenario(scenario)
