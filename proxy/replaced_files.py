"""Refuses imports of topoproxy's modules once its files were replaced.

A daemon imports modules when they are needed first, which keeps it small. If a package was upgraded since its
start, such a module is one of another version, and need not fit those in memory. What a replacement of the
daemon, a stop and a look at a daemon that still runs need is therefore imported at the start
(``proxy.admin_routes``, ``proxy.release.on_demand``); every other import fails with one clear error.

Libraries are not guarded: those that are in use are imported whole.
"""

from __future__ import annotations

import sys
from pathlib import Path

import proxy
from proxy.model.errors import ReplacedFilesError

_PACKAGE = f"{proxy.__name__}."
_Identity = tuple[int, int, int, int]


class ReplacedFilesGuard:
    """A finder of ``sys.meta_path`` that finds no module, and refuses those of topoproxy if need be."""

    def __init__(self, marker: Path) -> None:
        """Remember the installed files.

        Args:
            marker: A file that every package replaces.
        """
        self._marker = marker
        self._identity = _identity_of(marker)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """See ``importlib.abc.MetaPathFinder``; it is called for modules that are not in memory.

        Raises:
            ReplacedFilesError: The module is topoproxy's, and the files were replaced.
        """
        if fullname.startswith(_PACKAGE) and _identity_of(self._marker) != self._identity:
            raise ReplacedFilesError(
                f"cannot import {fullname}: the files of topoproxy were replaced since version "
                f"{proxy.__version__} was started: restart the daemon (topoproxy upgrade --now)"
            )


def guard_imports() -> None:
    """Refuse imports from now on if the files were replaced."""
    sys.meta_path.insert(0, ReplacedFilesGuard(Path(proxy.__file__)))


def _identity_of(marker: Path) -> _Identity | None:
    """Return what differs after a replacement; None if there is no such file."""
    try:
        found = marker.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
