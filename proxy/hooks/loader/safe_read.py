"""Reading a file that other processes write: never half of it, and no other file than the checked one.

A file that is being written looks like any other. Three signs reveal a writer: the inode changed just now;
a process has the file open for writing, which a read lease detects (fcntl(2), F_SETLEASE: it is granted only
if there is no writer, and a new writer then waits until it is released); the file changed during the read. In
each case the file is read later. On file systems without leases only the other two signs count.

Everything is done on one descriptor, so the checked file is the one that is read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from proxy.model.errors import HookError
from proxy.permissions import TrustCheck, link_chain

SETTLED_S = 0.15
SIZE_LIMIT_BYTES = 1 << 20
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_CLOCK_AHEAD_S = 0.05


class FileBeingWrittenError(Exception):
    """The file is being written, or was a moment ago."""


@dataclass(frozen=True, slots=True)
class Content:
    """The contents of a file.

    Attributes:
        data: All of it.
        version: Equal if the same file has the same content and was not written in between.
    """

    data: bytes
    version: tuple[object, ...]


def read(path: Path, what: str = "hook", *, trusted: bool = True) -> Content:
    """Read a file as it is between two writes.

    Args:
        path: The file, or a link to it.
        what: The word for the file in messages.
        trusted: Refuse a file that a user other than root could have written.

    Raises:
        FileBeingWrittenError: It is being written; try again shortly.
        UntrustedError: A user other than root could have written it.
        HookError: It cannot be read, or is too large.
    """
    try:
        where = _trusted_path(path, what) if trusted else path
        descriptor = os.open(where, _FLAGS | (os.O_NOFOLLOW if trusted else 0))
    except OSError as error:
        raise _unreadable(path, what, error) from error
    try:
        return _content(descriptor, path, what, trusted=trusted)
    except OSError as error:
        raise _unreadable(path, what, error) from error
    finally:
        os.close(descriptor)


def read_stable(path: Path, what: str = "hook", *, trusted: bool = True, timeout_s: float = 2.0) -> Content:
    """Do what ``read`` does, but wait a while for a file that is being written.

    Raises:
        HookError: As for ``read``, or the file is still being written.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            return read(path, what, trusted=trusted)
        except FileBeingWrittenError as error:
            if time.monotonic() > until:
                cause = error if os.path.lexists(path) else "there is no such file"
                raise HookError(f"cannot read {what} {path}: {cause}") from error
            time.sleep(SETTLED_S / 3)


def _trusted_path(path: Path, what: str) -> Path:
    if problem := TrustCheck().file_problem(path):
        raise UntrustedError(f"cannot trust {what} {path}: {problem}")
    *_, last = link_chain(path)
    return last


def _unreadable(path: Path, what: str, error: OSError) -> Exception:
    if error.errno == errno.ELOOP or (isinstance(error, FileNotFoundError) and not path.is_symlink()):
        return FileBeingWrittenError("it is being replaced")
    cause = "it is a link, and nothing is there" if isinstance(error, FileNotFoundError) else error.strerror
    return HookError(f"cannot read {what} {path}: {cause or error}")


def _content(descriptor: int, path: Path, what: str, *, trusted: bool) -> Content:
    before = os.fstat(descriptor)
    if not stat.S_ISREG(before.st_mode):
        raise HookError(f"cannot read {what} {path}: it is not a regular file")
    if trusted and (problem := TrustCheck().regular_file_problem(path, before)):
        raise UntrustedError(f"cannot trust {what} {path}: {problem}")
    if before.st_size > SIZE_LIMIT_BYTES:
        raise HookError(f"cannot read {what} {path}: it is larger than {SIZE_LIMIT_BYTES} bytes")
    age = time.time() - before.st_ctime
    if -_CLOCK_AHEAD_S < age < SETTLED_S:
        raise FileBeingWrittenError("it was written a moment ago")
    if age <= -_CLOCK_AHEAD_S:  # the clock was set back: watch the file instead
        time.sleep(SETTLED_S)
    with _writers_blocked(descriptor):
        data = _all(descriptor, before.st_size)
        after = os.fstat(descriptor)
    if _fingerprint(before) != _fingerprint(after) or len(data) != after.st_size:
        raise FileBeingWrittenError("it was written while it was read")
    version = (after.st_dev, after.st_ino, after.st_mtime_ns, hashlib.sha256(data).digest())
    return Content(data, version)


def _all(descriptor: int, size: int) -> bytes:
    """Read to the end, or to the size seen first: a process that keeps writing must not block the reader."""
    data = b""
    while len(data) <= size and (part := os.read(descriptor, size + 1 - len(data))):
        data += part
    return data


def _fingerprint(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_mode, found.st_uid)


@contextmanager
def _writers_blocked(descriptor: int) -> Iterator[None]:
    """Block writers for a short time.

    Raises:
        FileBeingWrittenError: Another process has it open for writing.
    """
    leased = False
    try:
        # A writer that waits makes the kernel send a signal: SIGIO would end the process, SIGURG is ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        leased = True
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise FileBeingWrittenError("another process has it open for writing") from error
    try:
        yield
    finally:
        if leased:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


class UntrustedError(HookError):
    """A user other than root could have written the file."""
