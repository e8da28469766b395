"""Tasks that the kernel has moved away, on the kernel's own v1 hierarchies if there are any."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.backends.cgroup.displaced_tasks import KernelDisplacedTasks
from proxy.backends.cgroup.files import OsCgroupFiles
from proxy.model.errors import CgroupError

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
    assert displaced.move_back(f"{POD}/{ID}") == 1
    assert held(ours) == {mine.pid}
    assert held(ours.parent) == {foreign.pid}, "no other task is taken"
    assert displaced.move_back(f"{POD}/{ID}") == 0, "a group with its tasks has none away"
    assert displaced.move_back(f"{POD}/absent") == 0


def test_tasks_are_found_further_up(groups: tuple[Path, Path], tasks: list[subprocess.Popen[bytes]]) -> None:
    ours, other = groups
    mine, foreign = tasks
    below = other / "init"
    below.mkdir()
    try:
        (below / "cgroup.procs").write_text(str(mine.pid))
        displaced = KernelDisplacedTasks(CPUSET, Path("/proc"))
        assert mine.pid not in held(ours.parent)
        assert displaced.move_back(f"{POD}/{ID}") == 1
        assert held(ours) == {mine.pid}
        assert foreign.pid not in held(ours)
    finally:
        for process in tasks:
            process.kill()
            process.wait()
        below.rmdir()


class Hierarchy:
    """A hierarchy of files, in which processes are moved as in the kernel, and ``/proc``."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.proc = top / "cpuset", top / "proc"
        self.refused: dict[str, int] = {}
        for path in ("", "kubepods", "kubepods/pod1", f"kubepods/pod1/{ID}"):
            self.put(path)
        monkeypatch.setattr(OsCgroupFiles, "write", lambda _, path, name, pid: self.move(path, pid))

    def put(self, path: str, *pids: str) -> None:
        """Put processes of the container into a group, in place of those in it."""
        (self.root / path).mkdir(parents=True, exist_ok=True)
        (self.root / path / "cgroup.procs").write_text("\n".join(pids))
        for pid in pids:
            (self.proc / pid).mkdir(parents=True, exist_ok=True)
            (self.proc / pid / "cgroup").write_text(f"4:memory:/kubepods/pod1/{ID}\n3:cpuset:/{path}\n")

    def pids(self, path: str) -> list[str]:
        return (self.root / path / "cgroup.procs").read_text().split()

    def move(self, path: str, pid: str) -> None:
        if pid in self.refused:
            raise OSError(self.refused[pid], os.strerror(self.refused[pid]))
        for file in self.root.rglob("cgroup.procs"):
            group = str(file.parent.relative_to(self.root))
            self.put(group, *(other for other in self.pids(group) if other != pid))
        self.put(path, *self.pids(path), pid)


def test_tasks_come_back_although_the_group_has_processes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, path = Hierarchy(tmp_path, monkeypatch), f"kubepods/pod1/{ID}"
    tree.put("kubepods/pod1", "100", "101", "102")
    tree.put(path, "200")  # executed in the container since
    displaced = KernelDisplacedTasks(tree.root, tree.proc)
    tree.refused = {"100": errno.ENOSPC, "101": errno.ESRCH}
    with pytest.raises(CgroupError, match=f"cannot move process 100 back into cgroup /{path}: No space"):
        displaced.move_back(path)
    assert tree.pids(path) == ["200", "102"], "the others are moved"
    tree.refused = {}
    assert displaced.move_back(path) == 2
    assert (sorted(tree.pids(path)), tree.pids("kubepods/pod1")) == (["100", "101", "102", "200"], [])


def test_the_root_is_searched_for_tasks_of_empty_groups_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, path = Hierarchy(tmp_path, monkeypatch), f"kubepods/pod1/{ID}"
    displaced = KernelDisplacedTasks(tree.root, tree.proc)
    tree.put("", "100")
    tree.put(path, "200")
    assert displaced.move_back(path) == 0, "the root has all processes of the system"
    tree.put(path)
    assert displaced.move_back(path) == 1
    assert tree.pids(path) == ["100"]


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
        f"print(KernelDisplacedTasks(Path('{CPUSET}'), Path('/proc')).move_back('{POD}/{ID}'))"
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
