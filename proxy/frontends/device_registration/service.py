"""Device plug-ins as the daemon starts and stops them: registrations, and what they lead to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from proxy.executor.device_ports import DevicePluginError
from proxy.frontends.device_registration.server import RegistrationServer
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import TopoproxyError
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.config.schema import DevicePluginsConfig
    from proxy.executor.context import NodeContext
    from proxy.executor.device_claims import OtherManagers

RETRY: Final = Backoff(1.0, 15.0)
"""Seconds before the socket is tried again: its current user may be stopping."""


class Registrations(Protocol):
    """What takes registrations."""

    async def register(self, resource: str, path: Path) -> None:
        """Make a plug-in the one of a resource.

        Raises:
            DevicePluginError: It cannot be.
        """

    def change_timeout(self, seconds: float) -> None:
        """Change the deadline of calls."""

    def page(self) -> list[dict[str, object]]:
        """Return the resources as plain data."""

    def close(self) -> None:
        """Drop all plug-ins."""


class DevicePluginService:
    """``run``, and then ``stop``."""

    def __init__(
        self,
        config: DevicePluginsConfig,
        executor: NodeContext,
        plugins: Registrations,
        others: OtherManagers | None = None,
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            config: Where plug-ins register and have their sockets.
            executor: The node.
            plugins: Takes registrations.
            others: What finds resources that have another manager; None where that cannot be known.
        """
        self._directory = config.socket_directory
        self._executor = executor
        self._plugins = plugins
        self._others = others
        self._server = RegistrationServer(self._directory, self._register, executor.telemetry)

    async def run(self) -> None:
        """Listen, as soon as the socket can be had, and watch other managers; returns when that is done."""
        await self._listen()
        if self._others is not None:
            await self._others.run()

    async def _listen(self) -> None:
        pauses, telemetry = RetryDelays(RETRY), self._executor.telemetry
        while True:
            try:
                await asyncio.to_thread(self._server.open)
                return telemetry.event("serving registrations of device plug-ins", path=self._directory)
            except TopoproxyError as error:
                telemetry.problem(
                    "cannot serve registrations of device plug-ins", path=self._directory, err=error
                )
            await asyncio.sleep(pauses.next())

    async def stop(self) -> None:
        """Stop listening, and drop all plug-ins."""
        self._plugins.close()
        await asyncio.to_thread(self._server.close)

    def reconfigure(self, config: DevicePluginsConfig) -> None:
        """Take what can change while plug-ins are served."""
        self._plugins.change_timeout(config.timeout)

    def page(self) -> dict[str, object]:
        """Return what the status shows."""
        return {
            "directory": str(self._directory),
            "resources": self._plugins.page(),
            "refused": self.refused(),
        }

    def refused(self) -> list[dict[str, object]]:
        """Return the resources that another device manager has, with the reasons."""
        return [] if self._others is None else self._others.page()

    async def _register(self, resource: str, path: Path) -> None:
        if self._others is not None and (conflict := await self._others.conflict(resource)):
            raise DevicePluginError(resource, conflict)
        await self._plugins.register(resource, path)
        self._executor.telemetry.count(metrics.DEVICE_PLUGIN_REGISTRATIONS, result="registered")
