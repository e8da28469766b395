"""Sets as properties of systemd's units, with a simulated systemd and runc."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.backends.runtime.quirks.runc import byte_reversed_mask
from proxy.engine.node_events import ModeChanged
from proxy.engine.systemd_masks import MaskOrder
from proxy.executor.kernel_ports import CpusetValue
from proxy.executor.systemd.ports import SystemdEvent, UnitSets
from proxy.model.errors import CgroupError, UnavailableError
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase
from proxy.telemetry import metrics
from tests.executor.test_best_effort_suppression import Bed

ALL = "0-15"
OWNED = "8-11"
REST = CpuSet.parse("0-7,12-15")
SHARES = {"cpu_shares": 512}
TOP = "kubepods.slice"


def cpus_of(text: str) -> CpuSet:
    return CpuSet.parse(text)


def unit_of(container_id: str) -> str:
    return f"cri-containerd-{container_id}.scope"


def slice_of(uid: str) -> str:
    return f"kubepods-pod{uid}.slice"


class Scopes:
    """The cgroups of the world as systemd has them on v2; paths end in units."""

    version = 2

    def __init__(self, world: Any) -> None:
        self.inner = world.cgroups
        self.slices: dict[str, CpuSet] = {}
        self.parents: dict[str, str] = {}
        self.log: list[str] = world.log
        self.world = world

    def find(self, parent: str, container_id: str) -> str | None:
        found = container_id in self.inner.sets
        return f"{TOP}/{parent}/{unit_of(container_id)}" if found and parent.endswith(".slice") else None

    @staticmethod
    def _id(path: str) -> str:
        return path.rpartition("/")[2].removeprefix("cri-containerd-").removesuffix(".scope")

    def read(self, path: str) -> CpusetValue:
        if path.endswith(".slice") or not path:
            held = self.slices.get(path.rpartition("/")[2], CpuSet())
            return CpusetValue(held, Mask(), held or cpus_of(ALL), Mask.parse("0-1"))
        found: CpusetValue = self.inner.read(self._id(path))
        return found

    def cpus(self, path: str) -> CpuSet:
        return self.read(path).effective_cpus

    def memory_nodes(self, path: str) -> Mask:
        found: Mask = self.inner.memory_nodes(self._id(path))
        return found

    def pod_group(self, parent: str) -> str | None:
        return f"{TOP}/{parent}" if parent.endswith(".slice") else None

    def children(self, path: str) -> Sequence[str]:
        return ()

    def write(self, path: str, cpus: CpuSet | None, mems: Mask | None, *, adjust_below: bool = True) -> bool:
        done: bool = self.inner.write(self._id(path), cpus, mems, adjust_below=adjust_below)
        return done

    def write_all(
        self, paths: Sequence[str], cpus: CpuSet, should_continue: Any = None
    ) -> Sequence[bool | None]:
        return [None for _ in paths]

    def replace_cpus(self, path: str, cpus: CpuSet) -> CpuSet:
        """Of the fences."""
        name = path.rpartition("/")[2]
        before, self.slices[name] = self.slices.get(name, CpuSet()), cpus
        self.world.systemd.look("fence")
        self.log.append(f"fence {name} {cpus}")
        return before


class PlayedSystemd:
    """Units by name, and the properties that runc sends for them."""

    def __init__(self, world: Any, *, wrong: bool) -> None:
        self.world, self.wrong = world, wrong
        self.units: dict[str, UnitSets] = {}
        self.gone: set[str] = set()
        self.queried: list[str] = []
        self.received: Callable[[SystemdEvent], None] | None = None
        self.away = False
        self.late = False
        """No connection is reported."""
        self.early = False
        """It writes before runc does, not after, which is worse."""
        self.slow: list[tuple[str, CpuSet | None, Mask | None]] | None = None
        """If a list: requests to set a property wait there, and the caller gives up."""
        self.overlaps: list[str] = []
        self.owner = ""

    def read(self, unit: str) -> UnitSets:
        if self.away:
            raise UnavailableError("cannot query systemd: away")
        self.queried.append(unit)
        if unit in self.gone:
            raise CgroupError(f"cannot read {unit}: not there", errno.ENOENT)
        return self.units.get(unit, UnitSets(CpuSet(), Mask()))

    def set(self, unit: str, cpus: CpuSet | None, mems: Mask | None) -> None:
        if self.away:
            raise UnavailableError("cannot query systemd: away")
        if unit not in self.units:
            raise CgroupError(f"cannot set {unit}: not there", errno.ENOENT)
        if self.slow is not None:
            self.away = True  # it reads earlier requests first, and then answers nothing else
            self.slow.append((unit, cpus, mems))
            raise UnavailableError("cannot query systemd: it does not answer")
        has = self.units[unit]
        self.units[unit] = UnitSets(has.cpus if cpus is None else cpus, has.mems if mems is None else mems)
        self.world.log.append(f"unit {unit} {cpus}")
        self._write(unit)

    def look(self, when: str) -> None:
        """Check that no other container is on the owner's CPUs: the part within the slice is in effect."""
        for container, cpus in self.world.cgroups.sets.items():
            fence = self.world.scopes.slices.get(slice_of(container.split("-")[1]), CpuSet())
            if self.owner in self.world.cgroups.sets and container != self.owner:
                both = ((cpus & fence or fence) if fence else cpus) & cpus_of(OWNED)
                self.overlaps += [f"{when}: {container} on {both}"] if both else []

    def _write(self, unit: str) -> None:
        """Write the cgroup file as systemd does."""
        container = Scopes._id(unit)
        if container in self.world.cgroups.sets and self.units[unit].cpus:
            self.world.cgroups.sets[container] = self.units[unit].cpus

    def watch(self, on_event: Callable[[SystemdEvent], None]) -> None:
        self.received = on_event
        if not self.late:
            on_event(SystemdEvent.CONNECTED)

    def report(self, news: SystemdEvent) -> None:
        assert self.received is not None
        self.received(news)

    def reload(self) -> None:
        for unit in self.units:
            self._write(unit)
        self.report(SystemdEvent.RELOADED)

    def runc(self, container_id: str, cpus: CpuSet) -> None:
        """Do what runc does at a start or update: the unit's property, systemd's write, and its own write."""
        unit = unit_of(container_id)
        mems = self.units.get(unit, UnitSets(CpuSet(), Mask())).mems
        self.units[unit] = UnitSets(byte_reversed_mask(cpus) if self.wrong else cpus, mems)
        self.world.cgroups.sets[container_id] = cpus
        if not self.early:
            self._write(unit)
        self.look("runc")

    def close(self) -> None:
        pass


Scenario = Callable[[Any, PlayedSystemd], Awaitable[None]]


def on_systemd(
    run_scenario: Any, scenario: Scenario, *, wrong: bool = True, syncs: bool = False, **options: Any
) -> None:
    """Run a scenario in which the cgroups of containers are systemd scopes."""

    async def whole(world: Any) -> None:
        systemd = PlayedSystemd(world, wrong=wrong)
        world.systemd = systemd
        scopes = world.scopes = Scopes(world)
        world.runtime.on_update = lambda i: (
            systemd.runc(i, world.executor.state.desired_cpus(world.executor.state.containers[i]))
            if i in world.cgroups.sets
            else None
        )
        await join(world)
        tasks = [asyncio.create_task(world.executor.unit_properties.run())]
        if syncs:
            runtime_sync = world.make_runtime_sync()
            tasks.append(asyncio.create_task(runtime_sync.run()))
        assert scopes.version == 2
        try:
            await scenario(world, systemd)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if syncs:
                runtime_sync.close()

    run_scenario(whole, reconciled=False, **options)


async def join(world: Any) -> None:
    """Connect a new executor to systemd and its scopes."""
    executor = world.executor
    executor.cpuset_writer.cgroups = world.scopes
    executor.cpuset_writer.sandbox_cgroups._cgroups = world.scopes
    executor.unit_properties.units = world.systemd
    executor.unit_properties.fencing.fences = world.scopes
    await world.sync.once()


async def pod(world: Any, uid: str, **more: Any) -> str:
    found: str = await world.pod(uid, parent=slice_of(uid), **more)
    return found


async def start(world: Any, container_id: str) -> None:
    call = await world.call("StartContainer", pb.StartContainerRequest(container_id=container_id))
    assert call.refused is None
    world.systemd.runc(container_id, cpus_of(world.runtime.specs[container_id]))
    world._state(container_id, "RUNNING")
    world.wire.finished(call, 0)
    await wait_until_settled(world)


async def run(world: Any, uid: str, **more: Any) -> str:
    container_id: str = await world.create(await pod(world, uid, **more), **SHARES)
    await start(world, container_id)
    return container_id


async def update(world: Any, container_id: str, **resources: Any) -> Any:
    """Send a client's update, and wait for its response."""
    request = pb.UpdateContainerResourcesRequest(
        container_id=container_id, linux=pb.LinuxContainerResources(**resources)
    )
    call = await world.call("UpdateContainerResources", request)
    forwarded = pb.UpdateContainerResourcesRequest.FromString(call.sent or b"").linux
    world.runtime.specs[container_id] = forwarded.cpuset_cpus
    world.systemd.runc(container_id, cpus_of(forwarded.cpuset_cpus))
    return call


async def wait_until_settled(world: Any) -> None:
    """Wait until no call is in flight and no unit is to be compared."""
    await world.quiet()
    unit_properties = world.executor.unit_properties
    await world.until(
        lambda: (
            not unit_properties._dirty
            and not any(world.executor.state.inflight.of(i) for i in world.executor.state.containers)
            and not unit_properties.fencing._active
        )
    )
    await world.quiet()


async def check_set(world: Any, container_id: str, cpus: CpuSet) -> None:
    """Check that a unit and its file have a set once the pending work is done."""
    await world.until(lambda: world.systemd.units[unit_of(container_id)].cpus == cpus)
    await wait_until_settled(world)
    assert world.systemd.units[unit_of(container_id)].cpus == cpus == world.cgroups.sets[container_id]


def test_a_moved_container_has_its_set_as_a_property(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        ls = await run(world, "ls", qos="LS")
        await check_set(world, ls, cpus_of(ALL))
        await run(world, "lse", qos="LSE", cpus=OWNED)
        await wait_until_settled(world)
        await check_set(world, ls, REST)
        systemd.reload()
        await wait_until_settled(world)
        assert world.cgroups.sets[ls] == REST
        assert world.executor.telemetry.value(metrics.SYSTEMD_RELOADS) == 1

    on_systemd(run_scenario, scenario)


def test_a_suppressed_container_has_no_property_with_cpus_of_a_new_owner(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        bed = Bed(world)
        be = await run(world, "be", qos="BE")
        await check_set(world, be, cpus_of(ALL))
        bed.meter.outside_pods = 9.0
        await bed.rounds(3)
        await wait_until_settled(world)
        narrow = world.cgroups.sets[be]
        assert (narrow, systemd.units[unit_of(be)].cpus) == (bed.be, cpus_of(ALL)), "it may change soon"
        await run(world, "lse", qos="LSE", cpus="15")
        await check_set(world, be, narrow)

    on_systemd(run_scenario, scenario)


def test_wrong_masks_are_detected_corrected_and_reported_once(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        lse = await run(world, "lse", qos="LSE", cpus=OWNED)
        assert world.executor.unit_properties.order is MaskOrder.REVERSED
        await check_set(world, lse, cpus_of(OWNED))
        ls = await run(world, "ls", qos="LS")
        await check_set(world, ls, REST)
        assert world.executor.telemetry.value(metrics.SYSTEMD_UNITS_REPAIRED) == 2
        assert len([p for p in world.executor.telemetry.problems() if "runc before 1.1.6" in str(p)]) == 1

    on_systemd(run_scenario, scenario)


def test_the_cpuset_of_an_earlier_plan_is_no_wrong_mask(run_scenario: Any) -> None:
    """An owner is on CPUs 8-11 and the next one on 0-3: one pool is the reverse of the other."""

    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        lse = await run(world, "lse", qos="LSE", cpus=OWNED)
        ls = await run(world, "ls", qos="LS")
        await check_set(world, ls, REST)
        systemd.away = True
        await world.stop(lse)
        sandbox = await pod(world, "next", qos="LSE", cpus="0-3")
        next_one = world.finish(await world.begin(sandbox, **SHARES), "n")
        assert world.cgroups.sets[ls] == byte_reversed_mask(REST) == cpus_of("4-15")
        systemd.away = False
        await check_set(world, ls, cpus_of("4-15"))
        assert world.executor.unit_properties.order is MaskOrder.CORRECT
        assert not any("runc before 1.1.6" in str(p) for p in world.executor.telemetry.problems())
        await world.remove(next_one)

    on_systemd(run_scenario, scenario, wrong=False)


def test_a_call_for_a_container_outside_of_a_fence_widens_it(run_scenario: Any) -> None:
    """A cpuset without a CPU of the fence has no effect: the container would run on its sibling's CPUs."""

    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        await run(world, "lse", qos="LSE", cpus="8-15")
        sandbox, slices = await pod(world, "two"), world.scopes.slices
        owner = await world.create(sandbox, "one", cpu_shares=1024, cpu_quota=100_000, cpu_period=100_000)
        fencing, state = world.executor.unit_properties.fencing, world.executor.state
        fence = await fencing.set_up(state.containers[owner])  # for a call
        assert len(slices[slice_of("two")]) == 1
        other = await world.create(sandbox, "two", **SHARES)
        want = cpus_of(world.runtime.specs[other])
        assert want == cpus_of("0-7") - fence.cpus, "the runtime sends this unchanged"
        call = await world.call("StartContainer", pb.StartContainerRequest(container_id=other))
        assert slices[slice_of("two")] == cpus_of("0-7")
        systemd.runc(other, want)
        world._state(other, "RUNNING")
        world.wire.finished(call, 0)
        await fencing.remove(fence)
        await check_set(world, other, want)

    on_systemd(run_scenario, scenario)


def test_a_call_with_a_doubtful_set_is_forwarded_within_a_fence(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        await run(world, "lse", qos="LSE", cpus=OWNED)
        ls = await run(world, "ls", qos="LS")
        await world.clear_log()
        call = await update(world, ls, cpu_shares=100)
        assert world.scopes.slices[slice_of("ls")] == REST  # systemd has 4-15 in effect, or soon
        assert world.log == [f"fence {slice_of('ls')} {REST}", "forward UpdateContainerResources"]
        world.wire.finished(call, 0)
        await wait_until_settled(world)
        assert world.log[2:] == [f"unit {unit_of(ls)} {REST}", f"fence {slice_of('ls')} {ALL}"]
        assert world.cgroups.sets[ls] == REST

    on_systemd(run_scenario, scenario)


def test_a_call_is_in_flight_until_its_unit_is_corrected(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        await run(world, "lse", qos="LSE", cpus=OWNED)
        ls = await run(world, "ls", qos="LS")
        call = await update(world, ls, cpu_shares=100)
        systemd.away = True
        world.wire.finished(call, 0)
        assert world.executor.state.inflight.of(ls)
        world.cgroups.sets[ls] = byte_reversed_mask(REST)
        await world.until(lambda: not world.executor.state.inflight.of(ls))
        assert world.cgroups.sets[ls] == REST, "written by the daemon where systemd cannot be called"
        await world.until(lambda: not world.executor.unit_properties.fencing._active)
        systemd.away = False
        await wait_until_settled(world)
        await check_set(world, ls, REST)

    on_systemd(run_scenario, scenario)


def test_a_start_is_forwarded_within_a_fence(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        await run(world, "lse", qos="LSE", cpus=OWNED)
        container = await world.create(await pod(world, "ls", qos="LS"), **SHARES)
        await world.clear_log()
        await start(world, container)
        fenced = [f"fence {slice_of('ls')} {REST}", "forward StartContainer"]
        assert world.log[:2] == fenced
        assert [line for line in world.log if line.startswith("fence")][1:] == [
            f"fence {slice_of('ls')} {ALL}"
        ]
        await check_set(world, container, REST)

    on_systemd(run_scenario, scenario)


def test_a_unit_follows_a_plan_that_changes_while_its_start_is_corrected(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        lse = await run(world, "lse", qos="LSE", cpus=OWNED)
        container = await world.create(await pod(world, "ls", qos="LS"), **SHARES)
        unit_properties = world.executor.unit_properties
        repair = unit_properties.repair

        async def slowly(*args: Any, **more: Any) -> bool:
            unit_properties.repair = repair
            done: bool = await repair(*args, **more)
            assert systemd.units[unit_of(container)].cpus == REST
            await world.stop(lse)
            return done

        unit_properties.repair = slowly
        await start(world, container)
        await check_set(world, container, cpus_of(ALL))

    on_systemd(run_scenario, scenario)


def test_the_fence_of_a_pod_holds_all_that_its_containers_are_to_have(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        sandbox = await pod(world, "lse", qos="LSE", cpus=OWNED)
        first = await world.create(sandbox, "one", **SHARES)
        await start(world, first)
        second = await world.create(sandbox, "two", **SHARES)
        world.scopes.slices[slice_of("lse")] = cpus_of("0-14")
        calls = [
            await world.call("StartContainer", pb.StartContainerRequest(container_id=second)),
            await update(world, first, cpu_shares=3),
        ]
        assert world.scopes.slices[slice_of("lse")] == cpus_of(OWNED)
        systemd.runc(second, cpus_of(OWNED))
        world._state(second, "RUNNING")
        world.wire.finished(calls[0], 0)
        await world.until(lambda: not world.executor.state.inflight.of(second))
        assert world.scopes.slices[slice_of("lse")] == cpus_of(OWNED), "another call is under way"
        world.wire.finished(calls[1], 0)
        await wait_until_settled(world)
        assert world.scopes.slices[slice_of("lse")] == cpus_of("0-14"), "the set is unchanged"

    on_systemd(run_scenario, scenario)


def test_a_runtime_with_right_sets_is_trusted(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        unit_properties: Any = world.executor.unit_properties
        ls = await run(world, "ls", qos="LS")
        assert unit_properties.order is MaskOrder.UNKNOWN, "all CPUs read the same in both orders"
        assert world.executor.telemetry.value(metrics.POD_CGROUPS_NARROWED) == 0
        lse = await run(world, "lse", qos="LSE", cpus=OWNED)
        assert world.executor.unit_properties.order is MaskOrder.CORRECT
        fences = world.executor.telemetry.value(metrics.POD_CGROUPS_NARROWED)
        await wait_until_settled(world)
        before = len(systemd.queried)
        for container in (ls, lse):
            world.wire.finished(await update(world, container, cpu_shares=7), 0)
            await wait_until_settled(world)
        assert world.executor.telemetry.value(metrics.POD_CGROUPS_NARROWED) == fences == 1
        assert len(systemd.queried) == before, "a known property is not queried"
        assert world.executor.telemetry.value(metrics.SYSTEMD_UNITS_REPAIRED) == 0

    on_systemd(run_scenario, scenario, wrong=False)


def test_a_property_that_a_release_has_set_does_not_show_the_order(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        await run(world, "lse", qos="LSE", cpus=OWNED)
        ls = await run(world, "ls", qos="LS")
        unit_properties = world.executor.unit_properties
        assert unit_properties.order is MaskOrder.REVERSED
        systemd.runc(ls, REST)
        unit_properties.sent(ls, REST, alone=True)
        await unit_properties.set_for_release(ls, REST, Mask())
        await wait_until_settled(world)
        assert unit_properties.order is MaskOrder.REVERSED

    on_systemd(run_scenario, scenario)


def test_a_runc_that_begins_to_send_wrong_masks_is_detected(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        def order() -> Any:
            return world.executor.unit_properties.order

        await run(world, "lse", qos="LSE", cpus=OWNED)
        assert order() is MaskOrder.CORRECT
        systemd.wrong = True
        ls = await run(world, "ls", qos="LS")
        await check_set(world, ls, REST)
        assert order() is MaskOrder.REVERSED

    on_systemd(run_scenario, scenario, wrong=False)


def test_own_changes_go_to_systemd_if_the_runtime_sends_wrong_sets(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        ls = await run(world, "ls", qos="LS")
        await run(world, "lsr", qos="LSR", cpus="12-13")
        await check_set(world, ls, cpus_of("0-11,14-15"))
        assert world.executor.unit_properties.order is MaskOrder.REVERSED
        await world.clear_log()
        lse = await run(world, "lse", qos="LSE", cpus=OWNED)
        await check_set(world, ls, REST - cpus_of("12-13"))
        await world.stop(lse)
        await check_set(world, ls, cpus_of("0-11,14-15"))
        assert not [line for line in world.log if line.startswith("runtime ")]

    on_systemd(run_scenario, scenario, syncs=True, settle_per_second=1000)


def test_an_unknown_runtime_is_called_within_a_fence(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        ls = await run(world, "ls", qos="LS")
        sandbox = await pod(world, "lse", qos="LSE", cpus=OWNED)
        await world.create(sandbox, **SHARES)  # ls moves, and the order of the runtime is not known yet
        await world.until(lambda: world.executor.unit_properties.order is not MaskOrder.UNKNOWN)
        await wait_until_settled(world)
        at = world.log.index(f"runtime {ls} {REST}")
        assert f"fence {slice_of('ls')} {REST}" in world.log[:at]
        await check_set(world, ls, REST)

    on_systemd(run_scenario, scenario, syncs=True, settle_per_second=1000)


def test_units_are_read_when_systemd_is_available(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        systemd.late = True
        ls = await run_unasked(world, "ls")
        await run_unasked(world, "lse", qos="LSE", cpus=OWNED)
        assert systemd.queried == []
        systemd.report(SystemdEvent.CONNECTED)
        await wait_until_settled(world)
        await check_set(world, ls, REST)
        section = world.executor.unit_properties.page()["systemd"]
        assert section == {"connected": True, "runtime_tells": "wrong", "due": 0}
        systemd.report(SystemdEvent.LOST)
        await world.quiet()
        assert world.executor.unit_properties.page()["systemd"]["connected"] is False

    on_systemd(run_scenario, scenario)


def test_a_property_is_in_flight_until_systemd_answers(run_scenario: Any) -> None:
    """A reload may take longer than the deadline, and the set arrives nevertheless."""

    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        shared = await run(world, "ls", qos="LS")
        await wait_until_settled(world)
        systemd.slow = []
        systemd.units[unit_of(shared)] = UnitSets(cpus_of("1"), Mask())
        world.executor.unit_properties.changed([shared])
        await world.until(lambda: systemd.slow)
        assert [one.carries for one in world.executor.state.inflight.of(shared)] == [cpus_of(ALL)]

        owner = await pod(world, "lse", qos="LSE", cpus=OWNED)
        creating = asyncio.create_task(world.create(owner, **SHARES))
        await world.until(lambda: len(world.executor.state.containers) > 1)
        await world.quiet()
        assert not creating.done()  # the update in flight carries its CPUs

        pending, systemd.slow, systemd.away = systemd.slow, None, False
        for call in pending:
            systemd.set(*call)
        await asyncio.wait_for(creating, 30)
        await check_set(world, shared, REST)
        assert not world.executor.state.inflight.of(shared)

    on_systemd(run_scenario, scenario, wrong=False)


@pytest.mark.parametrize("ends", ["exited", "removed", "released", "its unit is gone"])
def test_a_late_property_is_completed_whatever_becomes_of_its_container(run_scenario: Any, ends: str) -> None:
    """Nothing else would complete it: a release, a hand-over and owners' creates wait for calls in flight."""

    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        shared = await run(world, "ls", qos="LS")
        await wait_until_settled(world)
        systemd.slow = []
        systemd.units[unit_of(shared)] = UnitSets(cpus_of("1"), Mask())
        world.executor.unit_properties.changed([shared])
        await world.until(lambda: systemd.slow)
        assert world.executor.state.inflight.of(shared)

        if ends == "exited":
            world.executor.lifecycle.phase(shared, Phase.EXITED)
        elif ends == "removed":
            world.executor.lifecycle.removed([shared])
        elif ends == "released":
            world.executor.store.handle(ModeChanged(NodeMode.RELEASING))
        await world.quiet()
        assert world.executor.state.inflight.of(shared), "systemd has not answered yet"
        pending, systemd.slow, systemd.away = systemd.slow, None, False
        if ends == "its unit is gone":
            systemd.gone.add(unit_of(shared))
        else:
            for call in pending:
                systemd.set(*call)
        await world.until(lambda: not world.executor.state.inflight.calls)

    on_systemd(run_scenario, scenario, wrong=False)


async def run_unasked(world: Any, uid: str, **more: Any) -> str:
    container_id: str = await world.create(await pod(world, uid, **more), **SHARES)
    call = await world.call("StartContainer", pb.StartContainerRequest(container_id=container_id))
    world.systemd.runc(container_id, cpus_of(world.runtime.specs[container_id]))
    world._state(container_id, "RUNNING")
    world.wire.finished(call, 0)
    await world.quiet()
    return container_id


def test_a_foreign_property_is_repaired(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        await run(world, "lse", qos="LSE", cpus=OWNED)
        ls = await run(world, "ls", qos="LS")
        systemd.set(unit_of(ls), cpus_of("3"), None)
        assert world.cgroups.sets[ls] == cpus_of("3")
        await world.sync.once()
        await wait_until_settled(world)
        await check_set(world, ls, REST)

    on_systemd(run_scenario, scenario)


def test_memory_nodes_in_units_match_the_kernel(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        ls = await run(world, "ls", qos="LS")
        assert systemd.units[unit_of(ls)].mems == Mask()
        world.cgroups.mems[ls] = Mask.parse("1")
        world.executor.unit_properties.changed([ls])
        await wait_until_settled(world)
        assert systemd.units[unit_of(ls)].mems == Mask.parse("1")

    on_systemd(run_scenario, scenario)


def test_slices_above_contain_the_sets_of_their_units(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        systemd.units[TOP] = UnitSets(cpus_of("0-3"), Mask())
        systemd.units[slice_of("ls")] = UnitSets(CpuSet(), Mask())
        world.scopes.slices[TOP] = cpus_of(ALL)  # as a write of the daemon has widened it
        await run(world, "lse", qos="LSE", cpus=OWNED)
        await run(world, "ls", qos="LS")
        await wait_until_settled(world)
        assert systemd.units[TOP].cpus == cpus_of(ALL)
        assert systemd.units[slice_of("ls")].cpus == CpuSet(), "a unit without a set has that of its parent"

    on_systemd(run_scenario, scenario)


def test_a_slice_that_the_kernel_has_not_widened_stays(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        systemd.units[TOP] = UnitSets(cpus_of("0-3"), Mask())
        world.scopes.slices[TOP] = cpus_of("0-3")
        await run(world, "lse", qos="LSE", cpus=OWNED)
        await wait_until_settled(world)
        assert systemd.units[TOP].cpus == cpus_of("0-3")

    on_systemd(run_scenario, scenario)


def test_a_slice_that_is_not_a_pods_stays_and_its_content_is_repaired(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        await run(world, "lse", qos="LSE", cpus=OWNED)
        sandbox = await world.pod("odd", parent="system.slice", qos="LS")
        odd = await world.create(sandbox, **SHARES)
        await start(world, odd)
        systemd.early = True
        for _ in range(2):
            world.wire.finished(await update(world, odd, cpu_shares=5), 0)
            await check_set(world, odd, REST)
        assert "system.slice" not in world.scopes.slices

    on_systemd(run_scenario, scenario)


def test_fences_are_taken_at_the_end(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        await run(world, "lse", qos="LSE", cpus=OWNED)
        ls = await run(world, "ls", qos="LS")
        await update(world, ls, cpu_shares=9)
        assert world.scopes.slices[slice_of("ls")] == REST
        await world.executor.unit_properties.close()
        assert world.scopes.slices[slice_of("ls")] == cpus_of(ALL)

    on_systemd(run_scenario, scenario)


def test_a_start_that_is_refused_leaves_no_fence(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        await run(world, "lse", qos="LSE", cpus=OWNED)
        container = await world.create(await pod(world, "ls", qos="LS"), **SHARES)
        call = await world.call("StartContainer", pb.StartContainerRequest(container_id=container))
        world.wire.finished(call, 13)
        await world.sync.once()
        await wait_until_settled(world)
        assert world.scopes.slices[slice_of("ls")] == cpus_of(ALL)

    on_systemd(run_scenario, scenario)


def test_without_scopes_systemd_is_not_asked(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        sandbox = await world.pod("ls", qos="LS")
        container = await world.create(sandbox, **SHARES)
        call = await world.call("StartContainer", pb.StartContainerRequest(container_id=container))
        world.wire.finished(call, 0)
        await world.quiet()
        assert systemd.received is None
        assert world.executor.unit_properties.page() == {}

    on_systemd(run_scenario, scenario)


def test_a_container_with_returned_cpus_has_them_as_a_property(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        await run(world, "lse", qos="LSE", cpus=OWNED)
        ls = await run(world, "ls", qos="LS")
        world.executor.store.handle(ModeChanged(NodeMode.RELEASED))
        await world.executor.unit_properties.set_for_release(ls, cpus_of(ALL), Mask.parse("0-1"))
        assert systemd.units[unit_of(ls)] == UnitSets(cpus_of(ALL), Mask.parse("0-1"))
        systemd.away = True
        await world.executor.unit_properties.set_for_release(ls, REST, Mask.parse("0"))
        assert "cannot query systemd" in str(world.executor.telemetry.problems())

    on_systemd(run_scenario, scenario)


def test_no_container_is_ever_on_an_owners_cpus(run_scenario: Any) -> None:
    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        systemd.owner = await run(world, "lse", qos="LSE", cpus=OWNED)
        first, second = [await run(world, uid, qos="LS") for uid in ("one", "two")]
        for _ in range(3):
            calls = [
                await update(world, container, cpuset_cpus=ALL)
                for container in (first, second, systemd.owner)
            ]
            assert world.cgroups.sets[first] & cpus_of(OWNED), "by its file alone"
            for call in reversed(calls):
                world.wire.finished(call, 0)
            await wait_until_settled(world)
        await check_set(world, first, REST)
        assert world.cgroups.sets[systemd.owner] == cpus_of(OWNED)
        assert systemd.overlaps == []

    on_systemd(run_scenario, scenario)


def test_an_owner_waits_for_a_call_whose_fence_has_its_cpus(run_scenario: Any) -> None:
    """The call carries none of these CPUs. In reversed order it does, and a sibling widens the fence."""

    async def scenario(world: Any, systemd: PlayedSystemd) -> None:
        low, carried = cpus_of("0-7"), cpus_of("8")
        first = await run(world, "first", qos="LSE", cpus=str(low))
        sandbox = await pod(world, "mixed")
        own = await world.create(sandbox, "own", cpu_shares=1024, cpu_quota=100_000, cpu_period=100_000)
        await start(world, own)
        await start(world, await world.create(sandbox, "side", **SHARES))
        await world.remove(first)
        await wait_until_settled(world)
        call = await update(world, own, cpu_shares=1024)
        assert world.executor.state.desired_cpus(world.executor.state.containers[own]) == carried
        assert world.cgroups.sets[own] == byte_reversed_mask(carried) <= low
        assert low <= world.scopes.slices[slice_of("mixed")]
        lse = await pod(world, "lse", qos="LSE", cpus=str(low))
        creating = asyncio.create_task(world.create(lse, **SHARES))
        await world.until(lambda: len(world.executor.state.owners) > 1)
        await world.quiet()
        assert not creating.done(), "the call may put its container on these CPUs until it has completed"
        world.wire.finished(call, 0)
        await creating
        assert world.cgroups.sets[own] == carried

    on_systemd(run_scenario, scenario)
