"""Hooks of a whole daemon: files that are dropped while it runs, changed and removed; without, nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.apply.folder import FolderCgroups
from proxy.config.load import parse
from proxy.daemon import Daemon
from proxy.demo.client import CriClient, PodSpec
from proxy.demo.runtime import StandInRuntime
from proxy.topology.build import described

MACHINE = described(2, 1, 4, 2)
NARROWS = """
from proxy.hooks.api import Adjustment, CpuSet

API_VERSION = 1

def pre_create_container(event):
    return Adjustment(cpus=CpuSet.parse("{}"))
"""


class Node:
    """Where everything of one test lies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hooks = folder / "hooks.d"
        self.cgroups = FolderCgroups(folder / "cgroup", MACHINE.online, MACHINE.memory_nodes, 1)
        self.runtime = StandInRuntime(folder / "runtime.sock", self.cgroups)

    def daemon(self, text: str = "", hooks: str = "") -> Daemon:
        more = f"""
listen: unix://{self.folder}/cri.sock
adminSocket: unix://{self.folder}/admin.sock
runtime: unix://{self.folder}/runtime.sock
stateDir: {self.folder}/state
hooks:
  folder: {self.hooks}
  vendorFolder: {self.folder}/vendor
  serverFolder: {self.folder}/servers
  {hooks}
"""
        return Daemon(parse(text + more, "test"), machine=MACHINE, cgroups=self.cgroups)

    def write(self, name: str, text: str) -> None:
        """Drop a file as packages do: whole."""
        self.hooks.mkdir(mode=0o755, exist_ok=True)
        beside = self.folder / f".{name}"
        beside.write_text(textwrap.dedent(text))
        beside.chmod(0o644)
        os.replace(beside, self.hooks / name)

    def cpus(self, container_id: str) -> str:
        path = self.cgroups.find("", container_id)
        return "" if path is None else str(self.cgroups.read(path).cpus)

    async def launch(self, spec: PodSpec | str) -> str:
        """Have a pod with one container (LS if only its name is said), and tell its CPUs."""

        def work() -> str:
            with CriClient(self.folder / "cri.sock") as client:
                return client.launch(spec if isinstance(spec, PodSpec) else PodSpec(spec, "LS")).container_id

        return self.cpus(await asyncio.to_thread(work))


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="tp-") as folder:
        made = Node(Path(folder))
        made.runtime.start()
        yield made
        made.runtime.stop()


def live(daemon: Daemon, day: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await daemon.start()
        try:
            await day()
        finally:
            await daemon.stop()

    asyncio.run(whole())


async def until(condition: Callable[[], Any]) -> float:
    """Wait until something is so; gives the seconds that it took."""
    began = time.monotonic()
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
    return time.monotonic() - began


def points(daemon: Daemon) -> frozenset[str]:
    engine = daemon.hooking.engine if daemon.hooking is not None else None
    return frozenset() if engine is None else engine.points


def test_a_file_that_is_dropped_changed_broken_and_removed(node: Node) -> None:
    daemon = node.daemon()

    async def day() -> None:
        assert await node.launch("plain") == "0-15"
        node.write("10-x.py", NARROWS.format("2-3"))
        took = [await until(lambda: "pre_create_container" in points(daemon))]
        assert await node.launch("first") == "2-3"

        def loaded() -> object:
            return daemon.hooking.page()["hooks"][0]

        was = loaded()
        node.write("10-x.py", NARROWS.format("4-5"))
        first = daemon.hooking.engine._hooks
        took.append(await until(lambda: daemon.hooking.engine._hooks != first))
        assert await node.launch("second") == "4-5"
        node.write("10-x.py", "API_VERSION = 1\ndef pre_create_container(:\n")
        await until(lambda: loaded()["broken"])
        assert await node.launch("third") == "4-5", "the version before goes on"
        assert was["name"] == "10-x"
        (node.hooks / "10-x.py").unlink()
        took.append(await until(lambda: not points(daemon)))
        assert await node.launch("fourth") == "0-15"
        assert min(took) < 3, f"takes effect within a second on a machine that is not too busy: {took}"

    live(daemon, day)


def test_hooks_that_are_there_at_the_start_are_asked_of_the_first_call(node: Node) -> None:
    node.write("10-x.py", "import time\ntime.sleep(0.5)\n" + NARROWS.format("6"))
    daemon = node.daemon()

    async def day() -> None:
        assert await node.launch("first") == "6"

    live(daemon, day)


def test_a_hook_is_told_what_exists_and_that_the_daemon_ends(node: Node) -> None:
    node.write(
        "10-story.py",
        f"""
        from pathlib import Path

        API_VERSION = 1
        STORY = Path({str(node.folder / "story")!r})

        def tell(what):
            with STORY.open("a") as story:
                story.write(what + "\\n")

        def configure(event):
            tell("configure " + event.name)

        def synchronize(event):
            for each in event.containers:
                qos = each.pod.labels["koordinator.sh/qosClass"]
                tell("synchronize " + each.pod.name + " " + qos + " " + each.container.name)

        def post_start_container(event):
            tell("start " + event.pod.name)

        def shutdown(event):
            tell("shutdown " + event.reason)
        """,
    )
    kept = node.hooks / "10-story.py"
    hidden = kept.rename(node.folder / "hidden")

    async def before() -> None:
        await node.launch("there")

    async def after() -> None:
        story = node.folder / "story"
        await until(lambda: story.exists() and "synchronize" in story.read_text())
        await node.launch("new")
        await until(lambda: "start new" in story.read_text())

    live(node.daemon(), before)
    hidden.rename(kept)
    live(node.daemon(), after)
    lines = (node.folder / "story").read_text().splitlines()
    assert lines[0] == "configure 10-story"
    assert lines[1] == "synchronize there LS main"
    assert lines[2:] == ["start new", "shutdown stop"]


def test_cpus_of_owners_that_hooks_gave_are_left_when_the_configuration_says_so_no_more(node: Node) -> None:
    node.write("10-x.py", NARROWS.format("3-4"))

    async def before() -> None:
        assert await node.launch(PodSpec("lse", "LSE", cpuset="2-3")) == "3-4"
        assert await node.launch("ls") == "3-4"

    async def after() -> None:
        keeper = daemon.keeper
        assert keeper is not None
        ids = {c.pod.name: i for i, c in keeper.state.containers.items()}
        await until(lambda: (node.cpus(ids["lse"]), node.cpus(ids["ls"])) == ("3", "4"))

    live(node.daemon(hooks="ownedCPUs: true"), before)
    daemon = node.daemon()
    live(daemon, after)


def test_no_hooks_where_only_is_looked_on(node: Node) -> None:
    node.write("10-x.py", NARROWS.format("2"))
    daemon = node.daemon("mode: observe\n")

    async def day() -> None:
        await node.launch("first")
        assert daemon.hooking is None

    live(daemon, day)


def test_no_hooks_where_they_are_switched_off(node: Node) -> None:
    node.write("10-x.py", NARROWS.format("2"))
    daemon = node.daemon(hooks="enabled: false")

    async def day() -> None:
        assert await node.launch("first") == "0-15"
        assert daemon.hooking is None

    live(daemon, day)


def test_a_node_without_hooks_has_nothing_of_them_in_memory(node: Node) -> None:
    story = """
        import asyncio, sys
        sys.path.insert(0, sys.argv[1])
        import test_daemon_hooks as t
        from pathlib import Path
        node = t.Node(Path(sys.argv[2]))
        node.runtime.start()
        daemon = node.daemon()
        async def day():
            assert await node.launch("first") == "0-15"
            await asyncio.sleep(1)
        t.live(daemon, day)
        node.runtime.stop()
        print(*[name for name in sys.modules if name.startswith(("proxy.hooks", "proxy.cri.hooked"))])
    """
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(story),
        str(Path(__file__).parent),
        str(node.folder / "n"),
    ]
    (node.folder / "n").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
