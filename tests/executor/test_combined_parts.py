"""The parts of the executor together: calls without a response, fences, units, the runtime sync, drift."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from proxy.api.cri import api_pb2 as pb
from proxy.engine.call_events import SavedCpusLearned
from proxy.engine.pod_fence import ActiveFence, Fence
from proxy.executor.systemd.ports import UnitSets
from proxy.model.errors import RuntimeCallError
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase
from proxy.telemetry import metrics

ALL, REST = CpuSet.parse("0-15"), CpuSet.parse("4-15")
Live = Callable[..., None]


class PlayedUnits:
    """A simulated systemd, with one unit that has the set it was given."""

    def __init__(self) -> None:
        self.cpus = ALL
        self.reads = 0

    def read(self, unit: str) -> UnitSets:
        self.reads += 1
        return UnitSets(self.cpus, Mask())

    def set(self, unit: str, cpus: CpuSet | None, mems: Mask | None) -> None:
        self.cpus = cpus or self.cpus

    def watch(self, on_event: Any) -> None:
        pass

    def replace_cpus(self, path: str, cpus: CpuSet) -> CpuSet:
        """Of the fences."""
        return CpuSet()

    def close(self) -> None:
        pass


async def scope(world: Any) -> tuple[str, PlayedUnits]:
    """Make the cgroup of a running container a systemd scope."""
    ls = await world.run(await world.pod("ls", "LS"))
    units = PlayedUnits()
    world.cgroups.version = 2
    world.cgroups.sets["ls.scope"] = world.cgroups.sets[ls]
    world.executor.cpuset_writer._paths[ls] = "ls.scope"
    world.executor.unit_properties.units = world.executor.unit_properties.fencing.fences = units
    world.executor.unit_properties.connected = True
    return ls, units


def test_a_unit_that_waits_for_a_call_is_compared_although_the_call_fails(run_scenario: Live) -> None:
    async def scenario(world: Any) -> None:
        ls, units = await scope(world)
        call = await world.call(
            "UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls)
        )
        units.cpus = CpuSet.parse("0-3")
        world.executor.unit_properties.changed([ls])
        world.executor.spawn(world.executor.unit_properties.run())
        await world.until(lambda: not world.executor.unit_properties._dirty)
        assert units.reads == 0
        world.wire.finished(call, 2)
        await world.until(lambda: units.cpus == ALL)

    run_scenario(scenario)


def test_a_value_that_the_daemon_may_have_set_is_no_evidence_of_the_runtimes_order(
    run_scenario: Live,
) -> None:
    async def scenario(world: Any) -> None:
        ls, units = await scope(world)
        await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        units.cpus = REST
        call = world.executor.inflight_calls.track(ls, REST)
        ours = world.executor.inflight_calls.track(ls, REST)
        world.executor.inflight_calls.complete(ours)
        unit_properties = world.executor.unit_properties
        unit_properties.begin()
        await unit_properties.repair(ls, "ls.scope", call, REST)
        assert unit_properties.page()["systemd"]["runtime_tells"] == "not known"
        world.executor.inflight_calls.complete(call)
        alone = world.executor.inflight_calls.track(ls, REST)
        await unit_properties.repair(ls, "ls.scope", alone, REST)
        assert unit_properties.page()["systemd"]["runtime_tells"] == "right"
        world.executor.inflight_calls.complete(alone)

    run_scenario(scenario)


def test_a_fault_behind_a_fence_leaves_no_call_in_flight(run_scenario: Live) -> None:
    async def scenario(world: Any) -> None:
        ls, _ = await scope(world)
        fencing, call = world.executor.unit_properties.fencing, world.executor.inflight_calls.track(ls, ALL)
        fencing._active = {"slice": ActiveFence("ls.slice", ALL, CpuSet())}
        fencing.bind(call, Fence("slice", ALL))
        world.executor.cpuset_writer.do_first(lambda: 1 / 0)
        world.call_tracker.completed(call, ALL)
        await world.until(lambda: not world.executor.state.inflight.of(ls))
        world.executor.cpuset_writer.do_first(lambda: None)
        assert not fencing._active
        assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS)

    run_scenario(scenario)


def test_units_of_removed_containers_do_not_accumulate(run_scenario: Live) -> None:
    async def scenario(world: Any) -> None:
        ls, _ = await scope(world)
        world.executor.unit_properties.connected = False
        world.executor.unit_properties.changed([ls])
        await world.remove(ls)
        other, _ = await scope(world)
        world.executor.unit_properties.connected = False
        world.executor.unit_properties.changed([other])
        assert list(world.executor.unit_properties._dirty) == [other]

    run_scenario(scenario)


def test_a_container_settled_during_a_lost_start_is_updated_afterwards(run_scenario: Live) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        lost = await world.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        world.wire.finished(lost, None)
        await world.start(ls)  # kubelet tries again, and gets a response
        assert world.executor.state.containers[ls].phase is Phase.RUNNING
        runtime_sync = world.make_runtime_sync()
        world.executor.store.handle(SavedCpusLearned(ls, None))
        world.executor.sync_later(ls)
        await runtime_sync.finish(60)
        assert world.executor.state.inflight.orphans()
        await world.sync.once()
        assert not world.executor.state.inflight.orphans()
        assert ls in world.executor.state.runtime.awaiting_sync
        runtime_sync.close()

    run_scenario(scenario, settle_per_second=1000)


def test_a_container_that_could_not_be_updated_is_updated_later(run_scenario: Live) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        runtime_sync = world.make_runtime_sync()
        world.runtime.update_error = RuntimeCallError("cannot update: busy", 2)
        world.executor.sync_later(ls)
        world.executor.store.handle(SavedCpusLearned(ls, None))
        assert await runtime_sync._sync(ls)
        assert ls in world.executor.state.runtime.awaiting_sync
        world.runtime.update_error = None
        assert not await runtime_sync._sync(ls), "not at once"
        world.now += 5
        assert await runtime_sync._sync(ls)
        assert world.runtime.specs[ls] == str(REST)
        assert not runtime_sync._silent._known
        runtime_sync.close()

    run_scenario(scenario)


def test_an_abandoned_update_may_still_be_executed(run_scenario: Live) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        call = world.executor.inflight_calls.track(ls, ALL)

        async def update() -> None:
            async with world.call_tracker.under_way(call):
                await asyncio.sleep(60)

        task = asyncio.create_task(update())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert world.executor.state.inflight.orphans() == [call]

    run_scenario(scenario)


def test_suspected_containers_do_not_accumulate_on_a_released_node(run_scenario: Live) -> None:
    async def scenario(world: Any) -> None:
        await world.run(await world.pod("ls", "LS"))
        world.executor.drift.compare_soon("systemd")
        assert world.executor.drift._suspected == set()
        assert not world.executor.drift.known.hints

    run_scenario(scenario, mode=NodeMode.OBSERVE)


def test_no_task_begins_after_the_close(run_scenario: Live) -> None:
    async def scenario(world: Any) -> None:
        closing = asyncio.create_task(world.executor.close())
        world.executor.close = lambda **how: closing
        await closing
        world.executor.writes.write_soon(["any"])
        assert not world.executor._tasks
        await asyncio.sleep(0.02)
        assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0

    run_scenario(scenario)


def test_timed_comparison_begins_again_after_a_fault(run_scenario: Live) -> None:
    async def scenario(world: Any) -> None:
        looks: list[Any] = []

        def covers(ids: Any) -> bool:
            looks.append(ids)
            return bool(1 / (len(looks) - 1))

        world.executor.drift.watch.covers = covers
        world.executor.drift.start()
        await world.until(lambda: len(looks) > 2)
        assert world.executor.telemetry.value(metrics.TASKS_RESTARTED) == 1

    run_scenario(scenario, reconcile_period=0.02)
