"""docs/hooks.md: its files are created and its commands run with a daemon; the outputs match."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.admin.client import query_admin
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.cli.hooks.file_commands import shipped
from proxy.config.load import parse
from proxy.config.schema import HooksConfig
from proxy.demo.environment import ProxyProcess
from proxy.demo.runtime import StandInRuntime
from proxy.telemetry import metrics
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/hooks.md"
TEXT = PAGE.read_text() if PAGE.exists() else ""
FILE = re.compile(r"`([\w.-]+\.(?:py|json|yaml))`[^`\n]*:\n\n```\w+\n(.*?)^```", re.M | re.S)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.M | re.S)
GUIDE_PATHS = ("/etc/topoproxy", "/usr/lib/topoproxy", "/etc/runtime", "/run/topoproxy")
COMMAND = """#!{python}
from pathlib import Path
from proxy.cli.main import main
from proxy.config import load
load.__defaults__ = (None, Path({config!r}))  # the usual place of the configuration
main()
"""
PATIENT = ("topoproxy hooks list", "topoproxy status")
LIMIT_S = 30

pytestmark = [
    pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not there"),
    pytest.mark.skipif(shutil.which("install") is None, reason="install (coreutils) is not there"),
]


@dataclass
class GuideRoot:
    """The place of the guide's files: a root for its absolute paths, and a working directory."""

    root: Path
    work: Path

    def run_command(self, command: str) -> str:
        """Run a command; returns its output, with the guide's paths."""
        for path in GUIDE_PATHS:
            command = command.replace(path, f"{self.root}{path}")
        path = f"{self.root}/bin{os.pathsep}{os.environ['PATH']}"
        surroundings = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "80" if command.startswith("pytest") else "200",
        }
        done = subprocess.run(
            ["sh", "-c", f"{command} 2>&1"],
            cwd=self.work,
            env=surroundings,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.replace(str(self.root), "")


@pytest.fixture(scope="module")
def guide_root() -> Iterator[GuideRoot]:
    machine = regular_machine(2, 1, 4, 2)
    with tempfile.TemporaryDirectory(prefix="tp-") as short:
        root = Path(short).resolve()
        created = GuideRoot(root, root / "work")
        for directory in ("work", "bin", "proc", "etc/topoproxy/hooks.d", "etc/runtime/hookserver.d"):
            (root / directory).mkdir(parents=True)
        write_sysfs(machine, root / "machine")
        cgroups = FakeCgroups(root / "cgroup", machine.online, machine.memory_nodes, 1)
        hooks = {
            "directory": f"{root}/etc/topoproxy/hooks.d",
            "vendorDirectory": f"{root}/usr/lib/topoproxy/hooks.d",
            "serverDirectory": f"{root}/etc/runtime/hookserver.d",
            "settings": {"30-cpus-file": {"config": {"root": f"{root}/cpus"}}},
        }
        proxy = ProxyProcess(
            root,
            {
                "runtime": f"unix://{root}/runtime.sock",
                "sysfsRoot": f"{root}/machine/sys",
                "cgroupRoot": f"{root}/cgroup",
                "procfsRoot": f"{root}/proc",
                "hooks": hooks,
            },
        )
        _script(root / "bin/topoproxy", COMMAND.format(python=sys.executable, config=f"{root}/config.yaml"))
        _script(
            root / "bin/pytest",
            f'#!/bin/sh\nexec "{sys.executable}" -m pytest -p no:cacheprovider "$@"\n',
        )
        with StandInRuntime(root / "runtime.sock", cgroups):
            proxy.start()
            try:
                _until_ready(proxy)
                yield created
            finally:
                proxy.stop()


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _until_ready(proxy: ProxyProcess) -> None:
    end = time.monotonic() + LIMIT_S
    while not (answer := query_admin(proxy.admin, "/status", LIMIT_S)) or not answer["ready"]:  # type: ignore[index]
        assert time.monotonic() < end
        time.sleep(0.02)


def _pattern(expected: str) -> re.Pattern[str]:
    return re.compile(re.escape(expected).replace(re.escape("[...]"), ".*?"))


def test_every_command_prints_what_the_guide_has(guide_root: GuideRoot) -> None:
    for name, body in FILE.findall(TEXT):
        (guide_root.work / name).write_text(body)
        (guide_root.work / name).chmod(0o644)
    blocks = CONSOLE.findall(TEXT)
    assert len(blocks) >= 10
    for block in blocks:
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, expected = part.partition("\n")
            reported, end = guide_root.run_command(command), time.monotonic() + LIMIT_S
            while not _pattern(expected).fullmatch(reported) and command.startswith(PATIENT):
                assert time.monotonic() < end, f"{command}\n{reported}\ninstead of\n{expected}"
                time.sleep(0.1)
                reported = guide_root.run_command(command)
            assert _pattern(expected).fullmatch(reported), f"{command}\n{reported}\ninstead of\n{expected}"


def test_every_python_example_runs() -> None:
    named = {body for _, body in FILE.findall(TEXT)}
    pieces = [body for body in re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S) if body not in named]
    assert pieces
    for piece in pieces:
        exec(compile(piece, str(PAGE), "exec"), {})


def test_the_documented_defaults_are_those_of_the_code() -> None:
    pieces = [
        parse(body, "the guide").hooks for body in re.findall(r"^```yaml\n(.*?)^```", TEXT, re.M | re.S)
    ]
    assert pieces[0] == HooksConfig()
    assert len(pieces) == 3


def test_all_shipped_hooks_are_in_the_table() -> None:
    table = re.findall(r"^\| `(\d\d-[\w-]+)` \|", TEXT, re.M)
    assert table == sorted(shipped())


def test_every_explained_message_exists_in_the_code() -> None:
    """A cell of the tables of faults has messages in backticks, with ``...`` for variable parts."""
    sources = [
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())  # strings in several pieces
        for path in [*ROOT.glob("proxy/**/*.py")]
        if "/api/" not in str(path)
    ]
    reported = "\n".join(sources)
    reported += reported.replace("{what}", "hook")
    start = TEXT.index("## When something is wrong")
    cells = re.findall(r"^\| (`.*?) \| ", TEXT[start:], re.M)
    assert len(cells) > 25
    for sentence in (s for cell in cells for s in re.findall(r"`([^`]+)`", cell)):
        pieces = [p.strip(" :;?") for p in re.split(r"\.\.\.|NN?AME|SyntaxError|hooks\.settings\.", sentence)]
        for piece in (p for p in pieces if len(p) > 4):
            assert piece in reported, f"no message of the code contains {piece!r} ({sentence})"


def test_documented_metrics_exist() -> None:
    declared = {metric.name for metric in metrics.DAEMON_METRICS}
    named = re.findall(r"^\| `topoproxy_(hook\w*?)(?:_total)?\{", TEXT, re.M)
    assert len(named) == 11
    for name in named:
        assert name in declared
