"""Files that crash the daemon: which files were being loaded when an earlier daemon died.

Theory. A hook shares the process. One that ends it (``os._exit``, a crash in C code) while it is loaded,
configured or synchronized would do so again at each start, and the node would have no runtime. So a mark lies
in the state directory for as long as a file is being loaded. A file content that was marked at two deaths is
left out. Two, because the daemon may have been killed for another reason just then, and files are loaded in
parallel: a file with a mark at a start is *suspected* and tried alone, so a second death has one cause.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from proxy.model.errors import HookError

DEATHS: Final = 2
"""A content that the daemon has not survived so often is not tried any more."""


class DeadlyError(HookError):
    """The daemon has crashed while a file was brought into use."""


class CrashMarks:
    """Marks in a directory; a mark that cannot be written is skipped. Its methods block."""

    def __init__(self, directory: Path | None) -> None:
        """Nothing is written yet.

        Args:
            directory: Where marks lie; made with the first one. None to have none.
        """
        self._directory = directory

    def suspected(self, name: str) -> bool:
        """Return whether the daemon has ended while a hook was brought into use."""
        return self._directory is not None and os.path.lexists(self._directory / name)

    def begin(self, name: str, path: Path, data: bytes) -> None:
        """A file is about to be brought into use.

        Args:
            name: The hook's name.
            path: The file, for people.
            data: What is in it.

        Raises:
            DeadlyError: The daemon has not survived that.
        """
        if self._directory is None:
            return
        mark, content = self._directory / name, hashlib.sha256(data).hexdigest()
        try:
            seen, _, count = mark.read_text(encoding="ascii").partition(" ")
            deaths = int(count) if seen == content else 0
        except (OSError, ValueError):
            deaths = 0
        if deaths >= DEATHS:
            raise DeadlyError(
                f"cannot load hook {path}: the daemon has ended {deaths} times while it was brought into "
                f"use: change the file, or remove {mark} to try it again"
            )
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            mark.write_text(f"{content} {deaths + 1}", encoding="ascii")
        except OSError:
            return

    def end(self, name: str) -> None:
        """The file is in use, or has failed, and the daemon is there."""
        if self._directory is not None:
            try:
                (self._directory / name).unlink(missing_ok=True)
            except OSError:
                return
