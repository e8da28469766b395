"""Replaces files as a whole: a reader finds the old text or the new, also after a crash at any moment.

The text goes into a draft next to the file, the draft is synced and takes the file's name, and the directory
is synced. A file system that cannot sync a directory is no error.
"""

from __future__ import annotations

import contextlib
import errno
import os
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
) -> None:
    """Replace a file in one step, or not at all.

    Args:
        path: The file.
        data: What it is to hold.
        draft: The file next to it that is written first; one that a crash has left there is removed.
        mode: Permission bits, whatever the umask.
        sync: Whether it is to survive a loss of power.
        overwrite: Whether it may take the place of another.
        keep_owner: Whether it belongs to the owner of the file before, where this process may give it away.

    Raises:
        FileExistsError: There is a file, and it must not be overwritten.
        OSError: It cannot be written; what was there is as it was.
    """
    draft = draft or path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    fd = os.open(draft, _FLAGS, mode)
    try:
        os.fchmod(fd, mode)
        if keep_owner:
            _take_owner(fd, path)
        write_whole(fd, data)
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
        _sync_directory(path.parent)


def write_whole(fd: int, data: bytes) -> None:
    """Write in one call; a regular file takes less than that only when there is no more room.

    Raises:
        OSError: It cannot be written, or not all of it.
    """
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _take_owner(fd: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        old = path.stat()
        if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(fd, old.st_uid, old.st_gid)


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
