"""Reading small files that other processes write, without ever blocking on them."""

from __future__ import annotations

import os
import stat

from msgspec import Struct

LARGEST = 1 << 20
"""Bytes. A thousand pinned containers are a tenth of that."""


class Stamp(Struct, frozen=True):
    """A stamp that changes with the content of a file, without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Take the stamp of a file."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def stamp(path: str) -> Stamp | None:
    """Return a file's stamp; None where there is no file.

    Raises:
        OSError: The file's state cannot be read.
    """
    try:
        return Stamp.of(os.stat(path))  # noqa: PTH116 - this is called before each decision
    except FileNotFoundError:
        return None


def readable_stamp(path: str) -> Stamp | None:
    """Return a file's stamp; None where there is no file, or its state cannot be read."""
    try:
        return stamp(path)
    except OSError:
        return None


def read_small(path: str, largest: int = LARGEST) -> tuple[bytes, Stamp]:
    """Read a file, and the stamp of what was read.

    Args:
        path: The file.
        largest: Bytes that it may have.

    Raises:
        OSError: It cannot be read, or would let us wait (some files of the kernel's own).
        ValueError: It is not a regular file, or is larger.
    """
    # A pipe without a writer, or a device, may never reach an end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        content, large = b"", status.st_size > largest
        while not large and (part := os.read(descriptor, largest + 1 - len(content))):
            content += part
            large = len(content) > largest
    finally:
        os.close(descriptor)
    if large:
        raise ValueError(f"it is larger than {_size(largest)}")
    return content, Stamp.of(status)


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
