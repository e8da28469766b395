"""Tasks that the kernel has moved away, on the kernel's own v1 hierarchies where there are any."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.backends.cgroup.displaced_tasks import KernelDisplacedTasks

CPUSET, OTHER = Path("/sys/fs/cgroup/cpuset"), Path("/sys/fs/cgroup/memory")
SERVICE = Path(__file__).parents[3] / "systemd/topoproxy.service"
ID = "c0ffee" * 4
POD = f"topoproxy-displaced-{os.getpid()}"


@pytest.fixture
def groups() -> Iterator[tuple[Path, Path]]:
    """A container's group in two hierarchies, without tasks; the directories of both."""
    if os.geteuid() != 0 or not (CPUSET / "cpuset.cpus").exists() or not (OTHER / "cgroup.procs").exists():
        pytest.skip("needs root and cgroup v1")
    made = []
    try:
        for top in (CPUSET, OTHER):
            for directory in (top / POD, top / POD / ID):
                directory.mkdir()
                made.append(directory)
                for name in ("cpuset.cpus", "cpuset.mems") if top == CPUSET else ():
                    (directory / name).write_text((directory.parent / name).read_text())
        yield CPUSET / POD / ID, OTHER / POD / ID
    finally:
        for directory in reversed(made):
            directory.rmdir()


@pytest.fixture
def tasks(groups: tuple[Path, Path]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes."""
    found = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield found
    for process in found:
        process.kill()
        process.wait()


def held(group: Path) -> set[int]:
    return {int(pid) for pid in (group / "cgroup.procs").read_text().split()}


def test_tasks_come_back_to_their_group(
    groups: tuple[Path, Path], tasks: list[subprocess.Popen[bytes]]
) -> None:
    ours, other = groups
    mine, foreign = tasks
    (other / "cgroup.procs").write_text(str(mine.pid))  # nothing was moved
    for process in tasks:
        (ours.parent / "cgroup.procs").write_text(str(process.pid))  # the kernel moved it here
    displaced = KernelDisplacedTasks(CPUSET, Path("/proc"))
    assert displaced.bring_back(f"{POD}/{ID}") == 1
    assert held(ours) == {mine.pid}
    assert held(ours.parent) == {foreign.pid}, "no other task is taken"
    assert displaced.bring_back(f"{POD}/{ID}") == 0, "a group with its tasks has none away"
    assert displaced.bring_back(f"{POD}/absent") == 0


def test_tasks_are_found_further_up(groups: tuple[Path, Path], tasks: list[subprocess.Popen[bytes]]) -> None:
    ours, other = groups
    mine, foreign = tasks
    below = other / "init"
    below.mkdir()
    try:
        (below / "cgroup.procs").write_text(str(mine.pid))
        displaced = KernelDisplacedTasks(CPUSET, Path("/proc"))
        assert mine.pid not in held(ours.parent)
        assert displaced.bring_back(f"{POD}/{ID}") == 1
        assert held(ours) == {mine.pid}
        assert foreign.pid not in held(ours)
    finally:
        for process in tasks:
            process.kill()
            process.wait()
        below.rmdir()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) is not installed")
@pytest.mark.parametrize("without", ["", "SYS_NICE"])
def test_the_capabilities_of_the_shipped_unit_are_enough(
    groups: tuple[Path, Path], tasks: list[subprocess.Popen[bytes]], without: str
) -> None:
    """The kernel requires more of a process that moves another one with more capabilities."""
    ours, other = groups
    (other / "cgroup.procs").write_text(str(tasks[0].pid))  # it has all that root has here
    (found,) = re.findall(r"^CapabilityBoundingSet=(.*)$", SERVICE.read_text(), re.MULTILINE)
    names = {name.removeprefix("CAP_") for name in found.split()} - {without}
    some = ",".join(["-all", *(f"+{name.lower()}" for name in sorted(names))])
    code = (
        "from pathlib import Path; from proxy.backends.cgroup.displaced_tasks import KernelDisplacedTasks; "
        f"print(KernelDisplacedTasks(Path('{CPUSET}'), Path('/proc')).bring_back('{POD}/{ID}'))"
    )
    command = ["setpriv", f"--bounding-set={some}", "--inh-caps=-all", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if without:
        assert "cannot move process" in done.stderr
        assert "CAP_SYS_NICE" in done.stderr
        assert not held(ours)
    else:
        assert done.stdout == "1\n", done.stderr
        assert held(ours) == {tasks[0].pid}
