"""A simulated kernel that reports writes; ``tests/executor/test_writes.py`` compares it with the real one."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection

from proxy.model.errors import CgroupError


class PlayedWrites:
    """Implements ``proxy.executor.kernel_ports.WriteEvents``."""

    def __init__(self, groups: Collection[str], room: int = 1000) -> None:
        """``groups``: those that exist; ``room``: how many may be watched."""
        self.groups, self.room = groups, room
        self.flooded = False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watched: set[str] = set()
        self._changed: set[str] = set()

    def write(self, path: str) -> None:
        """Simulate a write of a group's cpuset by a process."""
        if path in self._watched:
            self._changed.add(path)
            os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def watch(self, path: str) -> bool:
        if path not in self.groups:
            return False
        if path not in self._watched and len(self._watched) >= self.room:
            raise CgroupError("cannot watch cpusets for writes by others: too many", errno.ENOSPC)
        self._watched.add(path)
        return True

    def unwatch(self, path: str) -> None:
        self._watched.discard(path)

    def watched(self) -> set[str]:
        return set(self._watched)

    def read_events(self) -> set[str] | None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return set()
        changed, self._changed = self._changed & self._watched, set()
        if self.flooded:
            self.flooded = False
            return None
        return changed

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._watched.clear()
