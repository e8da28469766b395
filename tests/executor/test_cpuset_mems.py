"""Memory nodes of running containers: always widened, narrowed only if no memory is outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from proxy.api.cri import api_pb2 as pb
from proxy.engine.call_events import RuntimeSyncDue, SavedCpusLearned
from proxy.engine.container_events import ContainersUpdated
from proxy.engine.node_events import ModeChanged
from proxy.executor.cpuset_mems import NOT_REPAIRED
from proxy.executor.kernel_ports import MemoryUse
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.telemetry import metrics

MIB = 1 << 20
BOTH = Mask((0, 1))


@dataclass
class PlayedMemory:
    """Reports where memory is; fails for ``broken`` containers."""

    uses: dict[str, MemoryUse] = field(default_factory=dict)
    broken: bool = False

    def memory_use(self, parent: str, container_id: str) -> MemoryUse | None:
        if self.broken:
            raise CgroupError("cannot read memory.numa_stat: broken")
        return self.uses.get(container_id)

    def migrates_pages(self, path: str) -> bool:
        return False


async def owner(world: Any) -> str:
    """A container that owns CPUs 2-3, and so is bound to node 0."""
    container: str = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
    world.cgroups.mems[container] = Mask((0,))
    await world.sync.once()
    await world.clear_log()
    return container


def mems(world: Any) -> list[str]:
    return [line for line in world.log if line.startswith("mems ")]


def test_correct_memory_nodes_are_not_written(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        await owner(world)
        await world.sync.once()
        assert mems(world) == []
        assert world.executor.telemetry.value(metrics.MEMS_REPAIRED) == 0

    run_scenario(scenario)


def test_missing_memory_nodes_are_restored(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        lse = await owner(world)
        world.cgroups.mems[lse] = Mask((1,))
        await world.sync.once()
        assert mems(world) == [f"mems {lse} 0-1"]
        assert any(
            "drift: another program wrote memory nodes containers=ns/lse/c" in line for line in world.logged
        )
        # The surplus differs now, and the location of its memory is not known.
        await world.sync.once()
        assert mems(world) == [f"mems {lse} 0-1"]
        (problem,) = (p["what"] for p in world.executor.telemetry.problems())
        assert "it was given 1 too, and it is not known where its memory is" in problem

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (MemoryUse({0: MIB, 1: 3 * MIB}, {}, {}), "it has 3.0 MiB there, and 0 bytes of page cache"),
        (MemoryUse({0: MIB}, {1: 4096}, {}), "it has 0 bytes there, and 4096 bytes of page cache"),
        (MemoryUse({}, {}, {1: 2 * MIB}), "it has 2.0 MiB there, and 0 bytes of page cache"),
        (None, "it is not known where its memory is"),
    ],
)
def test_surplus_nodes_with_memory_stay_and_are_reported(
    run_scenario: Callable[..., None], use: MemoryUse | None, expected: str
) -> None:
    async def scenario(world: Any) -> None:
        lse = await owner(world)
        world.executor.mems.memory = memory = PlayedMemory({lse: use} if use else {})
        world.cgroups.mems[lse] = BOTH
        await world.sync.once()
        assert mems(world) == []
        (problem,) = (p["what"] for p in world.executor.telemetry.problems())
        assert expected in problem
        # Until then the daemon narrows nothing.
        assert (await world.update(lse, cpu_shares=512)).cpuset_mems == "0-1"
        memory.uses[lse] = MemoryUse({0: MIB}, {0: MIB}, {0: MIB})
        await world.sync.once()
        assert mems(world) == [f"mems {lse} 0"]
        assert (await world.update(lse, cpu_shares=512)).cpuset_mems == "0"
        assert world.executor.telemetry.problems() == []

    run_scenario(scenario)


def test_updates_at_the_runtime_name_the_nodes_in_use(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        lse = await owner(world)
        world.cgroups.mems[lse] = BOTH
        await world.sync.once()
        sent: list[Mask | None] = []
        before = world.runtime.update_cpuset

        def update(container_id: str, cpus: CpuSet, nodes: Mask | None, quota: int = 0) -> None:
            sent.append(nodes)
            before(container_id, cpus, nodes, quota)

        world.runtime.update_cpuset = update
        runtime_sync = world.make_runtime_sync()
        world.executor.store.handle(SavedCpusLearned(lse, None))
        world.executor.store.handle(RuntimeSyncDue((lse,)))
        await runtime_sync.finish(30)
        assert sent == [BOTH]
        runtime_sync.close()

    run_scenario(scenario)


def test_updates_name_the_nodes_that_another_program_has_exchanged(run_scenario: Callable[..., None]) -> None:
    """On cgroup v2 the pages have moved with that write, and would move again with a narrower one."""

    async def scenario(world: Any) -> None:
        lse = await owner(world)
        world.executor.mems.memory = memory = PlayedMemory({lse: MemoryUse({1: 3000 * MIB}, {}, {})})
        world.cgroups.mems[lse] = Mask((1,))
        await world.sync.once()
        assert world.cgroups.mems[lse] == BOTH
        assert (await world.update(lse, cpu_shares=512)).cpuset_mems == "0-1"
        memory.broken = True
        await world.sync.once()
        assert (await world.update(lse, cpu_shares=512)).cpuset_mems == "0-1", "it may have memory there"

    run_scenario(scenario)


def test_a_resize_during_a_reconcile_is_not_undone_and_is_no_drift(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        await owner(world)
        await world.run(await world.pod("lse2", "LSE", cpus="0-1"))
        first, second = world.executor.state.containers  # in the order in which they are compared
        world.cgroups.mems = {first: Mask((0,)), second: Mask((0,))}
        world.executor.mems.memory = PlayedMemory({second: MemoryUse({0: MIB}, {}, {})})
        await world.sync.once()
        assert world.executor.mems.known.as_planned == {first, second}
        read, is_read, resized = world.cgroups.memory_nodes, threading.Event(), threading.Event()

        def slow(path: str) -> Mask:
            has: Mask = read(path)
            if path == first:
                is_read.set()
                resized.wait(30)
            return has

        monkeypatch.setattr(world.cgroups, "memory_nodes", slow)
        comparing = asyncio.ensure_future(world.executor.mems.once())
        await asyncio.to_thread(is_read.wait, 30)
        for container in world.executor.state.existing((first, second)):
            placement = structs.replace(container.placement, mems=BOTH)
            world.executor.store.handle(ContainersUpdated((structs.replace(container, placement=placement),)))
            world.cgroups.mems[container.id] = BOTH  # the runtime has written it
        resized.set()
        await comparing
        assert (world.cgroups.mems, mems(world)) == ({first: BOTH, second: BOTH}, [])
        assert world.executor.mems.known.as_planned == {second}, (
            "the first was compared with what it was to have"
        )
        assert world.executor.telemetry.value(metrics.MEMS_REPAIRED) == 0

    run_scenario(scenario)


def test_a_parent_with_fewer_nodes_is_not_widened(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", kube="burstable"))
        world.cgroups.mems[ls] = Mask((1,))
        whole = world.cgroups.read

        def read(path: str) -> Any:
            value = whole(path)
            return value if path else type(value)(value.cpus, Mask((1,)), value.cpus, Mask((1,)))

        world.cgroups.read = read
        await world.sync.once()
        assert mems(world) == []

    run_scenario(scenario)


def test_unreadable_memory_is_reported_and_does_not_affect_other_containers(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        lse = await owner(world)
        world.executor.mems.memory = PlayedMemory(broken=True)
        world.cgroups.mems[lse] = BOTH
        passes = world.executor.telemetry.value(metrics.RECONCILES)
        await world.sync.once()
        assert world.executor.telemetry.value(metrics.RECONCILES) == passes + 1
        (problem,) = world.executor.telemetry.problems()
        assert problem["message"] == "cannot repair the memory nodes of a container"
        assert (problem["keys"]["pod"], problem["keys"]["err"]) == (
            "ns/lse",
            "cannot read memory.numa_stat: broken",
        )
        page = await world.executor.mems.page()
        assert page["containers"][0]["problem"] == "cannot read memory.numa_stat: broken"

    run_scenario(scenario)


def not_repaired(world: Any) -> list[object]:
    return [p["keys"]["pod"] for p in world.executor.telemetry.problems() if p["message"] == NOT_REPAIRED]


def test_a_repair_that_is_no_longer_needed_is_no_problem(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        lse = await owner(world)
        world.cgroups.mems[lse] = BOTH
        await world.sync.once()
        assert not_repaired(world) == ["ns/lse"]
        world.cgroups.mems[lse] = Mask((1,))  # node 0 is restored; whether node 1 can go is not examined yet
        await world.sync.once()
        assert not_repaired(world) == []
        world.cgroups.mems[lse] = Mask((0,))
        await world.sync.once()
        assert not_repaired(world) == []

    run_scenario(scenario)


def test_a_released_node_has_no_memory_nodes_to_repair(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        lse = await owner(world)
        world.cgroups.mems[lse] = BOTH
        await world.sync.once()
        assert not_repaired(world) == ["ns/lse"]
        world.executor.store.handle(ModeChanged(NodeMode.RELEASED))
        await world.sync.once()
        assert not_repaired(world) == []

    run_scenario(scenario)


def test_the_page_shows_memory_by_node(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        lse = await owner(world)
        world.executor.mems.memory = PlayedMemory({lse: MemoryUse({0: MIB, 1: 5}, {1: 7}, {1: 2})})
        (row,) = (await world.executor.mems.page())["containers"]
        assert row == {
            "id": lse,
            "ref": "ns/lse/c",
            "decided": "0",
            "nodes": "0",
            "anon": {0: MIB, 1: 5},
            "file": {1: 7},
            "huge": {1: 2},
            "outside": 7,
            "outsideFile": 7,
            "migrates": False,
        }

    run_scenario(scenario)


def test_memory_elsewhere_is_not_reported_for_observed_containers(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.create(await world.pod("lse", "LSE", "", "2-3"))
        world.runtime.specs[lse] = "0-15"
        await world.start(lse)
        world.executor.mems.memory = PlayedMemory({lse: MemoryUse({0: MIB, 1: 5}, {}, {})})
        (row,) = (await world.executor.mems.page())["containers"]
        assert (row["decided"], row["nodes"]) == ("", "0-1")
        assert not row.keys() & {"outside", "outsideFile"}

    run_scenario(scenario, mode=NodeMode.OBSERVE)


def test_updates_without_drift_name_the_decided_nodes(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        lse = await owner(world)
        call = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=lse)
        )
        assert pb.UpdateContainerResourcesRequest.FromString(call.sent).linux.cpuset_mems == "0"

    run_scenario(scenario)
