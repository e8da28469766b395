"""Hooks of a whole daemon: files that are added, changed and removed while it runs; a node without hooks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.daemon import Daemon
from proxy.demo.client import DemoPod
from tests.testkit.daemon import DaemonNode, run, temporary_node
from tests.testkit.waiting import until

NARROWS = """
from proxy.hooks.api import Adjustment, CpuSet

API_VERSION = 1

def pre_create_container(event):
    return Adjustment(cpus=CpuSet.parse("{}"))
"""


class Node(DaemonNode):
    """A node with directories for hooks."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.hooks = directory / "hooks.d"

    def hooking_daemon(self, text: str = "", hooks: str = "") -> Daemon:
        """Create a daemon; ``hooks`` is an additional line of the hooks section."""
        section = f"""
hooks:
  directory: {self.hooks}
  vendorDirectory: {self.directory}/vendor
  serverDirectory: {self.directory}/servers
  {hooks}
"""
        return self.daemon(text + section)

    def write(self, name: str, text: str) -> None:
        """Add a file atomically, as packages do."""
        self.hooks.mkdir(mode=0o755, exist_ok=True)
        draft = self.directory / f".{name}"
        draft.write_text(textwrap.dedent(text))
        draft.chmod(0o644)
        os.replace(draft, self.hooks / name)

    async def placed(self, spec: DemoPod | str) -> str:
        """Run a pod with one container (LS if only its name is given); return its CPUs."""
        return self.cpus(await self.launch(spec if isinstance(spec, DemoPod) else DemoPod(spec, "LS")))


@pytest.fixture
def node() -> Iterator[Node]:
    with temporary_node(Node) as made:
        yield made


def points(daemon: Daemon) -> frozenset[str]:
    engine = daemon.parts.hooks.engine if daemon.parts.hooks is not None else None
    return frozenset() if engine is None else engine.points


def test_a_hook_file_is_added_changed_broken_and_removed(node: Node) -> None:
    daemon = node.hooking_daemon()

    async def scenario() -> None:
        assert await node.placed("plain") == "0-15"
        node.write("10-x.py", NARROWS.format("2-3"))
        took = [await until(lambda: "pre_create_container" in points(daemon))]
        assert await node.placed("first") == "2-3"

        def loaded() -> object:
            return daemon.parts.hooks.page()["hooks"][0]

        was = loaded()
        node.write("10-x.py", NARROWS.format("4-5"))
        first = daemon.parts.hooks.engine._hooks
        took.append(await until(lambda: daemon.parts.hooks.engine._hooks != first))
        assert await node.placed("second") == "4-5"
        node.write("10-x.py", "API_VERSION = 1\ndef pre_create_container(:\n")
        await until(lambda: loaded()["broken"])
        assert await node.placed("third") == "4-5", "the previous version stays in effect"
        assert was["name"] == "10-x"
        (node.hooks / "10-x.py").unlink()
        took.append(await until(lambda: not points(daemon)))
        assert await node.placed("fourth") == "0-15"
        assert min(took) < 3, f"takes effect within a second on a machine that is not too busy: {took}"

    run(daemon, scenario)


def test_hooks_present_at_the_start_are_called_for_the_first_request(node: Node) -> None:
    node.write("10-x.py", "import time\ntime.sleep(0.5)\n" + NARROWS.format("6"))
    daemon = node.hooking_daemon()

    async def scenario() -> None:
        assert await node.placed("first") == "6"

    run(daemon, scenario)


def test_a_hook_is_notified_of_existing_state_and_of_the_end(node: Node) -> None:
    node.write(
        "10-record.py",
        f"""
        from pathlib import Path

        API_VERSION = 1
        RECORD = Path({str(node.directory / "record")!r})

        def tell(what):
            with RECORD.open("a") as record:
                record.write(what + "\\n")

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
    kept = node.hooks / "10-record.py"
    hidden = kept.rename(node.directory / "hidden")

    async def before() -> None:
        await node.placed("there")

    async def after() -> None:
        record = node.directory / "record"
        await until(lambda: record.exists() and "synchronize" in record.read_text())
        await node.placed("new")
        await until(lambda: "start new" in record.read_text())

    run(node.hooking_daemon(), before)
    hidden.rename(kept)
    run(node.hooking_daemon(), after)
    lines = (node.directory / "record").read_text().splitlines()
    assert lines[0] == "configure 10-record"
    assert lines[1] == "synchronize there LS main"
    assert lines[2:] == ["start new", "shutdown stop"]


def test_owned_cpus_from_hooks_are_left_when_the_setting_is_off(node: Node) -> None:
    node.write("10-x.py", NARROWS.format("3-4"))

    async def before() -> None:
        assert await node.placed(DemoPod("lse", "LSE", cpuset="2-3")) == "3-4"
        assert await node.placed("ls") == "3-4"

    async def after() -> None:
        executor = daemon.executor
        assert executor is not None
        ids = {c.pod.name: i for i, c in executor.state.containers.items()}
        await until(lambda: (node.cpus(ids["lse"]), node.cpus(ids["ls"])) == ("3", "4"))

    run(node.hooking_daemon(hooks="ownedCPUs: true"), before)
    daemon = node.hooking_daemon()
    run(daemon, after)


def test_no_hooks_run_in_observe_mode(node: Node) -> None:
    node.write("10-x.py", NARROWS.format("2"))
    daemon = node.hooking_daemon("mode: observe\n")

    async def scenario() -> None:
        await node.placed("first")
        assert daemon.parts.hooks is None

    run(daemon, scenario)


def test_no_hooks_run_when_they_are_disabled(node: Node) -> None:
    node.write("10-x.py", NARROWS.format("2"))
    daemon = node.hooking_daemon(hooks="enabled: false")

    async def scenario() -> None:
        assert await node.placed("first") == "0-15"
        assert daemon.parts.hooks is None

    run(daemon, scenario)


def test_a_node_without_hooks_loads_no_hook_modules(node: Node) -> None:
    program = """
        import asyncio, sys
        from pathlib import Path
        from tests.test_daemon_hooks import Node
        from tests.testkit.daemon import run
        node = Node(Path(sys.argv[1]))
        node.runtime.start()
        daemon = node.hooking_daemon()
        async def scenario():
            assert await node.placed("first") == "0-15"
            await asyncio.sleep(1)
        run(daemon, scenario)
        node.runtime.stop()
        of_hooks = ("proxy.hooks.", "proxy.frontends.hook_bridge")
        print(*[name for name in sys.modules if name.startswith(of_hooks)])
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(node.directory / "n")]
    (node.directory / "n").mkdir()
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


LABELS = """
from dataclasses import dataclass

from proxy.hooks.api import Adjustment, CpuSet

API_VERSION = 1

@dataclass
class Settings:
    cpus: str = "0-3"

def configure(event):
    global CPUS
    CPUS = CpuSet.parse(event.settings.cpus)

def pre_create_container(event):
    return Adjustment(cpus=CPUS)
"""


def test_a_reload_changes_the_settings_of_a_hook(node: Node) -> None:
    file = node.directory / "config.yaml"

    def write(settings: str, directory: Path) -> str:
        text = (
            f"hooks: {{directory: {directory}, vendorDirectory: {node.directory}/vendor, "
            f"serverDirectory: {node.directory}/servers{settings}}}\n"
        )
        file.write_text(node.configuration(text))
        return text

    node.write("10-narrow.py", LABELS)
    daemon = node.daemon(write("", node.hooks), file=file)

    async def reload(settings: str, directory: Path | None = None) -> None:
        write(settings, directory or node.hooks)
        page = await daemon.parts.reload.action()
        assert page["reload"]["result"] == "applied", page

    def entry() -> str:
        rows = daemon.parts.pages.hooks()["hooks"]
        return " ".join(f"{row['state']} {row.get('timeout')} {row['error']}" for row in rows).strip()

    async def scenario() -> None:
        await until(lambda: entry() == "running 0.5")
        assert await node.placed("before") == "0-3"
        await reload(", settings: {10-narrow: {timeout: 2s, config: {cpus: 4-5}}}")
        await until(lambda: entry() == "running 2.0")
        assert await node.placed("after") == "4-5"
        await reload(", settings: {10-narrow: {config: {cpus: 7}}}")
        await until(lambda: "hooks.settings.10-narrow.config.cpus" in entry())
        assert await node.placed("wrong") == "4-5", "the previous version stays in effect"
        await reload(", timeout: 3s, settings: {10-narrow: {config: {cpus: 6-7}}}")
        await until(lambda: entry() == "running 3.0")
        assert await node.placed("right") == "6-7"
        await reload("", node.directory / "elsewhere")
        await until(lambda: entry() == "")
        assert await node.placed("without") == "0-15"

    run(daemon, scenario, reconciled=True)
