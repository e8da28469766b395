"""The directory in which device plug-ins and their registration server have their sockets.

A plug-in registers with the name of its socket; kubelet joins it to the directory, wherever that leads
(kubernetes v1.36 pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go, Register). Here it has to stay in the
directory.

At its start kubelet removes all sockets in its directory (manager.go, CleanupPluginDirectory) and makes its
own again. That is the signal on which plug-ins register: they watch the directory for their own socket, or
for a new ``kubelet.sock``.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
from pathlib import Path
from typing import Final

from proxy.config.endpoint import PATH_LIMIT
from proxy.model.errors import CannotCreateError, InputError, PermissionDeniedError
from proxy.model.quoting import quoted

SOCKET_NAME: Final = "kubelet.sock"
"""The name of the registration server's socket, which plug-ins have built in."""
MODE: Final = 0o750
"""Mode of the directory, as kubelet's."""


def prepare(directory: Path) -> None:
    """Make the directory, and remove the sockets in it, except that of the server.

    Raises:
        CannotCreateError: It cannot be made, or a socket cannot be removed.
        PermissionDeniedError: The process may not do that.
    """
    try:
        directory.mkdir(mode=MODE, parents=True, exist_ok=True)
        for entry in directory.iterdir():
            if entry.name != SOCKET_NAME and _is_socket(entry):
                entry.unlink(missing_ok=True)
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot prepare the directory {directory}: {error.strerror}") from error
    except OSError as error:
        raise CannotCreateError(f"cannot prepare the directory {directory}: {error.strerror}") from error


def _is_socket(path: Path) -> bool:
    """Return whether a socket is there, also at the end of a symbolic link."""
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(path.stat().st_mode)
    return False


def socket_of(directory: Path, endpoint: str) -> Path:
    """Return the socket of a plug-in.

    Args:
        directory: The directory.
        endpoint: What the plug-in has registered with.

    Raises:
        InputError: It leads out of the directory, or to the server itself, or is too long.
    """
    # As Go's filepath.Join: an absolute endpoint is below the directory too.
    relative = posixpath.normpath(f"./{endpoint}")
    cause = ""
    if not endpoint or "\0" in endpoint or relative in (".", SOCKET_NAME):
        cause = "it is not the name of a plug-in's socket"
    elif relative == ".." or relative.startswith("../"):
        cause = "it leads out of the directory"
    path = directory / relative
    if not cause and len(os.fsencode(path)) > PATH_LIMIT:
        cause = f"the path is longer than {PATH_LIMIT} bytes"
    if not cause and path.parent.resolve() != directory.resolve() / posixpath.dirname(relative):
        cause = "it leads out of the directory"
    if not cause and path.is_symlink():
        cause = "it is a symbolic link"
    if cause:
        raise InputError(f"cannot use the endpoint {quoted(endpoint)}: {cause}")
    return path
