"""A resource has one manager: if kubelet or a DRA driver manages it, topoproxy does not manage it too.

Two managers that know the same device give it to two containers. So a device plugin is refused if kubelet
can assign devices of its resource (because the plugin registered with both), or if a DRA driver has prepared
one of its devices for a claim. Both are checked when a plugin registers, and every ``PERIOD_S`` afterwards.
If a later check finds a conflict, the resource is withdrawn, and the plugin is refused until the other
manager has given the resource up. Containers keep the devices that they have.

A refusal is shown until the other manager has given the resource up, or its plugin is gone: nothing has
listened on the plugin's socket for ``GONE_S``.

Devices that kubelet has assigned but can no longer assign, for example because the plugin has ended, are not
a conflict: that is how a resource moves from kubelet to topoproxy. If kubelet is not queried
(``kubelet.podResources``), no conflict is known. While kubelet does not answer, the known conflicts stay.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct, field

from proxy.executor.context import NodeContext

PERIOD_S: Final = 30.0
"""Seconds between two checks of what the other managers have."""
LISTED_S: Final = 1.0
"""Seconds within which the first list of a resource is detected."""
GONE_S: Final = 600.0
"""Seconds after which a refused plugin counts as gone. When a plugin ends, kubelet restarts it after at
most 300 s."""
PROBLEM: Final = "cannot manage a resource that has another manager"


class ManagedElsewhere(Struct, frozen=True):
    """What other managers of the node have.

    Attributes:
        plugged: Resources of which kubelet can assign devices, with the ids of the devices.
        claimed: PCI functions of devices that DRA drivers have prepared, with the claim as text.
    """

    plugged: Mapping[str, Collection[str]] = field(default_factory=dict)
    claimed: Mapping[str, str] = field(default_factory=dict)


Read = Callable[[], ManagedElsewhere | None]
"""Queries the other managers; may block. Returns None if they do not answer."""


def conflict_of(resource: str, ids: Collection[str], elsewhere: ManagedElsewhere) -> str:
    """Return why a resource cannot be managed here; empty if it can.

    Args:
        resource: The resource.
        ids: The ids of its known devices; only ids that are PCI addresses can be compared.
        elsewhere: What other managers have.
    """
    if resource in elsewhere.plugged:
        return (
            f"cannot manage {resource}: kubelet's device manager manages it too "
            f"({len(elsewhere.plugged[resource])} devices); "
            "let its plugin register with kubelet or with topoproxy"
        )
    for name in sorted(ids):
        if claim := elsewhere.claimed.get(name.lower()):
            return f"cannot manage {resource}: its device {name} is also managed by DRA ({claim})"
    return ""


class OtherManagers:
    """Finds resources that have another manager, for the event loop."""

    def __init__(
        self,
        node: NodeContext,
        read: Read,
        withdraw: Callable[[str, str], Awaitable[None]],
        listens: Callable[[Path], bool],
    ) -> None:
        """Prepare; nothing is requested yet.

        Args:
            node: The node, with the resources that are managed here.
            read: Queries the other managers; runs in a thread.
            withdraw: Ends the management of a resource here, for a reason.
            listens: Returns whether a process listens on a socket; may block.
        """
        self._node = node
        self._read = read
        self._withdraw = withdraw
        self._refused: dict[str, str] = {}
        self._ids: dict[str, Collection[str]] = {}  # devices of refused resources: no plugin lists them
        self._compared: set[str] = set()
        self._listens = listens
        self._sockets: dict[str, Path] = {}  # of the plugins that registered last
        self._seen: dict[str, float] = {}  # when a refused plugin was there last

    def page(self) -> list[dict[str, object]]:
        """Return the resources that are refused, with the reasons."""
        return [{"resource": name, "reason": reason} for name, reason in sorted(self._refused.items())]

    async def conflict(self, resource: str, socket: Path) -> str:
        """Return why a plugin that registers a resource at a socket is refused; empty if it is not."""
        elsewhere = await asyncio.to_thread(self._read)
        self._sockets[resource] = socket
        self._seen.pop(resource, None)
        return (
            self._refused.get(resource, "")
            if elsewhere is None
            else self._reported_conflict(resource, elsewhere)
        )

    async def run(self) -> None:
        """Check the other managers periodically, and soon after the first list of a resource."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._listed()
            await self.withdraw_conflicting_resources()

    async def _listed(self) -> None:
        """Wait for devices of a resource that have not been compared."""
        while not self._lists() - self._compared:
            await asyncio.sleep(LISTED_S)

    def _lists(self) -> set[str]:
        return {resource for resource, ids in self._node.store.state.devices.registered.items() if ids}

    async def withdraw_conflicting_resources(self) -> None:
        """Withdraw the resources that another device manager manages now."""
        self._compared = self._lists()
        elsewhere = await asyncio.to_thread(self._read)
        if elsewhere is None:
            return
        registered = set(self._node.store.state.devices.registered)
        for resource in sorted(registered | self._refused.keys()):
            reason = self._reported_conflict(resource, elsewhere)
            if reason and resource in registered:
                await self._withdraw(resource, reason)
            elif reason:
                await self._forget_if_gone(resource)

    async def _forget_if_gone(self, resource: str) -> None:
        """End the refusal of a resource whose plugin has not been there for long."""
        now, socket = self._node.clock(), self._sockets.get(resource)
        if socket is not None and await asyncio.to_thread(self._listens, socket):
            self._seen[resource] = now
        elif now - self._seen.setdefault(resource, now) >= GONE_S:
            self._end(resource)
            del self._seen[resource]
            self._sockets.pop(resource, None)

    def _end(self, resource: str) -> None:
        del self._refused[resource], self._ids[resource]
        self._node.telemetry.resolved(PROBLEM, resource=resource)

    def _reported_conflict(self, resource: str, elsewhere: ManagedElsewhere) -> str:
        ids = self._node.store.state.devices.registered.get(resource) or self._ids.get(resource, ())
        if reason := conflict_of(resource, ids, elsewhere):
            self._node.telemetry.problem(PROBLEM, resource=resource, err=reason)
            self._refused[resource], self._ids[resource] = reason, tuple(ids)
        elif resource in self._refused:
            self._end(resource)
        return reason
