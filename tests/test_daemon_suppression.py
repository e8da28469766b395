"""BE suppression in a whole daemon, on a described machine whose counters a test writes."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.apply.folder import FolderCgroups
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.demo.client import CriClient, PodSpec
from proxy.demo.runtime import StandInRuntime
from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos
from proxy.topology.build import described

MACHINE = described(2, 1, 4, 2)
PERIOD_S = 0.1
S = 1_000_000_000


class Node:
    """Where everything of one test lies; ``busy`` CPUs are in use by the LS pod."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.proc = folder, folder / "cgroup", folder / "proc"
        self.cgroups = FolderCgroups(self.root, MACHINE.online, MACHINE.memory_nodes, 1)
        self.runtime = StandInRuntime(folder / "runtime.sock", self.cgroups)
        self.busy, self._used = 0.0, 0
        self.proc.mkdir()
        (self.proc / "stat").write_text("cpu  1 1 1 1 1 1 1 1 0 0\n")
        (self.root / "cpuacct.usage").write_text("0\n")

    def daemon(self, mode: str) -> Daemon:
        text = f"""
beSuppress: {{mode: {mode}, period: {PERIOD_S}s}}
reconcilePeriod: 200ms
procfsRoot: {self.proc}
cgroupRoot: {self.root}
listen: unix://{self.folder}/cri.sock
adminSocket: unix://{self.folder}/admin.sock
runtime: unix://{self.folder}/runtime.sock
stateDir: {self.folder}/state
"""
        return Daemon(parse(text, "test"), machine=MACHINE)

    def pods(self, qos: str) -> list[Path]:
        return [each for each in (self.root / "kubepods" / qos).iterdir() if each.is_dir()]

    @property
    def quota(self) -> int:
        return int((self.root / "kubepods/besteffort/cpu.cfs_quota_us").read_text())

    async def time_passes(self, until: Callable[[], object]) -> None:
        """Let counters grow with the clock until something is so."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            last = loop.time()
            while not until():
                await asyncio.sleep(0.02)
                now = loop.time()
                self._used += int((now - last) * self.busy * S)
                last = now
                for pod in self.pods("burstable"):
                    # In place, and as long as before, as the kernel does: never another file, nor half of it.
                    fd = os.open(pod / "cpuacct.usage", os.O_WRONLY | os.O_CREAT)
                    os.write(fd, f"{self._used:020d}\n".encode())
                    os.close(fd)


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="tp-") as folder:
        made = Node(Path(folder))
        made.runtime.start()
        yield made
        made.runtime.stop()


def live(daemon: Daemon, day: Callable[[], Coroutine[Any, Any, None]], *, crash: bool = False) -> None:
    async def whole() -> None:
        await daemon.start()
        try:
            await day()
        finally:
            if crash:
                daemon._suppression = None
            await daemon.stop()

    asyncio.run(whole())


async def launch(node: Node, spec: PodSpec) -> str:
    def work() -> str:
        with CriClient(node.folder / "cri.sock") as client:
            return client.launch(spec).container_id

    return await asyncio.to_thread(work)


BE, LS = PodSpec("be", "BE", KubeQos.BEST_EFFORT), PodSpec("ls", "LS")


def cpus(node: Node, container: str) -> CpuSet:
    path = node.cgroups.find("", container)
    assert path is not None
    return node.cgroups.read(path).cpus


def test_by_cpus(node: Node) -> None:
    daemon, ids = node.daemon("cpuset"), []

    async def day() -> None:
        ids.extend([await launch(node, BE), await launch(node, LS)])
        await node.time_passes(lambda: len(cpus(node, ids[0])) == 11)
        node.busy = 8.0
        await node.time_passes(lambda: len(cpus(node, ids[0])) <= 4)
        page: Any = daemon.pages.status()["beSuppress"]
        assert json.loads(json.dumps(page)) == page
        assert page["cpus"] == str(cpus(node, ids[0]))
        told: Any = daemon.pages.explain({"query": "be"})["records"][-1]
        assert told["now"].startswith("BE is suppressed: it runs on ")
        assert "now" not in daemon.pages.explain({"query": "ls"})["records"][-1]
        assert cpus(node, ids[1]) == MACHINE.online
        assert daemon.pages.status()["violations"] == []
        ids.append(await launch(node, PodSpec("late", "BE", KubeQos.BEST_EFFORT)))

    live(daemon, day)
    assert cpus(node, ids[0]) == cpus(node, ids[2]) == MACHINE.online
    updates = [call for call in node.runtime.calls if call.method == "UpdateContainerResources"]
    told = [(call.request.container_id, call.request.linux.cpuset_cpus) for call in updates]
    assert told[-1] == (ids[2], str(MACHINE.online)), "what came with a narrowed set is told at the end"
    assert {container for container, _ in told} == {ids[2]}


def test_by_a_quota_that_a_crash_leaves_behind(node: Node) -> None:
    async def day() -> None:
        await launch(node, BE)
        await launch(node, LS)
        await node.time_passes(lambda: node.quota == 1_040_000)

    live(node.daemon("cfs-quota"), day, crash=True)
    assert node.quota == 1_040_000

    async def after() -> None:
        await node.time_passes(lambda: node.quota == -1)

    off = node.daemon("off")
    live(off, after)

    async def quiet() -> None:
        assert "beSuppress" not in later.pages.status(), "nothing is left to do"

    later = node.daemon("off")
    live(later, quiet)


def test_where_nobody_counts(node: Node) -> None:
    (node.root / "cpuacct.usage").unlink()
    daemon = node.daemon("cpuset")

    async def day() -> None:
        be = await launch(node, BE)
        said = ["cannot find the kernel's CPU times", "cannot suppress BE pods"]
        async with asyncio.timeout(60):
            while not all(any(word in str(p) for p in daemon.pages.status()["problems"]) for word in said):
                await asyncio.sleep(0.05)
        assert cpus(node, be) == MACHINE.online

    live(daemon, day)


def test_who_only_looks_suppresses_nothing(node: Node) -> None:
    daemon = node.daemon("cpuset")
    daemon.config = parse(f"mode: observe\nbeSuppress: {{mode: cpuset}}\n{_rest(node)}", "test")

    async def day() -> None:
        assert "beSuppress" not in daemon.pages.status()

    live(daemon, day)


def _rest(node: Node) -> str:
    return f"""
cgroupRoot: {node.root}
listen: unix://{node.folder}/cri.sock
adminSocket: unix://{node.folder}/admin.sock
runtime: unix://{node.folder}/runtime.sock
"""
