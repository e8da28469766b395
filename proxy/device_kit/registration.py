"""The registration of a device plug-in: made once, and again whenever the manager may have forgotten it.

Theory. A manager listens on ``kubelet.sock`` in a directory, and the plug-in on a socket next to it.
``Register`` names that socket, and the manager connects to it. A manager that starts removes all sockets of
the directory and makes its own again (kubernetes v1.36 pkg/kubelet/cm/devicemanager/manager.go,
CleanupPluginDirectory), and does not know the plug-ins of before. Nor does it connect again after its stream
has ended. So a plug-in registers when

- ``kubelet.sock`` is another one than at its last registration: another inode, or one made later;
- its own socket is gone, or is not the one that it has made, and is made again;
- no manager has followed its devices for ``UNWATCHED_S``.

The directory is checked once a second: inotify would need a watch on each part of the path, and does not
report a mount over it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import grpc

from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.model.backoff import Backoff, RetryTimes

VERSION = "v1beta1"
REGISTER = "/v1beta1.Registration/Register"
MANAGER_SOCKET = "kubelet.sock"
UNWATCHED_S = 10.0
"""How long a manager may leave the devices unread before the plug-in registers again."""
REGISTER_S = 30.0
"""Deadline of a registration: kubelet connects to the plug-in in it, for up to 10 s."""
AGAIN = Backoff(first=1.0, longest=30.0)

Identity = tuple[int, int, int]
"""Device, inode and time of a socket: an inode number alone is given again soon."""


class RegistrationError(Exception):
    """A manager has refused a plug-in, or does not answer."""


def identity(path: Path) -> Identity | None:
    """Return what distinguishes a socket from another at the same path; None without a socket."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def register(manager: Path, endpoint: str, resource: str) -> None:
    """Register a plug-in once.

    Args:
        manager: The socket of the manager.
        endpoint: The name of the plug-in's socket, next to it.
        resource: What it serves.

    Raises:
        RegistrationError: The manager refuses, or does not answer.
    """
    request = pb.RegisterRequest(version=VERSION, endpoint=endpoint, resource_name=resource)
    with grpc.insecure_channel(f"unix:{manager}") as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(REGISTER)
        try:
            call(request.SerializeToString(), timeout=REGISTER_S)
        except grpc.RpcError as error:
            # grpc raises a call as the error, which its type hints do not say.
            raise RegistrationError(getattr(error, "details", error.__str__)()) from error


class Registration:
    """Whether a plug-in is registered, and when it is to be registered again."""

    def __init__(self, directory: Path, endpoint: str, resource: str) -> None:
        """Begin unregistered.

        Args:
            directory: Where the manager and the plug-ins have their sockets.
            endpoint: The name of the plug-in's socket.
            resource: What it serves.
        """
        self._manager = directory / MANAGER_SOCKET
        self._own = directory / endpoint
        self._resource = resource
        self._known: tuple[Identity | None, Identity | None] = None, None
        self._retries = RetryTimes[Identity](AGAIN)

    def due(self, unwatched_s: float, now: float) -> bool:
        """Return whether to register.

        Args:
            unwatched_s: For how long no manager has followed the devices.
            now: Seconds that only grow.
        """
        manager, own = identity(self._manager), identity(self._own)
        if manager is not None and not unwatched_s:
            self._retries.succeeded(manager)
        if manager is None or own is None or not self._retries.due(manager, now):
            return False
        return (manager, own) != self._known or unwatched_s > UNWATCHED_S

    def attempt(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Register.

        Raises:
            RegistrationError: The manager refuses, or does not answer; ``due`` waits before the next attempt.
        """
        found = identity(self._manager), identity(self._own)
        if found[0] is None:
            return
        self._retries.keep({found[0]})
        # A success waits, too: the manager needs a moment to follow the devices.
        self._retries.failed(found[0], clock())
        register(self._manager, self._own.name, self._resource)
        self._known = found
