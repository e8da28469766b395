"""The events of a reservation, as values: the input of ``proxy.engine.reservation.step``.

Most events are the result of an effect (``proxy.engine.reservation_effects``); ``ClientDisconnected``,
``ContainersExited``, ``PlanWithdrawn``, ``Interrupted`` and ``Cancelled`` come at any time. An event carries
all that the decision needs to know of the node at that moment, so a list of events replays a reservation
exactly.
"""

from __future__ import annotations

from msgspec import Struct, field

from proxy.model.idset import CpuSet


class RefusedWrite(Struct, frozen=True):
    """A write to a container's cpuset that the kernel refused.

    Attributes:
        container_id: The container.
        errno: The kernel's error number; 0 where the value read back differs from the one written.
        text: The error as a sentence.
    """

    container_id: str
    errno: int
    text: str = ""


class CpusInEffect(Struct, frozen=True):
    """What the kernel holds for a container.

    Attributes:
        container_id: The container.
        cpus: The CPUs that it may run on now; all that are online where that cannot be read.
        planned: The CPUs that it is to have by the newest plan.
    """

    container_id: str
    cpus: CpuSet
    planned: CpuSet


class ContestedCpus(Struct, frozen=True):
    """CPUs onto which another program puts a container again and again (a write conflict).

    Attributes:
        ref: The container.
        cpus: All CPUs that it is put on.
    """

    ref: str
    cpus: CpuSet


class ReservationRequested(Struct, frozen=True):
    """A reservation begins."""


class LedgerWritten(Struct, frozen=True):
    """What was to be recorded is durable."""


class LedgerLate(Struct, frozen=True):
    """The ledger was not written in time; whether it will be is not known.

    Attributes:
        cause: The cause as text.
    """

    cause: str


class LedgerRejected(Struct, frozen=True):
    """The ledger cannot hold the record.

    Attributes:
        cause: The cause as text.
    """

    cause: str


class InflightCompleted(Struct, frozen=True):
    """No call in flight can put a container on the CPUs that it must leave."""


class InflightLate(Struct, frozen=True):
    """Calls that were waited for are still in flight.

    Attributes:
        message: Which calls, for the operator.
        public: The same without the names of other pods' containers.
        cpus: All CPUs that these calls carry.
    """

    message: str
    public: str
    cpus: CpuSet


class CpusetsWritten(Struct, frozen=True):
    """Cpusets were written and read back.

    Attributes:
        refused: What the kernel refused.
        errors: All that failed, also groups above pods, as sentences.
        contested: Containers that another program puts onto the reserved CPUs.
        group_errors: Those of the errors that are about groups above pods.
    """

    refused: tuple[RefusedWrite, ...] = ()
    errors: tuple[str, ...] = ()
    contested: tuple[ContestedCpus, ...] = ()
    group_errors: tuple[str, ...] = ()


class CpusetsRead(Struct, frozen=True):
    """Cpusets were read.

    A container without a cgroup is missing; one of the reservation's own that has exited runs on no CPU.

    Attributes:
        cpusets: The CPUs that the kernel holds for each container.
        contested: Containers that another program puts onto the reserved CPUs.
    """

    cpusets: tuple[CpusInEffect, ...] = ()
    contested: tuple[ContestedCpus, ...] = ()


class PauseOver(Struct, frozen=True):
    """A pause has ended."""


class TimedOut(Struct, frozen=True):
    """The deadline for writes and reads has passed."""


class PlacedElsewhere(Struct, frozen=True):
    """The container of a create has another placement now; the one before is withdrawn.

    Attributes:
        container_id: The token of the create from now on.
        cpus: The CPUs that it is to own.
    """

    container_id: str
    cpus: CpuSet = field(default_factory=CpuSet)


class NoOtherPlacement(Struct, frozen=True):
    """There is no other placement; the one that was made stays."""


class PlacementWithdrawn(Struct, frozen=True):
    """The create was answered meanwhile (a hook refused it, say); its placement is withdrawn."""


class ClientDisconnected(Struct, frozen=True):
    """The client of the call has disconnected."""


class ContainersExited(Struct, frozen=True):
    """None of the containers runs any more."""


class PlanWithdrawn(Struct, frozen=True):
    """The plan is not applied to the containers any more: they get what they would have without topoproxy."""


class Interrupted(Struct, frozen=True):
    """An effect failed in a way that was not foreseen. The effects before it are done."""


class Cancelled(Struct, frozen=True):
    """The daemon stops."""


Event = (
    ReservationRequested
    | LedgerWritten
    | LedgerLate
    | LedgerRejected
    | InflightCompleted
    | InflightLate
    | CpusetsWritten
    | CpusetsRead
    | PauseOver
    | TimedOut
    | PlacedElsewhere
    | NoOtherPlacement
    | PlacementWithdrawn
    | ClientDisconnected
    | ContainersExited
    | PlanWithdrawn
    | Interrupted
    | Cancelled
)
