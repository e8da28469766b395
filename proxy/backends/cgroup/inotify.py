"""Notifications when another process writes a group's cpuset.

The kernel reports writes to the files of cgroups as for any file (IN_MODIFY): from any process, mount or
namespace, even if they change nothing. It does not report its own changes (CPUs that go offline, effective
sets), nor the removal of a group, so the caller must say when to stop watching. A watch is on the one file
and not on the directory, because each ``exec`` in a container writes files in the directory too.

Three functions of the C library are called with ctypes, which the daemon has loaded anyway; the packages for
inotify create a file object for each event, or a thread. fanotify would report the writer too, but needs
CAP_SYS_ADMIN.

inotify(7); the limits are ``fs.inotify.max_user_{instances,watches}``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

from proxy.model.errnos import ABSENT
from proxy.model.errors import CgroupError

_MODIFY, _OVERFLOW, _IGNORED = 0x2, 0x4000, 0x8000
_EVENT = struct.Struct("iIII")
"""``struct inotify_event`` without the name, which events of a watched file do not have."""
_READ_BYTES = 64 << 10
_FILE = "cpuset.cpus"
_CAUSES = {
    errno.EMFILE: "too many inotify instances (fs.inotify.max_user_instances)",
    errno.ENOSPC: "too many inotify watches (fs.inotify.max_user_watches)",
}


class InotifyWrites:
    """Implements ``proxy.executor.kernel_ports.WriteEvents`` for a hierarchy, v1 or v2."""

    def __init__(self, root: Path) -> None:
        """Open an inotify instance that watches nothing yet.

        Args:
            root: The root of the hierarchy with the cpuset controller.

        Raises:
            CgroupError: The kernel refuses an inotify instance.
        """
        self._root = str(root)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._paths: dict[int, str] = {}
        self._watches: dict[str, int] = {}
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _error("watch cpusets for writes by others")

    def fileno(self) -> int:
        """Return the descriptor, which is readable when events wait."""
        return self._fd

    def watch(self, path: str) -> bool:
        """Watch a group; see ``proxy.executor.kernel_ports.WriteEvents``."""
        if self._fd < 0:
            return False
        file = os.fsencode(f"{self._root}/{path}/{_FILE}")
        watch = self._libc.inotify_add_watch(self._fd, file, _MODIFY)
        if watch < 0:
            if ctypes.get_errno() in ABSENT:
                return False
            raise _error("watch cpusets for writes by others")
        known = self._watches.get(path)
        if known != watch:
            self._watches[path] = watch
            self._paths[watch] = path
            if known is not None:
                self._drop(known)  # this is a new group with the same name
        return True

    def unwatch(self, path: str) -> None:
        """Stop watching a group."""
        watch = self._watches.pop(path, None)
        if watch is not None:
            self._drop(watch)

    def _drop(self, watch: int) -> None:
        self._paths.pop(watch, None)
        if self._fd >= 0:
            self._libc.inotify_rm_watch(self._fd, watch)

    def watched(self) -> set[str]:
        """Return the groups that are watched."""
        return set(self._watches)

    def read_events(self) -> set[str] | None:
        """Read the notifications; see ``proxy.executor.kernel_ports.WriteEvents``."""
        written: set[str] = set()
        while True:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return written
            at = 0
            while at < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                if mask & _OVERFLOW:
                    return None
                path = self._paths.get(watch)
                if path is None:
                    continue
                if mask & _IGNORED:  # the file is gone, and its watch too; ``watch`` may have dropped it
                    self._paths.pop(watch, None)
                    if self._watches.get(path) == watch:
                        self._watches.pop(path, None)
                else:
                    written.add(path)

    def close(self) -> None:
        """Stop watching everything."""
        fd, self._fd = self._fd, -1
        self._watches.clear()
        self._paths.clear()
        if fd >= 0:
            os.close(fd)


def _error(action: str) -> CgroupError:
    number = ctypes.get_errno()
    return CgroupError(f"cannot {action}: {_CAUSES.get(number) or os.strerror(number)}", number)
