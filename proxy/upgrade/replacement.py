"""Replacing the running daemon by a process of the installed version (``proxy.succession``)."""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path

from proxy.admin.client import ask
from proxy.model.errors import TopoproxyError

LOOK_S = 0.05


def replace_daemon(admin: Path, timeout: float) -> int:
    """Have the daemon replaced, and wait until the new process is ready.

    Args:
        admin: The admin socket.
        timeout: Seconds for all of it.

    Returns:
        The id of the new process.

    Raises:
        TopoproxyError: The daemon goes on because the new process did not start, or that one is not ready in
            time.
        UnavailableError: The daemon does not answer, or is of a version that cannot be replaced.
        PermissionDeniedError: Only root may.
    """
    end = time.monotonic() + timeout
    answer = str(ask(admin, "/successor", timeout, act=True)).strip()
    if not answer.isdigit():
        raise TopoproxyError(answer)
    pid = int(answer)
    while not _is_ready(admin, pid):
        if time.monotonic() >= end:
            raise TopoproxyError(
                f"cannot replace the daemon in {timeout:g} seconds: process {pid} is not ready yet"
            )
        time.sleep(LOOK_S)
    return pid


def _is_ready(admin: Path, pid: int) -> bool:
    try:
        return _owner(admin) == pid and "passed" in str(ask(admin, "/readyz"))
    except (TopoproxyError, OSError):  # between the two of them no process listens
        return False


def _owner(path: Path) -> int:
    """Return the process that listens on a socket."""
    size = struct.calcsize("3i")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        return int(struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])
