"""A resource is managed by one manager: what kubelet or a DRA driver manages is not managed here too.

Two managers that know the same device give it to two containers. So a device plug-in is refused where
kubelet can assign devices of its resource, which is so where the plug-in registered with both, or where a DRA
driver has prepared one of its devices for a claim. Both are looked at when a plug-in registers, and every
``PERIOD_S`` afterwards: then the resource is withdrawn, and the plug-in is refused until the other manager
has given it up. Containers keep the devices that they have.

What kubelet has assigned and can no longer assign, as after its plug-in has ended, is not a conflict: that is
how a resource moves from kubelet to topoproxy. Where kubelet is not asked (``kubelet.podResources``), no
conflict is known; while it does not answer, what is known stays.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from msgspec import Struct, field

from proxy.executor.context import NodeContext

PERIOD_S: Final = 30.0
"""Seconds between two looks at what the other managers have."""
LISTED_S: Final = 1.0
"""Seconds within which the first list of a resource is noticed."""
PROBLEM: Final = "cannot manage a resource that has another manager"


class ManagedElsewhere(Struct, frozen=True):
    """What other managers of the node have.

    Attributes:
        plugged: Resources of which kubelet can assign devices, with the ids of these.
        claimed: PCI functions of devices that DRA drivers have prepared, with the claim in words.
    """

    plugged: Mapping[str, Collection[str]] = field(default_factory=dict)
    claimed: Mapping[str, str] = field(default_factory=dict)


Read = Callable[[], ManagedElsewhere | None]
"""Asks the other managers; may block. None where they do not answer."""


def conflict_of(resource: str, ids: Collection[str], elsewhere: ManagedElsewhere) -> str:
    """Say why a resource cannot be managed here; empty where it can.

    Args:
        resource: The resource.
        ids: Its devices, as far as they are known; those that are PCI addresses can be compared.
        elsewhere: What other managers have.
    """
    if resource in elsewhere.plugged:
        return (
            f"cannot manage {resource}: kubelet's device manager manages it too "
            f"({len(elsewhere.plugged[resource])} devices); let its plug-in register with one of the two"
        )
    for name in sorted(ids):
        if claim := elsewhere.claimed.get(name.lower()):
            return f"cannot manage {resource}: its device {name} is also managed by DRA ({claim})"
    return ""


class OtherManagers:
    """Finds resources that have another manager, for the event loop."""

    def __init__(
        self, node: NodeContext, read: Read, withdraw: Callable[[str, str], Awaitable[None]]
    ) -> None:
        """Ask nothing yet.

        Args:
            node: The node, with the resources that are managed here.
            read: Asks the other managers; runs in a thread.
            withdraw: Ends the management of a resource here, for a reason.
        """
        self._node = node
        self._read = read
        self._withdraw = withdraw
        self._refused: dict[str, str] = {}
        self._ids: dict[str, Collection[str]] = {}  # devices of what is refused: no plug-in lists them now
        self._compared: set[str] = set()

    def page(self) -> list[dict[str, object]]:
        """Return the resources that are refused, with the reasons."""
        return [{"resource": name, "reason": reason} for name, reason in sorted(self._refused.items())]

    async def conflict(self, resource: str) -> str:
        """Say why a plug-in that registers a resource is refused; empty where it is not."""
        elsewhere = await asyncio.to_thread(self._read)
        return self._refused.get(resource, "") if elsewhere is None else self._said(resource, elsewhere)

    async def run(self) -> None:
        """Look at the other managers again and again, and soon after the first list of a resource."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._listed()
            await self.look()

    async def _listed(self) -> None:
        """Wait for devices of a resource that have not been compared."""
        while not self._lists() - self._compared:
            await asyncio.sleep(LISTED_S)

    def _lists(self) -> set[str]:
        return {resource for resource, ids in self._node.store.state.devices.registered.items() if ids}

    async def look(self) -> None:
        """Withdraw what has another manager by now."""
        self._compared = self._lists()
        elsewhere = await asyncio.to_thread(self._read)
        if elsewhere is None:
            return
        registered = set(self._node.store.state.devices.registered)
        for resource in sorted(registered | self._refused.keys()):
            reason = self._said(resource, elsewhere)
            if reason and resource in registered:
                await self._withdraw(resource, reason)

    def _said(self, resource: str, elsewhere: ManagedElsewhere) -> str:
        telemetry = self._node.telemetry
        ids = self._node.store.state.devices.registered.get(resource) or self._ids.get(resource, ())
        if reason := conflict_of(resource, ids, elsewhere):
            telemetry.problem(PROBLEM, resource=resource, err=reason)
            self._refused[resource], self._ids[resource] = reason, tuple(ids)
        elif self._refused.pop(resource, ""):
            del self._ids[resource]
            telemetry.resolved(PROBLEM, resource=resource)
        return reason
