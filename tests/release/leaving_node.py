"""A node to leave: a whole daemon beside the stand-in runtime and an imitated cgroup tree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from proxy.admin.client import ask
from proxy.apply.folder import FolderCgroups
from proxy.cli.release import release
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.demo.client import CriClient, PodSpec
from proxy.demo.runtime import StandInRuntime
from proxy.topology.build import described
from proxy.topology.sysfs_tree import write_sysfs

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
        await self.until(lambda: daemon.pages.status()["mode"] == "released")

    def live(self, daemon: Daemon, day: Callable[[], Any]) -> None:
        async def whole() -> None:
            await daemon.start()
            try:
                await day()
            finally:
                await daemon.stop()

        asyncio.run(whole())


def command(node: Node, *words: str, config: str = "") -> Any:
    """``topoproxy release``, as a user types it."""
    file = node.folder / "c.yaml"
    if not file.exists():
        write_sysfs(MACHINE, node.folder / "machine")
    file.write_text(
        f"{config}\nlisten: unix://{node.folder}/cri.sock\nadminSocket: unix://{node.folder}/admin.sock\n"
        f"runtime: unix://{node.folder}/runtime.sock\nstateDir: {node.folder}/state\n"
        f"kubelet: {{stateDir: {node.folder}/kubelet}}\ncgroupRoot: {node.folder}/cgroup\n"
        f"sysfsRoot: {node.folder}/machine/sys\nprocfsRoot: {node.folder}/machine/proc\n"
        "settle: {perSecond: 100}\nreconcilePeriod: 200ms\n"
    )
    done = CliRunner().invoke(release, ["--config", str(file), *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done
