"""Move running owners to other CPUs, and revert moves that an earlier daemon has left unfinished.

The steps are those of ``proxy.engine.reservation``; which owners can be moved is in
``proxy.engine.owner_moves``.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from proxy.engine.container_events import CpusAssigned
from proxy.engine.enforcement import applies_to
from proxy.engine.owner_moves import containers_of, why_not_movable
from proxy.engine.owners import ReservationCpus
from proxy.engine.reservation_state import Reservation, ReservationKind, restoration
from proxy.executor.context import NodeContext
from proxy.executor.reservation_records import MOVE_RECORD, MoveRecord
from proxy.executor.reservations import ReservationRun, Reservations
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics

_ENDED = "it has ended, or may no longer be moved"


class OwnerMoves:
    """Moves running owners."""

    def __init__(self, context: NodeContext, reservations: Reservations) -> None:
        self._context = context
        self._reservations = reservations
        self._half_done: list[tuple[Reservation, ReservationRun]] = []

    async def move(self, owner: str, cpus: CpuSet) -> str:
        """Move a running owner to other CPUs of its own.

        Args:
            owner: The owner, as ``Container.owner``.
            cpus: The new CPUs, as many as it has.

        Returns:
            Empty once it has them; otherwise why it keeps the CPUs that it had.
        """
        context = self._context
        if not applies_to(context.state, None) or not context.reconciled.is_set():
            return "the node is not enforced now"
        if obstacle := why_not_movable(context.state, owner, cpus):
            return obstacle
        containers = containers_of(context.state, owner)
        if not applies_to(context.state, containers[0].pod):
            return "the plan is not applied to its pod"
        first, ids = containers[0], tuple(container.id for container in containers)
        own = first.placement.exclusive
        reservation = Reservation(ReservationKind.MOVE, ids, cpus, ref=first.ref, previous=own)
        return await self._moved(reservation, self._reservations.run_for("move", first))

    async def _moved(self, reservation: Reservation, run: ReservationRun) -> str:
        """Carry out a move, or its restoration, and send the resulting CPUs to the runtime and systemd."""
        context = self._context
        reservation = await self._reservations.carry_out(reservation, run)
        moved, obstacle = f"from CPUs {reservation.previous} to {reservation.cpus}", _ENDED
        if reservation.is_committed:
            obstacle = ""
            context.telemetry.count(metrics.OWNERS_MOVED)
            context.telemetry.event(
                "moved an owner", owner=reservation.ref, before=reservation.previous, cpus=reservation.cpus
            )
        elif reservation.reason is not None:
            obstacle = reservation.reason.message
            context.telemetry.count(metrics.MOVES_ABORTED)
            context.telemetry.problem(
                "cannot move an owner", owner=reservation.ref, cpus=reservation.cpus, err=obstacle
            )
        for container in containers_of(context.state, run.owner):
            if reservation.is_committed:
                context.history.amend(container.id, f"moved {moved}")
            context.sync_later(container.id)
            context.store.handle(CpusAssigned((container.id,)))
        return obstacle

    # -- moves that an earlier daemon has left unfinished -------------------------------------------------

    def recover(
        self, entries: Mapping[str, Mapping[str, object]], containers: list[Container]
    ) -> dict[str, ReservationCpus]:
        """Read the records of moves that were unfinished when the last daemon ended.

        The containers get their old CPUs, whatever else is recorded of them; ``resume`` puts them back.

        Args:
            entries: The ledger.
            containers: The containers in it; those of a move are replaced.

        Returns:
            The CPUs that are held until the containers are back, by reservation.
        """
        bounds, holds = self._context.state.node.machine.bounds.cpus, dict[str, ReservationCpus]()
        for key, value in entries.items():
            if not key.startswith(MOVE_RECORD):
                continue
            record, token = MoveRecord.load(value, bounds), key[len(MOVE_RECORD) :]
            if record is None:
                self._context.telemetry.problem(
                    "cannot use a record of the ledger", record=key, err="the placements are used instead"
                )
                self._context.ledger_writer.put(key, None)
                continue
            moved = [(at, c) for at, c in enumerate(containers) if c.id in record.containers]
            for at, container in moved:
                placement = structs.replace(container.placement, exclusive=record.previous)
                containers[at] = structs.replace(container, placement=placement)
            living = [c for _, c in moved if c.phase is not Phase.EXITED]
            if not living:
                self._context.ledger_writer.put(key, None)
                continue
            first = living[0]
            holds[token] = ReservationCpus(first.owner, record.cpus, first.placement.excludes_be)
            reservation = restoration(record.containers, record.previous, record.cpus, first.ref)
            self._half_done.append(
                (reservation, ReservationRun(token, first.owner, first.placement.excludes_be))
            )
        return holds

    def resume(self) -> None:
        """Put back the containers of unfinished moves; called once all running containers are known."""
        half_done, self._half_done = self._half_done, []
        for reservation, run in half_done:
            self._context.spawn(self._put_back(reservation, run))

    async def _put_back(self, reservation: Reservation, run: ReservationRun) -> None:
        await self._moved(reservation, run)
