"""Where the executor's parts meet: calls without an answer, fences, units, settling, drift, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from proxy.api.cri import api_pb2 as pb
from proxy.engine.call_events import SavedCpusLearned
from proxy.engine.pod_fence import Fence, StandingFence
from proxy.executor.systemd.ports import UnitSets
from proxy.model.errors import RuntimeCallError
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase
from proxy.telemetry import metrics

ALL, REST = CpuSet.parse("0-15"), CpuSet.parse("4-15")
Live = Callable[..., None]


class PlayedUnits:
    """systemd, with one unit that is as it was set."""

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

    def swap(self, path: str, cpus: CpuSet) -> CpuSet:
        """Of the fences."""
        return CpuSet()

    def close(self) -> None:
        pass


async def scope(w: Any) -> tuple[str, PlayedUnits]:
    """Have a container that runs be a scope of systemd's."""
    ls = await w.run(await w.pod("ls", "LS"))
    units = PlayedUnits()
    w.cgroups.version = 2
    w.cgroups.sets["ls.scope"] = w.cgroups.sets[ls]
    w.executor.enforcer._paths[ls] = "ls.scope"
    w.executor.unit_properties.units = w.executor.unit_properties.fencing.fences = units
    w.executor.unit_properties.connected = True
    return ls, units


def test_a_unit_that_waits_for_a_call_is_compared_although_the_call_fails(live: Live) -> None:
    async def day(w: Any) -> None:
        ls, units = await scope(w)
        call = await w.call("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls))
        units.cpus = CpuSet.parse("0-3")
        w.executor.unit_properties.changed([ls])
        w.executor.spawn(w.executor.unit_properties.run())
        await w.until(lambda: not w.executor.unit_properties._dirty)
        assert units.reads == 0
        w.wire.finished(call, 2)
        await w.until(lambda: units.cpus == ALL)

    live(day)


def test_what_we_may_have_set_ourselves_does_not_speak_for_the_runtime(live: Live) -> None:
    async def day(w: Any) -> None:
        ls, units = await scope(w)
        await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        units.cpus = REST
        flight = w.executor.calls.depart(ls, REST)
        ours = w.executor.calls.depart(ls, REST)
        w.executor.calls.land(ours)
        unit_properties = w.executor.unit_properties
        unit_properties.begin()
        await unit_properties.put_right(ls, "ls.scope", flight, REST)
        assert unit_properties.page()["systemd"]["runtime_tells"] == "not known"
        w.executor.calls.land(flight)
        alone = w.executor.calls.depart(ls, REST)
        await unit_properties.put_right(ls, "ls.scope", alone, REST)
        assert unit_properties.page()["systemd"]["runtime_tells"] == "right"
        w.executor.calls.land(alone)

    live(day)


def test_a_fault_behind_a_fence_leaves_no_call_in_flight(live: Live) -> None:
    async def day(w: Any) -> None:
        ls, _ = await scope(w)
        fencing, flight = w.executor.unit_properties.fencing, w.executor.calls.depart(ls, ALL)
        fencing._standing = {"slice": StandingFence("ls.slice", ALL, CpuSet())}
        fencing.bind(flight, Fence("slice", ALL))
        w.executor.enforcer.do_first(lambda: 1 / 0)
        w.start_update.landed(flight, ALL)
        await w.until(lambda: not w.executor.state.inflight.of(ls))
        w.executor.enforcer.do_first(lambda: None)
        assert not fencing._standing
        assert w.executor.telemetry.value(metrics.INTERNAL_ERRORS)

    live(day)


def test_units_of_gone_containers_do_not_accumulate(live: Live) -> None:
    async def day(w: Any) -> None:
        ls, _ = await scope(w)
        w.executor.unit_properties.connected = False
        w.executor.unit_properties.changed([ls])
        await w.remove(ls)
        other, _ = await scope(w)
        w.executor.unit_properties.connected = False
        w.executor.unit_properties.changed([other])
        assert list(w.executor.unit_properties._dirty) == [other]

    live(day)


def test_a_container_settled_during_a_lost_start_is_updated_afterwards(live: Live) -> None:
    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        lost = await w.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        w.wire.finished(lost, None)
        await w.start(ls)  # kubelet tries again, and is answered
        assert w.executor.state.containers[ls].phase is Phase.RUNNING
        settler = w.make_settler()
        w.executor.store.handle(SavedCpusLearned(ls, None))
        w.executor.settle_later(ls)
        await settler.finish(60)
        assert w.executor.state.inflight.strays()
        await w.sync.once()
        assert not w.executor.state.inflight.strays()
        assert ls in w.executor.state.runtime.unsettled
        settler.close()

    live(day, settle_per_second=1000)


def test_a_container_that_could_not_be_updated_is_updated_later(live: Live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        settler = w.make_settler()
        w.runtime.update_error = RuntimeCallError("cannot update: busy", 2)
        w.executor.settle_later(ls)
        w.executor.store.handle(SavedCpusLearned(ls, None))
        assert await settler._settle(ls)
        assert ls in w.executor.state.runtime.unsettled
        w.runtime.update_error = None
        assert not await settler._settle(ls), "not at once"
        w.now += 5
        assert await settler._settle(ls)
        assert w.runtime.specs[ls] == str(REST)
        assert not settler._silent._known
        settler.close()

    live(day)


def test_an_update_that_is_given_up_may_still_be_carried_out(live: Live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        flight = w.executor.calls.depart(ls, ALL)

        async def update() -> None:
            async with w.start_update.under_way(flight):
                await asyncio.sleep(60)

        task = asyncio.create_task(update())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert w.executor.state.inflight.strays() == [flight]

    live(day)


def test_suspects_do_not_accumulate_on_a_released_node(live: Live) -> None:
    async def day(w: Any) -> None:
        await w.run(await w.pod("ls", "LS"))
        w.executor.drift.suspect("systemd")
        assert w.executor.drift._suspected == set()
        assert not w.executor.drift.known.hints

    live(day, mode=NodeMode.OBSERVE)


def test_nothing_is_begun_any_more_at_the_end(live: Live) -> None:
    async def day(w: Any) -> None:
        closing = asyncio.create_task(w.executor.close())
        w.executor.close = lambda **how: closing
        await closing
        w.executor.writes.later(["any"])
        assert not w.executor._tasks
        await asyncio.sleep(0.02)
        assert w.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0

    live(day)


def test_timed_comparison_begins_again_after_a_fault(live: Live) -> None:
    async def day(w: Any) -> None:
        looks: list[Any] = []

        def covers(ids: Any) -> bool:
            looks.append(ids)
            return bool(1 / (len(looks) - 1))

        w.executor.drift.watch.covers = covers
        w.executor.drift.start()
        await w.until(lambda: len(looks) > 2)
        assert w.executor.telemetry.value(metrics.TASKS_RESTARTED) == 1

    live(day, reconcile_period=0.02)
