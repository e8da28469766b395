"""Check the process at a hook server's socket: only one of a trusted user is called.

A hook server sees every pod, and its answers change containers. Two things identify the process that answers:
the directories on the path of the socket, which decide which users can put a socket there, and the
credentials that the kernel recorded when the process began to listen (SO_PEERCRED, unix(7)). gRPC connects
by itself, again after a failure, and does not expose credentials. So the socket is checked before a call, and
if it is another one than before, we first make a connection of our own. Between that and gRPC's connection
only a trusted user could replace it, because no other user can write to its directories.

The check of a known socket costs one stat.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final, TypeAlias

from proxy.permissions import Trust

_CREDENTIALS: Final = struct.Struct("=iII")
"""struct ucred: process, user, group."""
_TIME: Final = struct.Struct("@ll")
"""struct timeval: seconds, microseconds."""
_ALLOW: Final = "which hooks.serverUsers does not name"

_Seen: TypeAlias = tuple[int, int, int]


class Peer:
    """The socket of a hook server, as it was when it was last found good; several threads may use it."""

    def __init__(self, path: Path, users: Collection[int] = ()) -> None:
        """Store the socket; ``distrust_reason`` checks it.

        Args:
            path: Of the socket.
            users: Users that are trusted besides root and the user of this process.
        """
        self._path = path
        self._users = frozenset(users)
        self._good: _Seen | None = None

    def distrust_reason(self, timeout: float) -> str:
        """Return why the process that answers there is not trusted; empty if it is.

        Args:
            timeout: Seconds to wait for a place in the queue of a busy server.

        Raises:
            OSError: No process answers, or the socket cannot be examined.
        """
        found = self._path.stat()
        seen = _seen(found)
        if seen == self._good:
            return ""
        trust = Trust(self._users)
        if not stat.S_ISSOCK(found.st_mode):
            return "it is not a socket"
        if problem := trust.path_problem(self._path):
            return problem
        trusted = {0, os.geteuid(), *self._users}
        if found.st_uid not in trusted:
            return f"the socket is owned by user {found.st_uid}, {_ALLOW}"
        process, user = _listener(self._path, timeout)
        if user not in trusted:
            return f"process {process} of user {user} answers there, {_ALLOW}"
        if _seen(self._path.stat()) != seen:
            return "the socket is being replaced"
        self._good = seen
        return ""


def _seen(found: os.stat_result) -> _Seen:
    return found.st_dev, found.st_ino, found.st_ctime_ns  # an inode number alone may be used again


def _listener(path: Path, timeout: float) -> tuple[int, int]:
    """Connect, and give the process and the user that listen there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        # Python's own timeout does not wait for a place in a full queue (EAGAIN of connect(2)). This does.
        whole = int(max(timeout, 0.001) * 1e6)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(*divmod(whole, 1_000_000)))
        begun = time.monotonic()
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            waited = time.monotonic() - begun
            raise TimeoutError(0, f"its queue has been full for {waited:.1f} s") from None
        content = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(content)
    return process, user
