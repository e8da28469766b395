"""The executor of reservations: performs their effects, and feeds the results back as events.

``proxy.engine.reservation`` decides what is done, and in which order. This module applies the effects to the
node: the store, the ledger writer, the kernel worker, calls in flight. Reservations of different owners may
overlap: each kernel write uses the newest state, so no lock is held across any wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from proxy.engine import reservation_effects as effects
from proxy.engine import reservation_events as events
from proxy.engine.call_answers import unreserved_verdict
from proxy.engine.container_events import CpusNotFreed
from proxy.engine.enforcement import applies_to
from proxy.engine.node_effects import Record
from proxy.engine.node_events import ReservationCpusChanged
from proxy.engine.owners import ReservationCpus
from proxy.engine.reservation import step
from proxy.engine.reservation_effects import WAITED, AbortReason, Effect
from proxy.engine.reservation_events import Event
from proxy.engine.reservation_state import FOR_OWNERS, Reservation, ReservationKind, ReservationPhase
from proxy.engine.state import NodeState
from proxy.engine.write_conflicts import WriteAction, action_for
from proxy.executor.confinement import Confinement, WaitResult
from proxy.executor.container_lifecycle import ContainerLifecycle
from proxy.executor.context import NodeContext
from proxy.executor.create_decisions import CreateDecisions
from proxy.executor.drift.detection import Drift
from proxy.executor.kernel_writes import KernelWrites
from proxy.executor.reservation_records import records_of
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

if TYPE_CHECKING:
    from proxy.executor.cpuset_writer import WriteResult

_TIMED = (effects.WriteSharers, effects.WriteOwners, effects.ReadCpusets, effects.Pause)


def _never() -> bool:
    return False


async def _as_placed(container: Container) -> Container | None:
    return container


class CreateClient(Struct, frozen=True):
    """The client's call that a create is reserved for.

    Attributes:
        is_disconnected: Reports whether the client has disconnected.
        placed_elsewhere: Called with the container when it is placed on other CPUs; returns the container as
            it should be, or None if the call was answered in the meantime, and the placement withdrawn.
    """

    is_disconnected: Callable[[], bool] = _never
    placed_elsewhere: Callable[[Container], Awaitable[Container | None]] = _as_placed


@dataclass(slots=True)
class ReservationRun:
    """A reservation while it is carried out.

    Attributes:
        token: Its name, for what it holds and for its record.
        owner: The owner that it holds CPUs for.
        excludes_be: Whether BE containers may not use these CPUs.
        client: The call that it is made for.
        deadline: By the loop's clock; None if there is none.
    """

    token: str
    owner: str = ""
    excludes_be: bool = True
    client: CreateClient = field(default_factory=CreateClient)
    deadline: float | None = None


class Reservations:
    """Carries out reservations."""

    def __init__(
        self,
        context: NodeContext,
        writes: KernelWrites,
        confinement: Confinement,
        drift: Drift,
        lifecycle: ContainerLifecycle,
        creates: CreateDecisions,
    ) -> None:
        """Carry out nothing yet.

        Args:
            context: The node.
            writes: Follows what a write has done.
            confinement: Waits for calls in flight.
            drift: Writes owners, and knows write conflicts.
            lifecycle: Withdraws the placement of a create.
            creates: Reports another placement.
        """
        self._context = context
        self._writes = writes
        self._confinement = confinement
        self._drift = drift
        self._lifecycle = lifecycle
        self._creates = creates

    # -- what is reserved ---------------------------------------------------------------------------------

    async def create(self, container: Container, client: CreateClient) -> Reservation:
        """Make the placement of a new owner durable, and have other containers leave its CPUs."""
        cpus, began = container.placement.exclusive, self._context.clock()
        self._context.telemetry.count(metrics.EXCLUSIVE_CREATES)
        reservation = Reservation(ReservationKind.CREATE, (container.id,), cpus, ref=container.ref)
        ended = await self.carry_out(reservation, ReservationRun(container.id, client=client))
        self._context.telemetry.observe(metrics.BARRIER_WAIT_SECONDS, self._context.clock() - began)
        return ended

    async def narrow(self, container: Container) -> Reservation:
        """Make durable what hooks name for a container that is being created, as no runtime lists it."""
        reservation = Reservation(ReservationKind.NARROW, (container.id,), CpuSet(), ref=container.ref)
        return await self.carry_out(reservation, ReservationRun(container.id))

    async def start(self, container: Container) -> Reservation:
        """Have other containers leave the CPUs of an owner that is about to start."""
        cpus = container.placement.exclusive | container.placement.replacement
        reservation = Reservation(ReservationKind.START, (container.id,), cpus, ref=container.ref)
        return await self.carry_out(reservation, ReservationRun(""))

    async def replace(
        self, containers: tuple[Container, ...], cpus: CpuSet, current_replacement: CpuSet
    ) -> Reservation:
        """Give an owner CPUs in place of offline ones.

        Args:
            containers: The containers that share the owner's CPUs.
            cpus: The CPUs.
            current_replacement: The CPUs that they have in place of offline ones already.
        """
        first, ids = containers[0], tuple(container.id for container in containers)
        reservation = Reservation(
            ReservationKind.REPLACEMENT, ids, cpus, ref=first.ref, previous=current_replacement
        )
        return await self.carry_out(reservation, self.run_for("instead", first))

    def run_for(self, kind: str, first: Container) -> ReservationRun:
        """Return the run of a reservation for existing containers, of which the first is given."""
        return ReservationRun(self._context.token(kind), first.owner, first.placement.excludes_be)

    # -- carrying out -------------------------------------------------------------------------------------

    async def carry_out(self, reservation: Reservation, run: ReservationRun) -> Reservation:
        """Perform the effects of a reservation until it is over; returns it as it ended."""
        event: Event = events.ReservationRequested()
        while True:
            try:
                reservation, requested = step(reservation, event)
                for effect in requested:
                    self._perform(effect, reservation, run)
                if reservation.is_over:
                    return reservation
                event = await self._result(requested[-1], reservation, run)
            except asyncio.CancelledError:
                self._end_at_once(reservation, events.Cancelled(), run)
                raise
            except Exception as error:
                if reservation.kind is not ReservationKind.MOVE:
                    self._end_at_once(reservation, events.Interrupted(), run)
                    raise
                self._context.report_internal_error(error)
                event = events.Interrupted()
                continue
            if reservation.kind is ReservationKind.MOVE and not self._is_applied(reservation):
                event = events.PlanNoLongerApplied()
                continue
            if run.client.is_disconnected():
                reservation, _ = step(reservation, events.ClientDisconnected())
            if reservation.kind in FOR_OWNERS and not self._living(reservation):
                event = events.ContainersExited()

    def _is_applied(self, reservation: Reservation) -> bool:
        """Return whether the plan is still applied to the pod of a reservation's containers."""
        state = self._context.state
        containers = state.existing(reservation.containers)
        return applies_to(state, containers[0].pod if containers else None)

    def _end_at_once(self, reservation: Reservation, event: Event, run: ReservationRun) -> None:
        reservation, requested = step(reservation, event)
        for effect in requested:
            self._perform(effect, reservation, run)

    def _living(self, reservation: Reservation) -> list[Container]:
        containers = self._context.state.existing(reservation.containers)
        return [c for c in containers if c.phase is not Phase.EXITED]

    # -- effects that are done at once --------------------------------------------------------------------

    def _perform(self, effect: Effect, reservation: Reservation, run: ReservationRun) -> None:
        context = self._context
        match effect:
            case effects.StartDeadline():
                run.deadline = asyncio.get_running_loop().time() + context.options.call_timeout
            case effects.EndDeadline():
                run.deadline = None
            case effects.RequestReconcile():
                context.reconcile_requested.set()
            case effects.ReportProblem(message, cause):
                report = context.telemetry.problem
                report(message, owner=reservation.ref, err=cause)  # a constant of proxy.engine.reservation
            case effects.WithdrawPlacement():
                self._lifecycle.withdrawn(reservation.containers[0])
            case effects.RecordSoon():
                for key, record in self._records(reservation, run, CpuSet(), context.state).items():
                    context.ledger_writer.put(key, record)
            case (
                effects.ReserveCpus()
                | effects.UnreserveCpus()
                | effects.AssignReplacement()
                | effects.AssignOwn()
            ):
                self._change(effect, reservation, run)
            case _:  # awaited elsewhere, or the end
                pass

    def _change(
        self,
        effect: effects.ReserveCpus | effects.UnreserveCpus | effects.AssignReplacement | effects.AssignOwn,
        reservation: Reservation,
        run: ReservationRun,
    ) -> None:
        """Change the state."""
        handle, token = self._context.store.handle, run.token
        match effect:
            case effects.ReserveCpus(cpus):
                reserved = ReservationCpus(run.owner, cpus, run.excludes_be)
                handle(ReservationCpusChanged(token, reserved))
            case effects.UnreserveCpus():
                handle(ReservationCpusChanged(token, None))
            case effects.AssignReplacement():
                handle(ReservationCpusChanged(token, None, self._replaced(reservation)))
            case effects.AssignOwn(cpus, held):
                reserved = ReservationCpus(run.owner, held, run.excludes_be)
                handle(ReservationCpusChanged(token, reserved, self._placed_on(reservation, cpus)))

    def _replaced(self, reservation: Reservation) -> tuple[Container, ...]:
        """Return the containers of a replacement with its CPUs as part of their placements."""
        cpus = reservation.previous | reservation.cpus
        return tuple(
            structs.replace(c, placement=structs.replace(c.placement, replacement=cpus))
            for c in self._living(reservation)
        )

    def _placed_on(self, reservation: Reservation, cpus: CpuSet) -> tuple[Container, ...]:
        """Return the containers of a move, exited ones too, as they are when placed on some CPUs."""
        moved = f"moved from CPUs {reservation.previous} to {reservation.cpus}"
        placed = []
        for container in self._context.state.existing(reservation.containers):
            reasons = tuple(reason for reason in container.placement.reasons if reason != moved)
            if cpus == reservation.cpus:
                reasons = (*reasons, moved)
            placement = structs.replace(container.placement, exclusive=cpus, reasons=reasons)
            placed.append(structs.replace(container, placement=placement))
        return tuple(placed)

    # -- effects that are waited for ----------------------------------------------------------------------

    async def _result(self, effect: Effect, reservation: Reservation, run: ReservationRun) -> Event:
        """Perform an effect that is waited for, within the deadline if it has one."""
        assert isinstance(effect, WAITED), effect
        if run.deadline is None or not isinstance(effect, _TIMED):
            return await self._performed(effect, reservation, run)
        try:
            async with asyncio.timeout_at(run.deadline):
                return await self._performed(effect, reservation, run)
        except TimeoutError:
            return events.TimedOut()

    async def _performed(self, effect: Effect, reservation: Reservation, run: ReservationRun) -> Event:
        context = self._context
        match effect:
            case effects.AppendLedger(may_run_on):
                return await self._append(reservation, run, may_run_on)
            case effects.AwaitInflight(cpus):
                return await self._await_inflight(reservation, cpus)
            case effects.AwaitOwnInflight(cpus):
                return await self._await_own_inflight(reservation, cpus)
            case effects.WriteSharers():
                return self._written(reservation, await self._writes.run(context.cpuset_writer.write_pools))
            case effects.WriteOwners():
                return await self._write_owners(reservation)
            case effects.ReadCpusets(container_ids):
                return await self._read(reservation, container_ids)
            case effects.Pause(seconds):
                if reservation.phase is ReservationPhase.PAUSING:
                    context.telemetry.count(metrics.CPUSET_WRITES_RETRIED)
                await asyncio.sleep(seconds)
                return events.PauseOver()
            case effects.PlaceElsewhere(reason):
                return await self._place_elsewhere(reservation, run, reason)
        raise AssertionError(f"{effect} is not waited for")

    async def _append(self, reservation: Reservation, run: ReservationRun, may_run_on: CpuSet) -> Event:
        """Record the effect's placement; without a container there is nothing to record."""
        state = self._context.state
        if reservation.kind is ReservationKind.REPLACEMENT:
            state = state.changed(put=self._replaced(reservation))
        records = self._records(reservation, run, may_run_on, state)
        if not records:
            return events.LedgerWritten()
        durable = reservation.kind is ReservationKind.MOVE
        return await self._context.ledger_writer.append(records, durable=durable)

    def _records(
        self, reservation: Reservation, run: ReservationRun, may_run_on: CpuSet, state: NodeState
    ) -> dict[str, Record | None]:
        containers = {c.id: c for c in state.existing(reservation.containers)}
        return records_of(reservation, containers, run.token, may_run_on)

    async def _await_inflight(self, reservation: Reservation, cpus: CpuSet) -> Event:
        confinement = self._confinement
        wait = await confinement.wait(cpus)
        if reservation.kind is ReservationKind.CREATE:
            self._count(wait)
        if not wait.late:
            return events.InflightCompleted()
        return events.InflightLate(confinement.text(wait), confinement.public_message(wait), wait.cpus)

    def _count(self, wait: WaitResult) -> None:
        """Count how a create of an owner waited for calls in flight."""
        telemetry = self._context.telemetry
        if wait.seconds is not None:
            telemetry.count(metrics.CREATES_WAITED)
            telemetry.count(metrics.CREATES_WAITED_MS, round(wait.seconds * 1000))
        if wait.passed and not wait.late:
            telemetry.count(metrics.CREATES_PAST_HANGING_CALLS)

    async def _await_own_inflight(self, reservation: Reservation, cpus: CpuSet) -> Event:
        """Wait for calls that carry other CPUs to the containers; calls sent from now on do not."""
        context, confinement = self._context, self._confinement
        calls = [
            call
            for i in reservation.containers
            for call in context.state.inflight.of(i)
            if not call.carries <= cpus
        ]
        await context.inflight_calls.wait(calls, context.options.call_timeout)
        late = WaitResult(tuple(call for call in calls if not context.inflight_calls.has_completed(call)))
        if not late.late:
            return events.InflightCompleted()
        return events.InflightLate(confinement.text(late), confinement.public_message(late), late.cpus)

    async def _write_owners(self, reservation: Reservation) -> Event:
        context = self._context
        if reservation.kind is ReservationKind.MOVE:
            return self._written(
                reservation, await self._writes.run(context.cpuset_writer.write, reservation.containers)
            )
        # A call in flight would undo the write for a moment; the containers are written when it completes.
        inflight = context.state.inflight
        ids = [i for i in reservation.containers if not inflight.is_awaited(i) or inflight.is_confined(i)]
        return self._written(reservation, await self._writes.run(self._drift.write, ids))

    def _written(self, reservation: Reservation, done: WriteResult) -> Event:
        refused = [events.RefusedWrite(i, error.errno, str(error)) for i, error in done.refused.items()]
        contested = self._drift.contested(reservation.cpus)
        return events.CpusetsWritten(tuple(refused), tuple(done.errors), contested, tuple(done.group_errors))

    async def _read(self, reservation: Reservation, container_ids: tuple[str, ...]) -> Event:
        context = self._context
        held = await context.kernel.run(self._read_cpus_in_effect, container_ids or reservation.containers)
        containers = context.state.containers
        if not container_ids:
            living = {container.id for container in self._living(reservation)}
            held |= {i: CpuSet() for i in reservation.containers if i not in living}
        found = [
            events.CpusInEffect(
                i, cpus, context.state.desired_cpus(containers[i]) if i in containers else CpuSet()
            )
            for i, cpus in held.items()
            if i in containers or not container_ids
        ]
        return events.CpusetsRead(tuple(found), self._drift.contested(reservation.cpus))

    def _read_cpus_in_effect(self, ids: tuple[str, ...]) -> dict[str, CpuSet]:
        """Read which CPUs containers are on; runs in the kernel worker."""
        context, found = self._context, dict[str, CpuSet]()
        for container_id in ids:
            container = context.state.containers.get(container_id)
            path = None if container is None else context.cpuset_writer.path_of(container)
            if path is None:
                continue
            try:
                found[container_id] = context.cpuset_writer.cgroups.read(path).effective_cpus
            except CgroupError as error:
                if action_for(error.errno) is not WriteAction.LOCATE:  # otherwise, it has exited
                    found[container_id] = context.state.node.machine.online  # it may be anywhere
        return found

    async def _place_elsewhere(
        self, reservation: Reservation, run: ReservationRun, reason: AbortReason
    ) -> Event:
        """Withdraw a placement on CPUs that cannot be freed, and make another one."""
        context, token = self._context, reservation.containers[0]
        container = context.state.containers.get(token)
        if container is None:
            return events.NoOtherPlacement()
        decided = context.store.decide(CpusNotFreed(token, reason, context.token("call")))
        if decided is None:
            return events.NoOtherPlacement()
        plan = decided.plan
        context.history.refused(token, unreserved_verdict(context.state, container, reason))
        context.history.removed(token)
        context.telemetry.count(metrics.CREATES_ON_OTHER_CPUS)
        cpus = container.placement.exclusive
        context.telemetry.problem("cannot free CPUs", **subject(container), cpus=cpus, err=reason.message)
        self._creates.report(plan)
        new = plan.container
        assert new is not None
        new = await run.client.placed_elsewhere(new)
        if new is None:
            return events.PlacementWithdrawn()
        return events.PlacedElsewhere(new.id, new.placement.exclusive)
