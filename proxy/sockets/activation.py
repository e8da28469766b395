"""Sockets that systemd opened for us before we started (sd_listen_fds(3))."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import MutableMapping
from pathlib import Path

from proxy.model.errors import CannotCreateError

FIRST_FD = 3
FD_NAME = "cri"


def adopt(environ: MutableMapping[str, str]) -> socket.socket | None:
    """Take the socket that systemd hands over, if it does.

    The one that is named ``cri`` is taken; where only one is handed over, its name does not matter.

    Args:
        environ: Where the LISTEN_ variables are; they are removed, so that children do not see them.

    Raises:
        CannotCreateError: What was handed over is not one listening unix stream socket.
    """
    count_text, pid = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_PID", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count_text.isdigit() or not 0 < int(count_text) < 1024:
        return None
    fds = range(FIRST_FD, FIRST_FD + int(count_text))
    named = [fd for fd, name in zip(fds, names, strict=False) if name == FD_NAME]
    chosen = named or [fd for fd in fds if len(fds) == 1]
    if len(chosen) != 1:
        raise CannotCreateError(
            f"cannot adopt systemd's sockets: of {len(fds)} handed over, {len(chosen)} are named {FD_NAME}"
            f" (FileDescriptorName={FD_NAME} in the socket unit names one)"
        )
    for fd in fds:
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)
    try:
        adopted = socket.socket(fileno=chosen[0])
    except OSError as error:
        raise CannotCreateError(f"cannot adopt file descriptor {chosen[0]}: {error.strerror}") from error
    listening = adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if adopted.family != socket.AF_UNIX or adopted.type != socket.SOCK_STREAM or not listening:
        cause = "it is not a listening unix stream socket (ListenStream=/path in the socket unit)"
        adopted.detach()
        raise CannotCreateError(f"cannot adopt file descriptor {chosen[0]}: {cause}")
    adopted.setblocking(False)
    return adopted


def path_of(adopted: socket.socket) -> Path:
    """Find where clients of an adopted socket connect.

    Raises:
        CannotCreateError: It has no path, or the path is gone.
    """
    name = adopted.getsockname()
    if not isinstance(name, str) or not name.startswith("/"):
        raise CannotCreateError("cannot adopt systemd's socket: it has no path in the file system")
    path = Path(name)
    try:
        is_socket = stat.S_ISSOCK(path.stat(follow_symlinks=False).st_mode)
    except OSError:
        is_socket = False
    if not is_socket:
        cause = "its path is gone, so no client can connect (restart the socket unit)"
        raise CannotCreateError(f"cannot adopt systemd's socket {path}: {cause}")
    return path
