"""Starts and updates: calls with which the runtime writes a cpuset to a container.

The state holds the calls in flight and their results (``engine.inflight``, ``engine.inflight_call_rules``).
This module prepares these calls, makes them, and records how they end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator

from proxy.engine.admission import NO_POOL_CPUS
from proxy.engine.adoption import overcommitted_memory
from proxy.engine.call_answers import public_reason
from proxy.engine.call_events import (
    CallOrphaned,
    OrphanEnded,
    OrphanListed,
    StartEnded,
    StartRefused,
    UpdateAccepted,
    UpdateEnded,
    UpdateRequested,
)
from proxy.engine.enforcement import applies_to
from proxy.engine.inflight import InflightCall
from proxy.engine.node_effects import OrphanOver
from proxy.engine.pod_fence import Fence
from proxy.engine.start_step import StartStep, is_below_class, start_step
from proxy.executor.background import Worker
from proxy.executor.confinement import Confinement
from proxy.executor.context import NodeContext
from proxy.executor.cpuset_mems import CpusetMems
from proxy.executor.former_calls import FormerCalls
from proxy.executor.kernel_writes import KernelWrites
from proxy.executor.quotas import OwnerQuotas
from proxy.executor.reservations import Reservations
from proxy.executor.systemd.fencing import Fencing
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

BUSY = "the runtime is still busy with an update of it"
ROUNDS = 5
STEPS = 3 * ROUNDS
"""The maximum number of steps before a start; more are needed only if the pools change all the time."""

_MAY_BE_CHANGED = (Phase.CREATED, Phase.STARTING, Phase.RUNNING)


def report_overcommitted_memory(context: NodeContext) -> None:
    """Report if more memory was promised to running containers than there is."""
    for resource, (promised, existing) in overcommitted_memory(context.state).items():
        context.telemetry.problem(
            "cannot count all memory of the running containers: they were promised more than there is",
            resource=resource,
            promisedMiB=promised >> 20,
            availableMiB=existing >> 20,
        )


class CallTracker:
    """Prepares and follows the starts and updates of containers.

    Attributes:
        lookups: The worker for requests to the runtime that a client's call waits for.
        former_calls: Calls that an earlier run of the daemon has left in flight.
    """

    def __init__(
        self,
        context: NodeContext,
        writes: KernelWrites,
        quotas: OwnerQuotas,
        mems: CpusetMems,
        reservations: Reservations,
        confinement: Confinement,
        fencing: Fencing,
    ) -> None:
        """Begin with no call in flight.

        Args:
            context: The node with the containers to start and update.
            writes: Writes the wanted cpusets to the kernel.
            quotas: Returns the CFS quotas that are sent with an update.
            mems: Returns the memory nodes that are sent with an update.
            reservations: Moves containers off the CPUs of an owner that starts.
            confinement: Knows which starts without a waiting client must not be ended by time alone.
            fencing: Sets up fences for calls.
        """
        self._context = context
        self._writes = writes
        self._quotas = quotas
        self._mems = mems
        self._reservations = reservations
        self._confinement = confinement
        self._fencing = fencing
        self.former_calls = FormerCalls(context)
        self.lookups = Worker("lookups", context.report_internal_error, threads=8)
        context.health.watch(self.lookups)

    async def make_ready(self, container_id: str) -> str:
        """Prepare the start of a created container: give it the right CPUs, and free its own CPUs.

        Returns:
            Empty if it may start; otherwise the reason why not.

        Raises:
            UnavailableError, RuntimeCallError: The runtime did not accept the CPUs.
        """
        context = self._context
        known = context.state.containers.get(container_id)
        if known is None or not applies_to(context.state, known.pod):
            return ""
        if known.phase is Phase.CREATED and not context.state.desired_cpus(known):
            return NO_POOL_CPUS
        if known.phase is Phase.CREATED and is_below_class(context.state, known):
            await self._writes.widen_groups(known)
        if known.phase is Phase.CREATED and context.cpuset_writer.cgroups.version != 1:
            await self._writes.make_room(known)
        for _ in range(STEPS):
            step = start_step(context.state, container_id)
            if step is StartStep.READY:
                return ""
            container = context.state.containers[container_id]
            match step:
                case StartStep.AWAIT_OTHERS | StartStep.AWAIT_ALL:
                    keep = (
                        context.state.desired_cpus(container) if step is StartStep.AWAIT_OTHERS else CpuSet()
                    )
                    if not await context.inflight_calls.wait_for_updates(
                        container_id, keep, context.options.call_timeout
                    ):
                        return BUSY
                case StartStep.SEND:
                    await self._send(container)
                case StartStep.CLEAR:
                    return await self._clear(container)
        return "the pools change faster than the runtime can be updated"

    async def _clear(self, container: Container) -> str:
        """Move other containers off the CPUs of an owner; returns why that fails, empty if it succeeds."""
        await self._quotas.before_start(container)
        reason = (await self._reservations.start(container)).reason
        if reason is None:
            return ""
        if reason.public_message != reason.message:
            problem = self._context.telemetry.problem
            problem("cannot start a container", **subject(container), err=reason.message)
        return public_reason(self._context.state, reason)

    async def _send(self, container: Container) -> None:
        """Send the CPUs of a created container to the runtime.

        Raises:
            UnavailableError, RuntimeCallError: The runtime did not accept them, or not in time.
        """
        context = self._context
        want, quota = context.state.desired_cpus(container), self._quotas.carried(container)
        call = context.inflight_calls.track(container.id, want)

        async def sent() -> None:
            async with self.under_way(call):
                mems = self._mems.carried(container)
                await self.lookups.run(context.runtime.update_cpuset, container.id, want, mems, quota)
                self._quotas.saved(container.id, quota)
                context.telemetry.count(metrics.CPUSETS_UPDATED_BEFORE_START)

        # If this takes too long, the caller gives up, but the call stays in flight until it has ended.
        job = asyncio.ensure_future(sent())
        job.add_done_callback(lambda late: late.cancelled() or late.exception())
        done, _ = await asyncio.wait([job], timeout=context.options.call_timeout)
        if not done:
            raise UnavailableError(f"cannot send the runtime the CPUs of {container.ref}: it does not answer")
        await job

    async def make_ready_fenced(self, container_id: str) -> tuple[str, Fence | None]:
        """Do the same as ``make_ready``, and set up a fence if the start needs one.

        When this returns, the state has not changed since the last check.

        Returns:
            The result of ``make_ready``, and the fence, to be passed to ``start``.
        """
        fencing, fence, obstacle = self._fencing, None, ""
        try:
            for _ in range(ROUNDS):
                fence = await fencing.guard(container_id, fence)
                obstacle = await self.make_ready(container_id)
                container = self._context.state.containers.get(container_id)
                if obstacle or container is None or fencing.fits(container, fence):
                    break
        except BaseException:
            await fencing.remove(fence)
            raise
        if obstacle:
            await fencing.remove(fence)
        return obstacle, fence

    def start(self, container_id: str, carries: CpuSet, fence: Fence | None = None) -> InflightCall:
        """Record that a start is about to be forwarded to the runtime; returns the call in flight.

        Args:
            container_id: The container.
            carries: The CPUs that the runtime may write during the start.
            fence: The fence that was set up for the start.
        """
        call = self._context.inflight_calls.track(container_id, carries, is_start=True)
        self._fencing.bind(call, fence)
        return call

    @contextlib.asynccontextmanager
    async def under_way(self, call: InflightCall) -> AsyncIterator[None]:
        """Make an update inside this context; how the block ends determines how the call in flight ends."""
        try:
            yield
        except (UnavailableError, asyncio.CancelledError):
            self.mark_orphaned(call)  # no caller waits any more; the runtime may still execute it
            raise
        except BaseException:
            self.completed(call, None)
            raise
        self.completed(call, call.carries)

    def started(self, call: InflightCall, *, ok: bool) -> None:
        """Record that a start has been answered."""
        context, completed, handle = self._context, self._fencing.completed, self._context.store.handle
        container = context.state.containers.get(call.container_id)
        if ok:
            completed(call, call.carries, functools.partial(handle, StartEnded(call, Phase.RUNNING)))
        elif container is None or container.phase is not Phase.STARTING:
            completed(call, None, functools.partial(handle, StartEnded(call, None)))
            context.reconcile_requested.set()
        else:
            context.store.handle(StartRefused(call, context.clock()))
            context.spawn(self._writes.make_room(container))

    def accepted(self, request: UpdateRequested) -> None:
        """Record an update that the runtime has executed for a client, or will most probably execute."""
        context = self._context
        context.store.handle(UpdateAccepted(request.container_id, request.memory_limit))
        container = context.state.containers.get(request.container_id)
        if request.memory_limit and container is not None and container.placement.blocks:
            report_overcommitted_memory(context)

    def completed(self, call: InflightCall, carried: CpuSet | None) -> None:
        """Record that an update was answered; ``carried`` is the set that the runtime has saved, if any."""
        then = functools.partial(self._context.store.handle, UpdateEnded(call, carried))
        self._fencing.completed(call, carried, then)

    def mark_orphaned(self, call: InflightCall) -> None:
        """Record that no caller waits for a start or update any more; the runtime may still execute it."""
        self._context.store.handle(CallOrphaned(call, self._context.clock()))

    def register_suspected_calls(self) -> Iterator[None]:
        """When the daemon starts, record the calls that the runtime may still execute for an earlier daemon.

        The calls that a replaced daemon still relays are known (``former_calls``). Which other calls there
        are, and which sets they carry, is unknown. So an update is assumed for every container that may be
        changed, and also a start if the container may be starting. Containers that have a call in flight
        already are skipped. The cost is that a create that arrives at once and gives CPUs away waits for
        ``ORPHAN_GRACE_S``. The alternative, to write each update to the ledger before it is sent, would slow
        down all updates.

        A generator of steps, after each of which the state may have changed.
        """
        if not self.former_calls.possible:
            return
        context = self._context
        anywhere = context.state.node.machine.online
        for container_id in list(context.state.containers):
            yield
            container = context.state.containers.get(container_id)
            if container is None or container.phase not in _MAY_BE_CHANGED:
                continue
            if context.state.inflight.of(container_id):
                continue
            known = self.former_calls.track(container_id)
            may_start = container.phase is not Phase.RUNNING and not any(call.is_start for call in known)
            for is_start in (False, True) if may_start else (False,):
                now = context.clock()
                context.inflight_calls.track(
                    container.id, anywhere, is_start=is_start, orphaned_since=now, suspected=True
                )

    def end_orphans(self, phase_of: Callable[[str], Phase | None], requested_at: float) -> Iterator[None]:
        """End calls without a waiting caller if the runtime's list or the time passed shows their end.

        A generator of steps, after each of which the state may have changed.

        Args:
            phase_of: Returns a container's phase in the runtime's list; None if the list does not show it.
            requested_at: When the list was requested, in seconds of the executor's clock.
        """
        context, now = self._context, self._context.clock()
        for call in context.state.inflight.orphans():
            yield
            held = self._confinement.may_still_run(call) or self.former_calls.is_relayed(call)
            phase = phase_of(call.container_id)
            for effect in context.store.handle(OrphanListed(call, phase, requested_at, now, held)):
                if isinstance(effect, OrphanOver):
                    self._end(effect)

    def _end(self, orphan: OrphanOver) -> None:
        """End a call without a waiting caller, once systemd has the right set for its container."""
        call, phase = orphan.call, orphan.phase
        sent = call.carries if call.is_start and phase is Phase.RUNNING else None

        def then() -> None:
            self._context.store.handle(OrphanEnded(call, phase))
            if not call.is_start and not call.suspected:
                self._context.spawn(self.read_memory_limit(call.container_id))

        self._fencing.completed(call, sent, then)

    async def read_memory_limit(self, container_id: str) -> None:
        """Read from the runtime which memory limit a container has after an update of unknown outcome."""
        before = self._context.state.containers.get(container_id)
        try:
            detail = await self.lookups.run(self._context.runtime.detail, container_id)
        except (UnavailableError, RuntimeCallError):
            return  # the recorded limit stays
        container = self._context.state.containers.get(container_id)
        # Another update may have been accepted since.
        if before is not None and container is not None and container.request == before.request:
            self.accepted(UpdateRequested(container_id, "", "", 0, detail.memory_limit))

    def close(self) -> None:
        """End the workers' threads."""
        self.lookups.close()
