"""Whether only root can have written a file: a hook runs with all that the daemon may do.

Who can write to a file decides what it says; who can write to a folder decides which file is there. So both
count, and so does each folder above, up to the root, also of each link on the way. A folder that anybody may
write to is no harm above where it is sticky, as ``/tmp`` is: others cannot rename what is root's in there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from proxy.model.errors import HookError

_LINKS = 40
"""As many links in a row as the kernel follows."""


class UntrustedError(HookError):
    """Somebody else than root could have written it."""


class Trust:
    """What has been found of folders, for as long as one look at them takes."""

    def __init__(self) -> None:
        self._folders: dict[tuple[str, bool], str] = {}

    def folder(self, folder: Path) -> str:
        """Say in a sentence what is to do before files in a folder can be trusted; empty if nothing.

        Raises:
            OSError: It cannot be looked at.
        """
        real = os.path.realpath(folder)
        lack = self._one(real, inner=True)
        while not lack and real != "/":
            real = os.path.dirname(real)  # noqa: PTH120 - twice a second, for every folder
            lack = self._one(real, inner=False)
        return lack

    def file(self, path: Path) -> str:
        """Say in a sentence what is to do before a file can be trusted; empty if nothing.

        Raises:
            OSError: It cannot be looked at; FileNotFoundError for a link to nothing.
        """
        for step in steps(path):
            if lack := self.folder(step.parent):
                return lack
        return of_file(step, os.lstat(step))

    def _one(self, folder: str, *, inner: bool) -> str:
        known = self._folders.get((folder, inner))
        if known is None:
            found = os.lstat(folder)
            sticky = not inner and bool(found.st_mode & stat.S_ISVTX)
            known = _lack(f"the folder {folder}", folder, found, sticky=sticky)
            self._folders[folder, inner] = known
        return known


def steps(path: Path) -> Iterator[Path]:
    """Walk a file's links: each place as it really is; the last one is no link.

    Raises:
        OSError: It cannot be looked at, or there are too many links.
    """
    for _ in range(_LINKS):
        here = Path(os.path.realpath(path.parent), path.name)
        yield here
        try:
            path = here.parent / here.readlink()
        except OSError:  # no link (EINVAL), or nothing there
            return
    raise OSError(f"more than {_LINKS} links in a row")


def of_file(path: Path, found: os.stat_result) -> str:
    """As ``Trust.file``, of the file alone, by its stat."""
    if not stat.S_ISREG(found.st_mode):
        return f"{path} is no regular file"
    return _lack(str(path), str(path), found, sticky=False)


def _lack(what: str, path: str, found: os.stat_result, *, sticky: bool) -> str:
    own = os.geteuid()
    if found.st_uid not in (0, own):
        return f"{what} is owned by user {found.st_uid}: chown root {path}"
    group, others = bool(found.st_mode & stat.S_IWGRP), bool(found.st_mode & stat.S_IWOTH)
    if sticky or not (group or others):
        return ""
    who = "its group and others" if group and others else "its group" if group else "others"
    letters = f"{'g' * group}{'o' * others}"
    mode = stat.S_IMODE(found.st_mode)
    return f"{what} can be written by {who} (mode {mode:04o}): chmod {letters}-w {path}"
