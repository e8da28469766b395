"""Starts, updates, and what is learned of the runtime by them, as events (``proxy.engine.node_events``)."""

from __future__ import annotations

from msgspec import Struct

from proxy.engine.inflight import InflightCall
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase


class StartRequested(Struct, frozen=True):
    """A container is to be started.

    Attributes:
        container_id: Its id.
        is_prepared: Whether the start has been prepared, or the container cannot be found.
        obstacle: Why it cannot be prepared; empty where it can.
    """

    container_id: str
    is_prepared: bool = False
    obstacle: str = ""


class UpdateRequested(Struct, frozen=True):
    """A client updates the resources of a container.

    Attributes:
        container_id: Its id.
        cpus, mems: The sets that the client names, as text; empty for none.
        cpu_quota: Microseconds; -1 for no limit, 0 for not set.
        memory_limit: Bytes; negative for no limit, 0 for not set.
    """

    container_id: str
    cpus: str
    mems: str
    cpu_quota: int
    memory_limit: int = 0


class UpdateAccepted(Struct, frozen=True):
    """The runtime has carried out an update of a client, or of a hook.

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
    """A call is over, and says nothing about its container.

    Attributes:
        call: The call.
    """

    call: InflightCall


class CallOrphaned(Struct, frozen=True):
    """The answer to a call is not waited for any more.

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
        phase: The phase that its container is in; None where that is not known.
    """

    call: InflightCall
    phase: Phase | None


class UpdateEnded(Struct, frozen=True):
    """An update has been answered.

    Attributes:
        call: The call.
        saved: The CPUs that the runtime has saved by it; None where it has saved none.
    """

    call: InflightCall
    saved: CpuSet | None


class ResendWanted(Struct, frozen=True):
    """The runtime is to be sent the CPUs of a container once the calls in flight for it are over.

    Attributes:
        container_id: The container.
    """

    container_id: str


class CallConfined(Struct, frozen=True):
    """The container of a call is kept within its current cpuset while the call is in flight, or no longer is.

    Attributes:
        call: The call.
        confined: Whether it is.
    """

    call: InflightCall
    confined: bool


class OrphanListed(Struct, frozen=True):
    """The runtime has listed what it has, while an orphan was in flight.

    Attributes:
        call: The orphan.
        phase: The phase that the list shows for its container; None where it says nothing.
        requested_at: When the list was requested.
        now: When it came.
        held: Time alone does not end the orphan.
    """

    call: InflightCall
    phase: Phase | None
    requested_at: float
    now: float
    held: bool


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
        container_id: The container; the event has no effect where it does not exist.
        cpus: The CPUs; None where they are not known.
    """

    container_id: str
    cpus: CpuSet | None


class ContainersUnsaved(Struct, frozen=True):
    """Containers may run on other CPUs than the runtime has saved for them: it is to be sent theirs.

    Attributes:
        ids: The containers.
    """

    ids: tuple[str, ...]


class RuntimeSyncStarted(Struct, frozen=True):
    """The CPUs of an unsaved container are being sent to the runtime.

    Attributes:
        container_id: The container.
    """

    container_id: str
