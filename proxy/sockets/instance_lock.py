"""Ensures one instance at a time: with a lock file that the death of its holder releases.

The lock is flock(2) on an open file, so the kernel releases it when the process ends, for whatever reason.
The file itself stays. If it were removed, a second process could lock a new file of the same name while a
third waits for the old one. The pid in the file is only for messages.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from proxy.model.errors import CannotCreateError, LockedError, PermissionDeniedError


@dataclass(slots=True)
class InstanceLock:
    """A lock that is held until ``release`` or the end of the process."""

    path: Path
    _fd: int

    @classmethod
    def acquire(cls, path: Path, what: str) -> Self:
        """Acquire the lock, or raise with the process that has it.

        Args:
            path: The lock file; it is created if it is missing.
            what: What the lock protects, for the message ("listen on /run/x.sock").

        Raises:
            LockedError: Another process holds it; nothing was changed.
            CannotCreateError: The file cannot be created, or it is not a regular file.
            PermissionDeniedError: The file may not be created or opened.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            try:
                fd = _open(path, flags)
            except PermissionError as error:
                raise PermissionDeniedError(f"cannot {what}: the lock {path}: {error.strerror}") from error
            except OSError as error:
                raise CannotCreateError(f"cannot {what}: the lock {path}: {error.strerror}") from error
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise CannotCreateError(f"cannot {what}: the lock {path}: it is not a regular file")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _holder(fd)
                os.close(fd)
                if isinstance(error, BlockingIOError):
                    raise LockedError(f"cannot {what}: {holder} holds the lock {path}") from error
                raise CannotCreateError(f"cannot {what}: the lock {path}: {error.strerror}") from error
            if _is_at_path(fd, path):
                break
            os.close(fd)  # The file was replaced between open and flock; the new one counts.
        _write_pid(fd)
        return cls(path, fd)

    @classmethod
    def from_descriptor(cls, path: Path, fd: int) -> Self:
        """Take a lock over from the process that has sent its open file: the kernel keeps it for both."""
        os.set_inheritable(fd, False)
        return cls(path, fd)

    def record_holder(self) -> None:
        """Write this process into the lock file, so that messages can name the holder."""
        _write_pid(self._fd)

    def fileno(self) -> int:
        """Return the descriptor of the locked file."""
        return self._fd

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        with contextlib.suppress(OSError):  # flock needs no write access, but the file must exist
            return os.open(path, flags & ~(os.O_RDWR | os.O_CREAT))
        raise


def _write_pid(fd: int) -> None:
    with contextlib.suppress(OSError):  # a full disk: the pid is for messages only
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _is_at_path(fd: int, path: Path) -> bool:
    try:
        status = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), status)


def _holder(fd: int) -> str:
    """Name the holder by its pid and its command line, if they are known."""
    text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
    if not (text.isascii() and text.isdigit()):
        return "another process"
    try:
        arguments = Path("/proc", text, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return f"pid {text}"
    command = b" ".join(arguments).decode("utf-8", "replace")
    shown = " ".join("".join(c if c.isprintable() else " " for c in command).split())[:120]
    return f"pid {text} ({shown})" if shown else f"pid {text}"
