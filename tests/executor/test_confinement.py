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
    """A start of a container that shares CPUs, in progress at the runtime, with or without a group."""

    def __init__(self, world: Any, container: str, call: Any) -> None:
        self.world, self.id, self.call = world, container, call

    @classmethod
    async def of(cls, world: Any, uid: str = "ls", *, group: bool = True) -> HangingStart:
        container = await world.create(await world.pod(uid, "LS"))
        call = await world.call("StartContainer", pb.StartContainerRequest(container_id=container))
        assert call.refused is None
        start = cls(world, container, call)
        if group:
            start.write()
        return start

    def write(self, writes: PlayedWrites | None = None) -> None:
        """Let runc write the set of the spec."""
        self.world.cgroups.sets[self.id] = CpuSet.parse(self.world.runtime.specs[self.id])
        if writes is not None:
            writes.write(self.id)

    async def complete(self) -> None:
        """Let the container's program begin, and complete the call."""
        self.world._state(self.id, "RUNNING")
        self.world.wire.finished(self.call, 0)
        await self.world.quiet()


def with_reported_writes(world: Any) -> PlayedWrites:
    """Simulate a kernel that reports writes."""
    writes = PlayedWrites(world.cgroups.sets)
    world.executor.drift.watch.writes, world.executor.drift.watch.refused = writes, ""
    world.executor.drift.watch.start()
    return writes


def count(world: Any) -> dict[str, int]:
    names = ("owners_cleared", "creates_waited", "creates_past_calls")
    page = world.executor.telemetry.registry.page()
    return {name: page.get(name, 0) for name in names}


def notes(world: Any) -> list[str]:
    return [problem["what"] for problem in world.executor.telemetry.problems()]


async def owner(world: Any, cpus: str = "0-3", uid: str = "lse") -> Any:
    return await world.begin(await world.pod(uid, "LSE", "", cpus))


def test_owners_are_created_and_started_beside_a_start_that_hangs(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        start = await HangingStart.of(world)
        assert world.on(start.id) == "0-15"
        call = await owner(world)
        assert call.refused is None
        assert world.on(start.id) == "4-15"
        assert count(world) == {"owners_cleared": 1, "creates_waited": 1, "creates_past_calls": 1}
        assert world.executor.telemetry.value(metrics.CREATES_WAITED_MS) < 19_000
        assert (await world.start(world.finish(call, "own"))).refused is None
        again = await owner(world, "4-5", "lse2")
        assert again.refused is None
        assert world.on(start.id) == "6-15", "it leaves CPUs that are owned later too"
        start.write(writes)
        await world.until(lambda: world.on(start.id) == "6-15")
        await start.complete()
        world.check()
        assert not world.executor.state.inflight.confined
        assert start.id in world.executor.state.runtime.awaiting_sync, "the set saved by the runtime is wider"
        assert world.executor.telemetry.value(metrics.CPUSETS_REPAIRED) == 0, (
            "a write of a call in flight is not drift"
        )

    run_scenario(scenario, call_timeout=20.0)


def test_an_owner_waits_for_a_start_that_completes_soon(
    run_scenario: Callable[..., None], monkeypatch: Any
) -> None:
    monkeypatch.setattr(confinement, "CONFINE_AFTER_S", 20.0)

    async def scenario(world: Any) -> None:
        start = await HangingStart.of(world)
        create = asyncio.create_task(owner(world))
        await world.until(lambda: world.executor.state.owners)
        await world.quiet()
        assert not create.done()
        assert not world.executor.state.inflight.confined
        await start.complete()
        assert (await create).refused is None
        assert count(world) == {"owners_cleared": 1, "creates_waited": 1, "creates_past_calls": 0}
        world.check()

    run_scenario(scenario)


def test_a_start_without_a_group_is_named_in_the_log_alone(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        world.limit_waits(world.executor.confinement, "wait", 0.7)
        start = await HangingStart.of(world, "secret", group=False)
        call = await owner(world)
        expected = (
            "cannot free CPUs for ns/lse/c: the runtime is still busy with calls for containers that must"
            " move: one is being started"
        )
        assert call.refused is not None
        assert call.refused[1] == expected
        noted = [
            note for note in notes(world) if "busy with the start of ns/secret/c, not answered for" in note
        ]
        assert len(noted) == 1
        assert count(world) == {"owners_cleared": 1, "creates_waited": 1, "creates_past_calls": 0}
        world.wire.finished(start.call, None)

    run_scenario(scenario, rules=TENANTS)


def test_a_create_continues_when_the_group_of_a_hanging_start_appears(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        start = await HangingStart.of(world, group=False)
        create = asyncio.create_task(owner(world))
        await asyncio.sleep(confinement.CONFINE_AFTER_S + 0.1)
        assert not create.done()
        start.write()
        assert (await create).refused is None
        assert world.on(start.id) == "4-15"
        await start.complete()
        world.check()

    run_scenario(scenario)


def test_an_update_is_waited_for(run_scenario: Callable[..., None]) -> None:
    """The container's program already runs, and uses owned CPUs until its group is narrowed again."""

    async def scenario(world: Any) -> None:
        world.limit_waits(world.executor.confinement, "wait", 0.7)
        ls = await world.run(await world.pod("ls", "LS"))
        request = pb.UpdateContainerResourcesRequest(container_id=ls)
        request.linux.memory_limit_in_bytes = 1 << 20
        update = await world.call("UpdateContainerResources", request)
        call = await owner(world)
        assert call.refused is not None
        assert call.refused[1].endswith("one is being updated")
        assert any("the update of ns/ls/c, not answered for" in note for note in notes(world))
        world.wire.finished(update, 0)

    run_scenario(scenario, rules=TENANTS)


def test_the_start_of_an_owner_names_no_other_pod(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        world.limit_waits(world.executor.confinement, "wait", 0.3)
        own = world.finish(await owner(world), "own")
        secret = await world.create(await world.pod("secret", "LS"))
        call = world.executor.inflight_calls.track(secret, CpuSet.parse("0-15"))
        refused = (await world.start(own)).refused
        assert refused is not None
        assert "one is being updated" in refused[1]
        assert "secret" not in refused[1]
        assert any(
            "cannot start a container pod=ns/lse" in note and "of ns/secret/c" in note
            for note in notes(world)
        )
        world.executor.inflight_calls.complete(call)

    run_scenario(scenario, rules=TENANTS)


@pytest.mark.parametrize("watched", [True, False])
def test_a_write_of_runc_is_narrowed_at_once(
    run_scenario: Callable[..., None], monkeypatch: Any, *, watched: bool
) -> None:
    """If the kernel does not report writes, the group is polled."""
    monkeypatch.setattr(confinement, "WATCHED_S", 40.0)

    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world) if watched else None
        start = await HangingStart.of(world)
        assert (await owner(world)).refused is None
        for _ in range(3):
            start.write(writes)
            begun = asyncio.get_running_loop().time()
            await world.until(lambda: world.on(start.id) == "4-15")
            assert asyncio.get_running_loop().time() - begun < confinement.WATCHED_S / 2
        await start.complete()
        world.check()

    run_scenario(scenario)


def test_a_removed_group_does_not_confine_a_start(
    run_scenario: Callable[..., None], monkeypatch: Any
) -> None:
    monkeypatch.setattr(confinement, "WATCHED_S", 0.02)

    async def scenario(world: Any) -> None:
        world.limit_waits(world.executor.confinement, "wait", 0.7)
        with_reported_writes(world)
        start = await HangingStart.of(world)
        assert (await owner(world)).refused is None
        del world.cgroups.sets[start.id]
        await world.until(lambda: not world.executor.state.inflight.confined)
        assert (await owner(world, "4", "lse2")).refused is not None, (
            "the group may be created again, with the old set"
        )

    run_scenario(scenario)


def test_a_start_without_its_client_is_confined_while_its_group_exists(
    run_scenario: Callable[..., None], monkeypatch: Any
) -> None:
    monkeypatch.setattr(confinement, "WATCHED_S", 0.02)

    async def passes(world: Any) -> None:
        for _ in range(3):
            world.now += 3
            await world.sync.once()
        await world.quiet()

    async def scenario(world: Any) -> None:
        writes = with_reported_writes(world)
        start = await HangingStart.of(world)
        assert (await owner(world)).refused is None
        world.wire.finished(start.call, None)
        await passes(world)
        assert world.executor.state.inflight.is_confined(start.id)
        start.write(writes)
        await world.until(lambda: world.on(start.id) == "4-15")
        del world.cgroups.sets[start.id]
        await world.until(lambda: not world.executor.state.inflight.confined)
        await passes(world)
        assert not world.executor.state.inflight.of(start.id)
        assert world.executor.state.containers[start.id].phase is Phase.CREATED

    run_scenario(scenario)


def test_the_next_daemon_confines_a_start_that_it_does_not_know(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        start = await HangingStart.of(world)
        own = world.finish(await owner(world), "own")
        await world.start(own)
        await world.close()
        world.cgroups.sets[start.id] = CpuSet.parse("0-15")  # runc has written between the two daemons
        world.boot()
        writes = with_reported_writes(world)
        await world.sync.once()
        assert world.on(start.id) == "4-15"
        assert world.executor.state.containers[start.id].phase is Phase.CREATED
        for _ in range(2):
            world.now += 3
            await world.sync.once()
        assert world.executor.state.inflight.is_confined(start.id), (
            "the runtime may continue the start at any time"
        )
        start.write(writes)
        await world.until(lambda: world.on(start.id) == "4-15")
        assert (await owner(world, "4-5", "lse2")).refused is None
        assert world.on(start.id) == "6-15"
        world._state(start.id, "RUNNING")
        await world.sync.once()
        await world.quiet()
        assert not world.executor.state.inflight.of(start.id)
        world.check()

    run_scenario(scenario)


def test_a_created_container_without_a_group_is_not_held_after_a_restart(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        await world.close()
        world.boot()
        for _ in range(3):
            await world.sync.once()
            world.now += 3
        assert not world.executor.state.inflight.of(ls)
        assert not world.executor.cpuset_writer._missed

    run_scenario(scenario)


def test_a_group_that_is_made_by_the_create_holds_no_start_after_a_restart(
    run_scenario: Callable[..., None],
) -> None:
    """CRI-O creates the group with the container: the group is no evidence of a start."""

    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        world.cgroups.sets[ls] = CpuSet.parse("0-15")
        await world.close()
        world.boot()
        for _ in range(3):
            await world.sync.once()
            world.now += 3
        assert not world.executor.state.inflight.of(ls)
        assert (await world.start(ls)).refused is None

    run_scenario(scenario, quirks=structs.replace(QUIRKS, is_made_by_create=lambda _: True))


# -- cgroup v2: a limit on the pod's group ------------------------------------------------------------------


class Limits:
    """Implements ``proxy.executor.systemd.ports.Fences``: what takes effect lies within the pod's list."""

    def __init__(self, world: Any) -> None:
        self.lists: dict[str, CpuSet] = {}
        world.cgroups.version = 2
        world.cgroups.pod_group = lambda parent: parent.strip("/") or None
        world.executor.unit_properties.fencing.fences = self

    def replace_cpus(self, path: str, cpus: CpuSet) -> CpuSet:
        before = self.lists.get(path, CpuSet())
        self.lists[path] = cpus
        return before

    def effective(self, world: Any, container: str, parent: str) -> CpuSet:
        """Return the CPUs on which a container may run."""
        has: CpuSet = world.cgroups.sets[container]
        limit = self.lists.get(parent) or has
        return has & limit or limit


@pytest.mark.parametrize("group", [True, False])
def test_on_v2_a_limit_on_the_pod_keeps_a_hanging_start_off_owned_cpus(
    run_scenario: Callable[..., None], *, group: bool
) -> None:
    """The container may never run on owned CPUs, and needs no group of its own."""

    async def scenario(world: Any) -> None:
        limits, pod = Limits(world), "kubepods/podls"
        start = await HangingStart.of(world, group=group)
        assert (await owner(world)).refused is None
        assert str(limits.lists[pod]) == "4-15"
        start.write()
        assert str(limits.effective(world, start.id, pod)) == "4-15"
        assert (await owner(world, "4-5", "lse2")).refused is None
        assert str(limits.effective(world, start.id, pod)) == "6-15"
        await start.complete()
        await world.until(lambda: str(limits.lists[pod]) == "0-15")
        await world.quiet()
        world.check()
        assert not world.executor.unit_properties.fencing._active
        assert count(world)["creates_past_calls"] == 2

    run_scenario(scenario, call_timeout=20.0)


def test_on_v2_a_limit_on_the_pod_keeps_a_hanging_update_off_owned_cpus(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        limits, pod = Limits(world), "kubepods/podls"
        ls = await world.run(await world.pod("ls", "LS"))
        call = world.executor.inflight_calls.track(ls, CpuSet.parse("0-15"))
        assert (await owner(world)).refused is None
        world.cgroups.sets[ls] = CpuSet.parse("0-15")
        assert str(limits.effective(world, ls, pod)) == "4-15"
        world.call_tracker.completed(call, call.carries)
        await world.until(lambda: str(limits.lists[pod]) == "0-15")
        await world.quiet()
        world.check()

    run_scenario(scenario, call_timeout=20.0)


@pytest.mark.parametrize("start", [True, False])
def test_on_v2_a_limit_is_narrowed_also_for_cpus_that_the_call_does_not_carry(
    run_scenario: Callable[..., None], *, start: bool
) -> None:
    """A cpuset that has no CPU of the limit has no effect: all CPUs of the limit are in effect."""

    async def scenario(world: Any) -> None:
        limits, pod = Limits(world), "kubepods/podls"
        first = world.finish(await owner(world, "0-9"), "own")
        if start:
            ls = (await HangingStart.of(world, group=False)).id
        else:
            ls = await world.run(await world.pod("ls", "LS"))
            world.executor.inflight_calls.track(ls, CpuSet.parse("10-15"))
        await world.remove(first)
        assert (await owner(world, "10-15", "lse2")).refused is None
        assert str(limits.lists[pod]) == "0-9"
        assert (await owner(world, "4-5", "lse3")).refused is None
        world.cgroups.sets[ls] = CpuSet.parse("10-15")
        assert str(limits.effective(world, ls, pod)) == "0-3,6-9"

    run_scenario(scenario, call_timeout=20.0)


@pytest.mark.parametrize("watched", [True, False])
def test_on_v2_a_limit_that_another_program_removes_is_set_again(
    run_scenario: Callable[..., None], monkeypatch: Any, *, watched: bool
) -> None:
    monkeypatch.setattr(confinement, "WATCHED_S", 40.0)

    async def scenario(world: Any) -> None:
        limits, pod = Limits(world), "kubepods/podls"
        writes = with_reported_writes(world) if watched else None
        ls = await world.run(await world.pod("ls", "LS"))
        call = world.executor.inflight_calls.track(ls, CpuSet.parse("0-15"))
        assert (await owner(world)).refused is None
        await world.quiet()
        limits.lists[pod] = CpuSet.parse("0-7")
        if writes is not None:
            writes.write(ls)
        begun = asyncio.get_running_loop().time()
        await world.until(lambda: str(limits.lists[pod]) == "4-15")
        assert asyncio.get_running_loop().time() - begun < confinement.WATCHED_S / 2
        world.call_tracker.completed(call, call.carries)
        await world.until(lambda: str(limits.lists[pod]) == "0-15")
        await world.quiet()
        world.check()

    run_scenario(scenario, call_timeout=20.0)


def test_on_v2_a_limit_ends_when_the_call_in_flight_completes(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        limits = Limits(world)
        ls = await world.run(await world.pod("ls", "LS"))
        call = world.executor.inflight_calls.track(ls, CpuSet.parse("0-15"))
        assert (await owner(world)).refused is None
        world.executor.inflight_calls.complete(call)
        await world.until(lambda: str(limits.lists["kubepods/podls"]) == "0-15")
        assert not world.executor.unit_properties.fencing._active

    run_scenario(scenario, call_timeout=20.0)


def test_on_v2_a_limit_stays_while_a_container_within_cannot_be_narrowed(
    run_scenario: Callable[..., None],
) -> None:
    """Only the limit keeps the container off the owner's CPUs, and so the create is forwarded."""

    async def scenario(world: Any) -> None:
        limits, pod = Limits(world), "kubepods/podls"
        ls = await world.run(await world.pod("ls", "LS"))
        read = world.cgroups.read
        world.cgroups.read = lambda path: changed_copy(
            read(path),
            effective_cpus=limits.effective(world, ls, pod) if path == ls else read(path).effective_cpus,
        )
        call = world.executor.inflight_calls.track(ls, CpuSet.parse("0-15"))
        world.cgroups.broken.add(ls)
        assert (await owner(world)).refused is None
        world.call_tracker.completed(call, call.carries)
        await world.until(lambda: not world.executor.unit_properties.fencing._active)
        assert world.on(ls) == "0-15"
        assert str(limits.effective(world, ls, pod)) == "4-15"
        world.cgroups.broken.clear()
        call = world.executor.inflight_calls.track(ls, CpuSet.parse("0-15"))
        assert (await owner(world, "4-5", "lse2")).refused is None
        world.call_tracker.completed(call, call.carries)
        await world.until(lambda: str(limits.lists[pod]) == "0-15")
        await world.quiet()
        world.check()
        assert world.on(ls) == "6-15"

    run_scenario(scenario, call_timeout=20.0)


def test_on_v2_a_limit_with_the_owners_cpus_does_not_count(run_scenario: Callable[..., None]) -> None:
    """Both containers are in one pod: only its own group keeps a container off the other's CPUs."""

    async def scenario(world: Any) -> None:
        world.limit_waits(world.executor.confinement, "wait", 0.7)
        limits = Limits(world)
        sandbox = await world.pod("g")
        some = {"cpu_shares": 512, "cpu_quota": 50_000, "cpu_period": 100_000}
        whole = {"cpu_shares": 1024, "cpu_quota": 100_000, "cpu_period": 100_000}
        ls = await world.create(sandbox, "share", **some)
        start = HangingStart(
            world, ls, await world.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        )
        call = await world.begin(sandbox, "own", **whole)
        assert call.refused is not None, "the group may be made with the old set at any time"
        await world.until(lambda: not world.executor.unit_properties.fencing._active)
        start.write()
        call = await world.begin(sandbox, "own", **whole)
        assert call.refused is None
        own = CpuSet.parse(pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus)
        assert CpuSet.parse(world.on(ls)).isdisjoint(own)
        assert limits.lists["kubepods/podg"] == CpuSet.parse("0-15")
        await start.complete()

    run_scenario(scenario)


def test_the_container_is_narrowed_if_its_pod_cannot_be_limited(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        limits = Limits(world)
        limits.replace_cpus = None  # type: ignore[method-assign,assignment]
        world.cgroups.pod_group = lambda parent: None
        start = await HangingStart.of(world)
        assert (await owner(world)).refused is None
        assert world.on(start.id) == "4-15"
        await start.complete()

    run_scenario(scenario, call_timeout=20.0)


def test_a_daemon_that_releases_the_node_confines_no_start(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        start = await HangingStart.of(world)
        world.executor.store.handle(ModeChanged(NodeMode.RELEASED))
        calls = world.executor.state.inflight.of(start.id)
        assert await world.executor.confinement.confine(calls, CpuSet.parse("0-3")) == set()
        assert world.on(start.id) == "0-15"

    run_scenario(scenario)


def test_after_an_undone_release_a_hanging_start_is_kept_off_owned_cpus(
    run_scenario: Callable[..., None],
) -> None:
    """Running owners get their CPUs back although no create waits for the start."""

    async def scenario(world: Any) -> None:
        own = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        start = await HangingStart.of(world, group=False)
        for _ in range(3):
            await world.sync.once()  # these do not search for its group any more
        release = Release(world.executor)
        await release.begin()
        world.cgroups.sets[start.id] = CpuSet.parse("0-15")
        await release.undo()
        await world.sync.once()
        await world.quiet()
        assert (world.on(own), world.on(start.id)) == ("0-3", "4-15")
        await start.complete()
        release.close()

    run_scenario(scenario)


@pytest.mark.parametrize("version", [1, 2])
def test_a_start_relayed_during_a_release_is_later_kept_off_owned_cpus(
    run_scenario: Callable[..., None], version: int
) -> None:
    """The start hangs before it has a cgroup: v2 limits its pod at once, v1 searches for the cgroup again."""

    async def scenario(world: Any) -> None:
        own, release = await world.run(await world.pod("lse", "LSE", "", "0-3")), Release(world.executor)
        limits, pod = Limits(world) if version == 2 else None, "kubepods/podls"
        made = await world.create(await world.pod("ls", "LS"))
        await release.begin()
        start = HangingStart(
            world, made, await world.call("StartContainer", pb.StartContainerRequest(container_id=made))
        )
        (call,) = world.executor.state.inflight.of(made)
        assert call.relayed
        inflight = world.executor.state.inflight
        assert not inflight.is_awaited_by_release(start.id), "no release waits for the start"
        world.runtime.specs[start.id] = "0-15"
        await release.undo()
        await world.sync.once()
        assert limits is None or str(limits.lists[pod]) == "4-15"
        start.write()
        await world.sync.once()
        await world.quiet()
        assert (world.on(own), world.on(start.id)) == ("0-3", "4-15")
        await start.complete()
        assert not world.executor.state.inflight.of(start.id)
        assert world.executor.state.containers[start.id].phase is Phase.RUNNING
        assert limits is None or str(limits.lists[pod]) == "0-15"
        release.close()

    run_scenario(scenario)


def test_the_runtime_is_notified_of_pools_that_have_changed_during_a_start(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        start, runtime_sync = await HangingStart.of(world), world.make_runtime_sync()
        await world.stop(lse)
        await world.sync.once()
        assert world.on(start.id) == "0-15", "a reconcile also writes a container that starts"
        await runtime_sync.finish(5)  # too early: no start can be corrected while it is in flight
        await start.complete()
        await runtime_sync.finish(5)
        assert (world.on(start.id), world.runtime.specs[start.id]) == ("0-15", "0-15")
        runtime_sync.close()

    run_scenario(scenario)
