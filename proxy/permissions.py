"""Checks whether only root can have written a file, and whether others can read it.

A configuration determines what the daemon does, and a hook runs with all privileges of the daemon. A user
with write access to a file can change its content; a user with write access to a directory can replace the
file. So both count, and so does each directory above, up to the root, including those of each link on the
path. A directory above may be writable for all users if it is sticky, as ``/tmp`` is: they cannot rename
root's files in it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

_LINKS_LIMIT = 40
"""The number of links in a row that the kernel follows."""


class TrustCheck:
    """Checks files and directories; keeps its results for directories for the duration of one check."""

    def __init__(self, owners: Collection[int] = ()) -> None:
        """Start without results.

        Args:
            owners: Users that are trusted in addition to root and the user of this process.
        """
        self._owners = frozenset((0, os.geteuid(), *owners))
        self._directories: dict[tuple[str, bool], str] = {}
        self._answers: dict[tuple[Path, bool], str] = {}

    def directory_problem(self, directory: Path, *, sticky: bool = False) -> str:
        """Return why files in a directory cannot be trusted, with the command that corrects this; or nothing.

        Args:
            directory: The directory.
            sticky: Whether the directory itself may be writable for others if it is sticky, like those above
                it.

        Raises:
            OSError: The directory cannot be examined.
        """
        known = self._answers.get((directory, sticky))
        if known is not None:
            return known
        real = os.path.realpath(directory)
        problem = self._problem_of_directory(real, inner=not sticky)
        while not problem and real != "/":
            real = os.path.dirname(real)  # noqa: PTH120 - twice a second, for every directory
            problem = self._problem_of_directory(real, inner=False)
        self._answers[directory, sticky] = problem
        return problem

    def path_problem(self, path: Path, *, sticky: bool = False) -> str:
        """Return the same for the directories of a file and of each link on its path."""
        for step in link_chain(path):
            if problem := self.directory_problem(step.parent, sticky=sticky):
                return problem
        return ""

    def file_problem(self, path: Path) -> str:
        """Return why a file cannot be trusted, with the command that corrects it; or nothing.

        Raises:
            OSError: The file cannot be examined; FileNotFoundError for a link to nothing.
        """
        last = path
        for last in link_chain(path):
            if problem := self.directory_problem(last.parent):
                return problem
        return self.regular_file_problem(last, os.lstat(last))

    def regular_file_problem(self, path: Path, status: os.stat_result) -> str:
        """Return the same for the file alone, from its stat."""
        if not stat.S_ISREG(status.st_mode):
            return f"{path} is not a regular file"
        return self.writer_problem(path, status)

    def writer_problem(self, path: Path, status: os.stat_result) -> str:
        """Return the same for anything that can be read, such as a pipe."""
        return self.owner_problem(path, status) or _writer_problem(str(path), str(path), status)

    def owner_problem(self, path: Path, status: os.stat_result) -> str:
        """Return what is wrong with the owner of a file, with the command that corrects it; or nothing."""
        return self._problem_of_owner(str(path), str(path), status)

    def _problem_of_owner(self, what: str, path: str, status: os.stat_result) -> str:
        if status.st_uid in self._owners:
            return ""
        return f"{what} is owned by user {status.st_uid}: chown root {path}"

    def _problem_of_directory(self, directory: str, *, inner: bool) -> str:
        problem = self._directories.get((directory, inner))
        if problem is None:
            status = os.lstat(directory)
            what = f"the directory {directory}"
            problem = self._problem_of_owner(what, directory, status)
            if not problem and (inner or not status.st_mode & stat.S_ISVTX):
                problem = _writer_problem(what, directory, status)
            self._directories[directory, inner] = problem
        return problem


def link_chain(path: Path) -> Iterator[Path]:
    """Walk a file's links: yield each resolved place; the last one is not a link.

    Raises:
        OSError: It cannot be examined, or there are too many links.
    """
    for _ in range(_LINKS_LIMIT):
        here = Path(os.path.realpath(path.parent), path.name)
        yield here
        try:
            path = here.parent / here.readlink()
        except OSError:  # no link (EINVAL), or nothing there
            return
    raise OSError(f"more than {_LINKS_LIMIT} links in a row")


def reader_problem(path: Path, status: os.stat_result) -> str:
    """Return which others can read a file, with the command that corrects this. Group root counts as root."""
    group = bool(status.st_mode & stat.S_IRGRP) and status.st_gid != 0
    others = bool(status.st_mode & stat.S_IROTH)
    return _access_problem(f"{path} can be read by", "r", str(path), status, group, others)


def _writer_problem(what: str, path: str, status: os.stat_result) -> str:
    group, others = bool(status.st_mode & stat.S_IWGRP), bool(status.st_mode & stat.S_IWOTH)
    return _access_problem(f"{what} can be written by", "w", path, status, group, others)


def _access_problem(
    what: str, letter: str, path: str, status: os.stat_result, group: bool, others: bool
) -> str:
    if not (group or others):
        return ""
    users = "its group and others" if group and others else "its group" if group else "others"
    mode = stat.S_IMODE(status.st_mode)
    return f"{what} {users} (mode {mode:04o}): chmod {'g' * group}{'o' * others}-{letter} {path}"
