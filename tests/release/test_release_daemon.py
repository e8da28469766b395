"""Leaving, by a whole daemon beside the stand-in runtime and an imitated cgroup tree."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.admin.client import ask
from proxy.apply.folder import FolderCgroups
from proxy.cli.release import release
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.demo.client import CriClient, PodSpec
from proxy.demo.runtime import StandInRuntime
from proxy.model.errors import InputError, LockedError, TopoproxyError, UnavailableError
from proxy.topology import write_sysfs
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


def test_the_command(node: Node) -> None:
    async def day() -> None:
        lse = await node.launch(PodSpec("lse", "LSE", cpuset="2-3"))
        with pytest.raises(LockedError, match="asked without --offline"):
            await asyncio.to_thread(command, node, "--offline")
        done = await asyncio.to_thread(command, node)
        assert done.stdout.startswith(
            "released: 1 containers have what they would have without topoproxy (1 "
        )
        assert node.cpus(lse) == ALL
        done = await asyncio.to_thread(command, node, "--json")
        assert json.loads(done.stdout)["stage"] == "released"
        done = await asyncio.to_thread(command, node, "--undo")
        assert done.stdout == "containers are placed again\n"
        await node.until(lambda: node.cpus(lse) == "2-3")
        with pytest.raises(InputError, match="the node is not released"):
            await asyncio.to_thread(command, node, "--undo")

    daemon = node.daemon()
    node.live(daemon, day)


def test_what_takes_too_long_is_told(node: Node) -> None:
    async def day() -> None:
        lse = await node.launch(PodSpec("lse", "LSE", cpuset="2-3"))
        node.runtime.stop()
        with pytest.raises(
            TopoproxyError, match=r"^cannot release everything in 1\.5 s: .*the daemon goes on"
        ):
            await asyncio.to_thread(command, node, "--timeout", "1.5")
        assert node.cpus(lse) == ALL

    daemon = node.daemon()
    node.live(daemon, day)


@pytest.mark.parametrize("mode", ["observe", "passthrough"])
def test_there_may_be_nothing_to_release(node: Node, mode: str) -> None:
    async def day() -> None:
        done = await asyncio.to_thread(command, node)
        assert done.stdout.startswith(f"there is nothing to release: in {mode} mode no container is moved")
        with pytest.raises(InputError, match=f"in {mode} mode"):
            await asyncio.to_thread(command, node, "--undo")
        assert daemon.status()["mode"] == mode

    daemon = node.daemon(f"mode: {mode}")
    node.live(daemon, day)


def test_without_a_daemon(node: Node) -> None:
    ids: list[str] = []

    async def day() -> None:
        ids.append(await node.launch(PodSpec("ls", "LS")))
        ids.append(await node.launch(PodSpec("lse", "LSE", cpuset="2-3")))
        assert daemon.keeper is not None
        await daemon.keeper.journal.flush()

    assert "has no ledger" in command(node, "--offline").stdout
    with pytest.raises(UnavailableError, match="topoproxy release --offline"):
        command(node)
    daemon = node.daemon()
    node.live(daemon, day)
    assert [node.cpus(i) for i in ids] == ["0-1,4-15", "2-3"]
    node.runtime.stop()
    with pytest.raises(TopoproxyError, match="run it again"):
        command(node, "--offline", "--timeout", "1.5")
    assert [node.cpus(i) for i in ids] == [ALL, ALL]
    node.runtime.start()
    # Whatever the configuration says today, the ledger is of a time when containers were moved.
    done = command(node, "--offline", config="mode: observe")
    assert done.stdout.startswith("released: 2 containers")
    assert (
        command(node, "--offline", "--undo").stdout == "containers are placed again when the daemon starts\n"
    )
    with pytest.raises(InputError, match="not released"):
        command(node, "--offline", "--undo")


def test_a_stop_gives_back_and_a_start_takes_again(node: Node) -> None:
    ids: list[str] = []

    async def day() -> None:
        ids.append(await node.launch(PodSpec("lse", "LSE", cpuset="2-3")))

    node.live(node.daemon("releaseAtStop: true"), day)
    assert node.cpus(ids[0]) == ALL
    again = node.daemon("releaseAtStop: true")

    async def after() -> None:
        await node.until(lambda: node.cpus(ids[0]) == "2-3")
        assert again.status()["mode"] == "enforce"

    node.live(again, after)
    assert node.cpus(ids[0]) == ALL
