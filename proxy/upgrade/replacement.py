"""Replaces the running daemon by a process of the installed version (``proxy.succession``)."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from proxy.admin.client import query_admin, query_error
from proxy.model.errors import TopoproxyError, UnavailableError
from proxy.observe.json_access import as_list, as_map, one_line
from proxy.succession.messages import FAILED

POLL_S = 0.05
READY_S = 30.0
"""Seconds to wait until the new process is ready; while the runtime is down, for example, it is not."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A daemon that was replaced.

    Attributes:
        pid: The new process.
        reason: Why it is not ready yet; empty if it is ready.
    """

    pid: int
    reason: str = ""


def replace_daemon(
    admin: Path,
    timeout: float,
    ready_s: float = READY_S,
    after: Path | None = None,
    answer_s: float | None = None,
) -> Replacement:
    """Replace the daemon, and wait a while until the new process is ready.

    Args:
        admin: The admin socket.
        timeout: Seconds until another process must have the admin socket.
        ready_s: Seconds to wait after that until the process is ready.
        after: The admin socket of the new process, if the configuration names another one now.
        answer_s: Seconds until the daemon must accept the request; ``timeout`` if None.

    Raises:
        TopoproxyError: The new process did not start and the daemon continues, or no process replaced it.
        UnavailableError: The daemon does not answer (any more), or is of a version that cannot be replaced.
        PermissionDeniedError: Only root may replace the daemon.
    """
    end, former = time.monotonic() + timeout, {_listening_pid(admin)}
    if after is not None and (other := _listening_pid_or_zero(after)):
        former.add(other)
    query_admin(admin, "/successor", timeout if answer_s is None else answer_s, act=True)
    pid, reason = 0, ""
    while time.monotonic() < end:
        if found := _successor(admin, after, former):
            if not pid:
                end = time.monotonic() + ready_s
            pid, reason = found[0], _why_not_ready(found[1])
            if not reason:
                return Replacement(pid)
        time.sleep(POLL_S)
    if not pid:
        raise _not_replaced(admin, after, timeout)
    return Replacement(pid, reason)


def _not_replaced(admin: Path, after: Path | None, timeout: float) -> TopoproxyError:
    """Return why no process has replaced the daemon: the daemon continues, or it has ended too."""
    message = f"cannot replace the daemon in {timeout:g} seconds"
    try:
        _listening_pid(admin)
    except UnavailableError:
        sockets = " or ".join(dict.fromkeys(str(path) for path in (admin, after) if path is not None))
        return UnavailableError(f"{message}: no process answers at {sockets}: systemctl status topoproxy")
    return TopoproxyError(f"{message}: it still runs")


def _successor(admin: Path, after: Path | None, former: Collection[int]) -> tuple[int, Path] | None:
    """Return the process that has replaced another one, and its socket; None while there is none.

    Raises:
        TopoproxyError: The former process continues.
    """
    try:
        pid = _listening_pid(admin)
        if pid not in former:
            return pid, admin
        page = str(query_admin(admin, "/successor"))
    except (UnavailableError, OSError):  # no process listens between the two
        if after is not None and (pid := _listening_pid_or_zero(after)) and pid not in former:
            return pid, after
        return None
    if page.startswith(FAILED):
        raise TopoproxyError(page.removeprefix(FAILED).strip())
    return None


def _why_not_ready(admin: Path) -> str:
    """Return why the daemon is not ready; empty if it is ready."""
    try:
        page = query_admin(admin, "/status")
    except (UnavailableError, OSError) as error:
        return str(error)
    status = as_map(page)
    if status.get("ready") is True:
        return ""
    required = [check for check in map(as_map, as_list(status.get("checks"))) if check.get("required")]
    failed = [one_line(check.get("reason")) for check in required if not check.get("ok")]
    return "; ".join(failed) or "it starts"


def _listening_pid_or_zero(path: Path) -> int:
    """Return the process that listens on a socket; 0 if none does."""
    try:
        return _listening_pid(path)
    except (UnavailableError, OSError):
        return 0


def _listening_pid(path: Path) -> int:
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
            raise query_error(path, error) from error
        return int(struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])
