"""Opens files that a user names, or that other programs put in place, without waiting for a writer.

A named pipe in the place of a file would block its reader until some process writes to it, and a device may
have no end. Such a path is an error. Exceptions are ``/dev/null``, and paths of descriptors that the process
has inherited: ``/dev/stdin``, and ``/dev/fd/N`` from a shell's ``<(COMMAND)``.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_INHERITED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NULL = os.makedev(1, 3)
"""The number of ``/dev/null`` (Documentation/admin-guide/devices.txt in the kernel's source)."""


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: It cannot be opened, or it is not a file; ``strerror`` says so.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise _not_a_file(path) from None
        raise
    try:
        _check(path, os.fstat(descriptor))
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    is_null = stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL
    if not (stat.S_ISREG(status.st_mode) or is_null or str(path).startswith(_INHERITED)):
        raise _not_a_file(path)


def _not_a_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))
