"""Starts and updates, and what they show about the runtime, as events (``proxy.engine.node_events``)."""

from __future__ import annotations

from msgspec import Struct

from proxy.engine.inflight import InflightCall
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase


class StartRequested(Struct, frozen=True):
    """A client requests the start of a container.

    Attributes:
        container_id: Its id.
        is_prepared: Whether the start has been prepared, or the container cannot be found.
        obstacle: Why the start cannot be prepared; empty if it can.
    """

    container_id: str
    is_prepared: bool = False
    obstacle: str = ""


class UpdateRequested(Struct, frozen=True):
    """A client updates the resources of a container.

    Attributes:
        container_id: Its id.
        cpus, mems: The sets that the client names, as text; empty if it names none.
        cpu_quota: Microseconds; -1 for no limit, 0 for not set.
        memory_limit: Bytes; negative for no limit, 0 for not set.
    """

    container_id: str
    cpus: str
    mems: str
    cpu_quota: int
    memory_limit: int = 0


class UpdateAccepted(Struct, frozen=True):
    """The runtime has accepted an update that a client or a hook requested.

    Attributes:
        container_id: The container.
        memory_limit: As in ``UpdateRequested``.
    """

    container_id: str
    memory_limit: int


class CallSent(Struct, frozen=True):
    """A call was sent to the runtime, or an earlier run of the daemon may have sent it.

    Attributes:
        call: The call.
    """

    call: InflightCall


class CallCompleted(Struct, frozen=True):
    """A call has ended; its end shows nothing about its container.

    Attributes:
        call: The call.
    """

    call: InflightCall


class CallOrphaned(Struct, frozen=True):
    """The answer to a call is no longer awaited.

    Attributes:
        call: The call.
        at: When.
    """

    call: InflightCall
    at: float


class StartRefused(Struct, frozen=True):
    """The runtime has answered a start with an error, and the container is still starting.

    Attributes:
        call: The call.
        at: When.
    """

    call: InflightCall
    at: float


class StartEnded(Struct, frozen=True):
    """A start is over.

    Attributes:
        call: The call.
        phase: The phase that its container is in; None if that is unknown.
    """

    call: InflightCall
    phase: Phase | None


class UpdateEnded(Struct, frozen=True):
    """An update has been answered.

    Attributes:
        call: The call.
        saved: The CPUs that the runtime has saved because of the update; None if it has saved none.
    """

    call: InflightCall
    saved: CpuSet | None


class ResendWanted(Struct, frozen=True):
    """A container's CPUs must be sent to the runtime once the calls in flight for it have ended.

    Attributes:
        container_id: The container.
    """

    container_id: str


class CallConfined(Struct, frozen=True):
    """A container is confined to its current cpuset while a call for it is in flight, or no longer is.

    Attributes:
        call: The call.
        confined: Whether its container is confined.
    """

    call: InflightCall
    confined: bool


class OrphanListed(Struct, frozen=True):
    """The runtime has listed its containers while an orphan was in flight.

    Attributes:
        call: The orphan.
        phase: The phase that the list shows for its container; None if it shows none.
        requested_at: When the list was requested.
        now: When the list came.
        is_exempt_from_timeout: Whether the orphan must not be ended by the passing of time alone.
    """

    call: InflightCall
    phase: Phase | None
    requested_at: float
    now: float
    is_exempt_from_timeout: bool


class OrphanEnded(Struct, frozen=True):
    """An orphan is over.

    Attributes:
        call: The orphan.
        phase: The phase that its container is in.
    """

    call: InflightCall
    phase: Phase


class SavedCpusLearned(Struct, frozen=True):
    """The CPUs that the runtime has saved for a container have become known, or are no longer known.

    Attributes:
        container_id: The container; the event has no effect if it does not exist.
        cpus: The CPUs; None if they are unknown.
    """

    container_id: str
    cpus: CpuSet | None


class RuntimeSyncDue(Struct, frozen=True):
    """Containers may run on other CPUs than the runtime has saved for them; their CPUs must be sent to it.

    Attributes:
        ids: The containers.
    """

    ids: tuple[str, ...]


class RuntimeSyncStarted(Struct, frozen=True):
    """The CPUs of a container that awaits a sync are being sent to the runtime.

    Attributes:
        container_id: The container.
    """

    container_id: str
