"""The events of a reservation, as values: the input of ``proxy.engine.reservation.step``.

Most events are the result of an effect (``proxy.engine.reservation_effects``); ``ClientDisconnected``,
``ContainersExited``, ``PlanNoLongerApplied``, ``Interrupted`` and ``Cancelled`` come at any time. An event
carries all facts about the node that the decision needs at that moment, so a list of events replays a
reservation exactly.
"""

from __future__ import annotations

from msgspec import Struct, field

from proxy.model.idset import CpuSet


class RefusedWrite(Struct, frozen=True):
    """A write to a container's cpuset that the kernel refused.

    Attributes:
        container_id: The container.
        errno: The kernel's error number; 0 if the value read back differs from the one written.
        text: The error as a sentence.
    """

    container_id: str
    errno: int
    text: str = ""


class CpusInEffect(Struct, frozen=True):
    """The cpuset that the kernel holds for a container.

    Attributes:
        container_id: The container.
        cpus: The CPUs that it may run on now; all online CPUs if that cannot be read.
        planned: The CPUs that the newest plan has for it.
    """

    container_id: str
    cpus: CpuSet
    planned: CpuSet


class ContestedCpus(Struct, frozen=True):
    """CPUs onto which another program repeatedly puts a container (a write conflict).

    Attributes:
        ref: The container.
        cpus: All CPUs onto which it is put.
    """

    ref: str
    cpus: CpuSet


class ReservationRequested(Struct, frozen=True):
    """A reservation begins."""


class LedgerWritten(Struct, frozen=True):
    """The record is durable."""


class LedgerLate(Struct, frozen=True):
    """The ledger was not written in time; it is unknown whether it will be.

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
    """No call in flight can put a container onto CPUs that it must leave any more."""


class InflightLate(Struct, frozen=True):
    """Calls for which the reservation waited are still in flight.

    Attributes:
        message: Which calls, for the operator.
        public: The same message without the names of other pods' containers.
        cpus: All CPUs that these calls carry.
    """

    message: str
    public: str
    cpus: CpuSet


class CpusetsWritten(Struct, frozen=True):
    """Cpusets were written and read back.

    Attributes:
        refused: The writes that the kernel refused.
        errors: All failures as sentences, including those about cgroups above pods.
        contested: Containers that another program puts onto the reserved CPUs.
        group_errors: Those of the errors that are about cgroups above pods.
    """

    refused: tuple[RefusedWrite, ...] = ()
    errors: tuple[str, ...] = ()
    contested: tuple[ContestedCpus, ...] = ()
    group_errors: tuple[str, ...] = ()


class CpusetsRead(Struct, frozen=True):
    """Cpusets were read.

    A container without a cgroup has no entry; a container of the reservation itself that has exited has an
    entry without CPUs.

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
    """The container of a create has a new placement; the earlier one is withdrawn.

    Attributes:
        container_id: The new token of the create.
        cpus: The CPUs that it is to own.
    """

    container_id: str
    cpus: CpuSet = field(default_factory=CpuSet)


class NoOtherPlacement(Struct, frozen=True):
    """There is no other placement; the existing one stays."""


class PlacementWithdrawn(Struct, frozen=True):
    """The create was answered in the meantime, for example by a hook; its placement is withdrawn."""


class ClientDisconnected(Struct, frozen=True):
    """The client of the call has disconnected."""


class ContainersExited(Struct, frozen=True):
    """All of the containers have exited."""


class PlanNoLongerApplied(Struct, frozen=True):
    """The plan is no longer applied to the containers: they get what they would have without topoproxy."""


class Interrupted(Struct, frozen=True):
    """An effect failed unexpectedly. The effects before it have been performed."""


class Cancelled(Struct, frozen=True):
    """The daemon is stopping."""


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
    | PlanNoLongerApplied
    | Interrupted
    | Cancelled
)
