"""Releases in a simulated world: races, failures, and restarts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.call_events import RuntimeSyncDue
from proxy.engine.inflight_call_rules import ORPHAN_GRACE_S
from proxy.engine.node_events import KubeletCpusRead
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.backoff import Backoff
from proxy.model.errors import InputError, RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager
from proxy.model.workload import Phase
from proxy.release import service
from proxy.release.on_demand import RELEASE_RECORD
from proxy.release.service import Release
from proxy.telemetry import metrics
from tests.executor.cleared_cpus import cleared

ALL = "0-15"
LIMIT = {"cpu_period": 100_000, "cpu_quota": 200_000, "cpu_shares": 2048}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PAUSES", Backoff(0.01, 0.05))
    monkeypatch.setattr(service, "RECONCILE_LIMIT_S", 1.0)


class Leaving:
    """A world with running reconciles, and its release."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.release = Release(world.executor)
        self.comparing = asyncio.get_running_loop().create_task(world.sync.run())

    async def __aenter__(self) -> Release:
        return self.release

    async def __aexit__(self, *_: object) -> None:
        await self.release.stop()
        self.comparing.cancel()
        await asyncio.gather(self.comparing, return_exceptions=True)
        self.release.close()


async def over(world: Any, release: Release) -> None:
    await world.until(lambda: release.stage == "released")


async def over_later(world: Any, release: Release) -> None:
    """Let the time pass until the release is over: an update that was not answered is waited for."""

    def is_over() -> bool:
        world.now += 0.2
        return release.stage == "released"

    await world.until(is_over)


def fast(run_scenario: Callable[..., None], scenario: Any, **more: Any) -> None:
    run_scenario(scenario, settle_per_second=1000, reconcile_period=0.05, **more)


def test_every_container_is_updated_once_and_only_if_needed(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", kube="burstable"))
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3", quota=200_000), **LIMIT)
        named = await world.run(await world.pod("named", kube="burstable"), cpuset_cpus="0-1,4-5")
        await world.stop(gone := await world.run(await world.pod("gone", "LSR", cpus="8-9")))
        assert world.on(ls) == "0-1,4-15"
        async with Leaving(world) as release:
            await release.begin()
            await over(world, release)
            assert (world.on(ls), world.on(lse), world.runtime.specs[ls], world.runtime.specs[lse]) == (
                ALL,
            ) * 4
            assert world.runtime.specs[named] == world.on(named) == "0-1,4-5"
            assert world.runtime.quotas[lse] == 200_000
            assert (
                world.cpu.quotas["kubepods/podlse"] == world.cpu.quotas[f"kubepods/podlse/{lse}"] == 200_000
            )
            assert gone not in world.cgroups.sets
            calls = [line for line in world.log if line.startswith("runtime ")]
            assert len(calls) == len({line.split()[1] for line in calls}) == 3
            assert world.ledger.entries[RELEASE_RECORD]["stage"] == "released"
            assert release.page()["left"] == []
            assert (release.page()["updated"], release.page()["containers"]) == (3, 3)
            await world.stop(ls)
            assert (release.page()["updated"], release.page()["containers"]) == (2, 2), (
                "of the existing containers"
            )

    fast(run_scenario, scenario)


def test_no_update_is_sent_if_no_container_was_moved(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        for number in range(3):
            await world.run(await world.pod(f"ls{number}", kube="burstable"))
        async with Leaving(world) as release:
            await release.begin()
            await over(world, release)
            assert not [line for line in world.log if line.startswith(("runtime ", "kernel "))]

    fast(run_scenario, scenario)


def test_a_create_in_flight_is_released_too(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", kube="burstable"))
        call = await world.begin(await world.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(world) as release:
            await release.begin()
            await world.until(lambda: release.progress.sweeps > 2)
            assert world.on(ls) == ALL
            assert release.stage == "releasing"
            lse = world.finish(call, "late")
            assert world.runtime.specs[lse] == "2-3"
            await over(world, release)
            assert world.runtime.specs[lse] == ALL
            await world.start(lse)
            assert world.on(lse) == ALL

    fast(run_scenario, scenario)


def test_a_release_waits_for_a_start_in_flight(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        ls = await world.create(await world.pod("ls", kube="burstable"))
        call = await world.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        async with Leaving(world) as release:
            await release.begin()
            await world.until(lambda: release.progress.sweeps > 2)
            assert world.runtime.specs[ls] == "0-1,4-15"
            world.cgroups.sets[ls] = CpuSet.parse(
                world.runtime.specs[ls]
            )  # the runtime starts the container with the resources that it has
            world._state(ls, "RUNNING")
            world.wire.finished(call, 0)
            await over(world, release)
            assert world.on(ls) == world.runtime.specs[ls] == ALL

    fast(run_scenario, scenario)


def test_queued_jobs_move_no_container_after_a_release(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", kube="burstable"))
        await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        runtime_sync = world.make_runtime_sync()
        async with Leaving(world) as release:
            assert world.executor.state.runtime.awaiting_sync
            world.executor.writes.write_soon([ls])
            await release.begin()
            await over(world, release)
            world.executor.store.handle(RuntimeSyncDue((ls,)))
            await runtime_sync.finish(10)
            world.executor.writes.write_soon([ls])
            await cleared(world, world.executor.state.node.machine.online)
            await world.quiet()
            assert world.on(ls) == world.runtime.specs[ls] == ALL
        runtime_sync.close()

    fast(run_scenario, scenario)


def test_calls_pass_unchanged_after_a_release(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", kube="burstable"))
        async with Leaving(world) as release:
            await release.begin()
            await over(world, release)
            for method, message in (
                ("RunPodSandbox", pb.RunPodSandboxRequest()),
                ("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls)),
                ("StopContainer", pb.StopContainerRequest(container_id=ls)),
            ):
                call = await world.call(method, message)
                assert call.sent == call.body
                world.wire.finished(call, 0)
            call = await world.begin("s-ls", "more")
            assert call.sent == call.body
            assert world.executor.state.containers[ls].phase is Phase.RUNNING

    fast(run_scenario, scenario)


def test_a_set_named_by_an_update_is_restored(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", kube="burstable"))
        result = await world.update(ls, cpuset_cpus="4-7")
        assert result.cpuset_cpus == ALL
        assert world.ledger.entries[f"c/{ls}"]["request"]["cpuset_cpus"] == "4-7"
        async with Leaving(world) as release:
            await release.begin()
            await over(world, release)
            assert world.on(ls) == world.runtime.specs[ls] == "4-7"

    fast(run_scenario, scenario)


def test_kubelets_static_policy_names_the_cpus_of_each_container(run_scenario: Callable[..., None]) -> None:
    held = {"whole": {"c": CpuSet.parse("4-5")}}
    manager = CpuManager("static", default=CpuSet.parse("0-3,6-15"), held=held)

    async def scenario(world: Any) -> None:
        world.executor.store.handle(KubeletCpusRead(manager, {}))
        whole = await world.run(await world.pod("whole"), cpuset_cpus="4-5", **LIMIT)
        ls = await world.run(await world.pod("ls", kube="burstable"), cpuset_cpus="0-15")
        await world.update(ls, cpuset_cpus="0-3,6-15")
        assert world.executor.state.containers[ls].request.cpuset_cpus == "0-15"
        async with Leaving(world) as release:
            await release.begin()
            await over(world, release)
            assert world.on(whole) == world.runtime.specs[whole] == "4-5"
            assert world.on(ls) == world.runtime.specs[ls] == "0-3,6-15"

    fast(run_scenario, scenario)


def test_a_container_that_the_runtime_refuses_is_reported_and_retried(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(world) as release:
            world.runtime.update_error = RuntimeCallError("cannot update: device or resource busy", 2)
            await release.begin()
            await world.until(lambda: "cannot update: device or resource busy" in release.page()["left"])
            assert world.on(lse) == ALL  # the kernel is changed first
            assert release.stage == "releasing"
            world.runtime.update_error = None
            await over(world, release)
            assert world.runtime.specs[lse] == ALL

    fast(run_scenario, scenario)


def test_an_internal_error_does_not_end_a_release(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(world) as release:
            right, world.executor.quotas.once = world.executor.quotas.once, lambda: 1 // 0
            await release.begin()
            await world.until(lambda: any("ZeroDivisionError" in text for text in release.page()["left"]))
            world.executor.quotas.once = right
            await over(world, release)
            assert world.on(lse) == world.runtime.specs[lse] == ALL

    fast(run_scenario, scenario)


def test_without_a_runtime_the_kernels_sets_are_released(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(world) as release:
            world.runtime.down = True
            await release.begin()
            await world.until(lambda: release.page()["left"])
            assert world.on(lse) == ALL
            world.runtime.down = False
            await over_later(world, release)
            assert world.runtime.specs[lse] == ALL

    fast(run_scenario, scenario)


def test_an_update_without_an_answer_stays_in_flight_after_an_undo(run_scenario: Callable[..., None]) -> None:
    """The runtime may still give the container all CPUs, when other containers own some of them."""

    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(world) as release:
            world.runtime.update_error = UnavailableError("the runtime does not answer in time")
            await release.begin()
            await world.until(lambda: world.executor.state.inflight.of(lse))
            world.runtime.update_error = None
            await release.undo()
            (call,) = world.executor.state.inflight.of(lse)
            assert (str(call.carries), call.orphaned_since is None) == (ALL, False)
            await world.until(lambda: world.executor.state.inflight.current(call).answered_at is not None)

            def is_over() -> bool:
                # Another update that is in flight when the time has passed may become an orphan, too.
                world.now += ORPHAN_GRACE_S / 10
                return not world.executor.state.inflight.of(lse)

            await world.until(is_over)

    fast(run_scenario, scenario)


def test_a_release_waits_for_an_update_without_an_answer_and_repeats_it(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(world) as release:
            world.runtime.update_error = UnavailableError("the runtime does not answer in time")
            await release.begin()
            await world.until(lambda: world.executor.state.inflight.of(lse))
            world.runtime.update_error = None
            await over_later(world, release)
            assert world.runtime.specs[lse] == world.on(lse) == ALL

    fast(run_scenario, scenario)


@pytest.mark.parametrize("stage", ["releasing", "released", "?"])
def test_a_restarted_release_reads_each_container_before_an_update(
    run_scenario: Callable[..., None], stage: str
) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", kube="burstable"))
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        await world.executor.ledger_writer.flush()
        world.ledger.entries[RELEASE_RECORD] = {"stage": stage, "since": 1.0}
        before = world.executor
        world.boot()
        await before.close()
        # One container was updated before the end.
        world.runtime.specs[ls] = ALL
        world.runtime.details[ls] = RuntimeDetail("", cpuset_cpus=ALL, cpuset_mems="0-1")
        world.log.clear()
        async with Leaving(world) as release:
            release.recover(world.ledger.entries[RELEASE_RECORD])
            await world.until(lambda: world.executor.reconciled.is_set())
            if stage == "released":
                await world.quiet()
                assert world.on(lse) == "2-3"
                assert not [line for line in world.log if line.startswith(("runtime ", "kernel "))]
                return
            await over(world, release)
            assert (world.on(ls), world.on(lse)) == (ALL, ALL)
            assert [line for line in world.log if line.startswith("runtime ")] == [f"runtime {lse} {ALL}"]
            assert any("containers are not placed, whatever the mode" in line for line in world.logged)

    fast(run_scenario, scenario)


def test_an_undone_release_takes_over_as_at_a_start(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", kube="burstable"))
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3", quota=200_000), **LIMIT)
        async with Leaving(world) as release:
            with pytest.raises(InputError, match="not released"):
                await release.undo()
            await release.begin()
            await over(world, release)
            await release.undo()
            assert not world.executor.reconciled.is_set()
            assert RELEASE_RECORD not in world.ledger.entries
            assert release.stage == ""
            call = await world.begin("s-ls", "more")  # waits until all are compared
            assert (
                pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus
                == "0-1,4-15"
            )
            world.finish(call, "more")
            await world.until(lambda: (world.on(ls), world.on(lse)) == ("0-1,4-15", "2-3"))
            await world.until(lambda: world.cpu.quotas["kubepods/podlse"] == -1)
            assert (
                world.executor.telemetry.value(metrics.CPUSETS_REPAIRED)
                == world.executor.telemetry.value(metrics.MEMS_DRIFT)
                == 0
            )

    fast(run_scenario, scenario)


def test_a_release_undone_in_the_middle(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(world) as release:
            world.runtime.update_error = RuntimeCallError("cannot update: busy", 2)
            await release.begin()
            await world.until(lambda: release.page()["left"])
            await release.undo()
            await world.until(lambda: world.on(lse) == "2-3")

    fast(run_scenario, scenario)


def test_a_release_at_a_stop_is_not_recorded(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(world) as release:
            await release.begin(lasting=False)
            assert await release.finish(60)
            assert world.on(lse) == world.runtime.specs[lse] == ALL
            assert RELEASE_RECORD not in world.ledger.entries

    fast(run_scenario, scenario)


def test_the_wait_of_a_stop_is_bounded(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(world) as release:
            world.runtime.update_error = RuntimeCallError("cannot update: busy", 2)
            await release.begin(lasting=False)
            assert not await release.finish(0.5)
            assert world.on(lse) == ALL

    fast(run_scenario, scenario)


def test_a_release_requested_during_an_undo_follows_it(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(world) as release:
            world.runtime.update_error = RuntimeCallError("cannot update: busy", 2)
            await release.begin()
            await world.until(lambda: release.page()["left"])
            answers = threading.Event()
            release._worker.start(answers.wait)  # a call that the runtime is slow to answer
            both = asyncio.gather(release.undo(), release.begin())
            await asyncio.sleep(0.05)
            answers.set()
            await both
            assert (release.stage, world.executor.store.mode.enforces) == ("releasing", False)
            world.runtime.update_error = None
            await over(world, release)
            assert world.on(lse) == world.runtime.specs[lse] == ALL
            assert world.ledger.entries[RELEASE_RECORD]["stage"] == "released"

    fast(run_scenario, scenario)
