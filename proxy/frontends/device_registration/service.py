"""The service for device plugins: it serves registrations, and is started and stopped by the daemon."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from proxy.executor.device_ports import DevicePluginError
from proxy.frontends.device_registration.server import Forwarding, RegistrationServer
from proxy.sockets.grpc_socket import open_with_retries
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.config.schema import DevicePluginsConfig
    from proxy.executor.device_manager_conflicts import OtherManagers
    from proxy.executor.node_executor import NodeExecutor
    from proxy.frontends.device_registration.server import ForwardTarget

POLL_S: Final = 1.0
"""Seconds between two checks whether kubelet has started."""


CANNOT_SERVE: Final = "cannot serve registrations of device plugins"


class Registrations(Protocol):
    """A receiver of registrations."""

    async def register(self, resource: str, path: Path) -> None:
        """Make a plugin the one that serves a resource.

        Raises:
            DevicePluginError: That is impossible.
        """

    def change_timeout(self, seconds: float) -> None:
        """Change the deadline of calls."""

    def page(self) -> list[dict[str, object]]:
        """Return the resources as plain data."""

    def close(self) -> None:
        """Drop all plugins."""


class DevicePluginService:
    """``run``, and then ``stop``."""

    def __init__(
        self,
        config: DevicePluginsConfig,
        executor: NodeExecutor,
        plugins: Registrations,
        others: OtherManagers | None = None,
        kubelet: ForwardTarget | None = None,
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            config: The directories in which plugins register and have their sockets.
            executor: The node.
            plugins: Takes registrations.
            others: Finds resources that have another manager; None if that cannot be known.
            kubelet: Takes registrations for resources that are not taken over.
        """
        self._directory = config.socket_directory
        self._shim_directory, self._shim_resources = config.shim_directory, config.shim
        self._executor = executor
        self._plugins = plugins
        self._others = others
        self._server = RegistrationServer(self._directory, self._register, executor.telemetry)
        self._kubelet = kubelet
        self._shim: RegistrationServer | None = None
        if kubelet is not None:
            forwarding = Forwarding(self._shim_resources, kubelet)
            self._shim = RegistrationServer(
                self._shim_directory, self._register, executor.telemetry, forwarding
            )

    async def run(self) -> None:
        """Listen as soon as the sockets can be bound, and watch other managers."""
        await self._open_with_retries(self._server.open, self._directory)
        if self._shim is not None:
            await self._open_with_retries(self._shim.open, self._shim_directory)
        async with asyncio.TaskGroup() as watches:
            if self._others is not None:
                watches.create_task(self._others.run())
            if self._shim is not None:
                watches.create_task(self._follow_kubelet_starts())

    async def _follow_kubelet_starts(self) -> None:
        """When kubelet has started, repeat its signal in the directory of its plugins."""
        assert self._kubelet is not None
        assert self._shim is not None
        seen = await asyncio.to_thread(self._kubelet.socket_identity)
        while True:
            await asyncio.sleep(POLL_S)
            found = await asyncio.to_thread(self._kubelet.socket_identity)
            if found is not None and found != seen:
                seen = found
                await self._open_with_retries(self._shim.reopen, self._shim_directory)

    async def _open_with_retries(self, open_it: Callable[[], None], directory: Path) -> None:
        """Open a socket, and retry until that succeeds."""
        telemetry = self._executor.telemetry
        await open_with_retries(
            functools.partial(asyncio.to_thread, open_it),
            lambda error: telemetry.problem(CANNOT_SERVE, path=directory, err=error),
        )
        telemetry.event("serving registrations of device plugins", path=directory)
        telemetry.resolved(CANNOT_SERVE, path=directory)

    async def stop(self) -> None:
        """Stop listening, and drop all plugins."""
        self._plugins.close()
        if self._kubelet is not None:
            self._kubelet.close()
        servers = [server for server in (self._server, self._shim) if server is not None]
        await asyncio.gather(*(asyncio.to_thread(server.close) for server in servers))

    def reconfigure(self, config: DevicePluginsConfig) -> None:
        """Apply settings that can change while plugins are served."""
        self._plugins.change_timeout(config.timeout)

    def page(self) -> dict[str, object]:
        """Return the data of the status."""
        page: dict[str, object] = {
            "directory": str(self._directory),
            "resources": self._plugins.page(),
            "refused": self.refused(),
        }
        if self._shim is not None:
            resources = sorted(self._shim_resources)
            page["shim"] = {"directory": str(self._shim_directory), "resources": resources}
        return page

    def refused(self) -> list[dict[str, object]]:
        """Return the resources that another device manager has, with the reasons."""
        return [] if self._others is None else self._others.page()

    async def _register(self, resource: str, path: Path) -> None:
        if self._others is not None and (conflict := await self._others.conflict(resource, path)):
            raise DevicePluginError(resource, conflict)
        if self._executor.device_grants is not None:
            await self._executor.device_grants.take_over(resource)
        await self._plugins.register(resource, path)
        self._executor.telemetry.count(metrics.DEVICE_PLUGIN_REGISTRATIONS, result="registered")
