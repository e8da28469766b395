"""Partitions of owned CPUs: made after the start, ended before others may grow onto them; else reported."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.admin.status_sections import partitions as shown_lines
from proxy.engine.partition import PartitionState
from proxy.executor.partitions.owners import PartitionSync
from proxy.executor.partitions.watcher import PartitionWatcher
from proxy.executor.status_data import node_page
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.model.mode import NodeMode
from proxy.release.service import enter
from proxy.telemetry import metrics
from tests.testkit.changed_copy import changed_copy


@dataclass
class PlayedPartitions:
    """Partitions by path; what is made and ended goes to the log."""

    log: list[str]
    lack: str = ""
    states: dict[str, PartitionState] = field(default_factory=dict)
    refuses: str = ""
    stuck: bool = False
    gone: set[str] = field(default_factory=set)
    during: Callable[[], None] = lambda: None

    def file(self, path: str) -> str:
        return ""

    def look(self, path: str) -> PartitionState:
        if path in self.gone:
            raise CgroupError("cannot read: gone", errno.ENOENT)
        return self.states.get(path, PartitionState("member", valid=False))

    def lent(self, path: str, cpus: CpuSet) -> Mapping[str, CpuSet]:
        return {"kubepods": cpus}

    def isolated(self) -> CpuSet | None:
        return CpuSet.parse("2-3")

    def make(self, path: str, cpus: CpuSet, kind: str, lent: Mapping[str, CpuSet]) -> PartitionState:
        self.during()
        self.log.append(f"partition {kind} {cpus}")
        if self.refuses:
            return PartitionState(kind, valid=False, reason=self.refuses)
        self.states[path] = PartitionState(kind, valid=True)
        return self.states[path]

    def end(self, path: str, cpus: CpuSet, lent: Mapping[str, CpuSet]) -> None:
        if self.stuck:
            raise CgroupError("cannot set: busy", errno.EBUSY)
        self.log.append(f"partition member {cpus} {dict(lent)}")
        self.states.pop(path, None)


def with_partitions(w: Any, asked: str = "isolated", **more: Any) -> tuple[PartitionSync, PlayedPartitions]:
    kernel = PlayedPartitions(w.log, **more)
    made = w.executor.partitions = PartitionSync(w.executor, kernel, asked)
    w.executor.store.subscribe(made)
    w.sync._parts = changed_copy(w.sync._parts, partitions=made)
    made.load(dict(w.ledger.entries))
    return made, kernel


def shown(w: Any) -> Any:
    """What ``status`` says."""
    return node_page(w.executor)["partitions"]


async def owner(w: Any, qos: str = "LSE") -> str:
    container: str = await w.run(await w.pod("own", qos, cpus="2-3"))
    await w.until(lambda: not w.executor.partitions._is_due)
    await w.quiet()
    return container


def of_partitions(w: Any) -> list[str]:
    return [line for line in w.log if line.startswith("partition ")]


def test_made_after_the_start_when_others_have_left(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        partitions, _ = with_partitions(w)
        await w.run(await w.pod("ls", "LS"))
        w.log.clear()
        container = await owner(w)
        await w.until(lambda: container in partitions.jobs.known.records)
        await w.until(lambda: of_partitions(w))
        kinds = [line.split()[0] for line in w.log]
        made = w.log.index("partition isolated 2-3")
        assert kinds.index("kernel") < made
        assert w.log.index("ledger +x/") < made
        assert "forward StartContainer" in w.log[:made]
        await w.sync.once()
        assert of_partitions(w) == ["partition isolated 2-3"]
        assert w.ledger.entries[f"x/{container}"]["lent"] == {"kubepods": "2-3"}

    live(day)


def test_what_stands_in_for_cpus_that_are_away_is_one_soon(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        partitions, _ = with_partitions(w)
        whole: Machine = w.machine
        own = await w.run(await w.pod("g"), cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
        await w.until(lambda: own in partitions.jobs.known.records)
        had = w.executor.state.containers[own].placement.exclusive

        gone = CpuSet([max(had)])
        nodes = tuple(changed_copy(n, cpus=n.cpus - gone) for n in whole.nodes)
        cpus = tuple(c for c in whole.cpus if c.id not in gone)
        w.machine = changed_copy(whole, cpus=cpus, nodes=nodes)
        await w.executor.hotplug.look()
        await w.until(lambda: w.on(own) != str(had) and len(CpuSet.parse(w.on(own))) == len(had))
        now = CpuSet.parse(w.on(own))
        await w.until(lambda: of_partitions(w)[-1] == f"partition isolated {now}")

        w.machine = whole
        await w.executor.hotplug.look()
        await w.until(lambda: of_partitions(w)[-1] == f"partition isolated {had}")

    live(day)


def test_ended_before_others_grow(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        partitions, _ = with_partitions(w)
        shared = await w.run(await w.pod("ls", "LS"))
        container = await owner(w)
        await w.until(lambda: of_partitions(w))
        w.log.clear()
        await w.stop(container)
        await w.until(lambda: w.cgroups.sets[shared] >= CpuSet.parse("2-3"))
        ended = next(i for i, line in enumerate(w.log) if line.startswith("partition member 2-3"))
        grown = next(i for i, line in enumerate(w.log) if line.startswith(f"kernel {shared} "))
        assert ended < grown
        await w.sync.once()
        await w.until(lambda: f"x/{container}" not in w.ledger.entries)
        assert partitions.jobs.known.records == {}

    live(day)


def test_a_partition_that_cannot_be_removed_is_reported(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        partitions, kernel = with_partitions(w)
        container = await owner(w)
        await w.until(lambda: of_partitions(w))
        kernel.stuck = True
        await w.stop(container)
        await w.sync.once()
        await w.quiet()
        assert any("cannot end a partition cpus=2-3" in p["what"] for p in w.executor.telemetry.problems())
        assert container in partitions.jobs.known.records
        kernel.stuck = False
        await w.sync.once()
        await w.sync.once()
        assert partitions.jobs.known.records == {}

    live(day)


def test_the_kernels_reason_is_reported_once_and_retried_ever_more_rarely(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        with_partitions(w, refuses="Parent is not a partition root")
        container = await owner(w)
        for _ in range(30):
            await w.sync.once()
        assert 3 < len(of_partitions(w)) < 10
        problems = [p for p in w.executor.telemetry.problems() if "cannot make a partition pod=" in p["what"]]
        assert len(problems) == 1
        assert "(Parent" not in problems[0]["what"]
        assert problems[0]["keys"]["err"] == "Parent is not a partition root"
        page = shown(w)
        assert page["containers"][0]["reason"] == "Parent is not a partition root"
        await w.until(lambda: f"x/{container}" not in w.ledger.entries)

    live(day)


def test_cpus_that_be_may_use_are_none(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        with_partitions(w)
        await owner(w, "LSR")
        await w.sync.once()
        assert of_partitions(w) == []
        (row,) = shown(w)["containers"]
        assert (row["state"], row["reason"]) == ("member", "BE containers may run on its CPUs")

    live(day)


def test_containers_that_have_the_same_cpus_are_none(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        with_partitions(w)
        sandbox = await w.pod("own", "LSE", cpus="2-3")
        await w.run(sandbox, "one")
        await w.until(lambda: of_partitions(w))
        await w.run(sandbox, "two")
        await w.sync.once()
        assert [line.split()[1] for line in of_partitions(w)] == ["isolated", "member"]
        rows = shown(w)["containers"]
        assert {row["state"] for row in rows} == {"member"}
        assert "has these CPUs too" in rows[0]["reason"]

    live(day)


def test_a_partition_that_the_kernel_ended_is_reported_and_made_again(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        _, kernel = with_partitions(w)
        container = await owner(w)
        await w.until(lambda: of_partitions(w))
        kernel.states[container] = PartitionState("isolated", valid=False, reason="No cpu available")
        w.log.clear()
        await w.sync.once()
        assert of_partitions(w)[0].startswith("partition member")
        assert w.executor.telemetry.value(metrics.PARTITIONS_LOST) == 1
        assert any(
            "isolated invalid (No cpu available)" in p["what"] for p in w.executor.telemetry.problems()
        )
        await w.sync.once()
        assert of_partitions(w)[-1] == "partition isolated 2-3"
        assert kernel.states[container].valid

    live(day)


def test_after_a_crash_what_is_not_wanted_is_ended(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        _, kernel = with_partitions(w)
        container = await owner(w)
        await w.until(lambda: kernel.states)
        w.boot()
        partitions, again = with_partitions(w, "")
        again.states = dict(kernel.states)
        w.log.clear()
        await w.sync.once()
        assert of_partitions(w)[0].startswith("partition member 2-3 {'kubepods'")
        await w.sync.once()
        assert partitions.jobs.known.records == {}
        await w.until(lambda: f"x/{container}" not in w.ledger.entries)
        assert again.states == {}

    live(day)


def test_after_a_crash_what_is_wanted_stays(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        _, kernel = with_partitions(w)
        await owner(w)
        await w.until(lambda: kernel.states)
        w.boot()
        _, again = with_partitions(w)
        again.states = dict(kernel.states)
        w.log.clear()
        await w.sync.once()
        assert of_partitions(w) == []

    live(day)


def test_without_a_ledger_the_partition_is_made_again(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        _, kernel = with_partitions(w)
        await owner(w)
        await w.until(lambda: kernel.states)
        w.ledger.entries = {k: v for k, v in w.ledger.entries.items() if not k.startswith("x/")}
        w.boot()
        _, again = with_partitions(w)
        again.states = dict(kernel.states)
        w.log.clear()
        await w.sync.once()
        w.now += 3
        await w.sync.once()  # calls of before the restart are over
        assert [line.split()[1] for line in of_partitions(w)] == ["member", "isolated"]

    live(day)


def test_a_release_ends_all(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        partitions, kernel = with_partitions(w)
        await owner(w)
        await w.until(lambda: kernel.states)
        enter(w.executor, NodeMode.RELEASED)
        await partitions.once()
        assert partitions.jobs.known.records == {}
        assert kernel.states == {}
        await partitions.once()
        assert kernel.states == {}
        enter(w.executor, NodeMode.ENFORCE)
        await w.sync.once()
        assert len(kernel.states) == 1

    live(day)


def test_an_owner_that_ends_meanwhile_leaves_nothing(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        partitions, kernel = with_partitions(w, refuses="not yet")
        container = await owner(w)
        kernel.refuses = ""
        loop = asyncio.get_running_loop()

        def during() -> None:
            asyncio.run_coroutine_threadsafe(w.stop(container), loop)

        kernel.during = during
        for _ in range(12):
            await w.sync.once()
        await w.quiet()
        await w.sync.once()
        assert kernel.states == {}
        assert partitions.jobs.known.records == {}

    live(day)


def test_cgroup_v1_is_reported_once(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        with_partitions(w, lack="cgroup v1 has none")
        await owner(w)
        await w.sync.once()
        assert of_partitions(w) == []
        (problem,) = [p for p in w.executor.telemetry.problems() if "apply.partitions" in p["what"]]
        assert (problem["count"], "v1" in problem["what"]) == (1, True)
        page = "\n".join(shown_lines(shown(w)))
        assert page.strip() == "Partitions of owned CPUs (isolated): there are none, cgroup v1 has none"

    live(day)


def test_an_invalid_record_is_reported(live: Callable[..., None]) -> None:
    async def day(w: Any) -> None:
        w.ledger.entries["x/a"] = {"path": 7}
        partitions, _ = with_partitions(w)
        assert partitions.jobs.known.records == {}
        assert any("record=x/a" in p["what"] for p in w.executor.telemetry.problems())

    live(day)


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


def test_a_change_is_reported_once_until_the_watcher_is_wound(tmp_path: Path) -> None:
    async def day() -> None:
        reports: list[int] = []
        watcher = PartitionWatcher(lambda: reports.append(1))
        path = next(path for path in ("/proc/self/mounts", "/proc/mounts") if os.access(path, os.R_OK))
        watcher.add("a", path)  # it has EPOLLPRI, too, when a mount comes or goes
        watcher.add("b", str(tmp_path / "absent"))
        (tmp_path / "plain").write_text("member")
        watcher.add("c", str(tmp_path / "plain"))
        assert list(watcher._files) == ["a"]
        watcher.wind()
        await asyncio.sleep(0)
        watcher._ready()
        assert reports == [1]
        watcher.silence()
        watcher.wind()
        watcher.drop("a")
        watcher.drop("a")
        assert watcher._files == {}
        watcher.close()

    asyncio.run(day())
