"""A container cannot be moved out of CPUs that a new owner is to have."""

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
    """Has the kernel refuse writes to one container, up to a number of times."""

    def __init__(self, w: Any, container_id: str, number: int, times: int = 1_000_000) -> None:
        self.left = times
        self.asked = 0
        plain = w.cgroups.write

        def write(path: str, cpus: Any, mems: Any, *, inner: bool = True) -> bool:
            if path == container_id and cpus is not None and w.cgroups.sets.get(path) != cpus:
                self.asked += 1
                if self.left > 0:
                    self.left -= 1
                    raise CgroupError(f"cannot set CPUs in {path}: {os.strerror(number)}", number)
            return bool(plain(path, cpus, mems, inner=inner))

        w.cgroups.write = write


def carried(call: Any) -> str:
    return str(pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus)


@pytest.mark.parametrize("number", [errno.EBUSY, 0])
def test_a_refusal_that_passes_is_tried_again(live: Callable[..., None], number: int) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        refusals = Refusals(w, ls, number, times=2)
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        assert call.refused is None
        assert (w.on(ls), refusals.asked) == ("4-15", 3)
        assert w.executor.telemetry.value(metrics.CPUSET_WRITES_RETRIED) == 2

    live(day)


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EIO])
def test_named_cpus_that_cannot_be_freed_refuse_the_create(live: Callable[..., None], number: int) -> None:
    """Containers that had moved already get exactly their old CPUs back; nothing of the create is left."""

    async def day(w: Any) -> None:
        ids = [await w.run(await w.pod(f"ls{i}", "LS")) for i in range(3)]
        refusals = Refusals(w, ids[1], number)
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        assert call.refused is not None
        assert call.refused[1].startswith("cannot free CPUs for ns/lse/c: cannot set CPUs in ")
        assert refusals.asked == (3 if number == errno.EBUSY else 1)
        await w.quiet()
        assert [w.on(i) for i in ids] == ["0-15"] * 3
        assert not w.executor.state.owners
        assert not [key for key in w.ledger.entries if key.startswith("i/")]
        assert w.executor.telemetry.value(metrics.CREATES_FAILED) == 1

    live(day)


def test_a_create_that_goes_on_all_the_same_is_not_reported_as_refused(live: Callable[..., None]) -> None:
    """The node is released while the reservation waits for the kernel."""

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        Refusals(w, ls, errno.EIO)
        create = w.executor.reservations.create

        async def then_released(*args: Any) -> Any:
            ended = await create(*args)
            w.executor.store.handle(ModeChanged(NodeMode.RELEASING))
            return ended

        w.executor.reservations.create = then_released
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        assert call.refused is None
        messages = {problem["message"] for problem in w.executor.telemetry.problems()}
        assert "refused a container" not in messages

    live(day)


def test_a_container_that_has_just_left_blocks_nothing(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        del w.cgroups.sets[ls]
        assert (await w.begin(await w.pod("lse", "LSE", "", "0-3"))).refused is None

    live(day)


def test_a_replaced_group_is_found_before_the_create_continues(
    live: Callable[..., None],
) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        w.cgroups.sets["moved"] = w.cgroups.sets.pop(ls)
        w.cgroups.find = lambda parent, container_id: "moved" if container_id == ls else None
        assert (await w.begin(await w.pod("lse", "LSE", "", "0-3"))).refused is None
        assert w.on("moved") == "4-15"

    live(day)


def test_a_container_elsewhere_that_cannot_be_written_blocks_nothing(live: Callable[..., None]) -> None:
    """An LS container was narrowed by hand and its group is not ours to write: these CPUs are free of it."""

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        w.cgroups.sets[ls] = CpuSet.parse("8-9")
        Refusals(w, ls, errno.EACCES)
        assert (await w.begin(await w.pod("free", "LSE", "", "0-3"))).refused is None
        assert any("cannot set CPUs" in problem["what"] for problem in w.executor.telemetry.problems())
        assert (await w.begin(await w.pod("in-the-way", "LSE", "", "8"))).refused is not None

    live(day)


def test_cpus_of_our_own_choice_are_chosen_again(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        first = carried(await w.begin(await w.pod("probe"), **TWO_CPUS))
        stuck = await w.run(await w.pod("stuck", "LS"))
        free = w.executor.state.pools.shared
        sandbox = await w.pod("g")
        w.cgroups.sets[stuck] = CpuSet.parse("1-4,9-12")
        Refusals(w, stuck, errno.EACCES)
        call = await w.begin(sandbox, **TWO_CPUS)
        assert call.refused is None
        got = CpuSet.parse(carried(call))
        assert len(got) == 2
        assert got.isdisjoint(CpuSet.parse("1-4,9-12") | CpuSet.parse(first))
        assert CpuSet.parse(w.on(ls)) == free - got
        assert violations(w.executor.state) == []
        assert w.executor.telemetry.value(metrics.CREATES_ON_OTHER_CPUS) == 1
        assert w.executor.telemetry.value(metrics.CREATES_FAILED) == 0
        w.finish(call, "own")
        await w.quiet()
        owner = w.executor.state.containers["own"]
        assert "could not be freed: cannot set CPUs in" in owner.placement.reasons[-1]
        assert "c/own" in w.ledger.entries
        assert len([key for key in w.ledger.entries if key.startswith("i/")]) == 1, "that of the probe"
        assert w.executor.state.kubelet == {}

    live(day)


def test_without_other_cpus_the_create_is_refused(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        stuck = await w.run(await w.pod("stuck", "LS"))
        Refusals(w, stuck, errno.EACCES)
        call = await w.begin(await w.pod("g"), **TWO_CPUS)
        assert call.refused is not None
        assert "Permission denied" in call.refused[1]
        await w.quiet()
        assert w.on(stuck) == "0-15"
        assert not w.executor.state.owners

    live(day)


def test_a_read_only_tree_does_not_lead_to_other_cpus(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        stuck = await w.run(await w.pod("stuck", "LS"))
        w.cgroups.sets[stuck] = CpuSet.parse("0-3,8-11")
        Refusals(w, stuck, errno.EROFS)
        call = await w.begin(await w.pod("g"), **TWO_CPUS)
        assert call.refused is not None
        assert "Read-only" in call.refused[1]
        assert w.executor.telemetry.value(metrics.CREATES_ON_OTHER_CPUS) == 0

    live(day)


def test_a_create_behind_a_slow_start_is_placed_elsewhere(live: Callable[..., None]) -> None:
    """A start in flight counts as holding the set that it left with: two CPUs that a pod may use."""

    async def day(w: Any) -> None:
        slow = await w.create(await w.pod("slow", "LS"))
        start = await w.call("StartContainer", pb.StartContainerRequest(container_id=slow))
        (left,) = w.executor.state.inflight.of(slow)
        w.executor.calls.land(left)
        w.executor.calls.depart(slow, CpuSet.parse("0-3,8-11"), is_start=True)
        call = await w.begin(await w.pod("g"), **TWO_CPUS)
        assert call.refused is None
        assert CpuSet.parse(carried(call)).isdisjoint(CpuSet.parse("0-3,8-11"))
        assert w.executor.telemetry.value(metrics.CREATES_ON_OTHER_CPUS) == 1
        refused = await w.begin(await w.pod("lse", "LSE", "", "1"))
        assert "still busy" in refused.refused[1]
        w.wire.finished(start, 0)

    live(day, call_timeout=0.1)


def test_a_client_that_is_gone_gets_no_second_placement(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        stuck = await w.run(await w.pod("stuck", "LS"))
        w.cgroups.sets[stuck] = CpuSet.parse("0-3,8-11")
        refusals = Refusals(w, stuck, errno.EBUSY)
        request = pb.CreateContainerRequest(pod_sandbox_id=await w.pod("g"))
        request.config.metadata.name = "c"
        request.config.linux.resources.CopyFrom(pb.LinuxContainerResources(**TWO_CPUS))
        call = w.played("CreateContainer", request)
        w.wire.request(call)
        await w.until(lambda: refusals.asked)
        w.wire.finished(call, None)
        await asyncio.wait_for(call.over.wait(), 60)
        await w.until(lambda: not w.executor.state.owners)
        assert w.executor.telemetry.value(metrics.CREATES_ON_OTHER_CPUS) == 0

    live(day)


def test_a_start_that_was_in_flight_at_a_crash_is_waited_for(live: Callable[..., None]) -> None:
    """Its set is that of before, and the runtime may get to it at any moment."""

    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        await w.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        await w.close()
        w.boot()
        await w.sync.once()
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        create = asyncio.create_task(w.begin(sandbox))
        await asyncio.sleep(0.05)
        assert not create.done()
        w.cgroups.sets[ls] = CpuSet.parse(w.runtime.specs[ls])
        w._state(ls, "RUNNING")
        await w.sync.once()
        w.now += 3
        await w.sync.once()
        assert (await create).refused is None
        assert w.on(ls) == "4-15"

    live(day)


def test_a_start_that_did_not_come_after_a_crash_is_not_waited_for_long(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        await w.close()
        w.boot()
        await w.sync.once()
        w.now += 3
        await w.sync.once()
        assert (await w.begin(await w.pod("lse", "LSE", "", "0-3"))).refused is None
        assert (await w.start(ls)).refused is None
        assert w.on(ls) == "4-15"

    live(day)
