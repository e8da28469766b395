"""Starts and updates: calls that bring a set to a container through the runtime.

What is kept here is what the runtime would use if it started or updated a container now (``saved``), and
which calls are on their way (``flights``). A container that is created has no cgroup yet: runc makes it at
the start, from the spec that was saved last.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from proxy.controller.confinement import Confinement
from proxy.controller.context import NodeContext
from proxy.controller.cpuset_mems import CpusetMems
from proxy.controller.drift.detection import UNKNOWN, Drift
from proxy.controller.inflight import Flight
from proxy.controller.kernel_writes import KernelWrites
from proxy.controller.lifecycle import Lifecycle
from proxy.controller.quotas.quotas import OwnerQuotas
from proxy.controller.reservations import Reservations
from proxy.controller.systemd.fencing import Fencing
from proxy.controller.worker import Worker
from proxy.engine.node_events import ContainersUpdated, ContainerTouched, SavedCpusLearned
from proxy.engine.pod_fence import Fence
from proxy.model.errors import UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BeCpuset
from proxy.model.workload import Container, KubeQos, Phase, Pool
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

BUSY = "the runtime is still busy with an update of it"
ROUNDS = 5
STRAY_GRACE_S = 2.0
"""How long a runtime that answers may still be at a call whose answer nobody waits for."""

_MAY_BE_CHANGED = (Phase.CREATED, Phase.STARTING, Phase.RUNNING)


class StartUpdate:
    """The starts and updates of a keeper's containers.

    Attributes:
        lookups: Who asks and tells the runtime in the way of a call.
    """

    def __init__(
        self,
        context: NodeContext,
        writes: KernelWrites,
        lifecycle: Lifecycle,
        quotas: OwnerQuotas,
        mems: CpusetMems,
        reservations: Reservations,
        confinement: Confinement,
        drift: Drift,
        fencing: Fencing,
        changed: Callable[[Iterable[str]], None],
    ) -> None:
        """Begin with no call in flight.

        Args:
            context: Whose containers.
            writes: Has the kernel follow.
            lifecycle: Is told which containers run, or have exited.
            quotas: Knows which CFS quotas go with an update.
            mems: Knows which memory nodes go with an update.
            reservations: Has containers leave the CPUs of an owner that starts.
            confinement: Knows which starts may go on by themselves.
            drift: Compares containers of which an update has landed.
            fencing: Puts fences up for calls.
            changed: Has the units of some containers compared.
        """
        self._context = context
        self._writes = writes
        self._lifecycle = lifecycle
        self._quotas = quotas
        self._mems = mems
        self._reservations = reservations
        self._confinement = confinement
        self._drift = drift
        self._fencing = fencing
        self._changed = changed
        self.lookups = Worker("lookups", context.broken, threads=8)
        context.health.watch(self.lookups)

    def is_fresh(self, container: Container) -> bool:
        """Tell whether the runtime would start a container with the right set, and nobody need be checked."""
        if not self._context.store.mode.enforces:
            return True
        return not self._is_below_class(container) and self._is_told(container)

    def _is_below_class(self, container: Container) -> bool:
        """Tell whether the groups above a container are narrowed (``controller.be.groups``)."""
        node = self._context.state.node
        return node.be_cpuset is BeCpuset.ERASE and container.pod.kube_qos is KubeQos.BEST_EFFORT

    def _is_told(self, container: Container) -> bool:
        context = self._context
        if container.placement.pool is Pool.OWN:
            return False
        if context.state.node.erases(container.placement):
            return True  # it starts with what its pod's group has
        known, want = container.id not in self._quotas.known.unsent, context.state.wanted(container)
        return (
            known
            and context.state.runtime.saved.get(container.id) == want
            and not context.flights.others(container.id, want)
        )

    async def freshen(self, container_id: str) -> str:
        """See to it that a created container starts with today's set, and with its own CPUs free.

        Returns:
            Empty when it may start; else why not.

        Raises:
            UnavailableError, RuntimeCallError: The runtime did not take the set.
        """
        context = self._context
        if not context.store.mode.enforces:
            return ""
        known = context.state.containers.get(container_id)
        if known is not None and known.phase is Phase.CREATED and self._is_below_class(known):
            await self._see_to_groups(known)
        for _ in range(ROUNDS):
            container = context.state.containers.get(container_id)
            if container is None or container.phase is not Phase.CREATED or self._is_told(container):
                return ""
            want = context.state.wanted(container)
            if not await context.flights.updated(container_id, want, context.options.call_timeout):
                return BUSY
            told = container_id not in self._quotas.known.unsent
            if not told or context.state.runtime.saved.get(container_id) != want:
                # Beside another update, though of the same set, it would not say what the runtime has saved.
                if not await context.flights.updated(container_id, CpuSet(), context.options.call_timeout):
                    return BUSY
                await self.tell(container)
                continue
            if container.placement.pool is Pool.OWN:
                await self._quotas.before_start(container)
                reason = (await self._reservations.start(container)).reason
                if reason is not None and reason.public_message != reason.message:
                    context.telemetry.problem(
                        "cannot start a container", **subject(container), err=reason.message
                    )
                return self._reservations.answer(reason) if reason is not None else ""
            return ""
        return "the pools change faster than the runtime can be told"

    async def _see_to_groups(self, container: Container) -> None:
        """Give the groups above a container what it needs: on v1 no container can have more than they do.

        What cannot be written in time is told; the container starts with what is there then.
        """
        context = self._context
        try:
            async with asyncio.timeout(context.options.call_timeout):
                self._writes.moved(await context.kernel.run(context.enforcer.enforce_groups))
        except TimeoutError:
            context.telemetry.problem(
                "cannot write the cgroups above a container in time", **subject(container)
            )

    async def tell(self, container: Container) -> None:
        """Tell the runtime today's set of a container that is created.

        Raises:
            UnavailableError, RuntimeCallError: It did not take it, or not in time.
        """
        context = self._context
        want, quota = context.state.wanted(container), self._quotas.carried(container)
        flight = context.flights.depart(container.id, want)

        async def told() -> None:
            async with self.under_way(flight):
                mems = self._mems.carried(container)
                await self.lookups.run(context.runtime.update_cpuset, container.id, want, mems, quota)
                self._quotas.saved(container.id, quota)
                context.telemetry.count(metrics.CPUSETS_UPDATED_BEFORE_START)

        # If it takes too long the caller gives up, but the call stays in flight until it has ended.
        job = asyncio.ensure_future(told())
        done, _ = await asyncio.wait([job], timeout=context.options.call_timeout)
        if not done:
            job.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise UnavailableError(f"cannot tell the runtime the CPUs of {container.ref}: it does not answer")
        await job

    async def freshen_fenced(self, container_id: str) -> tuple[str, Fence | None]:
        """Do as ``freshen``, in a fence where the start needs one; nothing has changed when this returns.

        Returns:
            As ``freshen``, and the fence, which is for ``start``.
        """
        fencing, fence, obstacle = self._fencing, None, ""
        try:
            for _ in range(ROUNDS):
                fence = await fencing.guard(container_id, fence)
                obstacle = await self.freshen(container_id)
                container = self._context.state.containers.get(container_id)
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
        context = self._context
        container = context.state.containers[container_id]
        if container.phase is Phase.CREATED:
            starting = container.in_phase(Phase.STARTING)
            context.store.handle(ContainersUpdated((starting,), "container starting", recorded=False))
            context.store.handle(ContainerTouched(container_id))
        carries = context.state.runtime.saved.get(container_id) or context.state.wanted(container)
        flight = context.flights.depart(container_id, carries, is_start=True)
        self._fencing.bind(flight, fence)
        return flight

    @contextlib.asynccontextmanager
    async def under_way(self, flight: Flight) -> AsyncIterator[None]:
        """An update of ours is made within this; how it ends is how its flight does."""
        try:
            yield
        except (UnavailableError, asyncio.CancelledError):
            self.stray(flight)  # nobody waits any more; the runtime may be at it
            raise
        except BaseException:
            self.landed(flight, None)
            raise
        self.landed(flight, flight.carries)

    def started(self, flight: Flight, *, ok: bool) -> None:
        """A start has been answered."""
        context, landed = self._context, self._fencing.landed
        container = context.state.containers.get(flight.container_id)
        if ok:
            landed(flight, flight.carries, functools.partial(self._ended, flight, Phase.RUNNING))
        elif container is None or container.phase is not Phase.STARTING:
            landed(flight, None, functools.partial(self._ended, flight, None))
            context.attention.set()
        else:
            # Whether it is still there, runs all the same, or has run and ended, the next list tells.
            flight.refused = True
            context.store.handle(ContainerTouched(flight.container_id))
            self.stray(flight)
            context.spawn(self._make_room(container))

    async def _make_room(self, container: Container) -> None:
        """Have the next start of a container find groups above it that are wide enough."""
        self._writes.moved(await self._context.kernel.run(self._context.enforcer.make_room, container))

    def _ended(self, flight: Flight, phase: Phase | None) -> None:
        """A start is over, and the container is in a phase; None where it says nothing about that."""
        context, confined = self._context, flight.confined
        context.flights.land(flight)
        container = context.state.containers.get(flight.container_id)
        if container is None or phase is None:
            return
        if phase is Phase.RUNNING:
            self._lifecycle.phase(container.id, phase)
            self._writes.later([container.id])
            if confined:  # the runtime has saved the set that the start has left with
                context.settle_later(container.id)
        elif phase is Phase.EXITED:
            self._lifecycle.phase(container.id, phase)
        elif container.phase is Phase.STARTING and not context.flights.starting(container.id):
            self._lifecycle.phase(container.id, Phase.CREATED)

    def landed(self, flight: Flight, carried: CpuSet | None) -> None:
        """An update has been answered; ``carried`` is the set that the runtime has saved by it, if any."""
        then = functools.partial(self._landed, flight, carried)
        self._fencing.landed(flight, carried, then)

    def _landed(self, flight: Flight, carried: CpuSet | None) -> None:
        context = self._context
        if not context.flights.land(flight):
            return
        container_id = flight.container_id
        if container_id not in context.state.containers:
            return
        if carried is not None and not flight.overlapped:
            context.store.handle(SavedCpusLearned(container_id, carried))
        else:
            context.store.handle(SavedCpusLearned(container_id, None))
            if carried is not None:
                self._tell_after(container_id)
        wanted = context.state.wanted(context.state.containers[container_id])
        if carried == wanted and not flight.overlapped:
            self._drift.suspect(UNKNOWN, [container_id])  # it is to hold that, and many may land together
        else:
            self._writes.later([container_id])

    def _tell_after(self, container_id: str) -> None:
        """Calls have overlapped: whichever came last, today's set is told after all of them."""
        others = self._context.flights.of(container_id)
        for flight in others:
            flight.tell = True
        if not others:
            self._context.settle_later(container_id)

    def stray(self, flight: Flight) -> None:
        """Nobody waits for a start's or an update's answer any more; the runtime may still execute it."""
        if not flight.landed.done():
            flight.stray_since = self._context.clock()
            self._context.attention.set()

    def suspect(self) -> Iterator[None]:
        """After a start of ours: the runtime may be at calls that a daemon before us let go.

        Nobody knows which, nor with what sets, so any container may be at one. Those that have been
        suspected are passed over. It costs a create that comes at once and gives CPUs away a wait of
        ``STRAY_GRACE_S``; to have each update in the ledger before it leaves would cost all of them.

        A generator of steps, after each of which the state may have changed.
        """
        context = self._context
        anywhere = context.state.node.machine.online
        for container_id in list(context.state.containers):
            yield
            container = context.state.containers.get(container_id)
            if container is None or container.phase not in _MAY_BE_CHANGED:
                continue
            if context.flights.of(container_id):
                continue
            for is_start in (False, True) if container.phase is not Phase.RUNNING else (False,):
                flight = context.flights.depart(container.id, anywhere, is_start=is_start)
                flight.tell = False
                flight.suspected = True
                self.stray(flight)

    def end_strays(self, phase_of: Callable[[str], Phase | None], asked: float) -> Iterator[None]:
        """Let strays land that the runtime's list, or the time, tells to be over.

        A generator of steps, after each of which the state may have changed.

        Args:
            phase_of: Gives what the runtime says of a container now; None where it says nothing.
            asked: When it was asked.
        """
        context, now = self._context, self._context.clock()
        for flight in context.flights.strays():
            yield
            if flight.landed.done() or flight.stray_since is None:
                continue  # it is over, or another comparison ends it just now
            if flight.seen is None and asked >= flight.stray_since:
                flight.seen = now
            phase = phase_of(flight.container_id)
            over = flight.seen is not None and asked - flight.seen >= STRAY_GRACE_S
            over = over and not self._confinement.holds(flight)
            if phase is Phase.EXITED or (flight.is_start and phase is Phase.RUNNING):
                self._end(flight, phase)
            elif over or (flight.refused and phase is Phase.CREATED):
                self._end(flight, Phase.CREATED)

    def _end(self, flight: Flight, phase: Phase) -> None:
        """A stray is over. Who compares writes the kernel after this."""
        flight.stray_since = None
        told = flight.carries if flight.is_start and phase is Phase.RUNNING else None
        then = functools.partial(self._over, flight, phase)
        self._fencing.landed(flight, told, then)

    def _over(self, flight: Flight, phase: Phase) -> None:
        context, container_id = self._context, flight.container_id
        if flight.is_start:
            self._ended(flight, phase)
        elif context.flights.land(flight) and container_id in context.state.containers:
            context.store.handle(SavedCpusLearned(container_id, None))
            self._changed([container_id])  # the runtime may have told systemd, or not
        if phase is Phase.EXITED:
            self._lifecycle.phase(container_id, phase)
        elif flight.tell and container_id in context.state.containers:
            context.settle_later(container_id)

    def close(self) -> None:
        """End the workers."""
        self.lookups.close()
