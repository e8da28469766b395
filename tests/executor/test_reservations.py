"""Creates of owners when a container cannot be moved off the CPUs of the new owner."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.invariants import violations
from proxy.engine.node_events import ModeChanged
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.telemetry import metrics
from tests.testkit.cri import TWO_CPUS


class Refusals:
    """Makes the kernel refuse writes to one container, up to a number of times."""

    def __init__(self, world: Any, container_id: str, number: int, times: int = 1_000_000) -> None:
        self.left = times
        self.attempts = 0
        plain = world.cgroups.write

        def write(path: str, cpus: Any, mems: Any, *, adjust_below: bool = True) -> bool:
            if path == container_id and cpus is not None and world.cgroups.sets.get(path) != cpus:
                self.attempts += 1
                if self.left > 0:
                    self.left -= 1
                    raise CgroupError(f"cannot set CPUs in {path}: {os.strerror(number)}", number)
            return bool(plain(path, cpus, mems, adjust_below=adjust_below))

        world.cgroups.write = write


def carried(call: Any) -> str:
    return str(pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus)


@pytest.mark.parametrize("number", [errno.EBUSY, 0])
def test_a_transient_refusal_is_retried(run_scenario: Callable[..., None], number: int) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        refusals = Refusals(world, ls, number, times=2)
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        assert call.refused is None
        assert (world.on(ls), refusals.attempts) == ("4-15", 3)
        assert world.executor.telemetry.value(metrics.CPUSET_WRITES_RETRIED) == 2

    run_scenario(scenario)


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EIO])
def test_named_cpus_that_cannot_be_freed_refuse_the_create(
    run_scenario: Callable[..., None], number: int
) -> None:
    """Containers that had already moved get exactly their old CPUs back; nothing of the create is left."""

    async def scenario(world: Any) -> None:
        ids = [await world.run(await world.pod(f"ls{i}", "LS")) for i in range(3)]
        refusals = Refusals(world, ids[1], number)
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        assert call.refused is not None
        assert call.refused[1].startswith("cannot free CPUs for ns/lse/c: cannot set CPUs in ")
        assert refusals.attempts == (3 if number == errno.EBUSY else 1)
        await world.quiet()
        assert [world.on(i) for i in ids] == ["0-15"] * 3
        assert not world.executor.state.owners
        assert not [key for key in world.ledger.entries if key.startswith("i/")]
        telemetry = world.executor.telemetry
        counted = metrics.CREATES_REFUSED, metrics.CREATES_FAILED, metrics.EXCLUSIVE_CREATES
        assert [telemetry.value(each) for each in counted] == [1, 0, 1], "the runtime was never called"
        (record,) = world.executor.history.find("ns/lse")
        assert record.explanation.verdict.reason == "CPUsNotFreed"
        assert (record.container_id, record.explanation.cpus, record.explanation.moved) == ("", CpuSet(), ())

    run_scenario(scenario)


def test_a_create_that_continues_despite_a_refused_write_is_not_reported_as_refused(
    run_scenario: Callable[..., None],
) -> None:
    """The node is released while the reservation waits for the kernel."""

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        Refusals(world, ls, errno.EIO)
        create = world.executor.reservations.create

        async def then_released(*args: Any) -> Any:
            ended = await create(*args)
            world.executor.store.handle(ModeChanged(NodeMode.RELEASING))
            return ended

        world.executor.reservations.create = then_released
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        assert call.refused is None
        messages = {problem["message"] for problem in world.executor.telemetry.problems()}
        assert "rejected a container" not in messages

    run_scenario(scenario)


def test_a_container_that_has_just_left_blocks_nothing(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        del world.cgroups.sets[ls]
        assert (await world.begin(await world.pod("lse", "LSE", "", "0-3"))).refused is None

    run_scenario(scenario)


def test_a_replaced_group_is_found_before_the_create_continues(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world.cgroups.sets["moved"] = world.cgroups.sets.pop(ls)
        world.cgroups.find = lambda parent, container_id: "moved" if container_id == ls else None
        assert (await world.begin(await world.pod("lse", "LSE", "", "0-3"))).refused is None
        assert world.on("moved") == "4-15"

    run_scenario(scenario)


def test_a_container_elsewhere_that_cannot_be_written_blocks_nothing(
    run_scenario: Callable[..., None],
) -> None:
    """An LS container was narrowed by hand and its group cannot be written: it does not use these CPUs."""

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        world.cgroups.sets[ls] = CpuSet.parse("8-9")
        Refusals(world, ls, errno.EACCES)
        assert (await world.begin(await world.pod("free", "LSE", "", "0-3"))).refused is None
        assert any("cannot set CPUs" in problem["what"] for problem in world.executor.telemetry.problems())
        assert (await world.begin(await world.pod("in-the-way", "LSE", "", "8"))).refused is not None

    run_scenario(scenario)


def test_cpus_chosen_by_the_daemon_are_chosen_again(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        first = carried(await world.begin(await world.pod("probe"), **TWO_CPUS))
        stuck = await world.run(await world.pod("stuck", "LS"))
        free = world.executor.state.pools.shared
        sandbox = await world.pod("g")
        world.cgroups.sets[stuck] = CpuSet.parse("1-4,9-12")
        Refusals(world, stuck, errno.EACCES)
        call = await world.begin(sandbox, **TWO_CPUS)
        assert call.refused is None
        owned = CpuSet.parse(carried(call))
        assert len(owned) == 2
        assert owned.isdisjoint(CpuSet.parse("1-4,9-12") | CpuSet.parse(first))
        assert CpuSet.parse(world.on(ls)) == free - owned
        assert violations(world.executor.state) == []
        assert world.executor.telemetry.value(metrics.CREATES_ON_OTHER_CPUS) == 1
        assert world.executor.telemetry.value(metrics.CREATES_FAILED) == 0
        world.finish(call, "own")
        await world.quiet()
        owner = world.executor.state.containers["own"]
        assert "could not be freed: cannot set CPUs in" in owner.placement.reasons[-1]
        assert "c/own" in world.ledger.entries
        assert len([key for key in world.ledger.entries if key.startswith("i/")]) == 1, (
            "the write of the probe"
        )
        assert world.executor.state.kubelet_cpus == {}

    run_scenario(scenario)


def test_without_other_cpus_the_create_is_refused(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        stuck = await world.run(await world.pod("stuck", "LS"))
        Refusals(world, stuck, errno.EACCES)
        call = await world.begin(await world.pod("g"), **TWO_CPUS)
        assert call.refused is not None
        assert "Permission denied" in call.refused[1]
        await world.quiet()
        assert world.on(stuck) == "0-15"
        assert not world.executor.state.owners

    run_scenario(scenario)


def test_a_read_only_tree_does_not_lead_to_other_cpus(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        stuck = await world.run(await world.pod("stuck", "LS"))
        world.cgroups.sets[stuck] = CpuSet.parse("0-3,8-11")
        Refusals(world, stuck, errno.EROFS)
        call = await world.begin(await world.pod("g"), **TWO_CPUS)
        assert call.refused is not None
        assert "Read-only" in call.refused[1]
        assert world.executor.telemetry.value(metrics.CREATES_ON_OTHER_CPUS) == 0

    run_scenario(scenario)


def test_a_create_behind_a_slow_start_is_placed_elsewhere(run_scenario: Callable[..., None]) -> None:
    """A start in flight counts as holding the set that it was forwarded with: two CPUs that a pod may use."""

    async def scenario(world: Any) -> None:
        world.limit_waits(world.executor.confinement, "wait", 0.1)
        slow = await world.create(await world.pod("slow", "LS"))
        start = await world.call("StartContainer", pb.StartContainerRequest(container_id=slow))
        (left,) = world.executor.state.inflight.of(slow)
        world.executor.inflight_calls.complete(left)
        world.executor.inflight_calls.track(slow, CpuSet.parse("0-3,8-11"), is_start=True)
        call = await world.begin(await world.pod("g"), **TWO_CPUS)
        assert call.refused is None
        assert CpuSet.parse(carried(call)).isdisjoint(CpuSet.parse("0-3,8-11"))
        assert world.executor.telemetry.value(metrics.CREATES_ON_OTHER_CPUS) == 1
        refused = await world.begin(await world.pod("lse", "LSE", "", "1"))
        assert "still busy" in refused.refused[1]
        world.wire.finished(start, 0)

    run_scenario(scenario)


def test_a_client_that_is_gone_gets_no_second_placement(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        stuck = await world.run(await world.pod("stuck", "LS"))
        world.cgroups.sets[stuck] = CpuSet.parse("0-3,8-11")
        refusals = Refusals(world, stuck, errno.EBUSY)
        request = pb.CreateContainerRequest(pod_sandbox_id=await world.pod("g"))
        request.config.metadata.name = "c"
        request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**TWO_CPUS))
        call = world.played("CreateContainer", request)
        world.wire.request(call)
        await world.until(lambda: refusals.attempts)
        world.wire.finished(call, None)
        await asyncio.wait_for(call.over.wait(), 60)
        await world.until(lambda: not world.executor.state.owners)
        assert world.executor.telemetry.value(metrics.CREATES_ON_OTHER_CPUS) == 0

    run_scenario(scenario)


def test_a_start_that_was_in_flight_at_a_crash_is_waited_for(run_scenario: Callable[..., None]) -> None:
    """The start carries the old set, and the runtime may execute it at any moment."""

    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        await world.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        await world.close()
        world.boot()
        await world.sync.once()
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        create = asyncio.create_task(world.begin(sandbox))
        await asyncio.sleep(0.05)
        assert not create.done()
        world.cgroups.sets[ls] = CpuSet.parse(world.runtime.specs[ls])
        world._state(ls, "RUNNING")
        await world.sync.once()
        world.now += 3
        await world.sync.once()
        assert (await create).refused is None
        assert world.on(ls) == "4-15"

    run_scenario(scenario)


def test_a_start_that_did_not_come_after_a_crash_is_not_waited_for_long(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        await world.close()
        world.boot()
        await world.sync.once()
        world.now += 3
        await world.sync.once()
        assert (await world.begin(await world.pod("lse", "LSE", "", "0-3"))).refused is None
        assert (await world.start(ls)).refused is None
        assert world.on(ls) == "4-15"

    run_scenario(scenario)
