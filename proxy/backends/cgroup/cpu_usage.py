"""Read the CPU time of the node and its pods from the kernel's counters.

The kernel counts the CPU time of every group: ``cpuacct.usage`` on v1 (nanoseconds), ``usage_usec`` in
``cpu.stat`` on v2, which exists there without any controller. The counter of a group includes all groups that
were ever below it, so the counter of a pod includes containers that have ended. The node's own counter is the
first line of ``/proc/stat``: all time that is neither idle, nor waiting for a disk, nor stolen by a
hypervisor. It includes interrupts, which no group's counter includes.

A few hundred counters are read every second, so their files stay open and are read with ``pread``. If a read
fails with ENODEV, the group is gone; the file is closed, and the group is opened again by its name. How two
readings are used is described in ``proxy.engine.be_usage``.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from proxy.backends.cgroup import group_names
from proxy.backends.cgroup.hierarchies import controller_mounts, mounts_elsewhere
from proxy.backends.cgroup.v2_values import parse_cpu_usage
from proxy.engine.be_usage import UsageGroup, UsageReading
from proxy.model.errnos import ABSENT
from proxy.model.errors import CgroupError

_OPEN_FILES_LIMIT = 1024
"""The most files that stay open; further files are opened for each reading."""
_READ_BYTES = 4096
_STAT_LINE_BYTES = 1024
_BUSY_COLUMNS = (1, 2, 3, 6, 7)
"""Columns of the first line of /proc/stat: user (with guests), nice, system, interrupts, soft interrupts."""

V1_FILE, V2_FILE = "cpuacct.usage", "cpu.stat"
_PARSERS: Mapping[str, Callable[[str], int]] = {V1_FILE: int, V2_FILE: parse_cpu_usage}


class CgroupUsage:
    """Reads counters, for one thread at a time; implements ``proxy.executor.kernel_ports.UsageSource``."""

    def __init__(self, root: Path, file: str, procfs: Path = Path("/proc")) -> None:
        """Use the hierarchy at a known path; ``open_usage`` finds it.

        Args:
            root: Where the hierarchy is mounted.
            file: ``V1_FILE`` or ``V2_FILE``: the file of a group that contains its counter.
            procfs: Where /proc is.
        """
        self.root = root
        self._file = file
        self._parse = _PARSERS[file]
        self._procfs = procfs
        self._tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        self._open: dict[str, int] = {}

    def read(self, groups: Mapping[str, UsageGroup]) -> UsageReading:
        """Read the counters; see ``proxy.executor.kernel_ports.UsageSource.read``."""
        at = time.monotonic_ns()
        node = self._read_node()
        usage: dict[str, Mapping[str, int]] = {}
        seen: set[str] = set()
        for key, group in groups.items():
            counters = self._read_group(group)
            if counters:
                usage[key] = counters
                seen |= counters.keys()
        for path in [path for path in self._open if path not in seen and path]:
            self._close(path)
        return UsageReading(at, node, usage)

    def best_effort_group(self, parents: Iterable[str]) -> str:
        """Find the group above BestEffort pods.

        See ``proxy.executor.kernel_ports.UsageSource.best_effort_group``.
        """
        above = Counter[str]()
        for parent in parents:
            path = (group_names.parent_path(parent) or "").rpartition("/")[0]
            if path.rpartition("/")[2] == "besteffort" or path.endswith("-besteffort.slice"):
                above[path] += 1
        return above.most_common(1)[0][0] if above else ""

    def close(self) -> None:
        """Close all files."""
        for path in list(self._open):
            self._close(path)

    # Counters

    def _read_node(self) -> int:
        try:
            with (self._procfs / "stat").open("rb", buffering=0) as file:
                line = file.read(_STAT_LINE_BYTES).split(b"\n", 1)[0].split()
            if line[0] == b"cpu":
                return sum(int(line[i]) for i in _BUSY_COLUMNS) * self._tick_ns
        except (OSError, ValueError, IndexError):
            pass
        whole = self._read_counter("")
        if whole is None:
            raise CgroupError(f"cannot read the node's CPU time: neither {self._procfs}/stat nor {self.root}")
        return whole

    def _read_group(self, group: UsageGroup) -> dict[str, int]:
        """Read a pod's counter, or the counters of its containers if ``cgroup_parent`` names no group."""
        path = group_names.parent_path(group.parent)
        if path:
            used = self._read_counter(path)
            return {} if used is None else {path: used}
        usage: dict[str, int] = {}
        for container in group.containers:
            for candidate in group_names.candidates(group.parent, container):
                used = self._read_counter(candidate)
                if used is not None:
                    usage[candidate] = used
                    break
        return usage

    def _read_counter(self, path: str) -> int | None:
        """Read one counter, in nanoseconds; None if the group is gone.

        Raises:
            CgroupError: The file exists but cannot be read.
        """
        for again in (True, False):
            fd = self._open.get(path)
            try:
                was_open = fd is not None
                if fd is None:
                    fd = os.open(self._full(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                    if len(self._open) < _OPEN_FILES_LIMIT:
                        self._open[path] = fd
                try:
                    text = os.pread(fd, _READ_BYTES, 0).decode("ascii", "replace")
                finally:
                    if path not in self._open:
                        os.close(fd)
            except OSError as error:
                self._close(path)
                if error.errno not in ABSENT:
                    raise CgroupError(
                        f"cannot read the CPU time of cgroup /{path}: {error.strerror}", error.errno or 0
                    ) from None
                if was_open and again:
                    continue  # a new group may exist under the same name
                return None
            try:
                return self._parse(text)
            except ValueError:
                raise CgroupError(
                    f"cannot read the CPU time of cgroup /{path}: {text[:40]!r} is not a number"
                ) from None
        return None

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}/{self._file}" if path else f"{self.root}/{self._file}"

    def _close(self, path: str) -> None:
        fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)


def open_usage(root: Path, procfs: Path = Path("/proc"), mounts: Path = Path("/proc")) -> CgroupUsage:
    """Find the hierarchy that counts CPU time.

    Args:
        root: The value of ``cgroupRoot``: usually ``/sys/fs/cgroup``; can also be a v1 cpuset mount itself or
            a directory with an imitated tree.
        procfs: Where /proc is.
        mounts: The /proc with this process's mount table, which is used if the hierarchy is at none of its
            usual places.

    Raises:
        CgroupError: There is no such hierarchy.
    """
    for mount in (root / "cpuacct", root / "cpu,cpuacct", root, root.parent / "cpuacct"):
        if (mount / V1_FILE).is_file():
            return CgroupUsage(mount, V1_FILE, procfs)
    for mount in (root, root / "unified"):
        if (mount / "cgroup.controllers").is_file() and (mount / V2_FILE).is_file():
            return CgroupUsage(mount, V2_FILE, procfs)
    for mount, version in controller_mounts(
        mounts_elsewhere(root, mounts), "cpuacct", V1_FILE, always=V2_FILE
    ):
        return CgroupUsage(mount, V1_FILE if version == 1 else V2_FILE, procfs)
    raise CgroupError(
        f"cannot find the kernel's CPU times below {root}: neither a v1 mount with {V1_FILE} nor a v2"
        " hierarchy"
    )
