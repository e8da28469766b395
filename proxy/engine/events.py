"""What happens to a reservation, as values: the input of ``proxy.engine.reservation.step``.

Most events are the result of an effect (``proxy.engine.effects``); ``ClientGone``, ``ContainersExited``,
``Interrupted`` and ``Cancelled`` come at any time. An event carries all that the decision needs to know of
the node at that moment, so a list of events replays a reservation exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.model.idset import CpuSet


@dataclass(frozen=True, slots=True)
class RefusedWrite:
    """A write to a container's cpuset that the kernel refused.

    Attributes:
        container_id: The container.
        errno: The kernel's error number; 0 where the value read back differs from the one written.
        text: The error as a sentence.
    """

    container_id: str
    errno: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class CpusInEffect:
    """What the kernel holds for a container.

    Attributes:
        container_id: The container.
        cpus: The CPUs that it may run on now; all that are online where that cannot be read.
        wanted: The CPUs that it is to have by the newest plan.
    """

    container_id: str
    cpus: CpuSet
    wanted: CpuSet


@dataclass(frozen=True, slots=True)
class ContestedCpus:
    """CPUs onto which another program puts a container again and again (a write conflict).

    Attributes:
        ref: The container.
        cpus: All CPUs that it is put on.
    """

    ref: str
    cpus: CpuSet


@dataclass(frozen=True, slots=True)
class ReservationRequested:
    """A reservation begins."""


@dataclass(frozen=True, slots=True)
class LedgerWritten:
    """What was to be recorded is durable."""


@dataclass(frozen=True, slots=True)
class LedgerLate:
    """The ledger was not written in time; whether it will be is not known.

    Attributes:
        cause: The cause in words.
    """

    cause: str


@dataclass(frozen=True, slots=True)
class LedgerRejected:
    """The ledger cannot hold the record.

    Attributes:
        cause: The cause in words.
    """

    cause: str


@dataclass(frozen=True, slots=True)
class InflightLanded:
    """No call in flight can bring the CPUs to a container that is not to have them."""


@dataclass(frozen=True, slots=True)
class InflightLate:
    """Calls that were waited for are still in flight.

    Attributes:
        message: Which calls, for the operator.
        public: The same without the names of other pods' containers.
        cpus: All CPUs that these calls carry.
    """

    message: str
    public: str
    cpus: CpuSet


@dataclass(frozen=True, slots=True)
class CpusetsWritten:
    """Cpusets were written and read back.

    Attributes:
        refused: What the kernel refused.
        errors: All that failed, also groups above pods, as sentences.
        contested: Containers that another program puts onto the reserved CPUs.
    """

    refused: tuple[RefusedWrite, ...] = ()
    errors: tuple[str, ...] = ()
    contested: tuple[ContestedCpus, ...] = ()


@dataclass(frozen=True, slots=True)
class CpusetsRead:
    """Cpusets were read.

    A container without a cgroup is missing; one of the reservation's own that has exited runs on no CPU.

    Attributes:
        found: What the kernel holds.
        contested: Containers that another program puts onto the reserved CPUs.
    """

    found: tuple[CpusInEffect, ...] = ()
    contested: tuple[ContestedCpus, ...] = ()


@dataclass(frozen=True, slots=True)
class PauseOver:
    """A pause has ended."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The deadline for writes and reads has passed."""


@dataclass(frozen=True, slots=True)
class PlacedElsewhere:
    """The container of a create has another placement now; the one before is withdrawn.

    Attributes:
        container_id: The token of the create from now on.
        cpus: The CPUs that it is to own.
    """

    container_id: str
    cpus: CpuSet = field(default_factory=CpuSet)


@dataclass(frozen=True, slots=True)
class NoOtherPlacement:
    """There is no other placement; the one that was made still stands."""


@dataclass(frozen=True, slots=True)
class PlacementWithdrawn:
    """The create was answered meanwhile (a hook refused it, say); its placement is withdrawn."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client of the call went away."""


@dataclass(frozen=True, slots=True)
class ContainersExited:
    """None of the containers runs any more."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An effect failed in a way that was not foreseen. The effects before it are done."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The daemon stops."""


Event = (
    ReservationRequested
    | LedgerWritten
    | LedgerLate
    | LedgerRejected
    | InflightLanded
    | InflightLate
    | CpusetsWritten
    | CpusetsRead
    | PauseOver
    | TimedOut
    | PlacedElsewhere
    | NoOtherPlacement
    | PlacementWithdrawn
    | ClientGone
    | ContainersExited
    | Interrupted
    | Cancelled
)
