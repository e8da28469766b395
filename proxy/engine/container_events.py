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
        sent: The CPUs that its request brought to the runtime; None where they are not known.
    """

    token: str
    container_id: str
    sent: CpuSet | None = None


class CreateFailed(Struct, frozen=True):
    """A create has failed, or is decided again.

    Attributes:
        token: The id that its container has in the state.
    """

    token: str


class CreateLost(Struct, frozen=True):
    """A create was cancelled under way: the runtime may have made the container or not.

    Attributes:
        token: The id that its container has in the state.
        at: When.
    """

    token: str
    at: float


class PhaseChanged(Struct, frozen=True):
    """A container has entered a phase. One that has exited stays so, and gives its CPUs back.

    Attributes:
        container_id: The container.
        phase: The phase.
    """

    container_id: str
    phase: Phase


class ContainersRemoved(Struct, frozen=True):
    """Containers, known or not, are gone.

    Attributes:
        ids: Their ids.
    """

    ids: tuple[str, ...]


class ContainerTouched(Struct, frozen=True):
    """A container has changed: lists that the runtime made earlier are stale for it.

    Attributes:
        container_id: The container.
    """

    container_id: str


class ContainerIsBack(Struct, frozen=True):
    """A list shows that a container is not gone after all.

    Attributes:
        container_id: The container.
    """

    container_id: str


class ContainersUpdated(Struct, frozen=True):
    """Containers that exist have another placement, request, cgroup or phase.

    Attributes:
        containers: The containers as they are from now on.
        recorded: Whether the ledger records them.
    """

    containers: tuple[Container, ...]
    recorded: bool = True


class CpusAssigned(Struct, frozen=True):
    """Containers may use other CPUs than before, by a hook, a move, or in place of CPUs that are offline.

    Attributes:
        ids: The containers.
    """

    ids: tuple[str, ...]


# -- decisions ----------------------------------------------------------------------------------------------
# Each is answered by ``PlanDecided`` or by the answer to the call; a placement is in the state at once.


class CreateRequested(Struct, frozen=True):
    """A container is to be created.

    Attributes:
        pod: Its pod.
        name: Its name.
        attempt: Its attempt.
        request: What it requests.
        token: Its id until the runtime has assigned one.
        preferred: What device plug-ins prefer, by container and resource; None where the plug-in has a
            preference and has not been queried.
    """

    pod: Pod
    name: str
    attempt: int
    request: Request
    token: str
    preferred: Preferences = NO_PREFERENCES


class CreateResumed(Struct, frozen=True):
    """A create continues: the devices, hooks or reservation that it waited for are done.

    Attributes:
        container: The container as it was placed.
        is_reserved: Whether its reservation has been carried out.
    """

    container: Container
    is_reserved: bool = False


class CreateWithoutDevices(Struct, frozen=True):
    """A container that is to be created cannot use its devices, and is not created.

    Attributes:
        container: The container as it was placed.
        cause: Why.
    """

    container: Container
    cause: str


class DevicesAllocated(Struct, frozen=True):
    """Device plug-ins have answered Allocate.

    Attributes:
        pod_key: The pod.
        name: The container.
        answers: What they answered, by resource.
        requested: The devices that were requested, by resource.
    """

    pod_key: str
    name: str
    answers: Mapping[str, AllocateAnswer]
    requested: Mapping[str, tuple[str, ...]]


class AllocateFailed(Struct, frozen=True):
    """A device plug-in has refused Allocate, or not answered it: what was reserved is free again.

    Attributes:
        pod_key: The pod.
        name: The container.
        requested: The devices that were requested, by resource.
    """

    pod_key: str
    name: str
    requested: Mapping[str, tuple[str, ...]]


class CreateDelegated(Struct, frozen=True):
    """The decision about a create was returned to a caller, which sends it to the runtime.

    Attributes:
        token: The id that its container has in the state.
        cpus, mems: The sets of the request, as they were returned.
        quota: Its CFS quota, as it was returned.
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
    """The CPUs of a create cannot be freed: it is to be placed elsewhere.

    Attributes:
        token: The id that its container has in the state.
        reason: The CPUs, and why they cannot be freed.
        new_token: Its id from now on.
    """

    token: str
    reason: AbortReason
    new_token: str


class ContainerFound(Struct, frozen=True):
    """The runtime lists a container that is not in the state: it keeps its present CPUs, where it may.

    Attributes:
        container_id: Its id.
        pod: Its pod.
        name: Its name.
        attempt: Its attempt.
        request: What it requested, with the CPUs that it has.
        phase: Its phase.
        saved: The CPUs that the runtime has saved for it; None where they are not known.
    """

    container_id: str
    pod: Pod
    name: str
    attempt: int
    request: Request
    phase: Phase
    saved: CpuSet | None = None
