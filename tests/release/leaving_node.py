"""A node for releases: a whole daemon with the stand-in runtime and an imitated cgroup tree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from proxy.admin.client import query_admin
from proxy.cli.release import release
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.topology.sysfs_writer import write_sysfs
from tests.testkit.daemon import MACHINE, DaemonNode, run
from tests.testkit.waiting import until

ALL = "0-15"


class Node(DaemonNode):
    """A node that topoproxy releases; effective CPUs and memory nodes are compared, as on cgroup v2."""

    def __init__(self, directory: Path, version: int) -> None:
        super().__init__(directory, version=version)
        self.settings = f"""
kubelet: {{stateDir: {directory}/kubelet}}
reconcilePeriod: 200ms
settle: {{perSecond: 100}}
"""

    def config(self, text: str = "") -> Any:
        return parse(self.configuration(text), "test")

    def cpus(self, container_id: str) -> str:
        path = self.cgroups.find("", container_id)
        return "" if path is None else str(self.cgroups.read(path).effective_cpus)

    def mems(self, container_id: str) -> str:
        path = self.cgroups.find("", container_id)
        return "" if path is None else str(self.cgroups.read(path).effective_mems)

    async def query(self, what: str, **options: Any) -> Any:
        return await asyncio.to_thread(query_admin, self.directory / "admin.sock", what, 30, **options)

    async def release(self, daemon: Daemon) -> None:
        await self.query("/release/start", act=True)
        await until(lambda: daemon.parts.pages.status()["mode"] == "released")

    def run_scenario(self, daemon: Daemon, scenario: Callable[[], Any]) -> None:
        run(daemon, scenario)


def command(node: Node, *args: str, config: str = "") -> Any:
    """``topoproxy release``, as on a command line."""
    file = node.directory / "c.yaml"
    if not file.exists():
        write_sysfs(MACHINE, node.directory / "machine")
    file.write_text(
        f"{config}\nlisten: unix://{node.directory}/cri.sock\nadminSocket: unix://{node.directory}/admin.sock\n"
        f"runtime: unix://{node.directory}/runtime.sock\nstateDir: {node.directory}/state\n"
        f"kubelet: {{stateDir: {node.directory}/kubelet}}\ncgroupRoot: {node.directory}/cgroup\n"
        f"sysfsRoot: {node.directory}/machine/sys\nprocfsRoot: {node.directory}/machine/proc\n"
        "settle: {perSecond: 100}\nreconcilePeriod: 200ms\n"
    )
    done = CliRunner().invoke(release, ["--config", str(file), *args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done
