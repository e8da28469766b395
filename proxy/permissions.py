"""Whether only root can have written a file, and whether others can read it.

A configuration decides what the daemon does, and a hook runs with all that the daemon may do. A user with
write access to a file decides what it says; a user with write access to a directory decides which file is
there. So both count, and so does each directory above, up to the root, also of each link on the way. A
directory above may be writable for all users where it is sticky, as ``/tmp`` is: they cannot rename what is
root's in it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

_LINKS = 40
"""As many links in a row as the kernel follows."""


class Trust:
    """What has been found of directories, for as long as one look at them takes."""

    def __init__(self, owners: Collection[int] = ()) -> None:
        """Begin a look.

        Args:
            owners: Users that are trusted besides root and the user of this process.
        """
        self._owners = frozenset((0, os.geteuid(), *owners))
        self._directories: dict[tuple[str, bool], str] = {}

    def directory(self, directory: Path, *, sticky: bool = False) -> str:
        """Describe in a sentence what is to do before files in a directory can be trusted; empty if nothing.

        Args:
            directory: The directory.
            sticky: It may be writable for others itself where it is sticky, and not only those above.

        Raises:
            OSError: It cannot be examined.
        """
        real = os.path.realpath(directory)
        lack = self._one(real, inner=not sticky)
        while not lack and real != "/":
            real = os.path.dirname(real)  # noqa: PTH120 - twice a second, for every directory
            lack = self._one(real, inner=False)
        return lack

    def way(self, path: Path, *, sticky: bool = False) -> str:
        """As ``directory``, of the directories of a file and of each link on the way to it."""
        for step in steps(path):
            if lack := self.directory(step.parent, sticky=sticky):
                return lack
        return ""

    def file(self, path: Path) -> str:
        """Describe in a sentence what is to do before a file can be trusted; empty if nothing.

        Raises:
            OSError: It cannot be examined; FileNotFoundError for a link to nothing.
        """
        if lack := self.way(path):
            return lack
        *_, last = steps(path)
        return self.regular(last, os.lstat(last))

    def regular(self, path: Path, found: os.stat_result) -> str:
        """As ``file``, of the file alone, by its stat."""
        if not stat.S_ISREG(found.st_mode):
            return f"{path} is not a regular file"
        return self.written(path, found)

    def written(self, path: Path, found: os.stat_result) -> str:
        """As ``regular``, of anything that can be read."""
        return self.owned(path, found) or _writable(str(path), str(path), found)

    def owned(self, path: Path, found: os.stat_result) -> str:
        """Return what is to do about the owner of a file; empty if nothing."""
        return self._owner(str(path), str(path), found)

    def _owner(self, what: str, path: str, found: os.stat_result) -> str:
        if found.st_uid in self._owners:
            return ""
        return f"{what} is owned by user {found.st_uid}: chown root {path}"

    def _one(self, directory: str, *, inner: bool) -> str:
        known = self._directories.get((directory, inner))
        if known is None:
            found = os.lstat(directory)
            what = f"the directory {directory}"
            known = self._owner(what, directory, found)
            if not known and (inner or not found.st_mode & stat.S_ISVTX):
                known = _writable(what, directory, found)
            self._directories[directory, inner] = known
        return known


def steps(path: Path) -> Iterator[Path]:
    """Walk a file's links: each place as it really is; the last one is no link.

    Raises:
        OSError: It cannot be examined, or there are too many links.
    """
    for _ in range(_LINKS):
        here = Path(os.path.realpath(path.parent), path.name)
        yield here
        try:
            path = here.parent / here.readlink()
        except OSError:  # no link (EINVAL), or nothing there
            return
    raise OSError(f"more than {_LINKS} links in a row")


def readable(path: Path, found: os.stat_result) -> str:
    """Return what is to do before a file is secret; empty if nothing. The group of root counts as root."""
    group = bool(found.st_mode & stat.S_IRGRP) and found.st_gid != 0
    others = bool(found.st_mode & stat.S_IROTH)
    return _open_to(f"{path} can be read by", "r", str(path), found, group, others)


def _writable(what: str, path: str, found: os.stat_result) -> str:
    group, others = bool(found.st_mode & stat.S_IWGRP), bool(found.st_mode & stat.S_IWOTH)
    return _open_to(f"{what} can be written by", "w", path, found, group, others)


def _open_to(what: str, letter: str, path: str, found: os.stat_result, group: bool, others: bool) -> str:
    if not (group or others):
        return ""
    users = "its group and others" if group and others else "its group" if group else "others"
    mode = stat.S_IMODE(found.st_mode)
    return f"{what} {users} (mode {mode:04o}): chmod {'g' * group}{'o' * others}-{letter} {path}"
