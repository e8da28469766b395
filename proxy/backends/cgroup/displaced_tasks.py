"""Move back tasks that the kernel has moved out of a group that lost its last CPU or memory node (v1).

A v1 group whose list becomes empty cannot hold tasks: the kernel moves them to the nearest ancestor that can,
and does not move them back. There they run on all CPUs of the group of their pod or of their QoS class. They
can still be identified by the other hierarchies, in which no task was moved: their group of the memory or the
cpu controller has the container's name. On v2 a group with an empty list has its parent's CPUs, and no task
is moved.

The groups above are searched even if the container's group has processes again: an exec may have started
these processes since, or an earlier attempt may have moved them back. If it has processes, only the root of
the hierarchy, which contains all processes of the system, is not searched.

A process that moves another process into a cpuset group needs all capabilities of the other process, or
CAP_SYS_NICE; otherwise the write fails with EPERM, even for root (Linux, ``cap_task_setscheduler``;
systemd/topoproxy.service grants it).

Linux, kernel/cgroup/cpuset-v1.c, ``remove_tasks_in_empty_cpuset``.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from proxy.backends.cgroup.files import OsCgroupFiles, read_kernel_file
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError

PROCS_FILE = "cgroup.procs"
ROUNDS_LIMIT = 3
"""The groups above are searched up to three times, because new processes can start while others are moved."""
_DENIED = "cannot move process {pid} back into cgroup /{path}: the kernel wants CAP_SYS_NICE for that"
_REFUSED = "cannot move process {pid} back into cgroup /{path}: {reason}"


class KernelDisplacedTasks:
    """Moves tasks back into their groups; implements ``proxy.executor.ports.DisplacedTasks``."""

    def __init__(self, root: Path, procfs: Path) -> None:
        """Set the hierarchy.

        Args:
            root: Where the cpuset controller's v1 hierarchy is mounted.
            procfs: Used in place of ``/proc``.
        """
        self._root = root
        self._procfs = procfs

    def move_back(self, path: str) -> int:
        """Move the tasks of a group back into it; see ``proxy.executor.ports.DisplacedTasks``."""
        group = self._root / path
        if not group.is_dir():
            return 0
        above = group.parent
        while above != self._root:
            if moved := self._move_back_from(above, path):
                return moved
            above = above.parent
        return 0 if _has_processes(group) else self._move_back_from(self._root, path)

    def _move_back_from(self, above: Path, path: str) -> int:
        """Move the tasks of a group that are in a group above it back into it."""
        name, files, moved = path.rpartition("/")[2], OsCgroupFiles(self._root), 0
        for _ in range(ROUNDS_LIMIT):
            refused: list[CgroupError] = []
            displaced = [pid for pid in _processes(above) if self._is_in_group_named(pid, name)]
            for pid in displaced:
                try:
                    files.write(path, PROCS_FILE, pid)
                    moved += 1
                except OSError as error:
                    if error.errno in (*GONE, errno.ESRCH):
                        continue  # the process has ended, or the group is gone
                    text = _DENIED if isinstance(error, PermissionError) else _REFUSED
                    message = text.format(pid=pid, path=path, reason=error.strerror)
                    refused.append(CgroupError(message, error.errno or 0))
            if not displaced:
                break
        if refused:
            raise refused[0]
        return moved

    def _is_in_group_named(self, pid: str, name: str) -> bool:
        """Return whether a process is in a group of that name, or below one, in another hierarchy."""
        try:
            lines = (self._procfs / pid / "cgroup").read_text().splitlines()
        except OSError:
            return False
        return any(name in line.split(":", 2)[-1].split("/") for line in lines)


def _has_processes(group: Path) -> bool:
    """Return whether a group, or a group below it, has processes."""
    return any(_processes(Path(directory)) for directory, _, _ in os.walk(group))


def _processes(group: Path) -> list[str]:
    try:
        return read_kernel_file(group / PROCS_FILE).split()
    except OSError:
        return []
