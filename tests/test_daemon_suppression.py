"""BE suppression in a whole daemon, on a described machine with CPU counters written by a test."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.daemon import Daemon
from proxy.demo.client import DemoPod
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos
from proxy.telemetry.metrics import BE_SUPPRESS_ROUNDS
from tests.testkit.daemon import MACHINE, DaemonNode, run, temporary_node

PERIOD_S = 0.1
S = 1_000_000_000


class Node(DaemonNode):
    """A node with counters of CPU time; ``busy`` CPUs are in use by the LS pod."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.root, self.proc = directory / "cgroup", directory / "proc"
        self.busy, self._used = 0.0, 0
        self.proc.mkdir()
        (self.proc / "stat").write_text("cpu  1 1 1 1 1 1 1 1 0 0\n")
        (self.root / "cpuacct.usage").write_text("0\n")

    def suppressing(self, mode: str) -> Daemon:
        """Create a daemon with this mode of BE suppression, which reads the node's counters."""
        text = f"""
beSuppress: {{mode: {mode}, period: {PERIOD_S}s}}
reconcilePeriod: 200ms
procfsRoot: {self.proc}
cgroupRoot: {self.root}
"""
        return self.daemon(text, cgroups=None)

    def pods(self, qos: str) -> list[Path]:
        return [each for each in (self.root / "kubepods" / qos).iterdir() if each.is_dir()]

    @property
    def quota(self) -> int:
        return int((self.root / "kubepods/besteffort/cpu.cfs_quota_us").read_text())

    async def time_passes(self, until: Callable[[], object]) -> None:
        """Let counters grow with the clock until a condition is true."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            last = loop.time()
            while not until():
                await asyncio.sleep(0.02)
                now = loop.time()
                self._used += int((now - last) * self.busy * S)
                last = now
                for pod in self.pods("burstable"):
                    # Overwritten in place with the same length, so that no read gets a part of it.
                    fd = os.open(pod / "cpuacct.usage", os.O_WRONLY | os.O_CREAT)
                    os.write(fd, f"{self._used:020d}\n".encode())
                    os.close(fd)


@pytest.fixture
def node() -> Iterator[Node]:
    with temporary_node(Node) as made:
        yield made


BE, LS = DemoPod("be", "BE", KubeQos.BEST_EFFORT), DemoPod("ls", "LS")


def cpus(node: Node, container: str) -> CpuSet:
    path = node.cgroups.find("", container)
    assert path is not None
    return node.cgroups.read(path).cpus


def test_be_pods_are_suppressed_by_cpus(node: Node) -> None:
    daemon, ids = node.suppressing("cpuset"), []

    async def scenario() -> None:
        ids.extend([await node.launch(BE), await node.launch(LS)])
        await node.time_passes(lambda: len(cpus(node, ids[0])) == 11)
        node.busy = 8.0
        await node.time_passes(lambda: len(cpus(node, ids[0])) <= 4)
        page: Any = daemon.parts.pages.status()["beSuppress"]
        assert json.loads(json.dumps(page)) == page
        assert page["cpus"] == str(cpus(node, ids[0]))
        reported: Any = daemon.parts.pages.explain({"query": "be"})["records"][-1]
        assert reported["now"].startswith("BE is suppressed: it runs on ")
        assert "now" not in daemon.parts.pages.explain({"query": "ls"})["records"][-1]
        assert cpus(node, ids[1]) == MACHINE.online
        assert daemon.parts.pages.status()["violations"] == []
        ids.append(await node.launch(DemoPod("late", "BE", KubeQos.BEST_EFFORT)))

    run(daemon, scenario)
    assert cpus(node, ids[0]) == cpus(node, ids[2]) == MACHINE.online
    creates = [call.request for call in node.runtime.calls if call.method == "CreateContainer"]
    created = [request.config.linux.resources.cpuset_cpus for request in creates]
    assert created[2] != "0-15"
    saved = dict(zip(ids, created, strict=True))
    for call in node.runtime.calls:
        if call.method == "UpdateContainerResources":
            container, cpuset = call.request.container_id, call.request.linux.cpuset_cpus
            assert saved[container] != cpuset, "no update without a change"
            saved[container] = cpuset
    assert saved == dict.fromkeys(ids, "0-15"), "a container that was narrowed is updated at the end"


def test_a_quota_left_by_a_crash_is_removed(node: Node) -> None:
    async def scenario() -> None:
        await node.launch(BE)
        await node.launch(LS)
        await node.time_passes(lambda: node.quota == 1_040_000)

    crashed = node.suppressing("cfs-quota")

    async def before() -> None:
        await scenario()
        crashed.parts.suppression = None  # the crashed daemon restores nothing

    run(crashed, before)
    assert node.quota == 1_040_000

    async def after() -> None:
        await node.time_passes(lambda: node.quota == -1)

    off = node.suppressing("off")
    run(off, after)

    async def quiet() -> None:
        assert "beSuppress" not in later.parts.pages.status(), "no updates are pending"

    later = node.suppressing("off")
    run(later, quiet)


def test_missing_counters_are_reported(node: Node) -> None:
    (node.root / "cpuacct.usage").unlink()
    daemon = node.suppressing("cpuset")

    async def scenario() -> None:
        be = await node.launch(BE)
        texts = ["cannot find the kernel's CPU times", "cannot suppress BE pods"]
        async with asyncio.timeout(60):
            while not all(
                any(text in str(p) for p in daemon.parts.pages.status()["problems"]) for text in texts
            ):
                await asyncio.sleep(0.05)
        assert cpus(node, be) == MACHINE.online

    run(daemon, scenario)


def test_observe_mode_suppresses_nothing(node: Node) -> None:
    daemon = node.daemon("mode: observe\nbeSuppress: {mode: cpuset, period: 100ms, threshold: 1}\n")

    async def scenario() -> None:
        assert daemon.executor is not None
        container = await node.launch(DemoPod("be", "BE", KubeQos.BEST_EFFORT))
        await asyncio.sleep(0.5)
        assert node.cpus(container) == str(MACHINE.online)
        assert daemon.executor.state.be_limit is None
        assert daemon.executor.telemetry.value(BE_SUPPRESS_ROUNDS) == 0

    run(daemon, scenario)


def test_a_reload_starts_changes_and_ends_suppression(node: Node) -> None:
    file = node.directory / "config.yaml"

    def write(text: str) -> str:
        text = f"reconcilePeriod: 200ms\nprocfsRoot: {node.proc}\ncgroupRoot: {node.root}\n{text}"
        file.write_text(node.configuration(text))
        return text

    daemon = node.daemon(write(""), file=file, cgroups=None)

    async def reload(text: str) -> str:
        write(text)
        page: Any = await daemon.parts.reload.action()
        return f"{page['reload']['result']}{page['reload']['reason']}"

    async def scenario() -> None:
        await node.launch(DemoPod("ls", "LS", KubeQos.BURSTABLE))
        be = await node.launch(DemoPod("be", "BE", KubeQos.BEST_EFFORT))
        node.busy = 8.0
        assert "beSuppress" not in daemon.parts.pages.status()
        assert await reload(f"beSuppress: {{mode: cpuset, period: {PERIOD_S}s}}") == "applied"
        await node.time_passes(lambda: len(CpuSet.parse(node.cpus(be))) < 16)
        narrow = len(CpuSet.parse(node.cpus(be)))
        assert await reload(f"beSuppress: {{mode: cpuset, threshold: 100, period: {PERIOD_S}s}}") == "applied"
        await node.time_passes(lambda: len(CpuSet.parse(node.cpus(be))) > narrow)
        assert await reload(f"beSuppress: {{mode: cfs-quota, period: {PERIOD_S}s}}") == "applied"
        await node.time_passes(lambda: node.quota > 0)
        assert len(CpuSet.parse(node.cpus(be))) == 16
        assert await reload("") == "applied"
        await node.time_passes(lambda: node.quota == -1)
        rounds = daemon.executor.telemetry.registry.page()["be_suppress_rounds"]
        await asyncio.sleep(4 * PERIOD_S)
        assert daemon.executor.telemetry.registry.page()["be_suppress_rounds"] == rounds
        assert daemon.parts.pages.status()["beSuppress"]["mode"] == "off"

    run(daemon, scenario, reconciled=True)
