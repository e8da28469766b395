"""Calls in flight that may write a container's cpuset at any moment.

A StartContainer or UpdateContainerResources that has left for the runtime carries the set that was right when
it left. If a pool shrinks meanwhile, a kernel write of ours could be undone when the runtime gets to it. So a
shrink first waits until such calls have landed, and only then writes and reads back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from proxy.model.idset import CpuSet


class Flights:
    """The calls in flight, by container id."""

    def __init__(self) -> None:
        self._flying: dict[str, dict[asyncio.Future[None], CpuSet]] = {}

    def depart(self, container_id: str, carries: CpuSet) -> asyncio.Future[None]:
        """Register a call that carries a set to a container; give the result to ``land``."""
        flight: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flying.setdefault(container_id, {})[flight] = carries
        return flight

    def land(self, container_id: str, flight: asyncio.Future[None]) -> None:
        """The call has been answered, or is lost."""
        flights = self._flying.get(container_id)
        if flights is not None and flights.pop(flight, None) is not None:
            if not flights:
                del self._flying[container_id]
            flight.set_result(None)

    def flying(self, container_id: str) -> bool:
        """Tell whether a call for the container is in flight."""
        return container_id in self._flying

    async def landed(self, wanted: Iterable[tuple[str, CpuSet]], timeout: float) -> bool:
        """Wait until no call is in flight that carries CPUs outside a container's wanted set.

        Args:
            wanted: Container ids with the sets that they must not exceed.
            timeout: Seconds to wait at most.

        Returns:
            False when the time is over and some are still flying.
        """
        waits = [
            flight
            for container_id, cpus in wanted
            for flight, carries in self._flying.get(container_id, {}).items()
            if not carries <= cpus
        ]
        if not waits:
            return True
        _, late = await asyncio.wait(waits, timeout=timeout)
        return not late
