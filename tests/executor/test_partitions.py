"""Partitions of owned CPUs: made after the start, ended before other containers may use the CPUs."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from proxy.admin.status_sections import partitions as shown_lines
from proxy.engine.partition import PartitionState
from proxy.executor.ledger_writer import LedgerWriter
from proxy.executor.partitions.sync import PartitionSync
from proxy.executor.partitions.watcher import PartitionWatcher
from proxy.executor.status_data import node_page
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.model.mode import NodeMode
from proxy.release.service import enter_mode
from proxy.telemetry import metrics
from tests.testkit.changed_copy import changed_copy


@dataclass
class PlayedPartitions:
    """Partitions by path; each change of one is logged."""

    log: list[str]
    unsupported_reason: str = ""
    states: dict[str, PartitionState] = field(default_factory=dict)
    refuses: str = ""
    stuck: bool = False
    gone: set[str] = field(default_factory=set)
    during: Callable[[], None] = lambda: None

    def event_file(self, path: str) -> str:
        return ""

    def read(self, path: str) -> PartitionState:
        if path in self.gone:
            raise CgroupError("cannot read: gone", errno.ENOENT)
        return self.states.get(path, PartitionState("member", valid=False))

    def exclusive_added(self, path: str, cpus: CpuSet) -> Mapping[str, CpuSet]:
        return {"kubepods": cpus}

    def isolated(self) -> CpuSet | None:
        return CpuSet.parse("2-3")

    def make(
        self, path: str, cpus: CpuSet, kind: str, exclusive_added: Mapping[str, CpuSet]
    ) -> PartitionState:
        self.during()
        self.log.append(f"partition {kind} {cpus}")
        if self.refuses:
            return PartitionState(kind, valid=False, reason=self.refuses)
        self.states[path] = PartitionState(kind, valid=True)
        return self.states[path]

    def end(self, path: str, cpus: CpuSet, exclusive_added: Mapping[str, CpuSet]) -> None:
        if self.stuck:
            raise CgroupError("cannot set: busy", errno.EBUSY)
        self.log.append(f"partition member {cpus} {dict(exclusive_added)}")
        self.states.pop(path, None)


def with_partitions(
    world: Any, mode: str = "isolated", **more: Any
) -> tuple[PartitionSync, PlayedPartitions]:
    kernel = PlayedPartitions(world.log, **more)
    made = world.executor.partitions = PartitionSync(world.executor, kernel, mode)
    world.executor.store.subscribe(made)
    made.load(dict(world.ledger.entries))
    return made, kernel


def partition_status(world: Any) -> Any:
    """Return the partitions of the status page."""
    return node_page(world.executor)["partitions"]


async def owner(world: Any, qos: str = "LSE") -> str:
    container: str = await world.run(await world.pod("own", qos, cpus="2-3"))
    await world.until(lambda: not world.executor.partitions._is_due)
    await world.quiet()
    return container


def of_partitions(world: Any) -> list[str]:
    return [line for line in world.log if line.startswith("partition ")]


def test_a_partition_is_made_after_the_start_when_other_containers_have_left(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        partitions, _ = with_partitions(world)
        await world.run(await world.pod("ls", "LS"))
        await world.clear_log()
        container = await owner(world)
        await world.until(lambda: container in partitions.jobs.known.records)
        await world.until(lambda: of_partitions(world))
        kinds = [line.split()[0] for line in world.log]
        made = world.log.index("partition isolated 2-3")
        assert kinds.index("kernel") < made
        assert world.log.index("ledger +x/") < made
        assert "forward StartContainer" in world.log[:made]
        await world.sync.once()
        assert of_partitions(world) == ["partition isolated 2-3"]
        assert world.ledger.entries[f"x/{container}"]["lent"] == {"kubepods": "2-3"}

    run_scenario(scenario)


def test_replacements_of_offline_cpus_become_a_partition(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        partitions, _ = with_partitions(world)
        whole: Machine = world.machine
        own = await world.run(await world.pod("g"), cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
        await world.until(lambda: own in partitions.jobs.known.records)
        owned = world.executor.state.containers[own].placement.exclusive

        gone = CpuSet([max(owned)])
        nodes = tuple(changed_copy(n, cpus=n.cpus - gone) for n in whole.nodes)
        cpus = tuple(c for c in whole.cpus if c.id not in gone)
        world.machine = changed_copy(whole, cpus=cpus, nodes=nodes)
        await world.executor.hotplug.reread()
        await world.until(
            lambda: world.on(own) != str(owned) and len(CpuSet.parse(world.on(own))) == len(owned)
        )
        now = CpuSet.parse(world.on(own))
        await world.until(lambda: of_partitions(world)[-1] == f"partition isolated {now}")

        world.machine = whole
        await world.executor.hotplug.reread()
        await world.until(lambda: of_partitions(world)[-1] == f"partition isolated {owned}")

    run_scenario(scenario)


def test_a_partition_ends_before_other_containers_grow(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        partitions, _ = with_partitions(world)
        shared = await world.run(await world.pod("ls", "LS"))
        container = await owner(world)
        await world.until(lambda: of_partitions(world))
        await world.clear_log()
        await world.stop(container)
        await world.until(lambda: world.cgroups.sets[shared] >= CpuSet.parse("2-3"))
        ended = next(i for i, line in enumerate(world.log) if line.startswith("partition member 2-3"))
        grown = next(i for i, line in enumerate(world.log) if line.startswith(f"kernel {shared} "))
        assert ended < grown
        await world.sync.once()
        await world.until(lambda: f"x/{container}" not in world.ledger.entries)
        assert partitions.jobs.known.records == {}

    run_scenario(scenario)


def test_a_partition_that_cannot_be_removed_is_reported(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        partitions, kernel = with_partitions(world)
        container = await owner(world)
        await world.until(lambda: of_partitions(world))
        kernel.stuck = True
        await world.stop(container)
        await world.sync.once()
        await world.quiet()
        assert any(
            "cannot end a partition cpus=2-3" in p["what"] for p in world.executor.telemetry.problems()
        )
        assert container in partitions.jobs.known.records
        kernel.stuck = False
        await world.sync.once()
        await world.sync.once()
        assert partitions.jobs.known.records == {}

    run_scenario(scenario)


def test_the_kernels_reason_is_reported_once_and_retried_ever_more_rarely(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        with_partitions(world, refuses="Parent is not a partition root")
        container = await owner(world)
        for _ in range(30):
            await world.sync.once()
        assert 3 < len(of_partitions(world)) < 10
        problems = [
            p for p in world.executor.telemetry.problems() if "cannot make a partition pod=" in p["what"]
        ]
        assert len(problems) == 1
        assert "(Parent" not in problems[0]["what"]
        assert problems[0]["keys"]["err"] == "Parent is not a partition root"
        page = partition_status(world)
        assert page["containers"][0]["reason"] == "Parent is not a partition root"
        await world.until(lambda: f"x/{container}" not in world.ledger.entries)

    run_scenario(scenario)


def test_cpus_that_be_may_use_are_not_a_partition(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        with_partitions(world)
        await owner(world, "LSR")
        await world.sync.once()
        assert of_partitions(world) == []
        (row,) = partition_status(world)["containers"]
        assert (row["state"], row["reason"]) == ("member", "BE containers may run on its CPUs")

    run_scenario(scenario)


def test_cpus_shared_by_two_containers_are_not_a_partition(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        with_partitions(world)
        sandbox = await world.pod("own", "LSE", cpus="2-3")
        await world.run(sandbox, "one")
        await world.until(lambda: of_partitions(world))
        await world.run(sandbox, "two")
        await world.sync.once()
        assert [line.split()[1] for line in of_partitions(world)] == ["isolated", "member"]
        rows = partition_status(world)["containers"]
        assert {row["state"] for row in rows} == {"member"}
        assert "has these CPUs too" in rows[0]["reason"]

    run_scenario(scenario)


def test_a_partition_that_the_kernel_ended_is_reported_and_made_again(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        _, kernel = with_partitions(world)
        container = await owner(world)
        await world.until(lambda: of_partitions(world))
        kernel.states[container] = PartitionState("isolated", valid=False, reason="No cpu available")
        await world.clear_log()
        await world.sync.once()
        assert of_partitions(world)[0].startswith("partition member")
        assert world.executor.telemetry.value(metrics.PARTITIONS_LOST) == 1
        assert any(
            "isolated invalid (No cpu available)" in p["what"] for p in world.executor.telemetry.problems()
        )
        await world.sync.once()
        assert of_partitions(world)[-1] == "partition isolated 2-3"
        assert kernel.states[container].valid

    run_scenario(scenario)


def test_an_invalid_partition_that_cannot_be_ended_is_not_reported_as_one(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        _, kernel = with_partitions(world)
        container = await owner(world)
        await world.until(lambda: of_partitions(world))
        kernel.states[container] = PartitionState("isolated", valid=False, reason="No cpu available")
        kernel.stuck = True
        for _ in range(3):
            await world.sync.once()
        assert world.executor.telemetry.value(metrics.PARTITIONS_LOST) == 1
        (shown,) = partition_status(world)["containers"]
        assert (shown["state"], "No cpu available" in shown["reason"]) == ("member", True)
        reported = " ".join(p["what"] for p in world.executor.telemetry.problems())
        assert "cannot end a partition" in reported
        assert "cannot read a partition" not in reported
        kernel.stuck = False
        await world.sync.once()
        await world.sync.once()
        assert partition_status(world)["containers"][0]["state"] == "isolated"

    run_scenario(scenario)


@pytest.mark.parametrize("crash", [False, True])
def test_a_partition_that_was_recorded_and_not_made_was_not_ended_by_the_kernel(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch, crash: bool
) -> None:
    async def scenario(world: Any) -> None:
        partitions, _ = with_partitions(world)
        monkeypatch.setattr(partitions, "check_soon", lambda: None)
        container = await owner(world)

        async def cancelled() -> None:
            await LedgerWriter.flush(world.executor.ledger_writer)
            raise TimeoutError

        monkeypatch.setattr(world.executor.ledger_writer, "flush", cancelled)
        with pytest.raises(TimeoutError):
            await partitions.once()
        monkeypatch.undo()
        assert f"x/{container}" in world.ledger.entries
        assert "partition isolated 2-3" not in of_partitions(world)
        if crash:
            world.boot()
            with_partitions(world)
        await world.sync.once()
        if crash:  # calls of the last daemon may be in flight in the first reconcile
            world.now += 3
            await world.sync.once()
            await world.sync.once()
        assert of_partitions(world)[-1] == "partition isolated 2-3", "it is made in the next pass"
        assert world.executor.telemetry.value(metrics.PARTITIONS_LOST) == 0
        assert not any("partition" in p["what"] for p in world.executor.telemetry.problems())
        (shown,) = partition_status(world)["containers"]
        assert (shown["state"], shown["reason"]) == ("isolated", "")

    run_scenario(scenario)


def test_a_partition_that_cannot_be_written_is_tried_again_ever_more_rarely(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        _, kernel = with_partitions(world)

        def busy() -> None:
            attempts.append("")
            raise CgroupError("cannot set: busy", errno.EBUSY)

        attempts: list[str] = []
        kernel.during = busy
        await owner(world)
        for _ in range(30):
            await world.sync.once()
        assert 3 < len(attempts) < 10
        assert world.executor.telemetry.value(metrics.PARTITIONS_LOST) == 0
        (shown,) = partition_status(world)["containers"]
        assert (shown["state"], shown["reason"]) == ("member", "cannot set: busy")
        kernel.during = lambda: None
        await world.until(lambda: not kernel.states)
        for _ in range(20):
            await world.sync.once()
        assert partition_status(world)["containers"][0]["state"] == "isolated"

    run_scenario(scenario)


def test_an_unwanted_partition_is_ended_after_a_crash(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        _, kernel = with_partitions(world)
        container = await owner(world)
        await world.until(lambda: kernel.states)
        world.boot()
        partitions, again = with_partitions(world, "")
        again.states = dict(kernel.states)
        await world.clear_log()
        await world.sync.once()
        assert of_partitions(world)[0].startswith("partition member 2-3 {'kubepods'")
        await world.sync.once()
        assert partitions.jobs.known.records == {}
        await world.until(lambda: f"x/{container}" not in world.ledger.entries)
        assert again.states == {}

    run_scenario(scenario)


def test_a_wanted_partition_stays_after_a_crash(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        _, kernel = with_partitions(world)
        await owner(world)
        await world.until(lambda: kernel.states)
        world.boot()
        _, again = with_partitions(world)
        again.states = dict(kernel.states)
        await world.clear_log()
        await world.sync.once()
        assert of_partitions(world) == []

    run_scenario(scenario)


def test_without_a_ledger_the_partition_is_made_again(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        _, kernel = with_partitions(world)
        await owner(world)
        await world.until(lambda: kernel.states)
        world.ledger.entries = {k: v for k, v in world.ledger.entries.items() if not k.startswith("x/")}
        world.boot()
        _, again = with_partitions(world)
        again.states = dict(kernel.states)
        await world.clear_log()
        await world.sync.once()
        world.now += 3
        await world.sync.once()  # calls from before the restart are over
        assert [line.split()[1] for line in of_partitions(world)] == ["member", "isolated"]

    run_scenario(scenario)


def test_a_release_ends_all_partitions(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        partitions, kernel = with_partitions(world)
        await owner(world)
        await world.until(lambda: kernel.states)
        enter_mode(world.executor, NodeMode.RELEASED)
        await partitions.once()
        assert partitions.jobs.known.records == {}
        assert kernel.states == {}
        await partitions.once()
        assert kernel.states == {}
        enter_mode(world.executor, NodeMode.ENFORCE)
        await world.sync.once()
        assert len(kernel.states) == 1

    run_scenario(scenario)


def test_an_owner_that_ends_meanwhile_leaves_no_partition(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        partitions, kernel = with_partitions(world, refuses="not yet")
        container = await owner(world)
        kernel.refuses = ""
        loop = asyncio.get_running_loop()

        def during() -> None:
            asyncio.run_coroutine_threadsafe(world.stop(container), loop)

        kernel.during = during
        for _ in range(12):
            await world.sync.once()
        await world.quiet()
        await world.sync.once()
        assert kernel.states == {}
        assert partitions.jobs.known.records == {}

    run_scenario(scenario)


def test_cgroup_v1_is_reported_once(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        with_partitions(world, unsupported_reason="cgroup v1 has none")
        await owner(world)
        await world.sync.once()
        assert of_partitions(world) == []
        (problem,) = [p for p in world.executor.telemetry.problems() if "apply.partitions" in p["what"]]
        assert (problem["count"], "v1" in problem["what"]) == (1, True)
        page = "\n".join(shown_lines(partition_status(world)))
        assert page.strip() == "Partitions of owned CPUs (isolated): there are none, cgroup v1 has none"

    run_scenario(scenario)


def test_an_invalid_record_is_reported(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        world.ledger.entries["x/a"] = {"path": 7}
        partitions, _ = with_partitions(world)
        assert partitions.jobs.known.records == {}
        assert any("record=x/a" in p["what"] for p in world.executor.telemetry.problems())

    run_scenario(scenario)


def test_status_shows_the_partitions() -> None:
    rows = [
        {"ref": "ns/a/c", "cpus": "2-3", "state": "isolated", "reason": ""},
        {"ref": "ns/b/c", "cpus": "4", "state": "member", "reason": "because"},
    ]
    page = list(shown_lines({"asked": "isolated", "isolated": "2-3", "containers": rows}))
    assert page == [
        "",
        "Partitions of owned CPUs (isolated)",
        "ns/a/c  2-3  isolated",
        "ns/b/c  4    member    because",
        "  The kernel isolates CPUs 2-3.",
    ]
    assert list(shown_lines({})) == []
    assert list(shown_lines({"asked": "", "containers": [rows[1]]})) == []


def test_a_change_is_reported_once_until_the_file_is_watched_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        reports: list[int] = []
        watcher = PartitionWatcher(lambda: reports.append(1))
        path = next(path for path in ("/proc/self/mounts", "/proc/mounts") if os.access(path, os.R_OK))
        watcher.add("a", path)  # EPOLLPRI is also set when a mount appears or disappears
        watcher.add("b", str(tmp_path / "absent"))
        (tmp_path / "plain").write_text("member")
        watcher.add("c", str(tmp_path / "plain"))
        assert list(watcher._files) == ["a"]
        watcher.watch_again()
        await asyncio.sleep(0)
        watcher._ready()
        assert reports == [1]
        watcher.silence()
        watcher.watch_again()
        watcher.drop("a")
        watcher.drop("a")
        assert watcher._files == {}
        watcher.close()

    asyncio.run(scenario())
