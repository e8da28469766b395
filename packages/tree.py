"""Files of a package as values, and a tar archive that is the same each time."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, a link or a directory.

    Attributes:
        data: The content of a file; None for others.
        link: The target of a symbolic link; empty for others.
        mode: Permission bits.
    """

    data: bytes | None = None
    link: str = ""
    mode: int = 0o644


Tree = dict[str, Entry]
"""Entries by path, without a slash at the beginning."""
DIRECTORY = Entry(mode=0o755)


def with_directories(tree: Mapping[str, Entry]) -> Tree:
    """Add the directories of the paths, and sort."""
    whole = dict(tree)
    for path in tree:
        for parent in list(Path(path).parents)[:-1]:
            whole.setdefault(str(parent), DIRECTORY)
    return dict(sorted(whole.items()))


def tar(tree: Mapping[str, Entry], epoch: int, prefix: str = "") -> bytes:
    """Return an archive: sorted, owned by root, with one time.

    Args:
        tree: The entries of the archive.
        epoch: The time of all entries, in seconds since the epoch.
        prefix: Stands before each path.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, entry in with_directories(tree).items():
            item = tarfile.TarInfo(prefix + path)
            item.mtime, item.mode, item.uname, item.gname = epoch, entry.mode, "root", "root"
            if entry.link:
                item.type, item.linkname, item.mode = tarfile.SYMTYPE, entry.link, 0o777
                archive.addfile(item)
            elif entry.data is None:
                item.type = tarfile.DIRTYPE
                archive.addfile(item)
            else:
                item.size = len(entry.data)
                archive.addfile(item, io.BytesIO(entry.data))
    return buffer.getvalue()


def gz(data: bytes) -> bytes:
    """Compress, without a time in the header."""
    return gzip.compress(data, 6, mtime=0)


def write_tree(tree: Mapping[str, Entry], root: Path, epoch: int) -> None:
    """Put the entries below a directory."""
    import os

    for path, entry in with_directories(tree).items():
        target = root / path
        if entry.link:
            target.symlink_to(entry.link)
        elif entry.data is None:
            target.mkdir(exist_ok=True)
        else:
            target.write_bytes(entry.data)
        if not entry.link:
            target.chmod(entry.mode)
        os.utime(target, (epoch, epoch), follow_symlinks=False)
