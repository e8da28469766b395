"""Reports and actions of the kernel other than its files: implementations of the daemon's ports."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet

if TYPE_CHECKING:
    from tests.simulation.kernel import SimulatedFiles, SimulatedGroup, SimulatedKernel


class SimulatedFences:
    """Implements ``proxy.executor.systemd.ports.Fences``."""

    def __init__(self, files: SimulatedFiles) -> None:
        self._files = files

    def replace_cpus(self, path: str, cpus: CpuSet) -> CpuSet:
        try:
            before = CpuSet.parse(self._files.read(path, "cpuset.cpus").strip())
            if before != cpus:
                self._files.write(path, "cpuset.cpus", f"{cpus}\n")
        except OSError as error:
            raise CgroupError(f"cannot set CPUs of cgroup /{path}", error.errno or 0) from None
        return before


class SimulatedWrites:
    """Reports writes to watched groups; implements ``proxy.executor.kernel_ports.WriteEvents``."""

    FD = 1001

    def __init__(self, kernel: SimulatedKernel, wake: Callable[[int], None], limit: int) -> None:
        self._kernel = kernel
        self._wake = wake
        self._limit = limit
        self._watched: dict[str, SimulatedGroup] = {}
        self._written: dict[str, None] = {}
        self.overflown = False

    def written(self, path: str) -> None:
        """A group's list was written."""
        if self._watched.get(path) is self._kernel.groups.get(path) and path in self._watched:
            self._written[path] = None
            self._wake(self.FD)

    @property
    def pending(self) -> bool:
        return bool(self._written)

    def fileno(self) -> int:
        return self.FD

    def watch(self, path: str) -> bool:
        group = self._kernel.groups.get(path)
        if group is None:
            self._watched.pop(path, None)
            return False
        if path not in self._watched and len(self._watched) >= self._limit:
            raise CgroupError("cannot watch cpusets for writes by others: too many", errno.ENOSPC)
        self._watched[path] = group
        return True

    def unwatch(self, path: str) -> None:
        self._watched.pop(path, None)

    def watched(self) -> set[str]:
        return set(self._watched)

    def read_events(self) -> set[str] | None:
        written, self._written = self._written, {}
        if self.overflown:
            self.overflown = False
            return None
        return {path for path in written if path in self._watched}

    def close(self) -> None:
        self._watched.clear()


class SimulatedMachineEvents:
    """Reports CPUs that go and return; implements ``proxy.executor.ports.MachineEvents``."""

    FD = 1002

    def __init__(self, wake: Callable[[int], None]) -> None:
        self._wake = wake
        self.pending = False

    def change(self) -> None:
        """The machine is another one now."""
        self.pending = True
        self._wake(self.FD)

    def fileno(self) -> int:
        return self.FD

    def read_changes(self) -> bool:
        pending, self.pending = self.pending, False
        return pending

    def close(self) -> None:
        self.pending = False


class SimulatedDisplacedTasks:
    """Brings back processes of v1 groups that had run empty; implements ``ports.DisplacedTasks``."""

    def __init__(self, kernel: SimulatedKernel) -> None:
        self._kernel = kernel

    def move_back(self, path: str) -> int:
        group = self._kernel.groups.get(path)
        if group is None or not group.displaced or not group.cpus:
            return 0
        group.displaced = False
        self._kernel.on_effective_change(group)
        return 1
