"""Updates of other containers by hooks: made apart from calls, bounded, and reported on failure."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.node_events import ModeChanged
from proxy.executor.runtime_ports import Limits
from proxy.frontends.hook_bridge import updates as module
from proxy.hooks.answers import CLEAR, Adjustment, Update
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet, Mask
from proxy.model.mode import NodeMode
from proxy.telemetry import metrics
from tests.executor.played_hooks import hooks
from tests.testkit.cri import TWO_CPUS


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def problems(world: Any) -> list[str]:
    return [problem["what"] for problem in world.executor.telemetry.problems()]


def failed_update(which: str, why: str, hook: str = "10-x") -> str:
    """Return the problem of an update that is not made."""
    return f'cannot update a container as hooks request {which} hook={hook} err="{why}"'


def request_update(h: Any, container_id: str, **fields: Any) -> None:
    owners = {f"updates[{container_id}].{name}": "10-x" for name in fields if name != "unified"}
    h.updates.queue({container_id: Update(**fields)}, owners)


async def done(world: Any, h: Any) -> None:
    await world.until(lambda: not h.updates._waiting and not h.updates._is_running)
    await world.quiet()


def test_cpus_of_another_container_are_narrowed_in_kernel_and_runtime(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.run(await world.pod("ls", "LS"))
            h.add(pre_create_container=lambda e: Adjustment(updates={one: Update(cpus=cpus("4-5"))}))
            await world.run(await world.pod("other", "LS"))
            await world.until(lambda: world.on(one) == "4-5")
            runtime_sync = world.make_runtime_sync()
            await runtime_sync.finish(10)
            runtime_sync.close()
            assert world.runtime.specs[one] == "4-5"
            assert world.ledger.entries[f"c/{one}"]["placement"]["narrowed"] == "4-5"
            request_update(h, one, cpus=CLEAR)
            await world.until(lambda: world.on(one) == "0-15")
            world.check()

    run_scenario(scenario)


def test_an_update_gives_cpus_of_owners_if_configured_but_no_reserved_ones(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world, owned_cpus=True) as h:
            ls = await world.run(await world.pod("ls", "LS"))
            lse = await world.run(await world.pod("lse", "LSE", "", "2-3"))
            request_update(h, lse, cpus=cpus("0,3-4"))
            request_update(h, ls, cpus=cpus("0,3-4"))
            await done(world, h)
            assert (world.on(lse), world.on(ls)) == ("2-3", "0,3-4")
            which = f"pod=ns/lse container=c containerID={lse}"
            assert problems(world) == [failed_update(which, "CPUs 0 are not among those it may have")]
            request_update(h, lse, cpus=cpus("3-4"))
            await done(world, h)
            assert world.on(lse) == "3-4"

    run_scenario(scenario, rules={"reserved": CpuSet((0,))})


def test_a_created_container_starts_with_the_cpus_of_an_update(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            shared = await world.create(await world.pod("ls", "LS", "burstable"))
            owner = await world.run(await world.pod("lse", "LSE", "", "2-3"))
            assert world.runtime.specs[shared] == "0-15"
            request_update(h, shared, cpu_shares=9)
            await world.until(lambda: world.runtime.updates)
            await done(world, h)
            start = await world.call("StartContainer", pb.StartContainerRequest(container_id=shared))
            assert start.refused is None
            assert (world.runtime.specs[shared], world.on(owner)) == ("0-1,4-15", "2-3")
            assert not world.executor.telemetry.value(
                metrics.CPUSETS_UPDATED_BEFORE_START
            )  # the runtime already has them from the update
            world.wire.finished(start, 0)

    run_scenario(scenario)


def test_notified_hooks_may_request_updates_too(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            h.add(post_start_container=lambda e: Adjustment(updates={e.container.id: Update(cpu_shares=9)}))
            one = await world.run(await world.pod("ls", "LS"))
            await world.until(lambda: world.runtime.updates)
            assert world.runtime.updates == [(one, "0-15", Limits(cpu_shares=9))]

    run_scenario(scenario)


@pytest.mark.parametrize("refused", [False, True])
def test_a_hook_that_raises_an_owners_memory_limit_adds_nodes(run_scenario, monkeypatch, refused) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            owner = await world.run(await world.pod("p"), memory_limit_in_bytes=40 << 30, **TWO_CPUS)
            sent = []

            def update_limits(container_id: str, cpus: CpuSet, mems: Mask | None, limits: Limits) -> None:
                sent.append((container_id, str(mems), limits.memory_limit))
                if refused:
                    raise RuntimeCallError("no", 2)

            monkeypatch.setattr(world.runtime, "update_limits", update_limits)
            request_update(h, owner, memory_limit=80 << 30)
            await done(world, h)
            assert sent == [(owner, "0-1", 80 << 30)]
            container = world.executor.state.containers[owner]
            limit, mems = (40 << 30, "0") if refused else (80 << 30, "0-1")
            assert (container.request.memory_limit, str(container.placement.mems)) == (limit, mems)
            assert world.ledger.entries[f"c/{owner}"]["request"]["memory_limit"] == limit

    run_scenario(scenario)


def test_other_updates_carry_the_cpus_and_clear_means_no_request(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.run(await world.pod("ls", "LS"))
            request_update(
                h, one, cpus=cpus("2-3"), memory_limit=1 << 20, cpu_quota=CLEAR, unified={"memory.high": "9"}
            )
            await done(world, h)
            limits = Limits(cpu_quota=-1, memory_limit=1 << 20, unified={"memory.high": "9"})
            assert world.runtime.updates == [(one, "2-3", limits)]
            assert world.executor.telemetry.value(metrics.UPDATED_BY_HOOKS) == 1
            assert world.on(one) == "2-3"
            assert not problems(world)

    run_scenario(scenario)


def test_a_removed_quota_stays_off_and_the_wanted_one_is_restored(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            lse = await world.run(await world.pod("lse", "LSE", "", "2-3"), cpu_quota=50_000)
            request_update(h, lse, cpu_quota=70_000)
            await done(world, h)
            assert [limits.cpu_quota for _, _, limits in world.runtime.updates] == [-1]
            assert world.executor.quotas.known.records[f"qc/{lse}"].quota == 70_000

    run_scenario(scenario)


def test_a_refused_update_does_not_change_the_quota_that_is_restored(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            lse = await world.run(await world.pod("lse", "LSE", "", "2-3"), cpu_quota=50_000)
            world.runtime.update_error = RuntimeCallError("cannot: no", 3)
            request_update(h, lse, cpu_quota=70_000)
            await done(world, h)
            assert world.executor.quotas.known.records[f"qc/{lse}"].quota == 50_000

    run_scenario(scenario)


def test_failed_updates_are_reported_with_the_hooks_name(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            lse = await world.run(await world.pod("lse", "LSE", "", "2-3"))
            ls = await world.run(await world.pod("ls", "LS"))
            gone = await world.run("s-ls", "gone")
            await world.stop(gone)
            request_update(h, "missing", cpu_shares=2)
            request_update(h, gone, cpu_shares=2)
            request_update(h, ls, cpus=cpus("3-4"))
            request_update(h, lse, cpus=cpus("4"))
            await done(world, h)
            world.runtime.update_error = RuntimeCallError("cannot: no", 3)
            request_update(h, ls, cpu_shares=2)
            await done(world, h)
            assert sorted(problems(world)) == sorted(
                [
                    failed_update("containerID=missing", "there is no such container"),
                    failed_update(f"pod=ns/ls container=gone containerID={gone}", "it does not run"),
                    failed_update(f"pod=ns/ls container=c containerID={ls}", "cannot: no"),
                    failed_update(
                        f"pod=ns/lse container=c containerID={lse}", "CPUs 4 are not among those it has"
                    ),
                ]
            )
            assert (world.on(ls), world.on(lse)) == ("0-1,4-15", "2-3")
            assert not world.executor.state.inflight.of(ls)

    run_scenario(scenario)


def test_updates_by_hooks_wait_for_calls_of_the_client(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.run(await world.pod("ls", "LS"))
            request = pb.UpdateContainerResourcesRequest(container_id=one)
            request.linux.cpu_shares = 5
            call = await world.call("UpdateContainerResources", request)
            request_update(h, one, cpu_shares=9)
            await asyncio.sleep(0.2)
            assert not world.runtime.updates
            world.wire.finished(call, 0)
            await done(world, h)
            assert [limits.cpu_shares for _, _, limits in world.runtime.updates] == [9]
            assert (world.executor.state.runtime.saved[one], world.executor.state.inflight.of(one)) == (
                cpus("0-15"),
                (),
            )
            call = await world.call("UpdateContainerResources", request)
            request_update(h, one, cpu_shares=10)
            await asyncio.sleep(0.1)
            world.now += module.UPDATE_TIMEOUT_S + 1
            await done(world, h)
            assert problems(world) == [
                failed_update(f"pod=ns/ls container=c containerID={one}", "the runtime is still busy with it")
            ]
            world.wire.finished(call, 0)
            await world.quiet()

    run_scenario(scenario)


@pytest.mark.parametrize("under_way", [False, True])
def test_a_newer_update_waits_as_long_as_if_there_were_no_older_one(
    run_scenario, monkeypatch, under_way: bool
) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.run(await world.pod("ls", "LS"))
            request = pb.UpdateContainerResourcesRequest(container_id=one)
            request.linux.cpu_shares = 5
            call = await world.call("UpdateContainerResources", request)
            attempt, attempts = h.updates._apply_to_container, []

            def renew() -> None:
                world.now += module.UPDATE_TIMEOUT_S + 1
                request_update(h, one, cpu_quota=50_000)

            async def one_attempt(container_id: str, wanted: Any) -> bool:
                attempts.append(container_id)
                again = await attempt(container_id, wanted)
                if under_way and len(attempts) == 1:
                    renew()
                return again

            monkeypatch.setattr(h.updates, "_apply_to_container", one_attempt)
            request_update(h, one, cpu_shares=9)
            if not under_way:
                renew()
            await world.until(lambda: len(attempts) > 1)
            assert not problems(world)
            world.wire.finished(call, 0)
            await done(world, h)
            limits = [(limits.cpu_shares, limits.cpu_quota) for _, _, limits in world.runtime.updates]
            assert limits == [(9, 50_000)]

    run_scenario(scenario)


def test_an_update_is_retried_while_the_runtime_is_unavailable(run_scenario, monkeypatch) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.run(await world.pod("ls", "LS"))
            world.runtime.update_error = UnavailableError("cannot reach it")
            request_update(h, one, cpu_shares=9)
            await world.until(lambda: world.executor.state.inflight.orphans())
            world.runtime.update_error = None
            world.now += 3
            await world.sync.once()
            world.now += 3
            await world.sync.once()
            await world.until(lambda: world.runtime.updates)
            await done(world, h)
            assert not problems(world)

    run_scenario(scenario)


def test_repeated_updates_of_a_hook_replace_its_earlier_ones(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.run(await world.pod("ls", "LS"))
            for number in range(1000):
                request_update(h, one, cpu_shares=number + 2, cpus=cpus(str(number % 16)))
            assert len(h.updates._waiting) == 1
            await done(world, h)
            assert [limits.cpu_shares for _, _, limits in world.runtime.updates] == [1001]
            assert world.on(one) == "7"

    run_scenario(scenario)


def test_the_number_of_waiting_updates_is_bounded(run_scenario, monkeypatch) -> None:
    async def scenario(world) -> None:
        monkeypatch.setattr(module, "MOST_CONTAINERS", 2)
        async with hooks(world) as h:
            sandbox = await world.pod("ls", "LS")
            ids = [await world.run(sandbox, f"c{n}") for n in range(3)]
            for each in ids:
                request_update(h, each, cpu_shares=9)
            await done(world, h)
            assert len(world.runtime.updates) == 2
            assert problems(world) == [
                failed_update(f"pod=ns/ls container=c2 containerID={ids[2]}", "too many updates wait")
            ]

    run_scenario(scenario)


def test_each_failed_update_is_reported_with_its_own_hook(run_scenario) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            wants = {name: Update(cpu_shares=9) for name in ("a", "b")}
            h.updates.queue(wants, {"updates[a].cpu_shares": "10-x", "updates[b].cpu_shares": "20-y"})
            assert problems(world) == [
                failed_update("containerID=a", "there is no such container"),
                failed_update("containerID=b", "there is no such container", "20-y"),
            ]

    run_scenario(scenario)


def test_an_update_waits_for_a_call_that_arrives_while_it_is_prepared(run_scenario, monkeypatch) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.run(await world.pod("ls", "LS"))
            request = pb.UpdateContainerResourcesRequest(container_id=one)
            request.linux.cpu_shares = 5
            fencing, calls = world.executor.unit_properties.fencing, []
            prepare = fencing.fitting

            async def comes(container_id: str) -> Any:
                fence = await prepare(container_id)
                if not calls:
                    calls.append(await world.call("UpdateContainerResources", request))
                    return "the fence"
                return fence

            async def remove(self, fence: Any) -> None:
                if fence is not None:
                    removed.append(fence)

            removed: list[Any] = []
            monkeypatch.setattr(type(fencing), "remove", remove)
            monkeypatch.setattr(type(fencing), "fitting", lambda self, container_id: comes(container_id))
            request_update(h, one, cpu_shares=9)
            await world.until(lambda: calls and one in h.updates._waiting)
            assert not world.runtime.updates
            assert removed == ["the fence"]
            world.wire.finished(calls[0], 0)
            await done(world, h)
            assert [limits.cpu_shares for _, _, limits in world.runtime.updates] == [9]
            assert not problems(world)

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("removed", "why"), [(False, "it does not run"), (True, "there is no such container")]
)
def test_a_container_that_ends_during_an_update_is_not_notified(
    run_scenario, monkeypatch, removed: bool, why: str
) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.run(await world.pod("ls", "LS"))
            fencing = world.executor.unit_properties.fencing
            prepare = fencing.fitting

            async def ends(container_id: str) -> Any:
                fence = await prepare(container_id)
                await world.stop(one)
                if removed:
                    await world.remove(one)
                return fence

            monkeypatch.setattr(type(fencing), "fitting", lambda self, container_id: ends(container_id))
            request_update(h, one, cpu_shares=9)
            await done(world, h)
            assert not world.runtime.updates
            assert [problem.rpartition(" err=")[2] for problem in problems(world)] == [f'"{why}"']
            assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 0

    run_scenario(scenario)


def test_nothing_is_sent_for_a_pod_that_was_released_during_an_update(run_scenario, monkeypatch) -> None:
    async def scenario(world) -> None:
        async with hooks(world) as h:
            one = await world.run(await world.pod("ls", "LS"))
            fencing = world.executor.unit_properties.fencing
            prepare = fencing.fitting

            async def released(container_id: str) -> Any:
                fence = await prepare(container_id)
                world.executor.store.handle(ModeChanged(NodeMode.RELEASING))
                return fence

            monkeypatch.setattr(type(fencing), "fitting", lambda self, container_id: released(container_id))
            with pytest.raises(UnavailableError, match="the plan is not applied to its pod any more"):
                await h.updates._send(one, module._PendingUpdate(0.0, {"cpu_shares": 9}))
            assert not world.runtime.updates

    run_scenario(scenario)


def test_the_thread_of_updates_ends_when_they_are_closed(run_scenario) -> None:
    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("hook-updates")]

    async def scenario(world) -> None:
        async with hooks(world) as h:
            request_update(h, await world.run(await world.pod("ls", "LS")), cpu_shares=9)
            await done(world, h)
            assert threads()
        assert not threads()

    run_scenario(scenario)
