"""Starts and updates: calls that bring a set to a container through the runtime.

What is kept here is what the runtime would use if it started or updated a container now (``saved``), and
which calls are on their way (``flights``). A container that is created has no cgroup yet: runc makes it at
the start, from the spec that was saved last.
"""

from __future__ import annotations

import asyncio
import functools

from proxy.keeper.fencing import Fence
from proxy.keeper.flights import Flight
from proxy.keeper.keeper import Keeper
from proxy.keeper.worker import Worker
from proxy.model.errors import UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pool

ROUNDS = 5
STRAY_GRACE_S = 2.0
"""How long a call that lost its client may still be executed by the runtime."""


class Launch:
    """The starts and updates of a keeper's containers.

    Attributes:
        lookups: Who asks and tells the runtime in the way of a call.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.lookups = Worker("lookups", keeper.broken, threads=8)

    def is_fresh(self, container: Container) -> bool:
        """Tell whether the runtime would start a container with the right set, and nobody need be checked."""
        keeper = self._keeper
        if not keeper.options.enforce:
            return True
        if container.placement.pool is Pool.OWN:
            return False
        if keeper.state.node.erases(container.placement):
            return True  # it starts with what its pod's group has
        known = container.id not in keeper.quotas.untold
        return known and keeper.saved.get(container.id) == keeper.state.wanted(container)

    async def freshen(self, container_id: str) -> str:
        """See to it that a created container starts with today's set, and with its own CPUs free.

        Returns:
            Empty when it may start; else why not.

        Raises:
            UnavailableError, RuntimeCallError: The runtime did not take the set.
        """
        keeper = self._keeper
        for _ in range(ROUNDS):
            container = keeper.state.containers.get(container_id)
            if container is None or container.phase is not Phase.CREATED or self.is_fresh(container):
                return ""
            told = container_id not in keeper.quotas.untold
            if not told or keeper.saved.get(container_id) != keeper.state.wanted(container):
                await self.tell(container)
                continue
            if container.placement.pool is Pool.OWN:
                await keeper.quotas.before_start(container)
                obstacle = await keeper.clearing.barrier(
                    container.placement.own | container.placement.instead
                )
                return obstacle.words if obstacle else ""
            return ""
        return "the pools change faster than the runtime can be told"

    async def tell(self, container: Container) -> None:
        """Tell the runtime today's set of a container that is created.

        Raises:
            UnavailableError, RuntimeCallError: It did not take it, or not in time.
        """
        keeper = self._keeper
        want, quota = keeper.state.wanted(container), keeper.quotas.carried(container)
        flight = keeper.flights.depart(container.id, want)

        async def told() -> None:
            carried: CpuSet | None = None
            try:
                mems = keeper.mems.told(container)
                await self.lookups.run(keeper.runtime.update_cpuset, container.id, want, mems, quota)
                carried = want
                keeper.quotas.told(container.id, quota)
                keeper.counters["specs_freshened"] += 1
            finally:
                self.landed(flight, carried)

        # If it takes too long the caller gives up, but the call stays in flight until it has ended.
        job = asyncio.ensure_future(told())
        done, _ = await asyncio.wait([job], timeout=keeper.options.call_timeout)
        if not done:
            job.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise UnavailableError(f"cannot tell the runtime the CPUs of {container.ref}: it does not answer")
        await job

    async def freshen_fenced(self, container_id: str) -> tuple[str, Fence | None]:
        """Do as ``freshen``, in a fence where the start needs one; nothing has changed when this returns.

        Returns:
            As ``freshen``, and the fence, which is for ``start``.
        """
        fencing, fence, obstacle = self._keeper.lasting.fencing, None, ""
        try:
            for _ in range(ROUNDS):
                fence = await fencing.guard(container_id, fence)
                obstacle = await self.freshen(container_id)
                container = self._keeper.state.containers.get(container_id)
                if obstacle or container is None or fencing.fits(container, fence):
                    break
        except BaseException:
            await fencing.drop(fence)
            raise
        if obstacle:
            await fencing.drop(fence)
        return obstacle, fence

    def start(self, container_id: str, fence: Fence | None = None) -> Flight:
        """A start leaves for the runtime."""
        keeper = self._keeper
        container = keeper.state.containers[container_id]
        if container.phase is Phase.CREATED:
            keeper.state = keeper.state.changed(put=(container.in_phase(Phase.STARTING),))
            keeper.touch(container_id)
        carries = keeper.saved.get(container_id) or keeper.state.wanted(container)
        flight = keeper.flights.depart(container_id, carries, is_start=True)
        keeper.lasting.fencing.bind(flight, fence)
        return flight

    def started(self, flight: Flight, *, ok: bool) -> None:
        """A start has been answered."""
        then = functools.partial(self._started, flight, ok=ok)
        self._keeper.lasting.fencing.landed(flight, flight.carries if ok else None, then)

    def _started(self, flight: Flight, *, ok: bool) -> None:
        keeper = self._keeper
        keeper.flights.land(flight)
        if ok:
            keeper.phase(flight.container_id, Phase.RUNNING)
            keeper.later([flight.container_id])
            return
        # Whether it is still there, or has run and ended, the runtime knows.
        keeper.attention.set()
        container = keeper.state.containers.get(flight.container_id)
        if container and container.phase is Phase.STARTING and not keeper.flights.starting(container.id):
            keeper.phase(container.id, Phase.CREATED)

    def landed(self, flight: Flight, carried: CpuSet | None) -> None:
        """An update has been answered; ``carried`` is the set that the runtime has saved by it, if any."""
        then = functools.partial(self._landed, flight, carried)
        self._keeper.lasting.fencing.landed(flight, carried, then)

    def _landed(self, flight: Flight, carried: CpuSet | None) -> None:
        keeper = self._keeper
        if not keeper.flights.land(flight):
            return
        container_id = flight.container_id
        if container_id not in keeper.state.containers:
            return
        if carried is not None and not flight.overlapped:
            keeper.saved[container_id] = carried
        else:
            keeper.saved.pop(container_id, None)
        keeper.later([container_id])

    def stray(self, flight: Flight) -> None:
        """A start or update has lost its client: the runtime may still execute it."""
        flight.stray_since = self._keeper.clock()
        self._keeper.attention.set()

    def end_strays(self, phases: dict[str, Phase]) -> None:
        """Let strays land that the runtime's list, or the time, tells to be over.

        Args:
            phases: What the runtime says of each container now.
        """
        keeper = self._keeper
        for flight in keeper.flights.strays():
            now = phases.get(flight.container_id)
            over = keeper.clock() - flight.stray_since > STRAY_GRACE_S
            if flight.is_start:
                if now in (Phase.RUNNING, Phase.EXITED) or over:
                    self.started(flight, ok=now is Phase.RUNNING)
            elif over or now is Phase.EXITED:
                self.landed(flight, None)

    def close(self) -> None:
        """End the workers."""
        self.lookups.close()
