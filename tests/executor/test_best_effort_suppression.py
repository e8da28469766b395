"""BE suppression: pods of all classes on 16 CPUs; a test prescribes their use of CPUs."""

from __future__ import annotations

import asyncio
import errno
import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from proxy.engine.be_usage import UsageGroup, UsageReading, usage_query
from proxy.engine.suppression import MISSED_ROUNDS, SUPPRESSION_RECORD, SuppressionSettings, suppression_note
from proxy.executor.best_effort.suppression import Suppression
from proxy.executor.status_data import suppression_page
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.koordinator import SuppressMode
from proxy.model.mode import NodeMode
from proxy.telemetry import metrics
from tests.testkit.changed_copy import changed_copy

S = 1_000_000_000
BE_GROUP = "kubepods/besteffort"
PART = {"cpu_quota": 50_000, "cpu_period": 100_000, "cpu_shares": 512}


class Meter:
    """Counters that grow by the prescribed usage of pods; a second passes with each reading."""

    def __init__(self) -> None:
        self.pods: dict[str, float] = {}
        """CPUs in use by name of a pod."""
        self.outside_pods = 0.0
        """CPUs that no pod uses."""
        self.broken: Exception | None = None
        self.at = 0
        self.node = 0.0
        self.used: dict[str, float] = {}

    def best_effort_group(self, parents: Iterable[str]) -> str:
        return BE_GROUP if any(parents) else ""

    def read(self, groups: Mapping[str, UsageGroup]) -> UsageReading:
        if self.broken is not None:
            raise self.broken
        self.at += S
        self.node += S * (sum(self.pods.values()) + self.outside_pods)
        for name, cpus in self.pods.items():
            self.used[name] = self.used.get(name, 0) + S * cpus
        counted = {}
        for key, group in groups.items():
            inside = group.parent == BE_GROUP
            names = [
                n for n in self.used if (n.startswith("be") if inside else group.parent.endswith(f"/pod{n}"))
            ]
            if names:
                counted[key] = {group.parent: int(sum(self.used[n] for n in names))}
        return UsageReading(self.at, int(self.node), counted)

    def close(self) -> None:
        pass


class Quotas:
    """Quotas by path; none unless set."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.at: dict[str, int] = {BE_GROUP: -1}
        self.refuses = 0

    def quota(self, path: str) -> int:
        if path not in self.at:
            raise CgroupError(f"cannot read the CFS quota of cgroup /{path}: the group is gone", errno.ENOENT)
        return self.at[path]

    def set_quota(self, path: str, quota: int) -> bool:
        self.quota(path)
        if self.refuses:
            raise CgroupError(f"cannot set the CFS quota to {quota} in cgroup /{path}: no", self.refuses)
        self.at[path] = quota
        self.log.append(f"quota {path} {quota}")
        return True


class Bed:
    """An executor in a world."""

    def __init__(self, world: Any, mode: str = "cpuset", **settings: Any) -> None:
        self.world = world
        self.meter = Meter()
        self.quotas = Quotas(world.log)
        self.begin(mode, **settings)

    def begin(self, mode: str, **settings: Any) -> None:
        """Start an executor with what the ledger holds."""
        executor, record = self.world.executor, self.world.ledger.entries.get(SUPPRESSION_RECORD)
        self.it = Suppression(
            executor,
            executor.writes,
            SuppressionSettings(SuppressMode(mode), **{"period": 0.01, **settings}),
            self.meter,
            self.quotas,
            record,
        )

    async def rounds(self, count: int = 1) -> None:
        for _ in range(count):
            await self.it.once()

    async def until_stable(self) -> list[int]:
        """Run rounds until BE keeps its CPUs; return the number of its CPUs after each round."""
        seen = [len(self.be)]
        while len(seen) < 2 or seen[-1] != seen[-2]:
            await self.it.once()
            seen.append(len(self.be))
        return seen

    @property
    def be(self) -> CpuSet:
        state = self.world.executor.state
        return state.pools.be if state.pools.be_now is None else state.pools.be_now

    @property
    def page(self) -> Any:
        found = suppression_page(self.it.known, self.it.settings, self.world.executor.state)
        assert json.loads(json.dumps(found)) == found
        return found


async def be_pod(world: Any, name: str = "be", **more: Any) -> str:
    return await world.run(await world.pod(name, "BE", "besteffort", **more))


def test_be_uses_the_cpus_that_other_classes_leave(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world)
        be = await be_pod(world)
        ls = await world.run(await world.pod("ls", "LS", "burstable"), **PART)
        assert world.on(be) == "0-15"
        await bed.rounds(2)
        assert len(bed.be) == 11, "65 % of 16 CPUs, no other pod uses any"
        bed.meter.pods = {"ls": 6.0, "be": 4.0}
        await bed.rounds()
        assert len(bed.be) == 5, "10.4 - 6 = 4.4; what BE itself uses does not matter"
        world.check()
        assert world.on(be) == str(bed.be)
        assert world.on(ls) == "0-15"
        assert bed.page["budget_milli"] == 4400
        assert bed.page["usage"] == {"node": 10.0, "be": 4.0, "others": 6.0, "system": 0.0}
        bed.meter.outside_pods = 1.5
        await bed.rounds()
        assert len(bed.be) == 3
        bed.meter.pods["ls"] = 15.0
        await bed.rounds()
        assert len(bed.be) == 2, "never less"
        cores = {cpu.core for cpu in world.machine.cpus if cpu.id in bed.be}
        assert len(cores) == 1, "siblings together"
        bed.meter.pods, bed.meter.outside_pods = {}, 0.0
        assert await bed.until_stable() == [2, 4, 6, 8, 10, 11, 11], "a tenth of 16 CPUs at a time"
        world.check()

    run_scenario(scenario)


def test_only_be_is_changed(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world)
        hard = await world.run(await world.pod("lse", "LSE", cpus="0-5"))
        soft = await world.run(await world.pod("lsr", "LSR", cpus="6-9"))
        be, plain = await be_pod(world), await world.run(await world.pod("plain", "", "besteffort"))
        bed.meter.pods = {"lse": 4.0, "lsr": 2.0}
        before = len(world.log)
        await bed.rounds(2)
        assert len(bed.be) == 5
        assert not bed.be & CpuSet.parse("0-5")
        assert len(bed.be & CpuSet.parse("6-9")) == 2, "in proportion from LSR and from other CPUs"
        assert world.on(be) == world.on(plain) == str(bed.be)
        touched = {line.split()[1] for line in world.log[before:] if line.startswith(("kernel", "runtime"))}
        assert touched == {be, plain}
        assert (world.on(hard), world.on(soft)) == ("0-5", "6-9")
        # A new owner takes CPUs that BE was narrowed to: it leaves them before that one starts.
        taken = bed.be - CpuSet.parse("6-9")
        await world.run(await world.pod("lse2", "LSE", cpus=str(taken)))
        world.check()
        assert not bed.be & taken
        await bed.rounds()
        assert not bed.be & taken
        world.check()

    run_scenario(scenario)


def test_be_has_the_whole_of_a_small_pool_on_an_idle_node(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world)
        await world.run(await world.pod("lse", "LSE", cpus="0-9"))
        be = await be_pod(world)
        bed.meter.pods = {"lse": 9.5}
        await bed.rounds(2)
        assert len(bed.be) == 2
        bed.meter.pods = {}
        assert await bed.until_stable() == [2, 4, 6, 6]
        assert world.on(be) == "10-15"
        assert world.executor.state.pools.be_now is None

    run_scenario(scenario)


def test_groups_of_pods_without_containers_follow(run_scenario: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: Any) -> None:
        bed, seen = Bed(world), []
        await world.pod("be", "BE", "besteffort")
        write = world.executor.cpuset_writer.write

        def noted(ids: Iterable[str]) -> Any:
            seen.append(world.executor.state.pools.be_now)
            return write(ids)

        monkeypatch.setattr(world.executor.cpuset_writer, "write", noted)
        await bed.rounds(2)
        await bed.it.stop()
        assert [limit and len(limit) for limit in seen] == [11, None]

    run_scenario(scenario)


def test_new_and_updated_containers_get_the_narrowed_set(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world)
        await be_pod(world)
        bed.meter.pods = {"ls": 9.0}
        await world.pod("ls", "LS", "burstable")
        await bed.rounds(2)
        late = await be_pod(world, "late")
        assert world.runtime.specs[late] == world.on(late) == str(bed.be)
        assert len(bed.be) == 2

    run_scenario(scenario)


def test_a_be_pod_stays_within_its_own_limit(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world)
        await world.pod("ls", "LS", "burstable")
        bound = await be_pod(world, "bound", annotation='{"cpuset":"12-13"}')
        await be_pod(world)
        bed.meter.pods = {"ls": 9.0}
        await bed.rounds(2)
        assert not bed.be & CpuSet.parse("12-13")
        assert world.on(bound) == "12-13"
        bed.meter.pods = {}
        await bed.until_stable()
        assert CpuSet.parse(world.on(bound)) <= CpuSet.parse("12-13")
        world.check()

    run_scenario(scenario)


def test_suppressed_sets_are_not_saved_at_the_runtime(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed, runtime_sync = Bed(world), world.make_runtime_sync()
        task = asyncio.ensure_future(runtime_sync.run())
        be = await be_pod(world)
        await world.pod("ls", "LS", "burstable")
        try:
            for used in (0.0, 3.0, 5.0, 8.0, 4.0, 1.0):
                bed.meter.pods = {"ls": used}
                await bed.rounds(2)
                await world.until(lambda: not world.executor.state.runtime.awaiting_sync)
            assert not [line for line in world.log if line.startswith("runtime")]
            # The set saved by the runtime holds CPUs that BE may no longer use: it must be updated.
            await world.run(await world.pod("lse", "LSE", cpus="0"))
            await world.until(lambda: f"runtime {be} {world.on(be)}" in world.log)
            counted = sum(line.startswith("runtime") for line in world.log)
            narrow = CpuSet.parse(world.runtime.specs[be])
            bed.meter.pods = {"ls": 9.0}
            await bed.rounds()
            await world.until(lambda: not world.executor.state.runtime.awaiting_sync)
            assert sum(line.startswith("runtime") for line in world.log) == counted
            assert narrow <= world.executor.state.pools.be
        finally:
            task.cancel()
        # At the end, sets that were saved narrow are updated too.
        await bed.it.stop()
        await runtime_sync.finish(60)
        assert world.runtime.specs[be] == world.on(be) == "1-15"
        runtime_sync.close()

    run_scenario(scenario, settle_per_second=1000)


def test_the_runtime_is_updated_if_a_new_owner_has_cpus_that_only_the_saved_set_holds(
    run_scenario: Any,
) -> None:
    async def scenario(world: Any) -> None:
        bed, runtime_sync = Bed(world), world.executor.runtime_sync
        task = asyncio.ensure_future(runtime_sync.run())
        be = await be_pod(world)
        await world.pod("ls", "LS", "burstable")
        bed.meter.pods = {"ls": 9.0}
        await bed.rounds(3)
        narrow = world.on(be)
        assert (narrow, world.runtime.specs[be]) == (str(bed.be), "0-15")
        await world.run(await world.pod("lse", "LSE", cpus="15"))
        assert world.on(be) == narrow, "its own CPUs do not change"
        await world.until(lambda: world.runtime.specs[be] == narrow)
        task.cancel()
        runtime_sync.close()

    run_scenario(scenario, settle_per_second=1000)


def test_a_pod_removed_between_two_readings_does_not_narrow_other_pods(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world)
        await be_pod(world)
        other = await be_pod(world, "be2")
        bed.meter.pods = {"be": 2.0, "be2": 6.0}
        await bed.rounds(2)
        before = len(bed.be)
        await world.remove(other)
        world.wire.finished(await world.call("RemovePodSandbox", _remove("s-be2")), 0)
        await world.quiet()
        assert "s-be2" not in world.executor.state.pods
        await bed.rounds()
        assert len(bed.be) == before
        assert bed.page["usage"]["be"] == 8.0

    run_scenario(scenario)


def _remove(sandbox: str) -> Any:
    from proxy.api.cri import api_pb2 as pb

    return pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox)


@pytest.mark.parametrize("mode", ["cpuset", "cfs-quota"])
def test_be_gets_its_whole_pool_without_usage_figures(run_scenario: Any, mode: str) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world, mode)
        be = await be_pod(world)
        await world.pod("ls", "LS", "burstable")
        bed.meter.pods = {"ls": 8.0}
        await bed.rounds(2)
        narrow = (world.on(be), bed.quotas.at[BE_GROUP])
        assert narrow == ((str(bed.be), -1) if mode == "cpuset" else ("0-15", 240_000))
        assert mode != "cpuset" or len(bed.be) == 3
        bed.meter.broken = CgroupError("cannot read the CPU time of cgroup /x: I/O error", 5)
        await bed.rounds(MISSED_ROUNDS - 1)
        assert (world.on(be), bed.quotas.at[BE_GROUP]) == narrow, "for a while nothing changes"
        assert not world.executor.telemetry.problems()
        await bed.rounds(2)
        assert (world.on(be), bed.quotas.at[BE_GROUP]) == ("0-15", -1)
        (problem,) = world.executor.telemetry.problems()
        assert "I/O error" in str(problem["what"])
        assert "budget_milli" not in bed.page
        assert SUPPRESSION_RECORD not in world.ledger.entries
        bed.meter.broken = None
        await bed.rounds(2)  # usage is a difference of two readings
        assert (len(bed.be) == 3) if mode == "cpuset" else (bed.quotas.at[BE_GROUP] == 240_000)

    run_scenario(scenario)


def test_occasional_usage_figures_are_enough(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world)
        await be_pod(world)
        await bed.rounds(2)
        for _ in range(3):
            bed.meter.broken = CgroupError("cannot read: no", 5)
            await bed.rounds(MISSED_ROUNDS - 1)
            bed.meter.broken = None
            await bed.rounds()
        assert len(bed.be) == 11
        assert not world.executor.telemetry.problems()

    run_scenario(scenario)


def test_an_earlier_quota_is_raised_although_all_be_pods_are_gone(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world, "cfs-quota")
        world.ledger.entries[SUPPRESSION_RECORD] = {"quota": [BE_GROUP]}
        bed.quotas.at[BE_GROUP] = 240_000
        bed.begin("cfs-quota")
        await bed.rounds(2)
        assert bed.quotas.at == {BE_GROUP: 400_000}

    run_scenario(scenario)


def test_pods_that_share_a_parent_are_be_only_if_all_are(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pod("x", "BE", "burstable", sandbox="s-be")
        assert usage_query(world.executor.state).be == {"/kubepods/burstable/podx"}
        await world.pod("x", "LS", "burstable", sandbox="s-ls")
        await world.pod("be")
        query = usage_query(world.executor.state)
        parents = {"/kubepods/burstable/podx", "/kubepods/podbe"}
        assert {group.parent for group in query.groups.values()} == parents
        assert query.be == frozenset()
        await be_pod(world, "be", sandbox="s-other")
        assert usage_query(world.executor.state).be == {"/kubepods/besteffort/podbe"}

    run_scenario(scenario)


def test_a_quota_for_all_be_pods(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world, "cfs-quota")
        await world.pod("ls", "LS", "burstable")
        await bed.rounds(2)
        assert bed.quotas.at == {BE_GROUP: -1}, "no BE pod, no group"
        await be_pod(world)
        bed.meter.pods = {"ls": 8.4, "be": 1.0}
        await world.clear_log()
        await bed.rounds(2)
        assert bed.quotas.at == {BE_GROUP: 200_000}
        written = world.log.index(f"quota {BE_GROUP} 200000")
        assert "ledger +b/" in world.log[:written], "the ledger holds it first"
        assert world.executor.state.pools.be_now is None
        bed.meter.pods["ls"] = 8.39  # less than a hundredth of the machine
        await bed.rounds()
        assert bed.quotas.at == {BE_GROUP: 200_000}
        bed.quotas.at[BE_GROUP] = -1  # a change by kubelet
        await bed.rounds()
        assert bed.quotas.at == {BE_GROUP: 201_000}
        bed.meter.pods = {}
        seen = []
        for _ in range(7):
            await bed.rounds()
            seen.append(bed.quotas.at[BE_GROUP])
        assert seen == [361_000, 521_000, 681_000, 841_000, 1_001_000, 1_040_000, 1_040_000]
        await bed.it.stop()
        assert bed.quotas.at == {BE_GROUP: -1}
        assert SUPPRESSION_RECORD not in world.ledger.entries

    run_scenario(scenario)


@pytest.mark.parametrize("mode", ["off", "cpuset", "cfs-quota"])
def test_after_a_crash_unwanted_quotas_are_removed(run_scenario: Any, mode: str) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world, "cfs-quota")
        await world.pod("ls", "LS", "burstable")
        be = await be_pod(world)
        bed.meter.pods = {"ls": 8.0}
        await bed.rounds(2)
        assert bed.quotas.at == {BE_GROUP: 240_000}
        await world.close()
        world.boot()
        bed.begin(mode)
        await world.sync.once()
        task = asyncio.ensure_future(bed.it.run())
        rounds = {"off": 0, "cpuset": 3, "cfs-quota": 3}[mode]
        await world.until(
            lambda: (
                world.executor.telemetry.value(metrics.BE_SUPPRESS_ROUNDS) >= rounds
                and (mode != "off" or SUPPRESSION_RECORD not in world.ledger.entries)
            )
        )
        task.cancel()
        kept = mode == "cfs-quota"
        assert bed.quotas.at == {BE_GROUP: 240_000 if kept else -1}
        assert (SUPPRESSION_RECORD in world.ledger.entries) is kept
        assert (world.on(be) == "0-15") is (mode != "cpuset")

    run_scenario(scenario)


def test_after_a_crash_narrowed_containers_have_the_whole_pool(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world)
        be = await be_pod(world)
        await world.pod("ls", "LS", "burstable")
        bed.meter.pods = {"ls": 9.0}
        await bed.rounds(2)
        assert world.on(be) == str(bed.be) != "0-15"
        await world.close()
        world.boot()
        await world.sync.once()
        assert world.on(be) == "0-15"

    run_scenario(scenario)


def test_containers_do_not_move_with_small_changes_of_usage(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world)
        await be_pod(world)
        await world.pod("ls", "LS", "burstable")
        seen = []
        for used in (0.0, 4.45, 4.35, 4.41, 4.20, 4.39, 4.14, 4.41):
            bed.meter.pods = {"ls": used}
            await bed.rounds(1 if used else 2)
            seen.append(len(bed.be))
        assert seen == [11, 6, 6, 6, 6, 6, 7, 6]

    run_scenario(scenario)


@pytest.mark.parametrize("mode", ["cpuset", "cfs-quota"])
def test_a_runtime_that_does_not_answer_at_the_start(run_scenario: Any, mode: str) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world, mode)
        bed.quotas.at[BE_GROUP] = 240_000
        world.ledger.entries[SUPPRESSION_RECORD] = {"quota": [BE_GROUP]}
        bed.begin(mode)
        task = asyncio.ensure_future(bed.it.run())
        await world.until(
            lambda: bed.quotas.at == {BE_GROUP: -1} and SUPPRESSION_RECORD not in world.ledger.entries
        )
        assert world.executor.telemetry.value(metrics.BE_SUPPRESS_ROUNDS) == 0
        await world.sync.once()
        await be_pod(world)
        rounds = world.executor.telemetry.value(metrics.BE_SUPPRESS_ROUNDS)
        await world.until(lambda: world.executor.telemetry.value(metrics.BE_SUPPRESS_ROUNDS) > rounds + 3)
        task.cancel()
        assert bed.quotas.at == {BE_GROUP: -1 if mode == "cpuset" else 1_040_000}
        assert world.log.count(f"quota {BE_GROUP} -1") == 1

    run_scenario(scenario, reconciled=False)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOENT])
def test_a_quota_that_cannot_be_written_is_reported(run_scenario: Any, number: int) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world, "cfs-quota")
        await be_pod(world)
        await bed.rounds(2)
        assert bed.quotas.at == {BE_GROUP: 1_040_000}
        bed.quotas.refuses = number
        bed.meter.outside_pods = 8.0
        await bed.rounds()
        assert any("cannot set the CFS quota" in str(p["what"]) for p in world.executor.telemetry.problems())
        await bed.it.stop()
        assert (SUPPRESSION_RECORD in world.ledger.entries) is (number == errno.EINVAL), (
            "a group that is gone has no quota"
        )

    run_scenario(scenario)


def test_a_node_without_usage_counters_is_not_suppressed(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world)
        bed.it = Suppression(
            world.executor,
            world.executor.writes,
            SuppressionSettings(SuppressMode.CPUSET),
            None,
            None,
            {"quota": "broken"},
        )
        await be_pod(world)
        await bed.rounds(MISSED_ROUNDS + 1)
        (problem,) = world.executor.telemetry.problems()
        assert "nothing counts" in str(problem["what"])
        world.check()

    run_scenario(scenario)


def test_the_reserve_and_the_least_share(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world, threshold=50, least=25)
        await be_pod(world)
        await world.pod("ls", "LS", "burstable")
        await bed.rounds(2)
        assert bed.page["budget_milli"] == 5000, "8 CPUs, 3 of them kept back"
        assert "3.0 are kept back" in bed.page["why"]
        bed.meter.pods = {"ls": 9.0}
        await bed.rounds()
        assert bed.page["budget_milli"] == 4000
        assert len(bed.be) == 4

    run_scenario(scenario, rules={"reserved": CpuSet.parse("0-2")})


def test_problems_are_worded_for_users(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        bed = Bed(world)
        be, ls = await be_pod(world), await world.run(await world.pod("ls", "LS", "burstable"), **PART)
        state = world.executor.state
        assert suppression_note(bed.it.known, bed.it.settings, state, state.containers[be]) == ""
        bed.meter.pods = {"ls": 8.0}
        await bed.rounds(2)
        state = world.executor.state
        reported = suppression_note(bed.it.known, bed.it.settings, state, state.containers[be])
        assert reported.startswith(
            f"BE is suppressed: it runs on {bed.be} now, of 0-15; the budget is 2.4 CPUs: "
        )
        assert "65 % of 16 are 10.4, other pods use 8.0" in reported
        assert suppression_note(bed.it.known, bed.it.settings, state, state.containers[ls]) == ""
        observed = changed_copy(state, mode=NodeMode.OBSERVE)
        assert suppression_note(bed.it.known, bed.it.settings, observed, state.containers[be]) == ""
        change = bed.page["last_change"]
        assert (change["before"], change["after"]) == ("CPUs 0-15", f"CPUs {bed.be}")
        assert world.executor.telemetry.value(metrics.BE_SUPPRESS_CHANGES) == 1
        bed.begin("cfs-quota")
        await bed.rounds(2)
        reported = suppression_note(
            bed.it.known, bed.it.settings, world.executor.state.with_be_limit(None), state.containers[be]
        )
        assert "all BE pods together have a CFS quota of 2.40 CPUs" in reported

    run_scenario(scenario)


def test_suppression_follows_a_changed_machine(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        from proxy.topology.regular_machine import regular_machine

        bed = Bed(world)
        be = await be_pod(world)
        await bed.rounds(2)
        world.machine = regular_machine(1, 1, 4, 2)
        await world.sync.once()
        await world.quiet()
        await bed.rounds()
        assert len(bed.be) == 6, "65 % of 8"
        assert world.on(be) == str(bed.be)
        assert bed.be <= world.machine.online

    run_scenario(scenario)


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_and_owners(run_scenario: Any, seed: int) -> None:
    async def scenario(world: Any) -> None:
        chance, bed = random.Random(seed), Bed(world, ["cpuset", "cfs-quota"][seed % 2])
        await world.pod("ls", "LS", "burstable")
        for name in ("be", "be2"):
            await be_pod(world, name)
        await bed.rounds(2)
        owners: list[str] = []
        for number in range(30):
            before = len(bed.be)
            deed = chance.choice(["load", "load", "comes", "goes", "unreadable"])
            if deed == "load":
                bed.meter.pods = {name: chance.uniform(0, 6) for name in ("ls", "be", "be2")}
                bed.meter.outside_pods = chance.uniform(0, 3)
            elif deed == "comes" and len(owners) < 3:
                free = sorted(world.executor.state.pools.shared)
                own = CpuSet(chance.sample(free, chance.randint(1, 4)))
                kind = chance.choice(["LSE", "LSR"])
                owners.append(await world.run(await world.pod(f"own{number}", kind, cpus=str(own))))
                before = 16  # the pool itself may have changed
            elif deed == "goes" and owners:
                await world.remove(owners.pop())
                before = 16
            bed.meter.broken = CgroupError("no", 5) if deed == "unreadable" else None
            await bed.rounds()
            world.check()
            pool = world.executor.state.pools.be
            assert bed.be <= pool
            assert len(bed.be) <= max(2, before + 2)
            assert len(bed.be) >= min(2, len(pool))
            if deed == "load" and bed.it.settings.mode is SuppressMode.CPUSET:
                milli = bed.page["budget_milli"]
                assert len(bed.be) <= max(2, -(-milli // 1000)), "never beyond the budget"
        await bed.it.stop()
        assert (bed.be, bed.quotas.at[BE_GROUP]) == (world.executor.state.pools.be, -1)
        world.check()

    run_scenario(scenario)
