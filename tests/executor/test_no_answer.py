"""Calls that the runtime may or may not execute: after a deadline, a refusal, or a crash."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.call_events import SavedCpusLearned
from proxy.executor.cpuset_writer import WriteResult
from proxy.executor.runtime_ports import RuntimeContainer
from proxy.model.errors import CgroupError, RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase
from tests.testkit.waiting import begin_held_create

LATE = UnavailableError("cannot update the cpuset of a container: Deadline Exceeded (DEADLINE_EXCEEDED)")


async def over(world: Any) -> None:
    """Let the runtime answer for so long that it cannot execute an older call any more."""
    await world.sync.once()
    world.now += 3
    await world.sync.once()
    await world.quiet()


def test_an_update_that_hits_its_deadline_may_be_executed_later(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        runtime_sync = world.make_runtime_sync()
        world.executor.run_always(runtime_sync.run)
        world.runtime.update_error = LATE
        world.executor.store.handle(SavedCpusLearned(ls, None))
        world.executor.sync_later(ls)
        await world.until(lambda: world.executor.state.inflight.orphans())
        world.runtime.update_error = None
        create = await begin_held_create(world, await world.pod("lse", "LSE", "", "0-3"))
        world.cgroups.sets[ls] = CpuSet.parse("0-15")  # the runtime executes it
        await world.sync.once()
        await world.quiet()
        assert not create.done(), "one answer is not enough"
        await over(world)
        assert (await create).refused is None
        assert world.on(ls) == "4-15"
        world.now += 5
        world.executor.sync_later(ls)
        await world.until(lambda: world.runtime.specs[ls] == "4-15")
        runtime_sync.close()

    run_scenario(scenario, settle_per_second=1000)


def test_no_second_update_while_the_last_may_be_in_flight(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        runtime_sync = world.make_runtime_sync()
        world.runtime.update_error = LATE
        world.executor.store.handle(SavedCpusLearned(ls, None))
        world.executor.sync_later(ls)
        await runtime_sync.finish(60)
        world.runtime.update_error = None
        await world.clear_log()
        world.executor.sync_later(ls)
        await runtime_sync.finish(60)
        assert not [line for line in world.log if line.startswith("runtime")]
        world.now += 100
        await world.sync.once()
        assert world.executor.state.inflight.orphans(), (
            "a runtime that hung may have executed the call until now"
        )
        world.now += 3
        await world.sync.once()
        assert not world.executor.state.inflight.orphans()
        assert ls in world.executor.state.runtime.awaiting_sync, (
            "it is updated without a further call when that is over"
        )
        await runtime_sync.finish(60)
        assert [line for line in world.log if line.startswith("runtime")] == [f"runtime {ls} 0-15"]
        runtime_sync.close()

    run_scenario(scenario)


def test_a_spec_that_is_not_updated_in_time_is_not_started(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        owner = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        world.runtime.update_error = LATE
        assert (await world.start(ls)).refused is not None
        world.runtime.update_error = None
        world.wire.finished(owner, 2)
        start = asyncio.create_task(world.start(ls))
        await world.quiet()
        assert not start.done(), "the old update may be executed after the next one"
        await over(world)
        assert (await start).refused is None
        assert world.on(ls) == world.runtime.specs[ls] == "0-15"

    run_scenario(scenario)


@pytest.mark.parametrize("state", ["CREATED", "RUNNING", "EXITED"])
def test_an_owner_waits_for_a_refused_start_until_the_list_shows_it(
    run_scenario: Callable[..., None], state: str
) -> None:
    """The runtime may have executed a call although it reports a failure."""

    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        start = await world.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        if state == "RUNNING":
            world.cgroups.sets[ls] = CpuSet.parse(world.runtime.specs[ls])
        world._state(ls, state)
        world.wire.finished(start, 2)
        create = await begin_held_create(world, sandbox)
        await world.sync.once()
        assert (await create).refused is None
        assert world.executor.state.containers[ls].phase is Phase[state]
        assert world.cgroups.sets.get(ls) in (None, CpuSet.parse("4-15"))

    run_scenario(scenario)


def test_groups_above_a_refused_start_are_widened(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        made: list[str] = []
        world.executor.cpuset_writer.make_room = lambda container: made.append(container.id) or WriteResult()
        good, bad = [await world.create(await world.pod(name, "LS")) for name in ("good", "bad")]
        for container_id, status in ((good, 0), (bad, 2)):
            start = await world.call("StartContainer", pb.StartContainerRequest(container_id=container_id))
            world.wire.finished(start, status)
        await world.quiet()
        assert made == [bad]

    run_scenario(scenario)


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_of_a_pod_is_widened_before_an_owner_starts_if_the_kernel_refuses_no_write(
    run_scenario: Callable[..., None], version: int
) -> None:
    async def scenario(world: Any) -> None:
        world.cgroups.version = version
        container = await world.create(await world.pod("lse", "LSE", "", "0-3"))
        world.executor.cpuset_writer.make_room = lambda container: world.log.append("widen") or WriteResult()
        await world.call("StartContainer", pb.StartContainerRequest(container_id=container))
        steps = [line for line in world.log if line in ("widen", "forward StartContainer")]
        assert steps == ["widen", "forward StartContainer"][2 - version :]

    run_scenario(scenario)


@pytest.mark.parametrize("again", [True, False])
def test_the_group_of_a_pod_of_an_earlier_daemon_is_widened_before_any_start(
    run_scenario: Callable[..., None], again: bool
) -> None:
    """The earlier daemon may have left a fence around the pod."""

    async def scenario(world: Any) -> None:
        world.cgroups.version = 2
        sandbox = await world.pod("ls", "LS")
        if again:
            await world.close()
            world.boot()
            await world.sync.once()
            await over(world)
        container = await world.create(sandbox)
        await world.clear_log()
        world.executor.cpuset_writer.make_room = lambda container: world.log.append("widen") or WriteResult()
        await world.call("StartContainer", pb.StartContainerRequest(container_id=container))
        steps = [line for line in world.log if line in ("widen", "forward StartContainer")]
        assert steps == ["widen", "forward StartContainer"][0 if again else 1 :]

    run_scenario(scenario)


@pytest.mark.parametrize("known", [True, False])
def test_an_update_that_was_in_flight_at_a_crash_is_waited_for(
    run_scenario: Callable[..., None], known: bool
) -> None:
    """Even if the ledger is lost, and the container is adopted from the list."""

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        await world.close()
        if not known:
            world.ledger.entries.clear()
        world.boot()
        await world.sync.once()
        create = await begin_held_create(world, await world.pod("lse", "LSE", "", "0-3"))
        world.cgroups.sets[ls] = CpuSet.parse("0-15")
        await over(world)
        assert (await create).refused is None
        assert world.on(ls) == "4-15"

    run_scenario(scenario)


def test_a_start_waits_for_an_update_that_was_in_flight_at_a_crash(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        ls = await world.create(await world.pod("ls", "LS"))
        await world.close()
        world.boot()
        await world.sync.once()
        start = asyncio.create_task(world.start(ls))
        await world.quiet()
        assert not start.done()
        world.runtime.specs[ls] = "0-15"  # the update that the previous daemon was sending to the runtime
        await over(world)
        await start
        assert CpuSet.parse(world.on(ls)) == world.executor.state.desired_cpus(
            world.executor.state.containers[ls]
        )
        assert world.runtime.specs[ls] == world.on(ls)

    run_scenario(scenario)


def test_a_start_after_a_crash_is_not_refused_if_all_cpus_are_shared(
    run_scenario: Callable[..., None],
) -> None:
    """The call that may be in flight carries the desired set, and the start waits for it nevertheless."""

    async def scenario(world: Any) -> None:
        ls = await world.create(await world.pod("ls", "LS"))
        await world.close()
        world.boot()
        await world.sync.once()
        start = asyncio.create_task(world.start(ls))
        await world.quiet()
        assert not start.done()
        await over(world)
        assert (await start).refused is None
        assert (world.on(ls), world.runtime.specs[ls]) == ("0-15", "0-15")

    run_scenario(scenario)


@pytest.mark.parametrize("how", ["container", "stop", "sandbox"])
def test_a_container_removed_during_its_lookup_is_not_adopted(
    run_scenario: Callable[..., None], how: str
) -> None:
    async def scenario(world: Any) -> None:
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        world.runtime.containers["odd"] = RuntimeContainer("odd", sandbox, "c", 0, "RUNNING")
        detail = world.runtime.detail
        loop = asyncio.get_running_loop()
        calls = {
            "container": ("RemoveContainer", pb.RemoveContainerRequest(container_id="odd")),
            "stop": ("StopContainer", pb.StopContainerRequest(container_id="odd")),
            "sandbox": ("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox)),
        }

        async def gone() -> None:
            call = await world.call(*calls[how])
            world.wire.finished(call, 0)

        def slowly(container_id: str) -> Any:
            found = detail(container_id)
            asyncio.run_coroutine_threadsafe(gone(), loop).result(60)
            return found

        world.runtime.detail = slowly
        await world.sync.once()
        assert "odd" not in world.executor.state.containers
        assert not world.executor.state.owners

    run_scenario(scenario)


def test_the_reported_obstacle_is_the_real_one(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        away, near = (
            await world.run(await world.pod("away", "LS")),
            await world.run(await world.pod("near", "LS")),
        )
        world.cgroups.sets[away] = CpuSet.parse("8-9")
        plain = world.cgroups.write

        def write(path: str, cpus: Any, mems: Any, *, adjust_below: bool = True) -> bool:
            if path in (away, near):
                raise CgroupError(f"cannot write {path}", errno.EACCES)
            return bool(plain(path, cpus, mems, adjust_below=adjust_below))

        world.cgroups.write = write
        call = await world.begin(await world.pod("lse", "LSE", "", "0-3"))
        assert call.refused is not None
        assert call.refused[1].endswith(f"cannot write {near}")

    run_scenario(scenario)


def test_a_kernel_that_does_not_answer_refuses_the_create(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        answers = asyncio.Event()
        run = world.executor.kernel.run_with_callback

        async def slowly(noted: Any, job: Any, *args: Any) -> Any:
            if job == world.executor.cpuset_writer.write_pools:
                await answers.wait()
            return await run(noted, job, *args)

        world.executor.kernel.run_with_callback = slowly
        call = await world.begin(sandbox)
        assert call.refused is not None
        assert "in time" in call.refused[1]
        await world.quiet()
        assert not world.executor.state.owners
        assert world.on(ls) == "0-15"

    run_scenario(scenario, call_timeout=0.2)


@pytest.mark.parametrize("end", ["refused", "gone", "late"])
def test_a_failed_create_restores_exactly_the_previous_sets(
    run_scenario: Callable[..., None], end: str
) -> None:
    """After other containers have left: a refusal by the runtime, a client that is gone, a deadline."""

    async def scenario(world: Any) -> None:
        names = {"ls": "LS", "be": "BE", "lsr": "LSR"}
        ids = [
            await world.run(await world.pod(uid, qos, "", "12-13" if qos == "LSR" else ""))
            for uid, qos in names.items()
        ]
        await over(world)
        sets, state = dict(world.cgroups.sets), world.executor.state
        records = {key for key in world.ledger.entries if key.startswith(("c/", "i/"))}
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        call = await world.begin(sandbox)
        assert call.refused is None
        assert world.on(ids[0]) == "4-11,14-15"
        world.wire.finished(call, {"refused": 2, "gone": None, "late": 4}[end])
        await over(world)
        assert world.cgroups.sets == sets
        assert world.executor.state.pools == state.pools
        assert world.executor.state.owners == state.owners
        assert {key for key in world.ledger.entries if key.startswith(("c/", "i/"))} == records
        world.check()

    run_scenario(scenario)


def test_an_update_that_is_refused_is_followed_by_the_kernel(run_scenario: Callable[..., None]) -> None:
    """The runtime may have written the group before it failed."""

    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        runtime_sync = world.make_runtime_sync()

        def half(container_id: str, cpus: Any, mems: Any, quota: int = 0) -> None:
            world.runtime.update_cpuset = plain
            world.cgroups.sets[container_id] = CpuSet.parse("5")
            raise RuntimeCallError("cannot update: odd", 2)

        plain, world.runtime.update_cpuset = world.runtime.update_cpuset, half
        world.executor.store.handle(SavedCpusLearned(ls, None))
        world.executor.sync_later(ls)
        await runtime_sync.finish(60)
        await world.until(lambda: world.on(ls) == "0-15")
        runtime_sync.close()

    run_scenario(scenario)
