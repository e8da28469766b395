"""CFS quotas of owners of CPUs: off while they own them, and restored, whatever happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from proxy.engine.pod_events import PodLearned
from proxy.engine.quotas import CpuGroupsSought
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.executor.status_data import quotas_page
from proxy.model.errors import RuntimeCallError
from proxy.model.koordinator import KeepQuota
from proxy.model.mode import NodeMode
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.telemetry import metrics
from tests.testkit.changed_copy import changed_copy
from tests.testkit.cri import created_with

TWO = {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000}
SEVERAL = {"rules": {"keep_quota": KeepQuota.SEVERAL_CONTAINERS}}
ALWAYS = {"rules": {"keep_quota": KeepQuota.ALWAYS}}


def at(w: Any, sandbox: str, container: str = "") -> int:
    """What the kernel says of a pod's quota, or of a container's."""
    path = w.parents[sandbox]
    return w.cpu.quotas[f"{path}/{container}" if container else path]


async def lsr(w: Any, uid: str = "db", quota: int = 200_000, **more: Any) -> str:
    return await w.pod(uid, "LSR", "", "2-3", quota=quota, **more)


async def settled(w: Any) -> None:
    """Do what the settler does."""

    settler = w.make_settler()
    await settler.finish(60)
    settler.close()


def test_a_container_and_its_pod(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        call = await w.begin(pod, **TWO)
        assert (created_with(call).cpu_quota, created_with(call).cpu_period) == (-1, 100_000)
        owner = w.finish(call, "o1")
        assert at(w, pod) == 200_000, "no container runs there yet"
        await w.start(owner)
        assert (at(w, pod), at(w, pod, owner)) == (-1, -1)
        order = [line for line in w.log if line.startswith("quota ") or line == "forward StartContainer"]
        assert order == ["quota kubepods/poddb -1", "forward StartContainer"]
        first = w.log.index("quota kubepods/poddb -1")
        assert "ledger +q/" in w.log[:first], "what was there is known before it goes"
        assert w.ledger.entries["q/db"] == {"quota": 200_000, "group": "kubepods/poddb"}
        await w.stop(owner)
        assert at(w, pod) == 200_000
        assert not [key for key in w.ledger.entries if key.startswith("q")]

    live(day)


def test_a_container_that_owns_nothing_keeps_its_quota(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await w.pod("ls", "LS", quota=100_000)
        call = await w.begin(pod, cpu_quota=50_000, cpu_period=100_000)
        assert created_with(call).cpu_quota == 50_000
        sharer = w.finish(call, "s1")
        await w.start(sharer)
        got = await w.update(sharer, cpu_quota=60_000)
        assert got.cpu_quota == 60_000
        assert (await w.update(sharer, cpu_shares=4)).cpu_quota == 0
        await w.sync.once()
        assert (at(w, pod), at(w, pod, sharer)) == (100_000, 60_000)

    live(day)


def test_an_update_does_not_bring_it_back_and_is_what_will_be(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        owner = await w.run(pod, **TWO)
        assert (await w.update(owner, cpu_quota=150_000)).cpu_quota == -1
        assert at(w, pod, owner) == -1
        assert quotas_page(w.executor)[1] == {
            "pod": "ns/db",
            "container": "c",
            "was": 150_000,
            "now": None,
            "group": "",
        }
        await w.update(owner, cpu_quota=-1)
        assert [row["container"] for row in quotas_page(w.executor)] == [""], "it has none to put back"

    live(day)


def test_another_program_writes_the_pods_quota(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        owner = await w.run(pod, **TWO)
        await w.sync.once()
        assert w.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT) == 0
        w.cpu.write("kubepods/poddb", 300_000)
        await w.sync.once()
        assert at(w, pod) == -1
        assert w.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT) == 1
        assert any(
            "drift: another program wrote a CFS quota path=/kubepods/poddb" in line for line in w.logged
        )
        await w.stop(owner)
        assert at(w, pod) == 300_000

    live(day)


def test_a_persistent_writer_is_repaired_ever_more_rarely(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        owner = await w.run(pod, **TWO)
        repaired = []
        for number in range(60):
            w.cpu.write("kubepods/poddb", 200_000 + number)
            await w.sync.once()
            if at(w, pod) == -1:
                repaired.append(number)
        assert repaired[:3] == [0, 1, 2]
        assert 5 <= len(repaired) <= 9
        await w.stop(owner)
        assert at(w, pod) == 200_059, "the newest value stands"
        assert quotas_page(w.executor) == []

    live(day)


def test_a_calm_pass_forgives(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        await w.run(pod, **TWO)
        for _ in range(10):
            w.cpu.write("kubepods/poddb", 200_000)
            await w.sync.once()
            assert at(w, pod) == -1
            await w.sync.once()

    live(day)


def test_a_running_container_is_adopted_with_a_quota(live: Callable[..., None]) -> None:
    """By a write at once, and through the runtime for good; after a restart without a ledger."""

    async def day(w: Any) -> None:
        pod = await lsr(w)
        owner = await w.run(pod, **TWO)
        w.cpu.write("kubepods/poddb", 200_000)
        w.runtime.limit(owner, 200_000)
        w.runtime.details[owner] = RuntimeDetail(f"/kubepods/poddb/{owner}", **TWO, cpuset_cpus="2-3")
        w.ledger.entries.clear()
        await w.executor.close()
        w.boot()
        await w.sync.once()
        assert (at(w, pod), at(w, pod, owner)) == (-1, -1)
        assert w.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT) == 0, "it is the first time that we see it"
        assert w.runtime.quotas[owner] == 200_000
        await settled(w)
        assert w.runtime.quotas[owner] == -1
        assert w.log[-1] == f"runtime {owner} 2-3 quota -1"
        await settled(w)
        w.log.clear()
        await w.sync.once()
        assert not [line for line in w.log if line.startswith(("runtime", "quota"))], "once is enough"

    live(day)


def test_a_restart_compares(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod, other = await lsr(w), await w.pod("lse", "LSE", "", "7", quota=100_000)
        owner, gone = await w.run(pod, **TWO), await w.run(other, **TWO)
        await w.executor.close()
        w.end(gone)
        w.cpu.write("kubepods/poddb", 250_000)
        w.boot()
        await w.sync.once()
        await w.quiet()
        assert (at(w, pod), at(w, other)) == (-1, 100_000)
        assert w.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT) == 1
        await w.stop(owner)
        assert at(w, pod) == 250_000

    live(day)


def test_a_restart_with_another_setting_puts_all_back(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        owner = await w.run(pod, **TWO)
        await w.executor.close()
        w.rules = {**w.rules, "keep_quota": KeepQuota.ALWAYS}
        w.boot()
        await w.sync.once()
        assert (at(w, pod), at(w, pod, owner)) == (200_000, 200_000)
        back = [line for line in w.log if line.startswith("quota") and not line.endswith("-1")]
        assert back == [f"quota kubepods/poddb/{owner} 200000", "quota kubepods/poddb 200000"]
        assert w.runtime.quotas[owner] == -1
        await settled(w)
        assert w.runtime.quotas[owner] == 200_000, "else the next update of anything would undo it"
        assert quotas_page(w.executor) == []
        await w.executor.journal.flush()
        assert not [key for key in w.ledger.entries if key.startswith("q")]

    live(day)


def test_a_newer_quota_is_not_overwritten(live: Callable[..., None]) -> None:
    """A program gave the container another quota while the daemon was not running."""

    async def day(w: Any) -> None:
        pod = await lsr(w)
        owner = await w.run(pod, **TWO)
        await w.executor.close()
        w.runtime.limit(owner, 170_000)
        w.rules = {**w.rules, "keep_quota": KeepQuota.ALWAYS}
        w.boot()
        await w.sync.once()
        await settled(w)
        assert (at(w, pod), at(w, pod, owner), w.runtime.quotas[owner]) == (200_000, 170_000, 170_000)
        assert quotas_page(w.executor) == []

    live(day)


def test_a_runtime_that_will_not_take_it_back_is_asked_ever_more_rarely(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        owner = await w.run(pod, **TWO)
        await w.executor.close()
        w.rules = {**w.rules, "keep_quota": KeepQuota.ALWAYS}
        w.boot()
        calls = []

        def no(*args: Any) -> None:
            calls.append(args)
            raise RuntimeCallError("cannot update: no", 2)

        plain, w.runtime.update_cpuset = w.runtime.update_cpuset, no
        for _ in range(60):
            await w.sync.once()
            await settled(w)
        assert 4 <= len(calls) <= 9
        assert at(w, pod, owner) == 200_000, "the write stands"
        w.runtime.update_cpuset = plain
        for _ in range(40):
            await w.sync.once()
            await settled(w)
        assert w.runtime.quotas[owner] == 200_000
        assert quotas_page(w.executor) == []

    live(day)


def test_an_update_meanwhile_carries_what_is_to_be_restored(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        owner = await w.run(await lsr(w), **TWO)
        await w.executor.close()
        w.rules = {**w.rules, "keep_quota": KeepQuota.ALWAYS}
        w.boot()
        await w.sync.once()
        assert (await w.update(owner, cpu_shares=4)).cpu_quota == 200_000
        assert (await w.update(owner, cpu_quota=170_000)).cpu_quota == 170_000
        await settled(w)
        assert w.runtime.quotas[owner] == 170_000, "the newest counts"
        w.now += 3
        await w.sync.once()  # calls of before the restart are over
        await settled(w)
        assert quotas_page(w.executor) == []

    live(day)


def test_several_containers(live: Callable[..., None]) -> None:
    """The second one brings quotas back for all; when it has ended they go again."""

    async def day(w: Any) -> None:
        pod = await lsr(w, quota=300_000)
        first = await w.run(pod, "first", **TWO)
        assert (at(w, pod), at(w, pod, first)) == (-1, -1)
        call = await w.begin(pod, "second", cpu_quota=100_000, cpu_period=100_000)
        assert created_with(call).cpu_quota == 100_000
        second = w.finish(call, "second-1")
        await w.quiet()
        assert (at(w, pod), at(w, pod, first)) == (300_000, 200_000)
        await w.start(second)
        await settled(w)
        assert (at(w, pod, second), w.runtime.quotas[first]) == (100_000, 200_000)
        await w.stop(second)
        await w.sync.once()
        assert (at(w, pod), at(w, pod, first)) == (-1, -1)

    live(day, **SEVERAL)


def test_several_containers_that_only_kubelet_knows(live: Callable[..., None]) -> None:
    """What runs at the same time counts; init containers do not."""

    async def day(w: Any) -> None:
        pods = []
        for uid, kind in (("pair", ContainerKind.APP), ("alone", ContainerKind.INIT)):
            pod = await w.pod(uid, "LSR", "", "2-3" if uid == "pair" else "4-5", quota=200_000)
            asks = PodRequests(
                uid,
                (ContainerResources("a", kind, {}, {}), ContainerResources("b", ContainerKind.APP, {}, {})),
            )

            known = changed_copy(w.executor.state.pods[pod], asks=asks, source="a test")
            w.executor.store.handle(PodLearned(known, "a test", recorded=False))
            pods.append((pod, await w.run(pod, "b", **TWO)))
        (pair, one), (alone, other) = pods
        assert (at(w, pair), at(w, pair, one)) == (200_000, 200_000)
        assert (at(w, alone), at(w, alone, other)) == (-1, -1)

    live(day, **SEVERAL)


def test_made_with_a_second_before_it_starts(live: Callable[..., None]) -> None:
    """The first was made without a quota, and is to have one when it starts: it is sent before."""

    async def day(w: Any) -> None:
        pod = await lsr(w)
        first = await w.create(pod, "first", **TWO)
        assert w.runtime.quotas[first] == -1
        await w.create(pod, "second", **TWO)
        await w.quiet()
        await w.start(first)
        assert (at(w, pod), at(w, pod, first)) == (200_000, 200_000)
        assert w.runtime.quotas[first] == 200_000
        assert quotas_page(w.executor) == [
            row for row in quotas_page(w.executor) if row["container"] == "second"
        ], "the first one's is settled"

    live(day, **SEVERAL)


def test_made_with_a_second_while_the_runtime_makes_it(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        call = await w.begin(pod, "first", **TWO)
        assert created_with(call).cpu_quota == -1
        await w.create(pod, "second", **TWO)
        first = w.finish(call, "first-1")
        await w.quiet()
        await w.start(first)
        assert (at(w, pod), at(w, pod, first), w.runtime.quotas[first]) == (200_000,) * 3

    live(day, **SEVERAL)


def test_a_create_that_fails_leaves_the_pods_quota(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        call = await w.begin(pod, **TWO)
        await w.sync.once()
        w.wire.finished(call, 13)
        await w.quiet()
        assert at(w, pod) == 200_000
        assert quotas_page(w.executor) == []

    live(day)


def test_the_group_of_several_pods_is_left(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod, other = await lsr(w), await w.pod("ls", "LS", quota=100_000)

        shared = changed_copy(w.executor.state.pods[other], cgroup_parent="/kubepods/poddb")
        w.executor.store.handle(PodLearned(shared, "a test", recorded=False))
        owner = await w.run(pod, **TWO)
        await w.sync.once()
        assert (at(w, pod), at(w, pod, owner)) == (200_000, -1)

    live(day)


def test_a_pod_that_is_gone_is_forgotten(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        owner = await w.run(pod, **TWO)
        del w.cpu.quotas[w.parents[pod]]
        w.cgroups.sets.pop(owner)
        w.runtime.containers.clear()
        w.runtime.pods.clear()
        await w.sync.once()
        await w.quiet()
        assert quotas_page(w.executor) == []
        assert w.executor.telemetry.problems() == []
        assert not w.ledger.entries

    live(day)


def test_a_failed_write_is_reported_and_tried_again(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        w.cpu.broken.add("kubepods/poddb")
        owner = await w.run(pod, **TWO)
        assert at(w, pod) == 200_000
        assert [p["what"] for p in w.executor.telemetry.problems()] == [
            'cannot write a CFS quota reason="cannot write kubepods/poddb: busy"'
        ]
        w.cpu.broken.clear()
        for _ in range(3):
            await w.sync.once()
        assert at(w, pod) == -1
        w.cpu.broken.add("kubepods/poddb")
        await w.stop(owner)
        assert at(w, pod) == -1
        w.cpu.broken.clear()
        for _ in range(40):
            await w.sync.once()
        assert at(w, pod) == 200_000

    live(day)


def test_without_a_cpu_controller_and_in_observe_mode_nothing_changes(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        w.executor.store.handle(CpuGroupsSought(found=False))
        pod = await lsr(w)
        call = await w.begin(pod, **TWO)
        assert created_with(call).cpu_quota == 200_000
        owner = w.finish(call, "o1")
        await w.start(owner)
        assert (await w.update(owner, cpu_quota=170_000)).cpu_quota == 170_000
        await w.sync.once()
        assert (at(w, pod), at(w, pod, owner)) == (200_000, 170_000)
        assert quotas_page(w.executor) == []

    live(day)

    async def watch(w: Any) -> None:
        pod = await lsr(w)
        call = await w.begin(pod, **TWO)
        assert call.sent == call.body
        await w.start(w.finish(call, "o1"))
        await w.sync.once()
        assert at(w, pod) == 200_000
        assert not [key for key in w.ledger.entries if key.startswith(("q/", "qc/"))]

    live(watch, mode=NodeMode.OBSERVE)


@pytest.mark.parametrize("value", [{}, {"quota": "x"}, {"quota": 0}, {"quota": 5, "group": 1}])
def test_an_invalid_record(live: Callable[..., None], value: dict[str, object]) -> None:
    async def day(w: Any) -> None:
        assert quotas_page(w.executor) == []
        assert "q/db" in str(w.executor.telemetry.problems())

    live(day, entries={"q/db": value})


def test_the_runtime_refuses_or_is_away(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        pod = await lsr(w)
        owner = await w.run(pod, **TWO)
        w.runtime.limit(owner, 200_000)
        await w.sync.once()
        w.runtime.update_error = RuntimeCallError("cannot update: no", 2)
        await asyncio.wait_for(settled(w), 60)
        w.runtime.update_error = None
        (problem,) = w.executor.telemetry.problems()
        assert problem["message"] == "cannot save a cpuset at the runtime"
        assert (problem["keys"]["pod"], problem["keys"]["err"]) == ("ns/db", "cannot update: no")
        assert at(w, pod, owner) == -1, "the write stands"
        w.runtime.limit(owner, 0)
        await w.sync.once()
        await settled(w)
        assert w.runtime.quotas[owner] == -1

    live(day)
