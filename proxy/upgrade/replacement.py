"""Replaces the running daemon by a process of the installed version (``proxy.succession``)."""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path

from proxy.admin.client import query_admin, unanswered
from proxy.model.errors import TopoproxyError, UnavailableError
from proxy.succession.messages import FAILED

POLL_S = 0.05


def replace_daemon(admin: Path, timeout: float) -> int:
    """Replace the daemon, and wait until the new process is ready.

    Args:
        admin: The admin socket.
        timeout: Seconds for the whole replacement.

    Returns:
        The id of the new process.

    Raises:
        TopoproxyError: The new process did not start, and the daemon continues; or the new process is not
            ready in time.
        UnavailableError: The daemon does not answer, or is of a version that cannot be replaced.
        PermissionDeniedError: Only root may.
    """
    end, former = time.monotonic() + timeout, _owner(admin)
    query_admin(admin, "/successor", timeout, act=True)
    while not (pid := _replaced(admin, former)):
        if time.monotonic() >= end:
            raise TopoproxyError(
                f"cannot replace the daemon in {timeout:g} seconds: no other process is ready"
            )
        time.sleep(POLL_S)
    return pid


def _replaced(admin: Path, former: int) -> int:
    """Return the process that has replaced another one and is ready; 0 as long as there is none.

    Raises:
        TopoproxyError: The former process continues.
    """
    try:
        pid = _owner(admin)
        page = str(query_admin(admin, "/successor" if pid == former else "/readyz"))
    except (UnavailableError, OSError):  # between the two of them no process listens
        return 0
    if pid == former and page.startswith(FAILED):
        raise TopoproxyError(page.removeprefix(FAILED).strip())
    return pid if pid != former and "passed" in page else 0


def _owner(path: Path) -> int:
    """Return the process that listens on a socket.

    Raises:
        UnavailableError: No process listens there.
        PermissionDeniedError: The socket is not for this user.
    """
    size = struct.calcsize("3i")
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError as error:
            raise unanswered(path, error) from error
        return int(struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])
