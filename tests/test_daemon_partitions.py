"""Partitions of owned CPUs in a whole daemon, on an imitated cgroup v2 tree with the kernel's rules."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.daemon import Daemon
from proxy.demo.client import DemoPod
from proxy.executor.node_executor import NodeExecutor
from proxy.model.errors import CannotCreateError
from proxy.model.idset import CpuSet
from proxy.telemetry import metrics
from tests.testkit.daemon import MACHINE, DaemonNode, run, temporary_node
from tests.testkit.waiting import until

OWN = CpuSet.parse("2-3")
ISOLATED, NONE = "apply: {partitions: isolated}", ""


class Node(DaemonNode):
    """A node with cgroup v2."""

    settings = "reconcilePeriod: 200ms"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, version=2)
        self.root = directory / "cgroup"

    def run_scenario(self, text: str, scenario: Callable[[Daemon], Coroutine[Any, Any, None]]) -> None:
        """Run a daemon with this configuration, and the scenario with the daemon."""
        daemon = self.daemon(text)
        run(daemon, lambda: scenario(daemon))

    async def group(self, spec: DemoPod) -> Path:
        """Run a pod; return its container's cgroup."""
        path = self.cgroups.find("", await self.launch(spec))
        assert path is not None
        return self.root / path

    def rest(self) -> CpuSet:
        """Return the CPUs that all other containers may use."""
        return CpuSet.parse((self.root / "cpuset.cpus.effective").read_text())


@pytest.fixture
def node() -> Iterator[Node]:
    with temporary_node(Node) as made:
        yield made


def kind(group: Path) -> str:
    return (group / "cpuset.cpus.partition").read_text().strip()


def effective(group: Path) -> CpuSet:
    return CpuSet.parse((group / "cpuset.cpus.effective").read_text())


def executor(daemon: Daemon) -> NodeExecutor:
    assert daemon.executor is not None
    return daemon.executor


def status_page(daemon: Daemon) -> Any:
    """Return the section about partitions of the status page."""
    assert daemon.parts.pages is not None
    status: Any = daemon.parts.pages.status()
    return status["partitions"]


LSE, LS = DemoPod("lse", "LSE", cpuset="2-3"), DemoPod("ls", "LS")


def test_a_partition_exists_from_the_start_to_the_end_of_an_owner(node: Node) -> None:
    async def scenario(daemon: Daemon) -> None:
        shared = await node.group(LS)
        own = await node.group(LSE)
        await until(lambda: kind(own) == "isolated")
        await until(
            lambda: node.rest() == MACHINE.online - OWN
        )  # the kernel changes all files in one write, the imitated tree one by one
        assert effective(own) == OWN
        await until(lambda: status_page(daemon)["isolated"] == "2-3")
        (row,) = status_page(daemon)["containers"]
        assert (row["state"], row["cpus"]) == ("isolated", "2-3")
        more = await node.group(DemoPod("more", "LSE", cpuset="4-5"))
        await until(lambda: kind(more) == "isolated")
        node.runtime.exit(own.name)
        await until(lambda: effective(shared) == MACHINE.online - CpuSet.parse("4-5"))
        assert effective(more) == CpuSet.parse("4-5")
        assert kind(more) == "isolated"
        assert executor(daemon).telemetry.problems() == []

    node.run_scenario(ISOLATED, scenario)


def test_a_partition_outlives_the_daemon_until_partitions_are_disabled(node: Node) -> None:
    groups: list[Path] = []

    async def first(daemon: Daemon) -> None:
        groups.append(await node.group(LSE))
        await until(lambda: kind(groups[0]) == "isolated")

    async def second(daemon: Daemon) -> None:
        await until(lambda: kind(groups[0]) == "member")
        await until(lambda: not (groups[0].parent / "cpuset.cpus.exclusive").read_text().strip())
        assert node.rest() == MACHINE.online
        assert effective(groups[0]) == OWN
        partitions = executor(daemon).partitions
        assert partitions is not None
        await until(lambda: not partitions.jobs.known.records)

    async def third(daemon: Daemon) -> None:
        assert executor(daemon).partitions is None

    node.run_scenario(ISOLATED, first)
    assert kind(groups[0]) == "isolated"
    node.run_scenario(NONE, second)
    node.run_scenario(NONE, third)


def test_a_partition_is_ended_although_the_ledger_is_read_only(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[Path] = []

    async def first(daemon: Daemon) -> None:
        groups.append(await node.group(LSE))
        await until(lambda: kind(groups[0]) == "isolated")

    async def second(daemon: Daemon) -> None:
        assert any("not kept" in str(reported["what"]) for reported in executor(daemon).telemetry.problems())
        await until(lambda: kind(groups[0]) == "member")
        await until(lambda: node.rest() == MACHINE.online)

    def refuse(*_: object) -> None:
        raise CannotCreateError("cannot open the ledger: Read-only file system")

    node.run_scenario(ISOLATED, first)
    monkeypatch.setattr("proxy.state_directory.open_ledger", refuse)
    node.run_scenario(NONE, second)


def test_a_foreign_overlap_is_repaired(node: Node) -> None:
    async def scenario(daemon: Daemon) -> None:
        own = await node.group(LSE)
        # The file has "isolated" before the daemon reads it back: an overlap in between would fail that read.
        await until(lambda: executor(daemon).telemetry.value(metrics.PARTITIONS_MADE))
        assert kind(own) == "isolated"
        sibling = str(own.relative_to(node.root).parent / "beside")
        node.cgroups.mkdir(sibling)
        node.cgroups.files.write(sibling, "cpuset.cpus", "3-4")
        telemetry = executor(daemon).telemetry
        await until(lambda: telemetry.value(metrics.PARTITIONS_LOST))
        await until(lambda: kind(own) == "member")
        await until(
            lambda: any("not exclusive" in str(reported["what"]) for reported in telemetry.problems())
        )
        assert node.rest() == MACHINE.online
        assert effective(own) == OWN
        node.cgroups.rmdir(sibling)
        await until(lambda: kind(own) == "isolated")

    node.run_scenario(ISOLATED, scenario)
