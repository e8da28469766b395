"""Starts that hang while owners of CPUs are created, restarted daemons included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from proxy.api.cri import api_pb2 as pb
from proxy.backends.runtime.quirks import QUIRKS
from proxy.engine.node_events import ModeChanged
from proxy.executor import confinement
from proxy.model.admission import AdmissionRules
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase
from proxy.release.service import Release
from proxy.telemetry import metrics
from tests.executor.played_writes import PlayedWrites
from tests.testkit.changed_copy import changed_copy

TENANTS = {"admission": AdmissionRules(name_others=False)}
"""Pods of several tenants: answers to one name no pod of another."""


class HangingStart:
    """A start of a container that shares CPUs: at the runtime, with or without a group."""

    def __init__(self, w: Any, container: str, call: Any) -> None:
        self.w, self.id, self.call = w, container, call

    @classmethod
    async def of(cls, w: Any, uid: str = "ls", *, group: bool = True) -> HangingStart:
        container = await w.create(await w.pod(uid, "LS"))
        call = await w.call("StartContainer", pb.StartContainerRequest(container_id=container))
        assert call.refused is None
        start = cls(w, container, call)
        if group:
            start.write()
        return start

    def write(self, writes: PlayedWrites | None = None) -> None:
        """Let runc write the set of the spec."""
        self.w.cgroups.sets[self.id] = CpuSet.parse(self.w.runtime.specs[self.id])
        if writes is not None:
            writes.write(self.id)

    async def land(self) -> None:
        """Let the container's program begin, and the call be answered."""
        self.w._state(self.id, "RUNNING")
        self.w.wire.finished(self.call, 0)
        await self.w.quiet()


def reporting(w: Any) -> PlayedWrites:
    """Have a kernel that reports writes."""
    writes = PlayedWrites(w.cgroups.sets)
    w.executor.drift.watch.writes, w.executor.drift.watch.refused = writes, ""
    w.executor.drift.watch.start()
    return writes


def count(w: Any) -> dict[str, int]:
    names = ("owners_cleared", "creates_waited", "creates_past_calls")
    page = w.executor.telemetry.registry.page()
    return {name: page.get(name, 0) for name in names}


def notes(w: Any) -> list[str]:
    return [problem["what"] for problem in w.executor.telemetry.problems()]


async def owner(w: Any, cpus: str = "0-3", uid: str = "lse") -> Any:
    return await w.begin(await w.pod(uid, "LSE", "", cpus))


def test_owners_are_created_and_started_beside_a_start_that_hangs(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        writes = reporting(w)
        start = await HangingStart.of(w)
        assert w.on(start.id) == "0-15"
        call = await owner(w)
        assert call.refused is None
        assert w.on(start.id) == "4-15"
        assert count(w) == {"owners_cleared": 1, "creates_waited": 1, "creates_past_calls": 1}
        assert w.executor.telemetry.value(metrics.CREATES_WAITED_MS) < 1900
        assert (await w.start(w.finish(call, "own"))).refused is None
        again = await owner(w, "4-5", "lse2")
        assert again.refused is None
        assert w.on(start.id) == "6-15", "it leaves what is owned later too"
        start.write(writes)
        await w.until(lambda: w.on(start.id) == "6-15")
        await start.land()
        w.check()
        assert not w.executor.state.inflight.confined
        assert start.id in w.executor.state.runtime.unsettled, "what the runtime has saved is wider"
        assert w.executor.telemetry.value(metrics.CPUSETS_REPAIRED) == 0, (
            "what a call in flight brings is no drift"
        )

    live(day, call_timeout=2.0)


def test_a_start_that_lands_soon_is_waited_for(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        start = await HangingStart.of(w)
        create = asyncio.create_task(owner(w))
        await w.until(lambda: w.executor.state.owners)
        await w.quiet()
        assert not create.done()
        assert not w.executor.state.inflight.confined
        await start.land()
        assert (await create).refused is None
        assert count(w) == {"owners_cleared": 1, "creates_waited": 1, "creates_past_calls": 0}
        w.check()

    live(day)


def test_a_start_without_a_group_is_named_in_the_log_alone(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        start = await HangingStart.of(w, "secret", group=False)
        call = await owner(w)
        words = (
            "cannot free CPUs for ns/lse/c: the runtime is still busy with calls for containers that must"
            " move: one is being started"
        )
        assert call.refused is not None
        assert call.refused[1] == words
        noted = [note for note in notes(w) if "busy with the start of ns/secret/c, not answered for" in note]
        assert len(noted) == 1
        assert count(w) == {"owners_cleared": 1, "creates_waited": 1, "creates_past_calls": 0}
        w.wire.finished(start.call, None)

    live(day, rules=TENANTS, call_timeout=0.7)


def test_a_group_that_is_made_while_a_create_waits_lets_it_continue(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        start = await HangingStart.of(w, group=False)
        create = asyncio.create_task(owner(w))
        await asyncio.sleep(confinement.PATIENCE_S + 0.1)
        assert not create.done()
        start.write()
        assert (await create).refused is None
        assert w.on(start.id) == "4-15"
        await start.land()
        w.check()

    live(day)


def test_an_update_is_waited_for(live: Callable[..., None]) -> None:
    """The container's program runs, and would run on owned CPUs until its group is narrowed again."""

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        request = pb.UpdateContainerResourcesRequest(container_id=ls)
        request.linux.memory_limit_in_bytes = 1 << 20
        update = await w.call("UpdateContainerResources", request)
        call = await owner(w)
        assert call.refused is not None
        assert call.refused[1].endswith("one is being updated")
        assert any("the update of ns/ls/c, not answered for" in note for note in notes(w))
        w.wire.finished(update, 0)

    live(day, rules=TENANTS, call_timeout=0.7)


def test_the_start_of_an_owner_names_no_other_pod(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        own = w.finish(await owner(w), "own")
        secret = await w.create(await w.pod("secret", "LS"))
        flight = w.executor.calls.depart(secret, CpuSet.parse("0-15"))
        refused = (await w.start(own)).refused
        assert refused is not None
        assert "one is being updated" in refused[1]
        assert "secret" not in refused[1]
        assert any(
            "cannot start a container pod=ns/lse" in note and "of ns/secret/c" in note for note in notes(w)
        )
        w.executor.calls.land(flight)

    live(day, rules=TENANTS, call_timeout=0.3)


@pytest.mark.parametrize("watched", [True, False])
def test_a_write_of_runc_is_narrowed_at_once(live: Callable[..., None], *, watched: bool) -> None:
    """Also where the kernel reports no writes: then the group is looked at all the time."""

    async def day(w: Any) -> None:
        writes = reporting(w) if watched else None
        start = await HangingStart.of(w)
        assert (await owner(w)).refused is None
        for _ in range(3):
            start.write(writes)
            begun = asyncio.get_running_loop().time()
            await w.until(lambda: w.on(start.id) == "4-15")
            assert asyncio.get_running_loop().time() - begun < confinement.WATCHED_S / 2
        await start.land()
        w.check()

    live(day)


def test_a_group_that_is_gone_confines_nothing(live: Callable[..., None], monkeypatch: Any) -> None:
    monkeypatch.setattr(confinement, "WATCHED_S", 0.02)

    async def day(w: Any) -> None:
        reporting(w)
        start = await HangingStart.of(w)
        assert (await owner(w)).refused is None
        del w.cgroups.sets[start.id]
        await w.until(lambda: not w.executor.state.inflight.confined)
        assert (await owner(w, "4", "lse2")).refused is not None, "it may be made again, with the old set"

    live(day, call_timeout=0.7)


def test_a_start_without_its_client_is_confined_while_its_group_exists(
    live: Callable[..., None], monkeypatch: Any
) -> None:
    monkeypatch.setattr(confinement, "WATCHED_S", 0.02)

    async def passes(w: Any) -> None:
        for _ in range(3):
            w.now += 3
            await w.sync.once()
        await w.quiet()

    async def day(w: Any) -> None:
        writes = reporting(w)
        start = await HangingStart.of(w)
        assert (await owner(w)).refused is None
        w.wire.finished(start.call, None)
        await passes(w)
        assert w.executor.state.inflight.is_confined(start.id)
        start.write(writes)
        await w.until(lambda: w.on(start.id) == "4-15")
        del w.cgroups.sets[start.id]
        await w.until(lambda: not w.executor.state.inflight.confined)
        await passes(w)
        assert not w.executor.state.inflight.of(start.id)
        assert w.executor.state.containers[start.id].phase is Phase.CREATED

    live(day)


def test_the_next_daemon_confines_a_start_that_it_does_not_know(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        start = await HangingStart.of(w)
        own = w.finish(await owner(w), "own")
        await w.start(own)
        await w.close()
        w.cgroups.sets[start.id] = CpuSet.parse("0-15")  # between two daemons runc has written
        w.boot()
        writes = reporting(w)
        await w.sync.once()
        assert w.on(start.id) == "4-15"
        assert w.executor.state.containers[start.id].phase is Phase.CREATED
        for _ in range(2):
            w.now += 3
            await w.sync.once()
        assert w.executor.state.inflight.is_confined(start.id), "the runtime may go on with it at any time"
        start.write(writes)
        await w.until(lambda: w.on(start.id) == "4-15")
        assert (await owner(w, "4-5", "lse2")).refused is None
        assert w.on(start.id) == "6-15"
        w._state(start.id, "RUNNING")
        await w.sync.once()
        await w.quiet()
        assert not w.executor.state.inflight.of(start.id)
        w.check()

    live(day)


def test_a_created_container_without_a_group_is_not_held_after_a_restart(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        await w.close()
        w.boot()
        for _ in range(3):
            await w.sync.once()
            w.now += 3
        assert not w.executor.state.inflight.of(ls)
        assert not w.executor.enforcer._missed

    live(day)


def test_a_group_that_is_made_by_the_create_holds_no_start_after_a_restart(live: Callable[..., None]) -> None:
    """CRI-O makes it: it does not show that the container is being started."""

    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        w.cgroups.sets[ls] = CpuSet.parse("0-15")
        await w.close()
        w.boot()
        for _ in range(3):
            await w.sync.once()
            w.now += 3
        assert not w.executor.state.inflight.of(ls)
        assert (await w.start(ls)).refused is None

    live(day, quirks=structs.replace(QUIRKS, is_made_by_create=lambda _: True))


# -- cgroup v2: a limit of the pod's group ------------------------------------------------------------------


class Limits:
    """Implements ``proxy.executor.systemd.ports.Fences``: what takes effect lies within the pod's list."""

    def __init__(self, w: Any) -> None:
        self.lists: dict[str, CpuSet] = {}
        w.cgroups.version = 2
        w.cgroups.pod_group = lambda parent: parent.strip("/") or None
        w.executor.unit_properties.fencing.fences = self

    def swap(self, path: str, cpus: CpuSet) -> CpuSet:
        before = self.lists.get(path, CpuSet())
        self.lists[path] = cpus
        return before

    def effective(self, w: Any, container: str, parent: str) -> CpuSet:
        """Give the CPUs on which a container may run."""
        has: CpuSet = w.cgroups.sets[container]
        limit = self.lists.get(parent) or has
        return has & limit or limit


@pytest.mark.parametrize("group", [True, False])
def test_on_v2_a_hanging_start_is_kept_off_by_its_pod(live: Callable[..., None], *, group: bool) -> None:
    """At no moment may it run on owned CPUs, and no group of its own is needed."""

    async def day(w: Any) -> None:
        limits, pod = Limits(w), "kubepods/podls"
        start = await HangingStart.of(w, group=group)
        assert (await owner(w)).refused is None
        assert str(limits.lists[pod]) == "4-15"
        start.write()
        assert str(limits.effective(w, start.id, pod)) == "4-15"
        assert (await owner(w, "4-5", "lse2")).refused is None
        assert str(limits.effective(w, start.id, pod)) == "6-15"
        await start.land()
        await w.until(lambda: str(limits.lists[pod]) == "0-15")
        await w.quiet()
        w.check()
        assert not w.executor.unit_properties.fencing._standing
        assert count(w)["creates_past_calls"] == 2

    live(day, call_timeout=2.0)


def test_on_v2_a_hanging_update_is_kept_off_by_its_pod(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        limits, pod = Limits(w), "kubepods/podls"
        ls = await w.run(await w.pod("ls", "LS"))
        flight = w.executor.calls.depart(ls, CpuSet.parse("0-15"))
        assert (await owner(w)).refused is None
        w.cgroups.sets[ls] = CpuSet.parse("0-15")
        assert str(limits.effective(w, ls, pod)) == "4-15"
        w.start_update.landed(flight, flight.carries)
        await w.until(lambda: str(limits.lists[pod]) == "0-15")
        await w.quiet()
        w.check()

    live(day, call_timeout=2.0)


@pytest.mark.parametrize("start", [True, False])
def test_on_v2_a_limit_is_narrowed_also_for_cpus_that_the_call_does_not_carry(
    live: Callable[..., None], *, start: bool
) -> None:
    """A cpuset that has no CPU of the limit has no effect: all CPUs of the limit are in effect."""

    async def day(w: Any) -> None:
        limits, pod = Limits(w), "kubepods/podls"
        first = w.finish(await owner(w, "0-9"), "own")
        if start:
            ls = (await HangingStart.of(w, group=False)).id
        else:
            ls = await w.run(await w.pod("ls", "LS"))
            w.executor.calls.depart(ls, CpuSet.parse("10-15"))
        await w.remove(first)
        assert (await owner(w, "10-15", "lse2")).refused is None
        assert str(limits.lists[pod]) == "0-9"
        assert (await owner(w, "4-5", "lse3")).refused is None
        w.cgroups.sets[ls] = CpuSet.parse("10-15")
        assert str(limits.effective(w, ls, pod)) == "0-3,6-9"

    live(day, call_timeout=2.0)


@pytest.mark.parametrize("watched", [True, False])
def test_on_v2_a_limit_that_another_program_removes_is_set_again(
    live: Callable[..., None], *, watched: bool
) -> None:
    async def day(w: Any) -> None:
        limits, pod = Limits(w), "kubepods/podls"
        writes = reporting(w) if watched else None
        ls = await w.run(await w.pod("ls", "LS"))
        flight = w.executor.calls.depart(ls, CpuSet.parse("0-15"))
        assert (await owner(w)).refused is None
        await w.quiet()
        limits.lists[pod] = CpuSet.parse("0-7")
        if writes is not None:
            writes.write(ls)
        begun = asyncio.get_running_loop().time()
        await w.until(lambda: str(limits.lists[pod]) == "4-15")
        assert asyncio.get_running_loop().time() - begun < confinement.WATCHED_S / 2
        w.start_update.landed(flight, flight.carries)
        await w.until(lambda: str(limits.lists[pod]) == "0-15")
        await w.quiet()
        w.check()

    live(day, call_timeout=2.0)


def test_on_v2_a_limit_goes_also_with_a_call_that_only_lands(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        limits = Limits(w)
        ls = await w.run(await w.pod("ls", "LS"))
        flight = w.executor.calls.depart(ls, CpuSet.parse("0-15"))
        assert (await owner(w)).refused is None
        w.executor.calls.land(flight)
        await w.until(lambda: str(limits.lists["kubepods/podls"]) == "0-15")
        assert not w.executor.unit_properties.fencing._standing

    live(day, call_timeout=2.0)


def test_on_v2_a_limit_stays_while_a_container_within_cannot_be_narrowed(live: Callable[..., None]) -> None:
    """The limit keeps it off the owner's CPUs, so the create is forwarded, and nothing else does."""

    async def day(w: Any) -> None:
        limits, pod = Limits(w), "kubepods/podls"
        ls = await w.run(await w.pod("ls", "LS"))
        read = w.cgroups.read
        w.cgroups.read = lambda path: changed_copy(
            read(path),
            effective_cpus=limits.effective(w, ls, pod) if path == ls else read(path).effective_cpus,
        )
        flight = w.executor.calls.depart(ls, CpuSet.parse("0-15"))
        w.cgroups.broken.add(ls)
        assert (await owner(w)).refused is None
        w.start_update.landed(flight, flight.carries)
        await w.until(lambda: not w.executor.unit_properties.fencing._standing)
        assert w.on(ls) == "0-15"
        assert str(limits.effective(w, ls, pod)) == "4-15"
        w.cgroups.broken.clear()
        flight = w.executor.calls.depart(ls, CpuSet.parse("0-15"))
        assert (await owner(w, "4-5", "lse2")).refused is None
        w.start_update.landed(flight, flight.carries)
        await w.until(lambda: str(limits.lists[pod]) == "0-15")
        await w.quiet()
        w.check()
        assert w.on(ls) == "6-15"

    live(day, call_timeout=2.0)


def test_on_v2_a_limit_with_the_owners_cpus_does_not_count(live: Callable[..., None]) -> None:
    """Both containers are in one pod: only the container's own group keeps it off the other's CPUs."""

    async def day(w: Any) -> None:
        limits = Limits(w)
        sandbox = await w.pod("g")
        some = {"cpu_shares": 512, "cpu_quota": 50_000, "cpu_period": 100_000}
        whole = {"cpu_shares": 1024, "cpu_quota": 100_000, "cpu_period": 100_000}
        ls = await w.create(sandbox, "share", **some)
        start = HangingStart(w, ls, await w.call("StartContainer", pb.StartContainerRequest(container_id=ls)))
        call = await w.begin(sandbox, "own", **whole)
        assert call.refused is not None, "the group may be made with the old set at any time"
        await w.until(lambda: not w.executor.unit_properties.fencing._standing)
        start.write()
        call = await w.begin(sandbox, "own", **whole)
        assert call.refused is None
        own = CpuSet.parse(pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus)
        assert CpuSet.parse(w.on(ls)).isdisjoint(own)
        assert limits.lists["kubepods/podg"] == CpuSet.parse("0-15")
        await start.land()

    live(day, call_timeout=0.7)


def test_the_container_is_narrowed_if_its_pod_cannot_be_limited(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        limits = Limits(w)
        limits.swap = None  # type: ignore[method-assign,assignment]
        w.cgroups.pod_group = lambda parent: None
        start = await HangingStart.of(w)
        assert (await owner(w)).refused is None
        assert w.on(start.id) == "4-15"
        await start.land()

    live(day, call_timeout=2.0)


def test_a_daemon_that_is_leaving_confines_nothing(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        start = await HangingStart.of(w)
        w.executor.store.handle(ModeChanged(NodeMode.RELEASED))
        flights = w.executor.state.inflight.of(start.id)
        assert await w.executor.confinement.confine(flights, CpuSet.parse("0-3")) == set()
        assert w.on(start.id) == "0-15"

    live(day)


def test_after_an_undone_release_a_start_that_hangs_is_kept_off_owners(live: Callable[..., None]) -> None:
    """Owners that run already get their CPUs back without a create that would wait for the start."""

    async def day(w: Any) -> None:
        own = await w.run(await w.pod("lse", "LSE", "", "0-3"))
        start = await HangingStart.of(w, group=False)
        for _ in range(3):
            await w.sync.once()  # which do not look for its group any more
        release = Release(w.executor)
        await release.begin()
        w.cgroups.sets[start.id] = CpuSet.parse("0-15")
        await release.undo()
        await w.sync.once()
        await w.quiet()
        assert (w.on(own), w.on(start.id)) == ("0-3", "4-15")
        await start.land()
        release.close()

    live(day)


@pytest.mark.parametrize("version", [1, 2])
def test_a_start_relayed_during_a_release_is_kept_off_owners_afterwards(
    live: Callable[..., None], version: int
) -> None:
    """It hangs before it has a cgroup: on v2 its pod is limited at once, on v1 it is looked at again."""

    async def day(w: Any) -> None:
        own, release = await w.run(await w.pod("lse", "LSE", "", "0-3")), Release(w.executor)
        limits, pod = Limits(w) if version == 2 else None, "kubepods/podls"
        made = await w.create(await w.pod("ls", "LS"))
        await release.begin()
        start = HangingStart(
            w, made, await w.call("StartContainer", pb.StartContainerRequest(container_id=made))
        )
        (call,) = w.executor.state.inflight.of(made)
        assert call.relayed
        assert not w.executor.state.inflight.is_known(start.id), "no release waits for it"
        w.runtime.specs[start.id] = "0-15"
        await release.undo()
        await w.sync.once()
        assert limits is None or str(limits.lists[pod]) == "4-15"
        start.write()
        await w.sync.once()
        await w.quiet()
        assert (w.on(own), w.on(start.id)) == ("0-3", "4-15")
        await start.land()
        assert not w.executor.state.inflight.of(start.id)
        assert w.executor.state.containers[start.id].phase is Phase.RUNNING
        assert limits is None or str(limits.lists[pod]) == "0-15"
        release.close()

    live(day)


def test_the_runtime_is_told_of_pools_that_have_changed_during_a_start(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        lse = await w.run(await w.pod("lse", "LSE", "", "0-3"))
        start, settler = await HangingStart.of(w), w.make_settler()
        await w.stop(lse)
        await w.sync.once()
        assert w.on(start.id) == "0-15", "a reconcile writes also a container that starts"
        await settler.finish(5)  # too early: no start can be corrected while it is in flight
        await start.land()
        await settler.finish(5)
        assert (w.on(start.id), w.runtime.specs[start.id]) == ("0-15", "0-15")
        settler.close()

    live(day)
