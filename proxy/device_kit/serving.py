"""Runs device plug-ins: their sockets, their registration, and the calls of ``devices`` on a timer."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

from proxy.device_kit.plugin import DevicePlugin
from proxy.device_kit.registration import Identity, Registration, RegistrationError, identity
from proxy.device_kit.service import PluginService
from proxy.logs import log
from proxy.logs import telemetry as logging_telemetry
from proxy.model.errors import TopoproxyError
from proxy.sockets.grpc_socket import GrpcSocket
from proxy.telemetry.port import Telemetry

DIRECTORY = Path("/var/lib/topoproxy/device-plugins")
"""Where topoproxy listens for device plug-ins; kubelet: ``/var/lib/kubelet/device-plugins``."""
TICK_S = 1.0
"""Seconds between two checks of the directory."""
THREADS, CALLS = 8, 32
"""Calls that are answered at a time, one of them ListAndWatch, and calls that may wait."""
STOP_S, END_S = 0.5, 5.0


class PluginServer:
    """Serves one plug-in until it is stopped."""

    def __init__(
        self, plugin: DevicePlugin, directory: Path, telemetry: Telemetry, *, tick_s: float = TICK_S
    ) -> None:
        """Open nothing yet.

        Args:
            plugin: The author's part.
            directory: Where the manager and the plug-ins have their sockets.
            telemetry: Where problems are reported.
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
            "serve a device plug-in",
            "v1beta1.DevicePlugin",
            service.handlers,
            threads=THREADS,
            at_once=CALLS,
            stop_s=STOP_S,
            end_s=END_S,
        )
        self._registration = Registration(directory, endpoint, plugin.resource)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._poll, self._keep)]

    def start(self) -> None:
        """Serve from now on."""
        for thread in self._threads:
            thread.start()

    def end_soon(self) -> None:
        """Register no more; ``stop`` then has less to wait for."""
        self._stopping.set()

    def stop(self) -> None:
        """Close the socket: the manager finds the plug-in gone."""
        self._stopping.set()
        self._socket.wanted = False
        self._threads[1].join(STOP_S)  # a manager may leave a registration unanswered
        self._socket.close()

    def _poll(self) -> None:
        while True:
            self._service.refresh()
            if self._stopping.wait(self._plugin.period_s):
                return

    def _keep(self) -> None:
        """Keep the socket open and the plug-in registered."""
        keys = {"resource": self._plugin.resource}
        while True:
            try:
                self._step()
            except (TopoproxyError, RegistrationError) as error:
                self._telemetry.problem("cannot register the device plug-in", **keys, err=error)
            else:
                self._telemetry.resolved("cannot register the device plug-in", **keys)
            if self._stopping.wait(self._tick_s):
                return

    def _step(self) -> None:
        if self._opened is None or identity(self._path) != self._opened:
            self._socket.close()
            self._socket.open()
            self._opened = identity(self._path)
        if self._registration.due(self._service.unwatched_s(), time.monotonic()):
            self._registration.attempt()
            self._telemetry.event("registered the device plug-in", resource=self._plugin.resource)


def serve(*plugins: DevicePlugin, directory: Path = DIRECTORY) -> None:
    """Serve plug-ins until the process gets SIGTERM or SIGINT; call it in the main thread.

    Args:
        plugins: The plug-ins, each with a resource of its own.
        directory: Where the manager and the plug-ins have their sockets.
    """
    log.setup()
    telemetry = logging_telemetry()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    servers = [PluginServer(plugin, directory, telemetry) for plugin in plugins]
    for server in servers:
        server.start()
    ended.wait()
    for server in servers:
        server.end_soon()
    for server in servers:
        server.stop()
