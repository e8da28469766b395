"""What the executor needs from device plugins. Calls are made on the event loop, each with a deadline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from proxy.engine.held_devices import PodDevices
from proxy.model.devices import AllocateAnswer


class DevicePluginError(Exception):
    """A device plugin cannot do what was requested.

    Attributes:
        resource: The resource of the plugin.
        message: The cause, with the plugin and, if it did not answer, the deadline.
    """

    def __init__(self, resource: str, message: str) -> None:
        super().__init__(message)
        self.resource = resource
        self.message = message


class KubeletAllocations(Protocol):
    """The devices that kubelet's device manager has assigned."""

    def read(self, resource: str) -> Mapping[str, PodDevices]:
        """Return the devices that containers hold, by uid of the pod; may block.

        Raises:
            DevicePluginError: The assigned devices of this resource cannot be read.
        """


class DevicePlugins(Protocol):
    """The device plugins of the node, by resource.

    The list of devices is not requested. Whenever the devices of a resource change, the implementation passes
    the event ``DevicesChanged`` with all of them to the store, at most once for each change, on the event
    loop.
    """

    def offers_preference(self, resource: str) -> bool:
        """Return whether the plugin of a resource answers ``preferred``."""

    def needs_pre_start(self, resource: str) -> bool:
        """Return whether the plugin of a resource must be called with ``pre_start`` before each create."""

    async def preferred(
        self, resource: str, available: frozenset[str], must_include: frozenset[str], size: int
    ) -> tuple[str, ...]:
        """Ask a plugin which devices it prefers (GetPreferredAllocation).

        Args:
            resource: The resource.
            available: Ids to choose from, including those of ``must_include``.
            must_include: Ids that the container has already.
            size: How many ids are wanted in all.

        Returns:
            The ids; empty if the plugin has no preference or the call has failed.
        """

    async def allocate(self, resource: str, ids: tuple[str, ...]) -> AllocateAnswer:
        """Ask a plugin what a container needs to use devices (Allocate).

        Raises:
            DevicePluginError: The plugin has refused, has gone, or has not answered in time.
        """

    async def pre_start(self, resource: str, ids: tuple[str, ...]) -> None:
        """Make a plugin prepare the devices of a container before its create (PreStartContainer).

        Raises:
            DevicePluginError: The plugin has refused, has gone, or has not answered in time.
        """
