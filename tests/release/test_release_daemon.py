"""Leaving, by a whole daemon beside the stand-in runtime and an imitated cgroup tree."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.admin.client import ask
from proxy.apply.folder import FolderCgroups
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.demo.client import CriClient, PodSpec
from proxy.demo.runtime import StandInRuntime
from proxy.topology.build import described

MACHINE = described(2, 1, 4, 2)
ALL = "0-15"


class Node:
    """Where everything of one test lies."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.cgroups = FolderCgroups(folder / "cgroup", MACHINE.online, MACHINE.memory_nodes, version)
        self.runtime = StandInRuntime(folder / "runtime.sock", self.cgroups)

    def config(self, text: str = "") -> Any:
        more = f"""
listen: unix://{self.folder}/cri.sock
adminSocket: unix://{self.folder}/admin.sock
runtime: unix://{self.folder}/runtime.sock
stateDir: {self.folder}/state
kubelet: {{stateDir: {self.folder}/kubelet}}
reconcilePeriod: 200ms
settle: {{perSecond: 100}}
"""
        return parse(text + more, "test")

    def daemon(self, text: str = "") -> Daemon:
        return Daemon(self.config(text), machine=MACHINE, cgroups=self.cgroups)

    def cpus(self, container_id: str) -> str:
        path = self.cgroups.find("", container_id)
        return "" if path is None else str(self.cgroups.read(path).effective_cpus)

    def mems(self, container_id: str) -> str:
        path = self.cgroups.find("", container_id)
        return "" if path is None else str(self.cgroups.read(path).effective_mems)

    async def launch(self, spec: PodSpec, socket: str = "cri") -> str:
        def work() -> str:
            with CriClient(self.folder / f"{socket}.sock") as client:
                return client.launch(spec).container_id

        return await asyncio.to_thread(work)

    async def ask(self, what: str, **options: Any) -> Any:
        return await asyncio.to_thread(ask, self.folder / "admin.sock", what, 30, **options)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.02)

    async def release(self, daemon: Daemon) -> None:
        await self.ask("/release/start", act=True)
        await self.until(lambda: daemon.status()["mode"] == "released")

    def live(self, daemon: Daemon, day: Callable[[], Any]) -> None:
        async def whole() -> None:
            await daemon.start()
            try:
                await day()
            finally:
                await daemon.stop()

        asyncio.run(whole())


@pytest.fixture(params=[1, 2])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="tp-") as folder:
        made = Node(Path(folder), request.param)
        made.runtime.start()
        yield made
        made.runtime.stop()


def test_everybody_gets_everything_back_and_stays_so(node: Node) -> None:
    ids: list[str] = []

    async def day() -> None:
        ids.append(await node.launch(PodSpec("ls", "LS")))
        ids.append(await node.launch(PodSpec("lse", "LSE", cpuset="2-3")))
        assert [node.cpus(i) for i in ids] == ["0-1,4-15", "2-3"]
        assert node.mems(ids[1]) == "0"
        await node.release(daemon)
        ids.append(await node.launch(PodSpec("direct", "LS"), "runtime"))
        assert [node.cpus(i) for i in ids] == [ALL] * 3
        assert [node.mems(i) for i in ids] == ["0-1"] * 3
        # From now on it is a relay: an owner that comes gets nothing, and nobody moves.
        ids.append(await node.launch(PodSpec("late", "LSE", cpuset="4-5")))
        passes = daemon.status()["counters"]["passes"]
        await node.until(lambda: daemon.status()["counters"]["passes"] > passes + 2)
        assert [node.cpus(i) for i in ids] == [ALL] * 4

    daemon = node.daemon()
    node.live(daemon, day)

    again = node.daemon()

    async def after() -> None:
        assert again.status()["mode"] == "released"
        assert again.keeper is not None
        await asyncio.wait_for(again.keeper.synced.wait(), 30)
        assert [node.cpus(i) for i in ids] == [ALL] * 4
        answer = await node.ask("/release/undo", act=True)
        assert answer["stage"] == ""
        assert again.status()["mode"] == "enforce"
        await node.until(lambda: [node.cpus(i) for i in ids[:2]] == ["0-1,6-15", "2-3"])
        await node.until(lambda: node.cpus(ids[3]) == "4-5")
        lsr = await node.launch(PodSpec("lsr", "LSR", cpuset="6-7"))
        assert node.cpus(lsr) == "6-7"

    node.live(again, after)
