"""Replaces files as a whole: a reader finds the old content or the new, also after a crash at any moment.

The content is written to a draft next to the file, the draft is synced and renamed to the file, and the
directory is synced. A file system that cannot sync a directory causes no error.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def write_file(
    path: Path,
    data: bytes,
    *,
    draft: Path | None = None,
    mode: int = 0o600,
    sync: bool = True,
    overwrite: bool = True,
    keep_owner: bool = False,
    finish: Callable[[int], None] | None = None,
) -> None:
    """Replace a file in one step, or not at all.

    Args:
        path: The file.
        data: The new content.
        draft: The file next to it that is written first; a draft that a crash has left is removed.
        mode: Permission bits, whatever the umask.
        sync: Whether the new content must survive a loss of power.
        overwrite: Whether an existing file may be replaced.
        keep_owner: Whether the new file gets the owner of the old one, if this process may change owners.
        finish: Called with the descriptor of the complete draft, to set further attributes.

    Raises:
        FileExistsError: The file exists, and ``overwrite`` is False.
        OSError: The file cannot be written; the old one is unchanged.
    """
    draft = draft or path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    fd = os.open(draft, _FLAGS, mode)
    try:
        os.fchmod(fd, mode)
        if keep_owner:
            _copy_owner(fd, path)
        write_completely(fd, data)
        if finish is not None:
            finish(fd)
        if sync:
            os.fsync(fd)
        if overwrite:
            draft.replace(path)
        else:
            os.link(draft, path, follow_symlinks=False)
            draft.unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    finally:
        os.close(fd)
    if sync:
        with contextlib.suppress(OSError):
            sync_directory(path.parent)


def write_completely(fd: int, data: bytes) -> None:
    """Write data in one call; write(2) on a regular file writes less only when the file system is full.

    Raises:
        OSError: The data cannot be written, or only a part of it.
    """
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _copy_owner(fd: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        old = path.stat()
        if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(fd, old.st_uid, old.st_gid)


def sync_directory(directory: Path) -> None:
    """Make the entries of a directory durable.

    Raises:
        OSError: The directory cannot be opened, or the file system cannot sync it.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
