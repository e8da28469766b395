"""What happens to containers, and decisions about them, as events (``proxy.engine.node_events``)."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from proxy.allocation.providers.provider import NO_PREFERENCES, Preferences
from proxy.engine.reservation_effects import AbortReason
from proxy.model.devices import AllocateAnswer
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pod, Request


class ContainerCreated(Struct, frozen=True):
    """The runtime has made a container and named it.

    Attributes:
        token: The id that it has in the state.
        container_id: Its id at the runtime.
        sent: The CPUs that its request carried to the runtime; None if they are unknown.
    """

    token: str
    container_id: str
    sent: CpuSet | None = None


class CreateFailed(Struct, frozen=True):
    """A create has failed, or is to be decided again.

    Attributes:
        token: The id that its container has in the state.
    """

    token: str


class CreateLost(Struct, frozen=True):
    """A create was cancelled while in flight: the runtime may have made the container or not.

    Attributes:
        token: The id that its container has in the state.
        at: When.
    """

    token: str
    at: float


class PhaseChanged(Struct, frozen=True):
    """A container has entered a phase. A container that has exited stays so, and gives its CPUs back.

    Attributes:
        container_id: The container.
        phase: The phase.
    """

    container_id: str
    phase: Phase


class ContainersRemoved(Struct, frozen=True):
    """Containers are gone; some of them may be unknown.

    Attributes:
        ids: Their ids.
    """

    ids: tuple[str, ...]


class ContainerTouched(Struct, frozen=True):
    """A container has changed: lists that were requested from the runtime earlier are stale for it.

    Attributes:
        container_id: The container.
    """

    container_id: str


class ContainerIsBack(Struct, frozen=True):
    """A list shows that a container that was reported removed still exists.

    Attributes:
        container_id: The container.
    """

    container_id: str


class ContainersUpdated(Struct, frozen=True):
    """Existing containers have another placement, request, cgroup or phase.

    Attributes:
        containers: The containers with their new values.
        recorded: Whether the ledger records them.
    """

    containers: tuple[Container, ...]
    recorded: bool = True


class CpusAssigned(Struct, frozen=True):
    """Containers may use other CPUs than before: because of a hook, a move, or CPUs that went offline.

    Attributes:
        ids: The containers.
    """

    ids: tuple[str, ...]


# -- decisions ----------------------------------------------------------------------------------------------
# Each event is answered by ``PlanDecided`` or by the answer to the call; a placement is in the state at once.


class CreateRequested(Struct, frozen=True):
    """A client requests the creation of a container.

    Attributes:
        pod: Its pod.
        name: Its name.
        attempt: Its attempt.
        request: The container's request.
        token: Its id until the runtime has assigned one.
        preferred: What device plugins prefer, by container and resource; None if the plugin has a
            preference and has not been queried.
    """

    pod: Pod
    name: str
    attempt: int
    request: Request
    token: str
    preferred: Preferences = NO_PREFERENCES


class CreateResumed(Struct, frozen=True):
    """A create continues, because the devices, hooks or reservation that it waited for are ready.

    Attributes:
        container: The container as it was placed.
        is_reserved: Whether its reservation has been carried out.
    """

    container: Container
    is_reserved: bool = False


class CreateWithoutDevices(Struct, frozen=True):
    """A container that was to be created cannot use its devices, so it is not created.

    Attributes:
        container: The container as it was placed.
        cause: Why.
    """

    container: Container
    cause: str


class DevicesAllocated(Struct, frozen=True):
    """Device plugins have answered Allocate calls.

    Attributes:
        pod_key: The pod.
        name: The container.
        answers: The answers, by resource.
        requested: The devices that were requested, by resource.
    """

    pod_key: str
    name: str
    answers: Mapping[str, AllocateAnswer]
    requested: Mapping[str, tuple[str, ...]]


class AllocateFailed(Struct, frozen=True):
    """A device plugin has refused Allocate, or not answered: the reserved devices are free again.

    Attributes:
        pod_key: The pod.
        name: The container.
        requested: The devices that were requested, by resource.
    """

    pod_key: str
    name: str
    requested: Mapping[str, tuple[str, ...]]


class CreateDelegated(Struct, frozen=True):
    """The decision about a create was returned to a caller, which itself sends the create to the runtime.

    Attributes:
        token: The id that its container has in the state.
        cpus, mems: The sets that were returned for the request.
        quota: The CFS quota that was returned for it.
    """

    token: str
    cpus: str
    mems: str
    quota: int


class CreateNotReserved(Struct, frozen=True):
    """The reservation of a create was given up, and its placement withdrawn.

    Attributes:
        container: The container as it was placed.
        reason: Why.
    """

    container: Container
    reason: AbortReason


class CpusNotFreed(Struct, frozen=True):
    """The CPUs of a create cannot be freed: its container has to be placed elsewhere.

    Attributes:
        token: The id that its container has in the state.
        reason: The CPUs, and why they cannot be freed.
        new_token: Its id from now on.
    """

    token: str
    reason: AbortReason
    new_token: str


class ContainerFound(Struct, frozen=True):
    """The runtime lists a container that is not in the state. It keeps its present CPUs, if it may.

    Attributes:
        container_id: Its id.
        pod: Its pod.
        name: Its name.
        attempt: Its attempt.
        request: Its request, with the CPUs that it has now.
        phase: Its phase.
        saved: The CPUs that the runtime has saved for it; None if they are unknown.
    """

    container_id: str
    pod: Pod
    name: str
    attempt: int
    request: Request
    phase: Phase
    saved: CpuSet | None = None
