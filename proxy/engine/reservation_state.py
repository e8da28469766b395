"""A reservation as a value. Its transitions are in ``proxy.engine.reservation``."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from proxy.engine.reservation_effects import AbortReason
from proxy.engine.reservation_events import RefusedWrite
from proxy.model.idset import CpuSet


class ReservationKind(StrEnum):
    """What a reservation is for."""

    CREATE = "create"
    START = "start"
    REPLACEMENT = "replacement"
    NARROW = "narrow"
    MOVE = "move"


FOR_OWNERS = (ReservationKind.REPLACEMENT, ReservationKind.MOVE)
"""The kinds for existing owners, which may exit during the reservation."""


class ReservationPhase(StrEnum):
    """What a reservation waits for."""

    REQUESTED = "requested"
    RECORDING = "recording"
    WAITING = "waiting"
    SHRINKING = "shrinking"
    PAUSING = "pausing"
    READING = "reading"
    PLACING = "placing"
    SECURING = "securing"
    DRAINING = "draining"
    MOVING = "moving"
    CHECKING = "checking"
    CONFIRMING = "confirming"
    HANDING_OVER = "handing over"
    RERECORDING = "rerecording"
    RESTORING = "restoring"
    REWRITING = "rewriting"
    RECHECKING = "rechecking"
    UNRECORDING = "unrecording"
    BACKING_OFF = "backing off"
    COMMITTED = "committed"
    ABORTED = "aborted"


_Phase = ReservationPhase
OVER = (_Phase.COMMITTED, _Phase.ABORTED)
BARRIER = (_Phase.WAITING, _Phase.SHRINKING, _Phase.PAUSING, _Phase.READING)
BEFORE_ASSIGNED = (_Phase.REQUESTED, _Phase.RECORDING, *BARRIER, _Phase.PLACING, _Phase.SECURING)
"""The phases in which the containers still have their earlier placement."""


class Reservation(Struct, frozen=True):
    """CPUs that are being freed for an owner.

    Attributes:
        kind: What it is for.
        containers: The containers that are to have the CPUs: ids, or the token of a create.
        cpus: The CPUs that other containers must leave.
        phase: What the reservation waits for.
        ref: The first container, for messages.
        previous: For a move, the CPUs that the containers owned before. For a replacement of offline CPUs,
            the replacements that they have already.
        tries: How often the containers that share CPUs were written since the CPUs were chosen; in a
            restoration, how often the restoration failed.
        alternatives: How many other placements were made for a create.
        client_disconnected: Whether the client of the call has disconnected.
        refused, errors: The writes that the kernel refused, and all failures, when the containers that share
            CPUs were written last.
        reason: Why it aborts; None if it does not, or if no reason needs to be given.
    """

    kind: ReservationKind
    containers: tuple[str, ...]
    cpus: CpuSet
    phase: ReservationPhase = ReservationPhase.REQUESTED
    ref: str = ""
    previous: CpuSet = field(default_factory=CpuSet)
    tries: int = 0
    alternatives: int = 0
    client_disconnected: bool = False
    refused: tuple[RefusedWrite, ...] = ()
    errors: tuple[str, ...] = ()
    reason: AbortReason | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has committed or aborted."""
        return self.phase in OVER

    @property
    def is_committed(self) -> bool:
        """Whether the CPUs belong to the owner."""
        return self.phase is ReservationPhase.COMMITTED

    @property
    def is_assigned(self) -> bool:
        """Whether the containers are placed on the CPUs already; if so, it completes, or is restored."""
        return self.phase not in BEFORE_ASSIGNED


def restoration(containers: tuple[str, ...], previous: CpuSet, cpus: CpuSet, ref: str = "") -> Reservation:
    """Return the reservation that undoes a move that was unfinished when the daemon ended.

    Args:
        containers: The containers.
        previous: The CPUs that they had before the move, and will have again.
        cpus: The CPUs to which they were to be moved.
        ref: The first container, for messages.
    """
    reason = AbortReason("the daemon ended before it was done", cpus)
    kind, phase = ReservationKind.MOVE, ReservationPhase.BACKING_OFF
    return Reservation(kind, containers, cpus, phase, ref, previous, reason=reason)
