"""Calls that a replaced daemon still relays: its successor expects what the runtime may do with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.executor.runtime_ports import RuntimeContainer
from proxy.model.idset import CpuSet
from proxy.telemetry import metrics
from tests.executor.test_confinement import HangingStart, Limits
from tests.testkit.waiting import create_that_waits

LONG = 3
"""Times that two seconds pass: more than a call has that only an ended daemon may have sent."""


async def long(w: Any) -> None:
    """The runtime answers other calls for a long time."""
    for _ in range(LONG):
        await w.sync.once()
        w.now += 3
    await w.sync.once()
    await w.quiet()


async def hanging_update(w: Any, container: str) -> Any:
    """An update that has left for the runtime with the CPUs that the container has then."""
    request = pb.UpdateContainerResourcesRequest(container_id=container)
    call = await w.call("UpdateContainerResources", request)
    assert call.sent is not None
    return call


@pytest.mark.parametrize("answered", [True, False])
def test_an_update_that_is_relayed_is_waited_for_until_it_is_over(
    live: Callable[..., None], *, answered: bool
) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        call = await hanging_update(w, ls)
        former = await w.hand_over(call)
        await long(w)
        create = await create_that_waits(w, await w.pod("lse", "LSE", "", "0-3"))
        w.cgroups.sets[ls] = CpuSet.parse("0-15")  # the runtime carries it out
        if answered:
            former.finished(call, 0)
        else:
            w.start_update.former_calls.all_over()  # the process that relayed it was killed
        await w.sync.once()
        await w.quiet()
        assert not create.done(), "one answer since is too early"
        await long(w)
        assert (await create).refused is None
        assert w.on(ls) == "4-15"
        assert not w.executor.state.inflight.of(ls)

    live(day, call_timeout=20.0)


def test_an_update_passes_through_two_replacements(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        call = await hanging_update(w, ls)
        first = await w.hand_over(call)
        await long(w)
        second = w.start_update.former_calls
        await w.hand_over()
        await long(w)
        assert w.executor.state.inflight.of(ls), "the first of three processes still relays it"
        first.finished(call, 0)
        await asyncio.wait_for(second.wait(), 1)
        await long(w)
        assert not w.executor.state.inflight.of(ls)

    live(day)


def test_a_start_that_is_relayed_stays_confined_until_the_runtime_lists_it(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        start = await HangingStart.of(w, group=False)
        await w.hand_over(start.call)
        assert w.executor.state.inflight.is_starting(start.id)
        await long(w)
        create = await create_that_waits(w, await w.pod("lse", "LSE", "", "0-3"))
        start.write()  # its cgroup is made only now, from the cpuset that was saved before the start
        assert (await create).refused is None
        assert w.on(start.id) == "4-15"
        w._state(start.id, "RUNNING")
        await w.sync.once()
        await w.quiet()
        assert not w.executor.state.inflight.of(start.id)
        w.check()

    live(day, call_timeout=20.0)


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_create_that_is_relayed_keeps_its_cpus_until_it_is_over(
    live: Callable[..., None], *, carried_out: bool
) -> None:
    async def day(w: Any) -> None:
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        call = await w.begin(sandbox)
        assert call.refused is None
        former = await w.hand_over(call)
        await long(w)
        assert str(w.executor.state.pools.shared) == "4-15"
        if carried_out:
            w.runtime.containers["late"] = RuntimeContainer("late", sandbox, "c", 0, "CREATED")
            w.runtime.specs["late"] = "0-3"
        former.finished(call, 0 if carried_out else None)
        await long(w)
        assert list(w.executor.state.containers) == (["late"] if carried_out else [])
        assert str(w.executor.state.pools.shared) == ("4-15" if carried_out else "0-15")
        assert not any(key.startswith("i/") for key in w.ledger.entries)

    live(day)


def test_on_v2_the_limits_of_pods_stay_for_calls_that_are_relayed(live: Callable[..., None]) -> None:
    """An owner was created in spite of an update that hangs: at no moment may that take effect."""

    async def day(w: Any) -> None:
        limits, pod = Limits(w), "kubepods/podls"
        ls = await w.run(await w.pod("ls", "LS"))
        call = await hanging_update(w, ls)
        own = w.finish(await w.begin(await w.pod("lse", "LSE", "", "0-3")), "own")
        await w.start(own)
        assert str(limits.lists[pod]) == "4-15"
        former = await w.hand_over(call)
        assert str(limits.lists[pod]) == "4-15"
        w.executor.unit_properties.fencing.fences = limits
        await w.sync.once()
        await long(w)
        limits.lists[pod] = CpuSet.parse("0-15")  # another program
        await w.until(lambda: str(limits.lists[pod]) == "4-15")
        w.cgroups.sets[ls] = CpuSet.parse("0-15")
        former.finished(call, 0)
        await long(w)
        assert w.on(ls) == "4-15"
        assert not w.executor.unit_properties.fencing._standing

    live(day, call_timeout=2.0)


def test_on_v2_a_limit_that_an_earlier_daemon_has_left_is_widened_behind_a_call(
    live: Callable[..., None],
) -> None:
    """The container would have the CPUs of the old limit, were it set again: another one owns them by now."""

    async def day(w: Any) -> None:
        limits, pod = Limits(w), "kubepods/podls"
        ls = await w.run(await w.pod("ls", "LS"))
        limits.lists[pod] = CpuSet.parse("0-3")
        flight = w.executor.calls.depart(ls, CpuSet.parse("0-15"))
        own = w.finish(await w.begin(await w.pod("lse", "LSE", "", "0-3")), "own")
        await w.start(own)
        w.start_update.landed(flight, flight.carries)
        await w.until(lambda: not w.executor.unit_properties.fencing._standing)
        await w.quiet()
        assert str(limits.effective(w, ls, pod)) == "4-15"

    live(day, call_timeout=2.0)


def test_a_job_that_waits_for_the_kernel_writes_nothing_more_once_another_process_has_the_node(
    live: Callable[..., None],
) -> None:
    async def day(w: Any) -> None:
        one, two = [await w.run(await w.pod(uid, "LS")) for uid in ("one", "two")]
        enforcer, write = w.executor.enforcer, w.cgroups.write

        def hangs(path: str, *args: Any, **more: Any) -> bool:
            enforcer.end()  # what the daemon does meanwhile
            done: bool = write(path, *args, **more)
            return done

        w.cgroups.sets[one] = w.cgroups.sets[two] = CpuSet.parse("0-1")
        w.cgroups.write = hangs
        enforcer.enforce([one, two])
        w.cgroups.write = write
        assert (w.on(one), w.on(two)) == ("0-15", "0-1")
        assert enforcer.enforce([two]).written == []

    live(day)


@pytest.mark.parametrize("waits_already", [True, False])
def test_a_held_create_is_decided_no_more_once_another_process_has_the_node(
    live: Callable[..., None], *, waits_already: bool
) -> None:
    async def day(w: Any) -> None:
        call = await hanging_update(w, await w.run(await w.pod("ls", "LS")))
        request = pb.CreateContainerRequest(pod_sandbox_id=await w.pod("lse", "LSE", "", "0-3"))
        held = w.played("CreateContainer", request)
        w.wire.request(held)
        if waits_already:
            await w.quiet()
        executor = w.executor
        await w.hand_over(call)
        await asyncio.sleep(1.2)  # longer than it would wait for the update
        assert executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0
        assert not held.over.is_set()
        await long(w)
        assert not w.executor.state.owners, "nothing of it is left"

    live(day, call_timeout=0.8)
