"""Reading small files that other processes write, without ever blocking on them."""

from __future__ import annotations

import os
import stat

from msgspec import Struct

FILE_LIMIT_BYTES = 1 << 20
"""The most bytes of a file. A state file with a thousand pinned containers has a tenth of that."""


class FileStamp(Struct, frozen=True):
    """Attributes of a file that change with its content, so that changes are noticed without reading it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """Return the stamp of a file."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def file_stamp(path: str) -> FileStamp | None:
    """Return a file's stamp; None if there is no file.

    Raises:
        OSError: The file's state cannot be read.
    """
    try:
        return FileStamp.of(os.stat(path))  # noqa: PTH116 - this is called before each decision
    except FileNotFoundError:
        return None


def readable_file_stamp(path: str) -> FileStamp | None:
    """Return a file's stamp; None if there is no file, or its state cannot be read."""
    try:
        return file_stamp(path)
    except OSError:
        return None


def read_small_file(path: str, largest: int = FILE_LIMIT_BYTES) -> tuple[bytes, FileStamp]:
    """Read a file, and return its content and the stamp of this content.

    Args:
        path: The file.
        largest: The most bytes that it may have.

    Raises:
        OSError: The file cannot be read, or the read would block (some files of the kernel).
        ValueError: The path is not a regular file, or the file is larger.
    """
    # O_NONBLOCK, and regular files only: a read from a pipe without a writer, or from a device, may never
    # end.
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
    return content, FileStamp.of(status)


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
