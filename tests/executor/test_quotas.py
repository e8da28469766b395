"""CFS quotas of owners: removed while they own CPUs, and restored whatever happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.engine.pod_events import PodLearned
from proxy.engine.quotas import CpuControllerChecked
from proxy.executor import runtime_sync
from proxy.executor.ledger_writer import LedgerWriter
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.executor.status_data import quotas_page
from proxy.model.backoff import Backoff
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


def at(world: Any, sandbox: str, container: str = "") -> int:
    """Return the kernel's quota of a pod or of a container."""
    path = world.parents[sandbox]
    return world.cpu.quotas[f"{path}/{container}" if container else path]


async def lsr(world: Any, uid: str = "db", quota: int = 200_000, **more: Any) -> str:
    return await world.pod(uid, "LSR", "", "2-3", quota=quota, **more)


async def settled(world: Any) -> None:
    """Run the runtime sync once."""

    sync = world.make_runtime_sync()
    await sync.finish(60)
    sync.close()


def test_the_quotas_of_an_owner_and_its_pod_are_off_while_it_runs(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        call = await world.begin(pod, **TWO)
        assert (created_with(call).cpu_quota, created_with(call).cpu_period) == (-1, 100_000)
        owner = world.finish(call, "o1")
        assert at(world, pod) == 200_000, "no container runs there yet"
        await world.start(owner)
        assert (at(world, pod), at(world, pod, owner)) == (-1, -1)
        order = [line for line in world.log if line.startswith("quota ") or line == "forward StartContainer"]
        assert order == ["quota kubepods/poddb -1", "forward StartContainer"]
        first = world.log.index("quota kubepods/poddb -1")
        assert "ledger +q/" in world.log[:first], "the quota is recorded before it is removed"
        assert world.ledger.entries["q/db"] == {"quota": 200_000, "group": "kubepods/poddb"}
        await world.stop(owner)
        assert at(world, pod) == 200_000
        assert not [key for key in world.ledger.entries if key.startswith("q")]

    run_scenario(scenario)


def test_a_container_that_owns_nothing_keeps_its_quota(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = await world.pod("ls", "LS", quota=100_000)
        call = await world.begin(pod, cpu_quota=50_000, cpu_period=100_000)
        assert created_with(call).cpu_quota == 50_000
        sharer = world.finish(call, "s1")
        await world.start(sharer)
        forwarded = await world.update(sharer, cpu_quota=60_000)
        assert forwarded.cpu_quota == 60_000
        assert (await world.update(sharer, cpu_shares=4)).cpu_quota == 0
        await world.sync.once()
        assert (at(world, pod), at(world, pod, sharer)) == (100_000, 60_000)

    run_scenario(scenario)


def test_a_quota_in_an_update_is_withheld_and_recorded_for_later(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        owner = await world.run(pod, **TWO)
        assert (await world.update(owner, cpu_quota=150_000)).cpu_quota == -1
        assert at(world, pod, owner) == -1
        assert quotas_page(world.executor)[1] == {
            "pod": "ns/db",
            "container": "c",
            "was": 150_000,
            "now": None,
            "group": "",
        }
        await world.update(owner, cpu_quota=-1)
        assert [row["container"] for row in quotas_page(world.executor)] == [""], "it has no quota to restore"

    run_scenario(scenario)


@pytest.mark.parametrize("status", [2, 14, None])
def test_a_refused_resize_does_not_change_the_quota_that_is_restored(
    run_scenario: Callable[..., None], status: int | None
) -> None:
    """Without an answer the resize may be in effect."""

    async def scenario(world: Any) -> None:
        owner = await world.run(await lsr(world), **TWO)
        resize = pb.UpdateContainerResourcesRequest(
            container_id=owner, linux=pb.LinuxContainerResources(cpu_quota=400_000)
        )
        call = await world.call("UpdateContainerResources", resize)
        world.wire.finished(call, status)
        await world.quiet()
        kept = 200_000 if status == 2 else 400_000
        assert world.executor.quotas.known.records[f"qc/{owner}"].quota == kept
        assert world.ledger.entries[f"qc/{owner}"]["quota"] == kept

    run_scenario(scenario)


@pytest.mark.parametrize("order", list(permutations(range(2))))
@pytest.mark.parametrize(
    ("quotas", "statuses", "kept"),
    [
        ((400_000, 400_000), (2, 0), 400_000),
        ((400_000, 400_000), (0, 2), 400_000),
        ((400_000, 400_000), (2, 14), 400_000),
        ((400_000, 300_000), (2, 0), 300_000),
        ((400_000, 300_000), (0, 2), 400_000),
        ((400_000, 300_000), (2, 2), 200_000),
        ((-1, 300_000), (2, 2), 200_000),
        ((-1, 300_000), (0, 2), None),
        ((300_000, -1), (2, 0), None),
        ((300_000, -1), (2, 2), 200_000),
    ],
)
def test_a_refused_resize_among_others_leaves_the_quota_of_those_that_are_in_effect(
    run_scenario: Callable[..., None],
    quotas: Sequence[int],
    statuses: Sequence[int],
    kept: int | None,
    order: Sequence[int],
) -> None:
    async def scenario(world: Any) -> None:
        owner = await world.run(await lsr(world), **TWO)
        calls = []
        for quota in quotas:
            resize = pb.UpdateContainerResourcesRequest(
                container_id=owner, linux=pb.LinuxContainerResources(cpu_quota=quota)
            )
            calls.append(await world.call("UpdateContainerResources", resize))
        for number in order:
            world.wire.finished(calls[number], statuses[number])
        await world.quiet()
        record = world.executor.quotas.known.records.get(f"qc/{owner}")
        assert (record.quota if record else None) == kept
        assert not world.executor.quotas._updates

    run_scenario(scenario)


def test_a_pod_quota_written_by_another_program_is_repaired(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        owner = await world.run(pod, **TWO)
        await world.sync.once()
        assert world.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT) == 0
        world.cpu.write("kubepods/poddb", 300_000)
        await world.sync.once()
        assert at(world, pod) == -1
        assert world.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT) == 1
        assert any(
            "drift: another program wrote a CFS quota path=/kubepods/poddb" in line for line in world.logged
        )
        await world.stop(owner)
        assert at(world, pod) == 300_000

    run_scenario(scenario)


def test_a_persistent_writer_is_repaired_ever_more_rarely(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        owner = await world.run(pod, **TWO)
        repaired = []
        for number in range(60):
            world.cpu.write("kubepods/poddb", 200_000 + number)
            await world.sync.once()
            if at(world, pod) == -1:
                repaired.append(number)
        assert repaired[:3] == [0, 1, 2]
        assert 5 <= len(repaired) <= 9
        await world.stop(owner)
        assert at(world, pod) == 200_059, "the newest value stays"
        assert quotas_page(world.executor) == []

    run_scenario(scenario)


def test_a_reconcile_without_drift_resets_the_repair_pace(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        await world.run(pod, **TWO)
        for _ in range(10):
            world.cpu.write("kubepods/poddb", 200_000)
            await world.sync.once()
            assert at(world, pod) == -1
            await world.sync.once()

    run_scenario(scenario)


def test_a_running_container_is_adopted_with_a_quota(run_scenario: Callable[..., None]) -> None:
    """By a write at once, and by an update at the runtime; after a restart without a ledger."""

    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        owner = await world.run(pod, **TWO)
        world.cpu.write("kubepods/poddb", 200_000)
        world.runtime.limit(owner, 200_000)
        world.runtime.details[owner] = RuntimeDetail(f"/kubepods/poddb/{owner}", **TWO, cpuset_cpus="2-3")
        world.ledger.entries.clear()
        await world.executor.close()
        world.boot()
        await world.sync.once()
        assert (at(world, pod), at(world, pod, owner)) == (-1, -1)
        assert world.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT) == 0, (
            "the daemon sees the quota for the first time"
        )
        assert world.runtime.quotas[owner] == 200_000
        await settled(world)
        assert world.runtime.quotas[owner] == -1
        assert world.log[-1] == f"runtime {owner} 2-3 quota -1"
        await settled(world)
        await world.clear_log()
        await world.sync.once()
        assert not [line for line in world.log if line.startswith(("runtime", "quota"))], "once is enough"

    run_scenario(scenario)


def test_a_restart_compares_quotas(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod, other = await lsr(world), await world.pod("lse", "LSE", "", "7", quota=100_000)
        owner, gone = await world.run(pod, **TWO), await world.run(other, **TWO)
        await world.executor.close()
        world.end(gone)
        world.cpu.write("kubepods/poddb", 250_000)
        world.boot()
        await world.sync.once()
        await world.quiet()
        assert (at(world, pod), at(world, other)) == (-1, 100_000)
        assert world.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT) == 1
        await world.stop(owner)
        assert at(world, pod) == 250_000

    run_scenario(scenario)


@pytest.mark.parametrize("restart", [False, True])
def test_a_quota_that_was_recorded_and_not_removed_is_not_another_programs(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        owner = await world.create(pod, **TWO)

        async def cancelled() -> None:
            await LedgerWriter.flush(world.executor.ledger_writer)
            raise TimeoutError

        monkeypatch.setattr(world.executor.ledger_writer, "flush", cancelled)
        await world.executor.quotas.before_start(world.executor.state.containers[owner])
        monkeypatch.undo()
        assert (at(world, pod), world.ledger.entries["q/db"]["quota"]) == (200_000, 200_000)
        if restart:
            await world.executor.close()
            world.boot()
            for _ in range(2):  # until the calls are over that a killed daemon may have sent
                await world.sync.once()
                world.now += 3
        await world.sync.once()
        await world.start(owner)
        assert at(world, pod) == -1
        assert world.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT) == 0
        world.cpu.write("kubepods/poddb", 200_000)
        await world.sync.once()
        assert (at(world, pod), world.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT)) == (-1, 1)

    run_scenario(scenario)


def test_a_quota_that_a_killed_daemon_forwarded_and_did_not_record_is_not_another_programs(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        def drift() -> object:
            return world.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT)

        owner = await world.run(await lsr(world), **TWO)
        never = world.rules
        await world.executor.close()
        world.rules = {**never, "keep_quota": KeepQuota.ALWAYS}
        world.boot()
        world.runtime.update_error = RuntimeCallError("cannot update: no", 2)  # so the record remains
        await world.sync.once()
        await settled(world)
        recorded = dict(world.ledger.entries)
        assert recorded[f"qc/{owner}"]["quota"] == 200_000
        assert (await world.update(owner, cpu_quota=170_000)).cpu_quota == 170_000
        await world.executor.close()
        world.ledger.entries = recorded  # the daemon was killed before it wrote the ledger
        world.rules, world.runtime.update_error = never, None
        world.boot()
        await world.sync.once()
        path = f"{world.parents['s-db']}/{owner}"
        assert (world.cpu.quotas[path], drift()) == (-1, 0)
        assert f"the CFS quota of a container is not the recorded one path=/{path}" in str(world.logged)
        await world.executor.ledger_writer.flush()
        assert world.ledger.entries[f"qc/{owner}"]["quota"] == 170_000, "it is the one to restore"
        assert world.executor.state.inflight.is_busy(owner), "the killed daemon may have sent an update"
        world.cpu.write(path, 160_000)
        await world.sync.once()
        assert (world.cpu.quotas[path], drift()) == (-1, 0), "that update may have written it"
        while world.executor.state.inflight.is_busy(owner):
            world.now += 60
            await world.sync.once()
        world.cpu.write(path, 150_000)
        await world.sync.once()
        assert (world.cpu.quotas[path], drift()) == (-1, 1)

    run_scenario(scenario)


def test_a_restart_with_another_setting_restores_all_quotas(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        owner = await world.run(pod, **TWO)
        await world.executor.close()
        world.rules = {**world.rules, "keep_quota": KeepQuota.ALWAYS}
        world.boot()
        await world.sync.once()
        assert (at(world, pod), at(world, pod, owner)) == (200_000, 200_000)
        back = [line for line in world.log if line.startswith("quota") and not line.endswith("-1")]
        assert back == [f"quota kubepods/poddb/{owner} 200000", "quota kubepods/poddb 200000"]
        assert world.runtime.quotas[owner] == -1
        await settled(world)
        assert world.runtime.quotas[owner] == 200_000, (
            "otherwise the next update of any resource would undo it"
        )
        assert quotas_page(world.executor) == []
        await world.executor.ledger_writer.flush()
        assert not [key for key in world.ledger.entries if key.startswith("q")]

    run_scenario(scenario)


def test_a_newer_quota_is_not_overwritten(run_scenario: Callable[..., None]) -> None:
    """A program gave the container another quota while the daemon was not running."""

    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        owner = await world.run(pod, **TWO)
        await world.executor.close()
        world.runtime.limit(owner, 170_000)
        world.rules = {**world.rules, "keep_quota": KeepQuota.ALWAYS}
        world.boot()
        await world.sync.once()
        await settled(world)
        assert (at(world, pod), at(world, pod, owner), world.runtime.quotas[owner]) == (
            200_000,
            170_000,
            170_000,
        )
        assert quotas_page(world.executor) == []

    run_scenario(scenario)


def test_a_refused_restore_at_the_runtime_is_retried_ever_more_rarely(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reconciles send the quota again; timers of the runtime sync do so, too, and are left out here."""
    monkeypatch.setattr(runtime_sync, "SILENT", Backoff(3600.0, 3600.0))

    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        owner = await world.run(pod, **TWO)
        await world.executor.close()
        world.rules = {**world.rules, "keep_quota": KeepQuota.ALWAYS}
        world.boot()
        calls = []

        def no(*args: Any) -> None:
            calls.append(args)
            raise RuntimeCallError("cannot update: no", 2)

        plain, world.runtime.update_cpuset = world.runtime.update_cpuset, no
        for _ in range(60):
            await world.sync.once()
            await settled(world)
        assert 4 <= len(calls) <= 9
        assert at(world, pod, owner) == 200_000, "the write remains"
        world.runtime.update_cpuset = plain
        for _ in range(40):
            await world.sync.once()
            await settled(world)
        assert world.runtime.quotas[owner] == 200_000
        assert quotas_page(world.executor) == []

    run_scenario(scenario)


def test_an_update_meanwhile_carries_the_quota_to_be_restored(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        owner = await world.run(await lsr(world), **TWO)
        await world.executor.close()
        world.rules = {**world.rules, "keep_quota": KeepQuota.ALWAYS}
        world.boot()
        await world.sync.once()
        assert (await world.update(owner, cpu_shares=4)).cpu_quota == 200_000
        assert (await world.update(owner, cpu_quota=170_000)).cpu_quota == 170_000
        await settled(world)
        assert world.runtime.quotas[owner] == 170_000, "the newest counts"
        world.now += 3
        await world.sync.once()  # calls from before the restart are over
        await settled(world)
        assert quotas_page(world.executor) == []

    run_scenario(scenario)


def test_quotas_of_a_pod_with_several_containers(run_scenario: Callable[..., None]) -> None:
    """The second container restores the quotas of all; when it has ended they are removed again."""

    async def scenario(world: Any) -> None:
        pod = await lsr(world, quota=300_000)
        first = await world.run(pod, "first", **TWO)
        assert (at(world, pod), at(world, pod, first)) == (-1, -1)
        call = await world.begin(pod, "second", cpu_quota=100_000, cpu_period=100_000)
        assert created_with(call).cpu_quota == 100_000
        second = world.finish(call, "second-1")
        await world.quiet()
        assert (at(world, pod), at(world, pod, first)) == (300_000, 200_000)
        await world.start(second)
        await settled(world)
        assert (at(world, pod, second), world.runtime.quotas[first]) == (100_000, 200_000)
        await world.stop(second)
        await world.sync.once()
        assert (at(world, pod), at(world, pod, first)) == (-1, -1)

    run_scenario(scenario, **SEVERAL)


def test_quotas_of_a_pod_whose_containers_only_kubelet_knows(run_scenario: Callable[..., None]) -> None:
    """Containers that run at the same time count; init containers do not."""

    async def scenario(world: Any) -> None:
        pods = []
        for uid, kind in (("pair", ContainerKind.APP), ("alone", ContainerKind.INIT)):
            pod = await world.pod(uid, "LSR", "", "2-3" if uid == "pair" else "4-5", quota=200_000)
            requests = PodRequests(
                uid,
                (ContainerResources("a", kind, {}, {}), ContainerResources("b", ContainerKind.APP, {}, {})),
            )

            known = changed_copy(world.executor.state.pods[pod], requests=requests, source="a test")
            world.executor.store.handle(PodLearned(known, recorded=False))
            pods.append((pod, await world.run(pod, "b", **TWO)))
        (pair, one), (alone, other) = pods
        assert (at(world, pair), at(world, pair, one)) == (200_000, 200_000)
        assert (at(world, alone), at(world, alone, other)) == (-1, -1)

    run_scenario(scenario, **SEVERAL)


def test_a_second_container_created_before_the_first_starts(run_scenario: Callable[..., None]) -> None:
    """The first container is created without a quota and needs one at its start: the update comes first."""

    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        first = await world.create(pod, "first", **TWO)
        assert world.runtime.quotas[first] == -1
        await world.create(pod, "second", **TWO)
        await world.quiet()
        await world.start(first)
        assert (at(world, pod), at(world, pod, first)) == (200_000, 200_000)
        assert world.runtime.quotas[first] == 200_000
        assert quotas_page(world.executor) == [
            row for row in quotas_page(world.executor) if row["container"] == "second"
        ], "the first one was sent"

    run_scenario(scenario, **SEVERAL)


def test_a_second_container_created_while_the_runtime_creates_the_first(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        call = await world.begin(pod, "first", **TWO)
        assert created_with(call).cpu_quota == -1
        await world.create(pod, "second", **TWO)
        first = world.finish(call, "first-1")
        await world.quiet()
        await world.start(first)
        assert (at(world, pod), at(world, pod, first), world.runtime.quotas[first]) == (200_000,) * 3

    run_scenario(scenario, **SEVERAL)


def test_a_create_that_fails_leaves_the_pods_quota(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        call = await world.begin(pod, **TWO)
        await world.sync.once()
        world.wire.finished(call, 13)
        await world.quiet()
        assert at(world, pod) == 200_000
        assert quotas_page(world.executor) == []

    run_scenario(scenario)


def test_the_group_of_several_pods_is_not_changed(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod, other = await lsr(world), await world.pod("ls", "LS", quota=100_000)

        shared = changed_copy(world.executor.state.pods[other], cgroup_parent="/kubepods/poddb")
        world.executor.store.handle(PodLearned(shared, recorded=False))
        owner = await world.run(pod, **TWO)
        await world.sync.once()
        assert (at(world, pod), at(world, pod, owner)) == (200_000, -1)

    run_scenario(scenario)


def test_quotas_of_a_removed_pod_are_forgotten(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        owner = await world.run(pod, **TWO)
        del world.cpu.quotas[world.parents[pod]]
        world.cgroups.sets.pop(owner)
        world.runtime.containers.clear()
        world.runtime.pods.clear()
        await world.sync.once()
        await world.quiet()
        assert quotas_page(world.executor) == []
        assert world.executor.telemetry.problems() == []
        assert not world.ledger.entries

    run_scenario(scenario)


def test_a_failed_write_is_reported_and_tried_again(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        world.cpu.broken.add("kubepods/poddb")
        owner = await world.run(pod, **TWO)
        assert at(world, pod) == 200_000
        assert [p["what"] for p in world.executor.telemetry.problems()] == [
            'cannot write a CFS quota reason="cannot write kubepods/poddb: busy"'
        ]
        for _ in range(3):
            await world.sync.once()
        assert world.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT) == 0, "the quota is not a foreign one"
        world.cpu.broken.clear()
        for _ in range(6):
            await world.sync.once()
        assert at(world, pod) == -1
        world.cpu.write("kubepods/poddb", 200_000)
        await world.sync.once()
        assert world.executor.telemetry.value(metrics.CFS_QUOTA_DRIFT) == 1
        world.cpu.broken.add("kubepods/poddb")
        await world.stop(owner)
        assert at(world, pod) == -1
        world.cpu.broken.clear()
        for _ in range(40):
            await world.sync.once()
        assert at(world, pod) == 200_000

    run_scenario(scenario)


def test_without_a_cpu_controller_and_in_observe_mode_nothing_changes(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        world.executor.store.handle(CpuControllerChecked(found=False))
        pod = await lsr(world)
        call = await world.begin(pod, **TWO)
        assert created_with(call).cpu_quota == 200_000
        owner = world.finish(call, "o1")
        await world.start(owner)
        assert (await world.update(owner, cpu_quota=170_000)).cpu_quota == 170_000
        await world.sync.once()
        assert (at(world, pod), at(world, pod, owner)) == (200_000, 170_000)
        assert quotas_page(world.executor) == []

    run_scenario(scenario)

    async def watch(world: Any) -> None:
        pod = await lsr(world)
        call = await world.begin(pod, **TWO)
        assert call.sent == call.body
        await world.start(world.finish(call, "o1"))
        await world.sync.once()
        assert at(world, pod) == 200_000
        assert not [key for key in world.ledger.entries if key.startswith(("q/", "qc/"))]

    run_scenario(watch, mode=NodeMode.OBSERVE)


@pytest.mark.parametrize("value", [{}, {"quota": "x"}, {"quota": 0}, {"quota": 5, "group": 1}])
def test_an_invalid_quota_record_is_reported(
    run_scenario: Callable[..., None], value: dict[str, object]
) -> None:
    async def scenario(world: Any) -> None:
        assert quotas_page(world.executor) == []
        assert "q/db" in str(world.executor.telemetry.problems())

    run_scenario(scenario, entries={"q/db": value})


def test_a_runtime_that_refuses_or_is_unavailable(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        pod = await lsr(world)
        owner = await world.run(pod, **TWO)
        world.runtime.limit(owner, 200_000)
        await world.sync.once()
        world.runtime.update_error = RuntimeCallError("cannot update: no", 2)
        await asyncio.wait_for(settled(world), 60)
        world.runtime.update_error = None
        (problem,) = world.executor.telemetry.problems()
        assert problem["message"] == "cannot save a cpuset at the runtime"
        assert (problem["keys"]["pod"], problem["keys"]["err"]) == ("ns/db", "cannot update: no")
        assert at(world, pod, owner) == -1, "the write remains"
        world.runtime.limit(owner, 0)
        await world.sync.once()
        await settled(world)
        assert world.runtime.quotas[owner] == -1

    run_scenario(scenario)
