"""Calls that the runtime may or may not carry out: after a deadline, a refusal, or a crash."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.call_events import SavedCpusLearned
from proxy.executor.enforce import Enforced
from proxy.executor.runtime_ports import RuntimeContainer
from proxy.model.errors import CgroupError, RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase
from tests.testkit.waiting import create_that_waits

LATE = UnavailableError("cannot update the cpuset of a container: Deadline Exceeded (DEADLINE_EXCEEDED)")


async def over(w: Any) -> None:
    """The runtime answers for so long that it can be at nothing any more."""
    await w.sync.once()
    w.now += 3
    await w.sync.once()
    await w.quiet()


def test_settling_that_hits_its_deadline_may_be_carried_out_later(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        settler = w.make_settler()
        w.executor.tend(settler.run)
        w.runtime.update_error = LATE
        w.executor.store.handle(SavedCpusLearned(ls, None))
        w.executor.settle_later(ls)
        await w.until(lambda: w.executor.state.inflight.strays())
        w.runtime.update_error = None
        create = await create_that_waits(w, await w.pod("lse", "LSE", "", "0-3"))
        w.cgroups.sets[ls] = CpuSet.parse("0-15")  # the runtime gets to it
        await w.sync.once()
        await w.quiet()
        assert not create.done(), "one answer is too early"
        await over(w)
        assert (await create).refused is None
        assert w.on(ls) == "4-15"
        w.now += 5
        w.executor.settle_later(ls)
        await w.until(lambda: w.runtime.specs[ls] == "4-15")
        settler.close()

    live(day, settle_per_second=1000)


def test_no_second_update_while_the_last_may_be_in_flight(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        settler = w.make_settler()
        w.runtime.update_error = LATE
        w.executor.store.handle(SavedCpusLearned(ls, None))
        w.executor.settle_later(ls)
        await settler.finish(60)
        w.runtime.update_error = None
        w.log.clear()
        w.executor.settle_later(ls)
        await settler.finish(60)
        assert not [line for line in w.log if line.startswith("runtime")]
        w.now += 100
        await w.sync.once()
        assert w.executor.state.inflight.strays(), "a runtime that hung may have been at it until now"
        w.now += 3
        await w.sync.once()
        assert not w.executor.state.inflight.strays()
        assert ls in w.executor.state.runtime.unsettled, "it is updated by itself when that is over"
        await settler.finish(60)
        assert [line for line in w.log if line.startswith("runtime")] == [f"runtime {ls} 0-15"]
        settler.close()

    live(day)


def test_a_spec_that_is_not_updated_in_time_is_not_started(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        owner = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        w.runtime.update_error = LATE
        assert (await w.start(ls)).refused is not None
        w.runtime.update_error = None
        w.wire.finished(owner, 2)
        start = asyncio.create_task(w.start(ls))
        await w.quiet()
        assert not start.done(), "the old update may come after the next one"
        await over(w)
        assert (await start).refused is None
        assert w.on(ls) == w.runtime.specs[ls] == "0-15"

    live(day)


@pytest.mark.parametrize("state", ["CREATED", "RUNNING", "EXITED"])
def test_a_refused_start_is_waited_for_until_the_list_shows_it(live: Callable[..., None], state: str) -> None:
    """A runtime may have done what it says that it could not."""

    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        start = await w.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        if state == "RUNNING":
            w.cgroups.sets[ls] = CpuSet.parse(w.runtime.specs[ls])
        w._state(ls, state)
        w.wire.finished(start, 2)
        create = await create_that_waits(w, sandbox)
        await w.sync.once()
        assert (await create).refused is None
        assert w.executor.state.containers[ls].phase is Phase[state]
        assert w.cgroups.sets.get(ls) in (None, CpuSet.parse("4-15"))

    live(day)


def test_a_start_that_was_refused_has_room_made_in_the_groups_above(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        made: list[str] = []
        w.executor.enforcer.make_room = lambda container: made.append(container.id) or Enforced()
        good, bad = [await w.create(await w.pod(name, "LS")) for name in ("good", "bad")]
        for container_id, status in ((good, 0), (bad, 2)):
            start = await w.call("StartContainer", pb.StartContainerRequest(container_id=container_id))
            w.wire.finished(start, status)
        await w.quiet()
        assert made == [bad]

    live(day)


@pytest.mark.parametrize("known", [True, False])
def test_an_update_that_was_in_flight_at_a_crash_is_waited_for(
    live: Callable[..., None], known: bool
) -> None:
    """Also where the ledger is lost, and the container is taken in from the list."""

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        await w.close()
        if not known:
            w.ledger.entries.clear()
        w.boot()
        await w.sync.once()
        create = await create_that_waits(w, await w.pod("lse", "LSE", "", "0-3"))
        w.cgroups.sets[ls] = CpuSet.parse("0-15")
        await over(w)
        assert (await create).refused is None
        assert w.on(ls) == "4-15"

    live(day)


def test_a_start_waits_for_an_update_that_was_in_flight_at_a_crash(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        ls = await w.create(await w.pod("ls", "LS"))
        await w.close()
        w.boot()
        await w.sync.once()
        start = asyncio.create_task(w.start(ls))
        await w.quiet()
        assert not start.done()
        w.runtime.specs[ls] = "0-15"  # what the daemon before us was telling the runtime
        await over(w)
        await start
        assert CpuSet.parse(w.on(ls)) == w.executor.state.wanted(w.executor.state.containers[ls])
        assert w.runtime.specs[ls] == w.on(ls)

    live(day)


def test_a_start_after_a_crash_is_not_refused_where_all_cpus_are_shared(live: Callable[..., None]) -> None:
    """What was perhaps in flight carries the very set that it is to have, and must still be over."""

    async def day(w: Any) -> None:
        ls = await w.create(await w.pod("ls", "LS"))
        await w.close()
        w.boot()
        await w.sync.once()
        start = asyncio.create_task(w.start(ls))
        await w.quiet()
        assert not start.done()
        await over(w)
        assert (await start).refused is None
        assert (w.on(ls), w.runtime.specs[ls]) == ("0-15", "0-15")

    live(day)


@pytest.mark.parametrize("how", ["container", "stop", "sandbox"])
def test_a_container_that_has_gone_while_it_was_looked_up_is_not_adopted(
    live: Callable[..., None], how: str
) -> None:
    async def day(w: Any) -> None:
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        w.runtime.containers["odd"] = RuntimeContainer("odd", sandbox, "c", 0, "RUNNING")
        detail = w.runtime.detail
        loop = asyncio.get_running_loop()
        calls = {
            "container": ("RemoveContainer", pb.RemoveContainerRequest(container_id="odd")),
            "stop": ("StopContainer", pb.StopContainerRequest(container_id="odd")),
            "sandbox": ("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox)),
        }

        async def gone() -> None:
            call = await w.call(*calls[how])
            w.wire.finished(call, 0)

        def slowly(container_id: str) -> Any:
            found = detail(container_id)
            asyncio.run_coroutine_threadsafe(gone(), loop).result(60)
            return found

        w.runtime.detail = slowly
        await w.sync.once()
        assert "odd" not in w.executor.state.containers
        assert not w.executor.state.owners

    live(day)


def test_the_reported_obstacle_is_the_real_one(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        away, near = await w.run(await w.pod("away", "LS")), await w.run(await w.pod("near", "LS"))
        w.cgroups.sets[away] = CpuSet.parse("8-9")
        plain = w.cgroups.write

        def write(path: str, cpus: Any, mems: Any, *, inner: bool = True) -> bool:
            if path in (away, near):
                raise CgroupError(f"cannot write {path}", errno.EACCES)
            return bool(plain(path, cpus, mems, inner=inner))

        w.cgroups.write = write
        call = await w.begin(await w.pod("lse", "LSE", "", "0-3"))
        assert call.refused is not None
        assert call.refused[1].endswith(f"cannot write {near}")

    live(day)


def test_a_kernel_that_does_not_answer_refuses_the_create(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        answers = asyncio.Event()
        run = w.executor.kernel.run_noted

        async def slowly(noted: Any, job: Any, *args: Any) -> Any:
            if job == w.executor.enforcer.enforce_pools:
                await answers.wait()
            return await run(noted, job, *args)

        w.executor.kernel.run_noted = slowly
        call = await w.begin(sandbox)
        assert call.refused is not None
        assert "in time" in call.refused[1]
        await w.quiet()
        assert not w.executor.state.owners
        assert w.on(ls) == "0-15"

    live(day, call_timeout=0.2)


@pytest.mark.parametrize("end", ["refused", "gone", "late"])
def test_a_failed_create_restores_exactly_the_previous_sets(live: Callable[..., None], end: str) -> None:
    """The runtime refuses it after the others have left; its client goes; its deadline passes."""

    async def day(w: Any) -> None:
        names = {"ls": "LS", "be": "BE", "lsr": "LSR"}
        ids = [
            await w.run(await w.pod(uid, qos, "", "12-13" if qos == "LSR" else ""))
            for uid, qos in names.items()
        ]
        await over(w)
        sets, state = dict(w.cgroups.sets), w.executor.state
        records = {key for key in w.ledger.entries if key.startswith(("c/", "i/"))}
        sandbox = await w.pod("lse", "LSE", "", "0-3")
        call = await w.begin(sandbox)
        assert call.refused is None
        assert w.on(ids[0]) == "4-11,14-15"
        w.wire.finished(call, {"refused": 2, "gone": None, "late": 4}[end])
        await over(w)
        assert w.cgroups.sets == sets
        assert w.executor.state.pools == state.pools
        assert w.executor.state.owners == state.owners
        assert {key for key in w.ledger.entries if key.startswith(("c/", "i/"))} == records
        w.check()

    live(day)


def test_an_update_that_is_refused_is_followed_by_the_kernel(live: Callable[..., None]) -> None:
    """The runtime may have written the group before it failed."""

    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        settler = w.make_settler()

        def half(container_id: str, cpus: Any, mems: Any, quota: int = 0) -> None:
            w.runtime.update_cpuset = plain
            w.cgroups.sets[container_id] = CpuSet.parse("5")
            raise RuntimeCallError("cannot update: odd", 2)

        plain, w.runtime.update_cpuset = w.runtime.update_cpuset, half
        w.executor.store.handle(SavedCpusLearned(ls, None))
        w.executor.settle_later(ls)
        await settler.finish(60)
        await w.until(lambda: w.on(ls) == "0-15")
        settler.close()

    live(day)
