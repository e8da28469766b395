"""The answer to a held call: forward it with a decision, forward it unchanged, refuse it, or let it wait.

There is one function for each kind of call. Each reads the state as it is at that moment, and is called again
after every wait (hooks, a reservation, a preparation). So if the node was released in the meantime, or the
plan is no longer applied to the pod, the call is forwarded unchanged.

A container that only shares CPUs needs one answer, without a wait.
"""

from __future__ import annotations

from msgspec import Struct

from proxy.allocation.devices.allocate import QueryPreference
from proxy.allocation.rejection import UNEXPECTED
from proxy.engine.admission import NO_POOL_CPUS, exhausted_verdict
from proxy.engine.enforcement import applies_to
from proxy.engine.held_devices import holds_all
from proxy.engine.memory_resize import added_nodes
from proxy.engine.quotas import carried_quota
from proxy.engine.reservation_effects import AbortReason
from proxy.engine.start_step import is_ready
from proxy.engine.state import NodeState
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Pod, Pool, Verdict


class Forward(Struct, frozen=True):
    """Send a call on to the runtime with a decision.

    Attributes:
        planned_cpus: The CPUs that the plan has for the container.
        cpus: The CPUs that the request names; None to erase those that it names.
        mems: The memory nodes that the request names; None to leave those that it names.
        quota: The CFS quota of the request; -1 for no quota, 0 to leave it.
    """

    planned_cpus: CpuSet
    cpus: CpuSet | None
    mems: Mask | None
    quota: int = 0


class ForwardUnchanged(Struct, frozen=True):
    """Forward a call to the runtime unchanged."""


class ForwardStart(Struct, frozen=True):
    """Forward a start unchanged: the container runs on the CPUs that the runtime has saved for it.

    Attributes:
        carries: The CPUs that the runtime may write because of the start.
    """

    carries: CpuSet


class Refuse(Struct, frozen=True):
    """Refuse a call: answer it with a gRPC status, and do not forward it to the runtime.

    Attributes:
        code: The status.
        message: The reason.
    """

    code: int
    message: str


class ReserveFirst(Struct, frozen=True):
    """First carry out the reservation of a create, then query the engine again.

    Attributes:
        container: The container as it is placed.
    """

    container: Container


class AllocateFirst(Struct, frozen=True):
    """Call Allocate of the device plugins first, then query the engine again."""


class RecordFirst(Struct, frozen=True):
    """Forward a call unchanged, once the ledger has recorded what was set aside for its pod."""


class PrepareStart(Struct, frozen=True):
    """First prepare a start, then query the engine again."""


CallAnswer = (
    Forward
    | ForwardUnchanged
    | ForwardStart
    | Refuse
    | QueryPreference
    | AllocateFirst
    | ReserveFirst
    | RecordFirst
    | PrepareStart
)
_UNCHANGED, _RECORD_FIRST = ForwardUnchanged(), RecordFirst()
RELEASED_WITH_SANDBOX = "they were released with its sandbox"
"""Why a container has no devices, if its sandbox was stopped while its create waited."""


def create_answer(
    state: NodeState,
    pod: Pod,
    container: Container | None,
    verdict: Verdict | None = None,
    *,
    is_reserved: bool = False,
    has_devices: bool = False,
) -> CallAnswer:
    """Return the answer to CreateContainer.

    Args:
        state: The node as it is.
        pod: The container's pod.
        container: The placed container; None if it was not placed, or has been removed since.
        verdict: Why the container was not placed; None if it was placed and has been removed since.
        is_reserved: Whether its reservation has been carried out.
        has_devices: Whether its devices have been added to the request.
    """
    if not applies_to(state, pod):
        return _UNCHANGED
    if container is None:
        return _UNCHANGED if verdict is None else Refuse(verdict.code, verdict.message)
    placement = container.placement
    if placement.devices:
        if not has_devices:
            return AllocateFirst()
        if not holds_all(state, container):  # its sandbox was stopped in the meantime
            verdict = unallocated_verdict(container, RELEASED_WITH_SANDBOX)
            return Refuse(verdict.code, verdict.message)
    owns = placement.pool is Pool.OWN
    if not is_reserved and (owns or placement.hook_cpus is not None):
        return ReserveFirst(container)
    cpus = state.desired_cpus(container)
    if owns:
        return Forward(cpus, cpus, placement.mems, carried_quota(state, container))
    return Forward(cpus, None if state.node.erases(placement) else cpus, placement.mems)


def unreserved_verdict(state: NodeState, container: Container, reason: AbortReason) -> Verdict:
    """Return the verdict on a create whose CPUs cannot be freed."""
    public = public_reason(state, reason)
    message = f"cannot free CPUs for {container.ref}: {public}"
    return Verdict(GrpcStatus.FAILED_PRECONDITION, "CPUsNotFreed", message)


def unallocated_verdict(container: Container, cause: str) -> Verdict:
    """Return the verdict on a create whose devices cannot be used, in kubelet's words.

    Source: kubernetes v1.36, pkg/kubelet/cm/admission/errors.go ``GetPodAdmitResult``.
    """
    message = f"{UNEXPECTED}: Allocate failed due to {cause}, which is unexpected ({container.ref})"
    return Verdict(GrpcStatus.FAILED_PRECONDITION, UNEXPECTED, message)


def public_reason(state: NodeState, reason: AbortReason) -> str:
    """Return the reason as text for a client; it names other pods only if the configuration allows that."""
    return reason.message if state.node.admission.name_others else reason.public_message


def pod_answer(state: NodeState, pod: Pod, verdict: Verdict) -> CallAnswer:
    """Return the answer to RunPodSandbox.

    Args:
        state: The node as it is.
        pod: The pod, with the CPUs and memory that were set aside for it.
        verdict: The decision about the pod as a whole.
    """
    if not applies_to(state, pod):
        return _UNCHANGED
    if not verdict.admitted:
        return Refuse(verdict.code, verdict.message)
    return _UNCHANGED if pod.reserved_for_pod is None else _RECORD_FIRST


def start_answer(state: NodeState, container_id: str, *, is_prepared: bool, obstacle: str) -> CallAnswer:
    """Return the answer to StartContainer.

    Args:
        state: The node as it is.
        container_id: The container.
        is_prepared: Whether the start has been prepared, or the container cannot be found.
        obstacle: Why the start cannot be prepared; empty if it can.
    """
    if obstacle:
        message = f"cannot start container {container_id}: {obstacle}"
        return Refuse(GrpcStatus.FAILED_PRECONDITION, message)
    container = state.containers.get(container_id)
    if not is_prepared and (container is None or not is_ready(state, container)):
        return PrepareStart()
    if container is None or container.phase not in (Phase.CREATED, Phase.STARTING):
        return _UNCHANGED  # the runtime's answer tells the client what is wrong
    if not applies_to(state, container.pod):
        return ForwardStart(state.node.machine.online)  # it may run on any CPU
    return ForwardStart(state.runtime.saved.get(container_id) or state.desired_cpus(container))


def update_answer(
    state: NodeState, container: Container | None, quota: int, memory_limit: int = 0
) -> CallAnswer:
    """Return the answer to UpdateContainerResources.

    Args:
        state: The node as it is.
        container: The container; None if it is unknown.
        quota: The CFS quota that replaces the client's; 0 to leave it.
        memory_limit: The memory limit that the client requests; 0 for none.
    """
    if container is None or container.phase is Phase.EXITED or not applies_to(state, container.pod):
        return _UNCHANGED
    cpus, mems = state.desired_cpus(container), state.facts.mems.carried(state, container)
    if not cpus:
        verdict = exhausted_verdict(f"update {container.ref}", NO_POOL_CPUS)
        return Refuse(verdict.code, verdict.message)
    mems |= added_nodes(state, container, memory_limit)
    return Forward(cpus, None if state.node.erases(container.placement) else cpus, mems, quota)
