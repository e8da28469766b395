"""Runs device plugins: their sockets, their registration, and the calls of ``devices`` on a timer.

A plugin is registered once, and again whenever the manager may have forgotten it.

Theory. A manager listens on ``kubelet.sock`` in a directory, and the plugin on a socket next to it.
``Register`` names that socket, and the manager connects to it. A manager that starts removes all sockets of
the directory and creates its own again (kubernetes v1.36 pkg/kubelet/cm/devicemanager/manager.go,
CleanupPluginDirectory), and does not know earlier plugins. It does not connect again after its stream has
ended. So a plugin registers when

- ``kubelet.sock`` is not the same socket as at its last registration: another inode, or created later;
- its own socket is gone or was replaced, and has been created again;
- no manager has followed its devices for ``UNWATCHED_S``.

The directory is checked once a second, because inotify would need a watch on each part of the path, and does
not report a mount over it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import grpc

from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.device_kit.service import DevicePlugin, PluginService
from proxy.logs import log
from proxy.logs import telemetry as logging_telemetry
from proxy.model.backoff import Backoff, RetryTimes
from proxy.model.errors import TopoproxyError
from proxy.sockets.grpc_socket import GrpcSocket
from proxy.telemetry.port import Telemetry

DIRECTORY = Path("/var/lib/topoproxy/device-plugins")
"""Where topoproxy listens for device plugins; kubelet's directory: ``/var/lib/kubelet/device-plugins``."""
TICK_S = 1.0
"""Seconds between two checks of the directory."""
THREADS, WAITING_CALLS = 8, 32
"""Calls that are answered at a time, one of them ListAndWatch, and calls that may wait."""
STOP_S, END_S = 0.5, 5.0

VERSION = "v1beta1"
REGISTER = "/v1beta1.Registration/Register"
MANAGER_SOCKET = "kubelet.sock"
UNWATCHED_S = 10.0
"""Seconds without a manager that follows the devices, after which the plugin registers again."""
REGISTER_S = 30.0
"""Deadline of a registration, during which kubelet connects to the plugin, for up to 10 s."""
RETRY_BACKOFF = Backoff(first=1.0, longest=30.0)

Identity = tuple[int, int, int]
"""Device, inode and time of a socket: an inode number alone may be used again soon."""


class RegistrationError(Exception):
    """A manager has refused a plugin, or does not answer."""


def identity(path: Path) -> Identity | None:
    """Return what distinguishes a socket from another at the same path; None without a socket."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def register(manager: Path, endpoint: str, resource: str) -> None:
    """Register a plugin once.

    Args:
        manager: The socket of the manager.
        endpoint: The name of the plugin's socket, next to it.
        resource: The resource that the plugin serves.

    Raises:
        RegistrationError: The manager refuses, or does not answer.
    """
    request = pb.RegisterRequest(version=VERSION, endpoint=endpoint, resource_name=resource)
    with grpc.insecure_channel(f"unix:{manager}") as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(REGISTER)
        try:
            call(request.SerializeToString(), timeout=REGISTER_S)
        except grpc.RpcError as error:
            # The error that grpc raises is also a call, which its type hints do not show.
            raise RegistrationError(getattr(error, "details", error.__str__)()) from error


class Registration:
    """Decides when a plugin must be registered (again), and registers it."""

    def __init__(self, directory: Path, endpoint: str, resource: str) -> None:
        """Begin unregistered.

        Args:
            directory: Where the manager and the plugins have their sockets.
            endpoint: The name of the plugin's socket.
            resource: The resource that the plugin serves.
        """
        self._manager_socket = directory / MANAGER_SOCKET
        self._plugin_socket = directory / endpoint
        self._resource = resource
        self._registered_sockets: tuple[Identity | None, Identity | None] = None, None
        self._retries = RetryTimes[Identity](RETRY_BACKOFF)

    def due(self, unwatched_s: float, now: float) -> bool:
        """Return whether to register.

        Args:
            unwatched_s: For how long no manager has followed the devices.
            now: Seconds that only grow.
        """
        manager, socket = identity(self._manager_socket), identity(self._plugin_socket)
        if manager is not None and not unwatched_s:
            self._retries.succeeded(manager)
        if manager is None or socket is None or not self._retries.due(manager, now):
            return False
        return (manager, socket) != self._registered_sockets or unwatched_s > UNWATCHED_S

    def attempt(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Register.

        Raises:
            RegistrationError: The manager refuses, or does not answer; ``due`` waits before the next attempt.
        """
        identities = identity(self._manager_socket), identity(self._plugin_socket)
        if identities[0] is None:
            return
        self._retries.keep({identities[0]})
        # Wait after a success too: the manager needs a moment until it follows the devices.
        self._retries.failed(identities[0], clock())
        register(self._manager_socket, self._plugin_socket.name, self._resource)
        self._registered_sockets = identities


class PluginServer:
    """Serves one plugin until it is stopped."""

    def __init__(
        self, plugin: DevicePlugin, directory: Path, telemetry: Telemetry, *, tick_s: float = TICK_S
    ) -> None:
        """Open nothing yet.

        Args:
            plugin: The plugin of the author.
            directory: Where the manager and the plugins have their sockets.
            telemetry: Reports problems.
            tick_s: Seconds between two checks of the directory.
        """
        self._plugin = plugin
        self._telemetry = telemetry
        self._tick_s = tick_s
        endpoint = f"{plugin.resource.replace('/', '_')}.sock"
        self._service = service = PluginService(plugin, telemetry)
        self._path = directory / endpoint
        self._opened: Identity | None = None
        self._socket = GrpcSocket(
            self._path,
            "serve a device plugin",
            "v1beta1.DevicePlugin",
            service.handlers,
            threads=THREADS,
            max_requests=WAITING_CALLS,
            grace_s=STOP_S,
            close_timeout_s=END_S,
        )
        self._registration = Registration(directory, endpoint, plugin.resource)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=each, daemon=True) for each in (self._poll, self._stay_registered)
        ]

    def start(self) -> None:
        """Serve from now on."""
        for thread in self._threads:
            thread.start()

    def end_soon(self) -> None:
        """Stop registering; ``stop`` then has less to wait for."""
        self._stopping.set()

    def stop(self) -> None:
        """Close the socket, so that the manager notices that the plugin is gone."""
        self._stopping.set()
        self._socket.may_open = False
        self._threads[1].join(STOP_S)  # a manager may leave a registration unanswered
        self._socket.close()

    def _poll(self) -> None:
        while True:
            self._service.refresh()
            if self._stopping.wait(self._plugin.period_s):
                return

    def _stay_registered(self) -> None:
        """Keep the socket open and the plugin registered."""
        keys = {"resource": self._plugin.resource}
        while True:
            try:
                self._step()
            except (TopoproxyError, RegistrationError) as error:
                self._telemetry.problem("cannot register the device plugin", **keys, err=error)
            else:
                self._telemetry.resolved("cannot register the device plugin", **keys)
            if self._stopping.wait(self._tick_s):
                return

    def _step(self) -> None:
        if self._opened is None or identity(self._path) != self._opened:
            self._socket.close()
            self._check_directory()
            self._socket.open()
            self._opened = identity(self._path)
        if self._registration.due(self._service.unwatched_s(), time.monotonic()):
            self._registration.attempt()
            self._telemetry.event("registered the device plugin", resource=self._plugin.resource)

    def _check_directory(self) -> None:
        """Raise TopoproxyError if the directory of the sockets is missing."""
        directory = self._path.parent
        if not directory.exists():
            hint = (
                " (the daemon makes it when devicePlugins.enabled is true)" if directory == DIRECTORY else ""
            )
            raise TopoproxyError(f"cannot listen in {directory}: there is no such directory{hint}")


def serve(*plugins: DevicePlugin, directory: Path = DIRECTORY) -> None:
    """Serve plugins until the process gets SIGTERM or SIGINT; call it in the main thread.

    Args:
        plugins: The plugins, each with another resource.
        directory: Where the manager and the plugins have their sockets.
    """
    log.setup()
    telemetry = logging_telemetry()
    # Not an Event: a handler that interrupts the start of wait() would wait for the lock that wait() holds.
    # SimpleQueue.put may be called by a handler.
    ended: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: ended.put(received))
    servers = [PluginServer(plugin, directory, telemetry) for plugin in plugins]
    for server in servers:
        server.start()
    ended.get()
    for server in servers:
        server.end_soon()
    for server in servers:
        server.stop()
