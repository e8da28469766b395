"""Leaving, in a played world: what races with it, what fails, and what a restart finds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.call_events import ContainersUnsettled
from proxy.engine.node_events import KubeletCpusRead
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.backoff import Backoff
from proxy.model.errors import InputError, RuntimeCallError
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager
from proxy.model.workload import Phase
from proxy.release import service
from proxy.release.record import KEY
from proxy.release.service import Release
from proxy.telemetry import metrics

ALL = "0-15"
LIMIT = {"cpu_period": 100_000, "cpu_quota": 200_000, "cpu_shares": 2048}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PAUSES", Backoff(0.01, 0.05))
    monkeypatch.setattr(service, "PASS_LIMIT_S", 1.0)


class Leaving:
    """A world with its comparisons running, and a release of it."""

    def __init__(self, world: Any) -> None:
        self.w = world
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


def fast(live: Callable[..., None], day: Any, **more: Any) -> None:
    live(day, settle_per_second=1000, reconcile_period=0.05, **more)


def test_every_container_is_updated_once_and_only_if_needed(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", kube="burstable"))
        lse = await w.run(await w.pod("lse", "LSE", cpus="2-3", quota=200_000), **LIMIT)
        named = await w.run(await w.pod("named", kube="burstable"), cpuset_cpus="0-1,4-5")
        await w.stop(gone := await w.run(await w.pod("gone", "LSR", cpus="8-9")))
        assert w.on(ls) == "0-1,4-15"
        async with Leaving(w) as release:
            await release.begin()
            await over(w, release)
            assert (w.on(ls), w.on(lse), w.runtime.specs[ls], w.runtime.specs[lse]) == (ALL,) * 4
            assert w.runtime.specs[named] == w.on(named) == "0-1,4-5"
            assert w.runtime.quotas[lse] == 200_000
            assert w.cpu.quotas["kubepods/podlse"] == w.cpu.quotas[f"kubepods/podlse/{lse}"] == 200_000
            assert gone not in w.cgroups.sets
            calls = [line for line in w.log if line.startswith("runtime ")]
            assert len(calls) == len({line.split()[1] for line in calls}) == 3
            assert w.ledger.entries[KEY]["stage"] == "released"
            assert release.page()["left"] == []
            assert (release.page()["updated"], release.page()["containers"]) == (3, 3)
            await w.stop(ls)
            assert (release.page()["updated"], release.page()["containers"]) == (2, 2), (
                "of those that are there"
            )

    fast(live, day)


def test_no_update_is_sent_where_no_container_was_moved(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        for number in range(3):
            await w.run(await w.pod(f"ls{number}", kube="burstable"))
        async with Leaving(w) as release:
            await release.begin()
            await over(w, release)
            assert not [line for line in w.log if line.startswith(("runtime ", "kernel "))]

    fast(live, day)


def test_a_create_that_was_on_its_way_is_given_back_too(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", kube="burstable"))
        call = await w.begin(await w.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(w) as release:
            await release.begin()
            await w.until(lambda: release.progress.sweeps > 2)
            assert w.on(ls) == ALL
            assert release.stage == "releasing"
            lse = w.finish(call, "late")
            assert w.runtime.specs[lse] == "2-3"
            await over(w, release)
            assert w.runtime.specs[lse] == ALL
            await w.start(lse)
            assert w.on(lse) == ALL

    fast(live, day)


def test_a_start_that_was_on_its_way_is_waited_for(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        await w.run(await w.pod("lse", "LSE", cpus="2-3"))
        ls = await w.create(await w.pod("ls", kube="burstable"))
        call = await w.call("StartContainer", pb.StartContainerRequest(container_id=ls))
        async with Leaving(w) as release:
            await release.begin()
            await w.until(lambda: release.progress.sweeps > 2)
            assert w.runtime.specs[ls] == "0-1,4-15"
            w.cgroups.sets[ls] = CpuSet.parse(w.runtime.specs[ls])  # the runtime makes it with what it has
            w._state(ls, "RUNNING")
            w.wire.finished(call, 0)
            await over(w, release)
            assert w.on(ls) == w.runtime.specs[ls] == ALL

    fast(live, day)


def test_queued_jobs_move_no_container_any_more(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", kube="burstable"))
        await w.run(await w.pod("lse", "LSE", cpus="2-3"))
        settler = w.make_settler()
        async with Leaving(w) as release:
            assert w.executor.state.runtime.unsettled
            w.executor.writes.later([ls])
            await release.begin()
            await over(w, release)
            w.executor.store.handle(ContainersUnsettled((ls,)))
            await settler.finish(10)
            w.executor.writes.later([ls])
            await w.executor.reservations.clear(w.executor.state.node.machine.online)
            await w.quiet()
            assert w.on(ls) == w.runtime.specs[ls] == ALL
        settler.close()

    fast(live, day)


def test_calls_pass_as_they_come(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", kube="burstable"))
        async with Leaving(w) as release:
            await release.begin()
            await over(w, release)
            for method, message in (
                ("RunPodSandbox", pb.RunPodSandboxRequest()),
                ("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls)),
                ("StopContainer", pb.StopContainerRequest(container_id=ls)),
            ):
                call = await w.call(method, message)
                assert call.sent == call.body
                w.wire.finished(call, 0)
            call = await w.begin("s-ls", "more")
            assert call.sent == call.body
            assert w.executor.state.containers[ls].phase is Phase.RUNNING

    fast(live, day)


def test_a_set_that_an_update_names_is_what_comes_back(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", kube="burstable"))
        got = await w.update(ls, cpuset_cpus="4-7")
        assert got.cpuset_cpus == ALL
        assert w.ledger.entries[f"c/{ls}"]["request"]["cpuset_cpus"] == "4-7"
        async with Leaving(w) as release:
            await release.begin()
            await over(w, release)
            assert w.on(ls) == w.runtime.specs[ls] == "4-7"

    fast(live, day)


def test_kubelets_static_policy_names_the_cpus_of_each_container(live: Callable[..., None]) -> None:
    held = {"whole": {"c": CpuSet.parse("4-5")}}
    manager = CpuManager("static", default=CpuSet.parse("0-3,6-15"), held=held)

    async def day(w: Any) -> None:
        w.executor.store.handle(KubeletCpusRead(manager, {}))
        whole = await w.run(await w.pod("whole"), cpuset_cpus="4-5", **LIMIT)
        ls = await w.run(await w.pod("ls", kube="burstable"), cpuset_cpus="0-15")
        await w.update(ls, cpuset_cpus="0-3,6-15")
        assert w.executor.state.containers[ls].request.cpuset_cpus == "0-15"
        async with Leaving(w) as release:
            await release.begin()
            await over(w, release)
            assert w.on(whole) == w.runtime.specs[whole] == "4-5"
            assert w.on(ls) == w.runtime.specs[ls] == "0-3,6-15"

    fast(live, day)


def test_a_container_that_the_runtime_refuses_is_reported_and_retried(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        lse = await w.run(await w.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(w) as release:
            w.runtime.update_error = RuntimeCallError("cannot update: device or resource busy", 2)
            await release.begin()
            await w.until(lambda: "cannot update: device or resource busy" in release.page()["left"])
            assert w.on(lse) == ALL  # the kernel first
            assert release.stage == "releasing"
            w.runtime.update_error = None
            await over(w, release)
            assert w.runtime.specs[lse] == ALL

    fast(live, day)


def test_a_fault_of_ours_ends_nothing(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        lse = await w.run(await w.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(w) as release:
            right, w.executor.quotas.once = w.executor.quotas.once, lambda: 1 // 0
            await release.begin()
            await w.until(lambda: any("ZeroDivisionError" in words for words in release.page()["left"]))
            w.executor.quotas.once = right
            await over(w, release)
            assert w.on(lse) == w.runtime.specs[lse] == ALL

    fast(live, day)


def test_without_a_runtime_the_kernel_is_given_back(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        lse = await w.run(await w.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(w) as release:
            w.runtime.down = True
            await release.begin()
            await w.until(lambda: release.page()["left"])
            assert w.on(lse) == ALL
            w.runtime.down = False
            await over(w, release)
            assert w.runtime.specs[lse] == ALL

    fast(live, day)


@pytest.mark.parametrize("stage", ["releasing", "released", "?"])
def test_a_restart_continues_and_asks_before_it_updates(live: Callable[..., None], stage: str) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", kube="burstable"))
        lse = await w.run(await w.pod("lse", "LSE", cpus="2-3"))
        await w.executor.journal.flush()
        w.ledger.entries[KEY] = {"stage": stage, "since": 1.0}
        before = w.executor
        w.boot()
        await before.close()
        # One was updated before the end.
        w.runtime.specs[ls] = ALL
        w.runtime.details[ls] = RuntimeDetail("", cpuset_cpus=ALL, cpuset_mems="0-1")
        w.log.clear()
        async with Leaving(w) as release:
            release.recover(w.ledger.entries[KEY])
            await w.until(lambda: w.executor.reconciled.is_set())
            if stage == "released":
                await w.quiet()
                assert w.on(lse) == "2-3"
                assert not [line for line in w.log if line.startswith(("runtime ", "kernel "))]
                return
            await over(w, release)
            assert (w.on(ls), w.on(lse)) == (ALL, ALL)
            assert [line for line in w.log if line.startswith("runtime ")] == [f"runtime {lse} {ALL}"]
            assert any("containers are not placed, although the mode is enforce" in line for line in w.logged)

    fast(live, day)


def test_undone_it_takes_over_as_at_a_start(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", kube="burstable"))
        lse = await w.run(await w.pod("lse", "LSE", cpus="2-3", quota=200_000), **LIMIT)
        async with Leaving(w) as release:
            with pytest.raises(InputError, match="not released"):
                await release.undo()
            await release.begin()
            await over(w, release)
            await release.undo()
            assert not w.executor.reconciled.is_set()
            assert KEY not in w.ledger.entries
            assert release.stage == ""
            call = await w.begin("s-ls", "more")  # waits until all are compared
            assert (
                pb.CreateContainerRequest.FromString(call.sent).config.linux.resources.cpuset_cpus
                == "0-1,4-15"
            )
            w.finish(call, "more")
            await w.until(lambda: (w.on(ls), w.on(lse)) == ("0-1,4-15", "2-3"))
            await w.until(lambda: w.cpu.quotas["kubepods/podlse"] == -1)
            assert (
                w.executor.telemetry.value(metrics.CPUSETS_REPAIRED)
                == w.executor.telemetry.value(metrics.MEMS_DRIFT)
                == 0
            )

    fast(live, day)


def test_undone_in_the_middle(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        lse = await w.run(await w.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(w) as release:
            w.runtime.update_error = RuntimeCallError("cannot update: busy", 2)
            await release.begin()
            await w.until(lambda: release.page()["left"])
            await release.undo()
            await w.until(lambda: w.on(lse) == "2-3")

    fast(live, day)


def test_at_a_stop_nothing_is_remembered(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        lse = await w.run(await w.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(w) as release:
            await release.begin(lasting=False)
            assert await release.finish(60)
            assert w.on(lse) == w.runtime.specs[lse] == ALL
            assert KEY not in w.ledger.entries

    fast(live, day)


def test_a_stop_waits_no_longer_than_it_may(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        lse = await w.run(await w.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(w) as release:
            w.runtime.update_error = RuntimeCallError("cannot update: busy", 2)
            await release.begin(lasting=False)
            assert not await release.finish(0.5)
            assert w.on(lse) == ALL

    fast(live, day)


def test_a_release_that_is_asked_for_while_one_is_undone_comes_after_it(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        lse = await w.run(await w.pod("lse", "LSE", cpus="2-3"))
        async with Leaving(w) as release:
            w.runtime.update_error = RuntimeCallError("cannot update: busy", 2)
            await release.begin()
            await w.until(lambda: release.page()["left"])
            answers = threading.Event()
            release._worker.start(answers.wait)  # a call that the runtime is slow to answer
            both = asyncio.gather(release.undo(), release.begin())
            await asyncio.sleep(0.05)
            answers.set()
            await both
            assert (release.stage, w.executor.store.mode.enforces) == ("releasing", False)
            w.runtime.update_error = None
            await over(w, release)
            assert w.on(lse) == w.runtime.specs[lse] == ALL
            assert w.ledger.entries[KEY]["stage"] == "released"

    fast(live, day)
