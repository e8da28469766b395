"""Creates the path where a gRPC server listens: no other user can open it at any time.

The gRPC library binds a path by itself, with the mode that the process's umask gives, and replaces whatever
is there. So it binds in a directory that only we can access, and the socket is moved to its path when it has
its mode. What exists at the path is checked first, as for the socket for kubelet: a dead socket is replaced,
anything else is left alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from proxy.config.endpoint import PATH_LIMIT
from proxy.model.errors import CannotCreateError, PermissionDeniedError
from proxy.sockets.unix_socket import refuse_living

MODE = 0o600


class SocketPath:
    """One path, taken and given back."""

    def __init__(self, path: Path, purpose: str, *, announced: bool = False) -> None:
        """Touch nothing yet.

        Args:
            path: Where to listen.
            purpose: What is done there, for messages: ``serve hooks``.
            announced: Whether the path is to appear as a new file (IN_CREATE of inotify(7)), as where a
                server binds it, and not as a file that is moved there. A dead socket is removed before.
        """
        self._path = path
        self._announced = announced
        self._failed = f"cannot {purpose} on {path}"
        self._identity: tuple[int, int] | None = None

    def take(self, bind: Callable[[str], int]) -> None:
        """Bind a socket, and move it to the path.

        Args:
            bind: Binds and listens at the given path; returns 0 if that failed.

        Raises:
            CannotCreateError: A process answers there, something else is there, or it cannot be bound.
            PermissionDeniedError: The process may not write there.
        """
        path = self._path
        refuse_living(path)
        try:
            with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as directory:  # mode 0700
                beside = Path(directory, "s")
                if len(os.fsencode(beside)) > PATH_LIMIT:
                    raise CannotCreateError(f"{self._failed}: the name of its directory is too long")
                self._bind(bind, beside)
                beside.chmod(MODE)
                found = beside.stat()
                self._move(beside)
        except PermissionError as error:
            raise PermissionDeniedError(f"{self._failed}: {error.strerror}") from error
        except OSError as error:
            raise CannotCreateError(f"{self._failed}: {error.strerror}") from error
        self._identity = found.st_dev, found.st_ino

    def _move(self, beside: Path) -> None:
        if self._announced:
            self._path.unlink(missing_ok=True)
            self._path.hardlink_to(beside)
        else:
            beside.rename(self._path)

    def _bind(self, bind: Callable[[str], int], beside: Path) -> None:
        cause = ""
        try:
            if bind(str(beside)):
                return
        except RuntimeError as error:  # how the library says it
            cause = f": {error}"
        raise CannotCreateError(f"{self._failed}: it cannot be bound{cause}")

    def give_back(self) -> None:
        """Remove the path, if it is still ours."""
        with contextlib.suppress(OSError):
            found = self._path.stat(follow_symlinks=False)
            if (found.st_dev, found.st_ino) == self._identity:
                self._path.unlink()
        self._identity = None
