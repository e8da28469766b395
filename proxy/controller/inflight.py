"""Calls in flight that may write a container's cpuset at any moment.

A StartContainer or UpdateContainerResources that has left for the runtime carries the set that was right when
it left. If a pool shrinks meanwhile, a kernel write of ours could be undone when the runtime gets to it. So a
shrink first waits until such calls have landed, and only then writes and reads back.

A call that gets no answer (its client went away, its deadline passed, the runtime was lost), and a start
that was refused, may still be executed by the runtime, or be so already: it stays in flight, as a *stray*,
until the runtime's list tells, or the runtime has answered others for long enough. A runtime that hangs
answers nobody, so its strays stay. When two calls for one container overlap, nobody knows which the runtime
executed last: neither tells what the runtime has saved.

A start that hangs need not hold up anything once its container's group exists: the container is *confined*,
see ``confinement``. Its flight stays registered until it lands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from proxy.model.idset import CpuSet


@dataclass(slots=True, eq=False)
class Flight:
    """One call in flight.

    Attributes:
        container_id: Whom it is about.
        carries: The set that it brings.
        is_start: A start, not an update.
        overlapped: Another call for the container was in flight at the same time.
        stray_since: When it became a stray; None while its answer is waited for.
        seen: When the runtime first answered something that was asked after that.
        refused: It is a start that the runtime has answered with an error: its next list is right about it.
        tell: When it is over, the runtime is told today's set.
        departed: When it left, by the loop's clock.
        suspected: It is not known to exist: a daemon before us may have let it go.
        confined: The container is kept within its current set while the call is in flight.
    """

    container_id: str
    carries: CpuSet
    is_start: bool
    landed: asyncio.Future[None]
    overlapped: bool = False
    stray_since: float | None = None
    seen: float | None = None
    refused: bool = False
    tell: bool = True
    departed: float = 0.0
    suspected: bool = False
    confined: bool = False


class InflightCalls:
    """The calls in flight, by container id."""

    def __init__(self) -> None:
        self._flying: dict[str, list[Flight]] = {}
        self._confined: dict[str, int] = {}

    def depart(self, container_id: str, carries: CpuSet, *, is_start: bool = False) -> Flight:
        """Register a call that carries a set to a container; give the result to ``land``."""
        loop = asyncio.get_running_loop()
        landed: asyncio.Future[None] = loop.create_future()
        flight = Flight(container_id, carries, is_start, landed, departed=loop.time())
        others = self._flying.setdefault(container_id, [])
        if others:
            flight.overlapped = True
            for other in others:
                other.overlapped = True
        others.append(flight)
        return flight

    def land(self, flight: Flight) -> bool:
        """The call has been answered, or is lost.

        Returns:
            False where it had landed before.
        """
        if flight.landed.done():
            return False
        flight.landed.set_result(None)
        self.confine(flight, confined=False)
        others = self._flying[flight.container_id]
        others.remove(flight)
        if not others:
            del self._flying[flight.container_id]
        return True

    def of(self, container_id: str) -> list[Flight]:
        """Give the calls in flight for a container."""
        return list(self._flying.get(container_id, ()))

    def busy(self, container_id: str) -> bool:
        """Tell whether a call for the container is in flight; callable from any thread."""
        return container_id in self._flying

    def starting(self, container_id: str) -> bool:
        """Tell whether a start of the container is in flight."""
        return any(flight.is_start for flight in self._flying.get(container_id, ()))

    def strays(self) -> list[Flight]:
        """Give the calls that nobody waits for any more."""
        return [f for flights in self._flying.values() for f in flights if f.stray_since is not None]

    def awaited(self, container_id: str) -> bool:
        """Tell whether a call is in flight for a container whose answer will be followed."""
        return any(flight.stray_since is None for flight in self._flying.get(container_id, ()))

    def known(self, container_id: str) -> bool:
        """Tell whether a call is in flight for a container that is not only suspected to be."""
        flying = self._flying.get(container_id, ())
        return any(flight.stray_since is None or flight.tell for flight in flying)

    async def updated(self, container_id: str, cpus: CpuSet, timeout: float) -> bool:
        """Wait until no update is in flight that carries another set to a container.

        Args:
            container_id: Which container.
            cpus: The set that it is to have.
            timeout: Seconds to wait at most.

        Returns:
            False where one is in flight still.
        """
        waits = [flight.landed for flight in self.others(container_id, cpus)]
        return not waits or not (await asyncio.wait(waits, timeout=timeout))[1]

    def others(self, container_id: str, cpus: CpuSet) -> list[Flight]:
        """Give the updates in flight that carry another set to a container."""
        flying = self._flying.get(container_id, ())
        return [flight for flight in flying if not flight.is_start and flight.carries != cpus]

    def beyond(self, wanted: Iterable[tuple[str, CpuSet]], mine: CpuSet) -> list[Flight]:
        """Give the calls in flight that carry some CPUs to a container that is not to have them.

        Args:
            wanted: Container ids with the sets that they must not exceed.
            mine: The CPUs that it is about.
        """
        return [
            flight
            for container_id, cpus in wanted
            for flight in self._flying.get(container_id, ())
            if (flight.carries - cpus) & mine
        ]

    # -- confined containers ------------------------------------------------------------------------------

    def confine(self, flight: Flight, *, confined: bool) -> None:
        """Mark a flight whose container is kept within its current set, or no longer is."""
        if flight.confined is confined:
            return
        flight.confined = confined
        count = self._confined.get(flight.container_id, 0) + (1 if confined else -1)
        if count:
            self._confined[flight.container_id] = count
        else:
            self._confined.pop(flight.container_id, None)

    def is_confined(self, container_id: str) -> bool:
        """Tell whether a container is confined; callable from any thread."""
        return container_id in self._confined

    def confined(self) -> list[str]:
        """Give the ids of the containers that are confined."""
        return list(self._confined)
