"""What the author of a device plug-in writes: its devices, and what a container needs to use some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from proxy.model.devices import AllocateAnswer


class PluginDevice(Struct, frozen=True):
    """A device that a plug-in reports.

    Attributes:
        id: Unique within the resource.
        healthy: An unhealthy device is not given to a container; one that has it keeps it.
        numa: The NUMA nodes that it is near to; empty where that is not known.
    """

    id: str
    healthy: bool = True
    numa: tuple[int, ...] = ()


class DevicePlugin:
    """A device plug-in: a subclass sets ``resource`` and defines ``devices``, the rest is optional.

    The methods run in threads of the kit, several of them at a time. What they raise is logged and answered
    as an error, and the plug-in continues.

    Attributes:
        resource: The resource, with a domain: ``example.com/vf``.
        period_s: How often ``devices`` is called, in seconds.
    """

    resource: str = ""
    period_s: float = 5.0

    def devices(self) -> Iterable[PluginDevice]:
        """Return all devices, healthy or not. While this raises, all known devices are reported unhealthy."""
        raise NotImplementedError

    def allocate(self, ids: Sequence[str]) -> AllocateAnswer:
        """Return what a container needs to use these devices; they are known and healthy."""
        del ids
        return AllocateAnswer()

    def preferred(self, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        """Return which devices go together best; a plug-in without this method has no preference.

        Args:
            available: Ids to choose from.
            must_include: Ids that must be among the answer.
            size: How many ids to return.
        """
        raise NotImplementedError

    def pre_start(self, ids: Sequence[str]) -> None:
        """Prepare devices before each start of the container that has them; optional."""
        raise NotImplementedError

    @property
    def offers_preference(self) -> bool:
        """Whether the plug-in defines ``preferred``."""
        return type(self).preferred is not DevicePlugin.preferred

    @property
    def needs_pre_start(self) -> bool:
        """Whether the plug-in defines ``pre_start``."""
        return type(self).pre_start is not DevicePlugin.pre_start


class FunctionPlugin(DevicePlugin):
    """A device plug-in made of functions, for one that needs no more than its devices and their files."""

    def __init__(
        self,
        resource: str,
        devices: Callable[[], Iterable[PluginDevice]],
        allocate: Callable[[Sequence[str]], AllocateAnswer] | None = None,
    ) -> None:
        """Take the functions.

        Args:
            resource: The resource, with a domain.
            devices: Returns all devices.
            allocate: Returns what a container needs to use devices; nothing if None.
        """
        self.resource = resource
        self._devices = devices
        self._allocate = allocate

    def devices(self) -> Iterable[PluginDevice]:
        """Return what the function returns."""
        return self._devices()

    def allocate(self, ids: Sequence[str]) -> AllocateAnswer:
        """Return what the function returns."""
        return AllocateAnswer() if self._allocate is None else self._allocate(ids)
