"""Compute for each container what would change if the plan were applied to all pods.

The plan is compared with what the kernel has, not with what was written. A container that differs although
the plan is applied to it has drifted. While a call for a container is in flight and its answer is awaited,
the container does not count as different, because the call may change it. A call that got no answer (an
orphan) hides no difference: it stays in flight for as long as the runtime does not answer, and the kernel is
written in the meantime.

The memory nodes of a running container are not changed, because its memory may be there. The container would
be bound to the nodes of the plan when it is created again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct

from proxy.engine.enforcement import applies_to
from proxy.engine.quotas import CONTAINER_QUOTA, POD_QUOTA, QuotaPlace, pool_forbids_quota, removable
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import LIVE, Container, Pool
from proxy.pools.claims import UNLIMITED


class PlanChange(StrEnum):
    """How the CPUs of a container would change."""

    NONE = ""
    """The container has the CPUs that the plan has for it."""
    PIN = "pin"
    """The container would get exclusive CPUs."""
    JOIN_POOL = "move"
    """The container would be moved to the CPUs of its pool."""
    DRIFT = "drift"
    """The plan is applied to the container, but it runs on other CPUs; its cpuset will be repaired."""


class ContainerDifference(Struct, frozen=True):
    """A container in the plan and in the kernel.

    Attributes:
        container: The container.
        applied: Whether the plan is applied to it.
        change: How its CPUs would change.
        cpus, mems: The CPUs and memory nodes in the kernel; None if they are unknown.
        desired_cpus, desired_mems: The CPUs and memory nodes according to the plan.
        quota: The CFS quota, in microseconds, that would be removed from it; None if none would be.
        pod_quota: The CFS quota that would be removed from its pod, likewise.
    """

    container: Container
    applied: bool
    change: PlanChange
    cpus: CpuSet | None
    mems: Mask | None
    desired_cpus: CpuSet
    desired_mems: Mask
    quota: int | None = None
    pod_quota: int | None = None

    @property
    def rebinds_memory(self) -> bool:
        """Whether it would be bound to other memory nodes when it is created again."""
        return not self.applied and self.mems is not None and self.mems != self.desired_mems

    @property
    def is_changed(self) -> bool:
        """Whether anything about it would change while it runs."""
        return self.change is not PlanChange.NONE or (self.quota, self.pod_quota) != (None, None)


def live_containers(state: NodeState) -> list[Container]:
    """Return the containers that may run, in the order of their names."""
    return sorted((c for c in state.containers.values() if c.phase in LIVE), key=lambda c: (c.ref, c.id))


def removable_quotas(state: NodeState, containers: Iterable[Container]) -> dict[str, QuotaPlace]:
    """Return the places of the CFS quotas that owners run without, by the ledger's key."""
    pods = ((c, state.current_pod(c.pod)) for c in containers)
    return removable(
        state, [c for c, pod in pods if pool_forbids_quota(state, pod, c.name, c.placement.pool)]
    )


def plan_differences(
    state: NodeState,
    containers: Iterable[Container],
    cpusets: Mapping[str, tuple[CpuSet, Mask]],
    quotas: Mapping[str, int],
) -> list[ContainerDifference]:
    """Compare containers with the kernel.

    Args:
        state: The node.
        containers: The containers.
        cpusets: The CPUs and memory nodes in effect, by container id.
        quotas: The CFS quotas of ``removable_quotas``, in microseconds; -1 for none.
    """
    return [_difference(state, container, cpusets.get(container.id), quotas) for container in containers]


def _difference(
    state: NodeState, container: Container, in_effect: tuple[CpuSet, Mask] | None, quotas: Mapping[str, int]
) -> ContainerDifference:
    applied, desired = applies_to(state, container.pod), state.desired_cpus(container)
    change = PlanChange.NONE
    if in_effect is not None and in_effect[0] != desired and not state.inflight.is_awaited(container.id):
        if applied:
            change = PlanChange.DRIFT
        else:
            change = PlanChange.PIN if container.placement.pool is Pool.OWN else PlanChange.JOIN_POOL
    cpus, mems = in_effect or (None, None)
    return ContainerDifference(
        container,
        applied,
        change,
        cpus,
        mems,
        desired,
        state.desired_mems(container),
        _limit(quotas.get(CONTAINER_QUOTA + container.id)),
        _limit(quotas.get(POD_QUOTA + container.pod.key)) if container.placement.pool is Pool.OWN else None,
    )


def _limit(quota: int | None) -> int | None:
    return None if quota == UNLIMITED else quota


def enforcement_change_note(state: NodeState, key: str, *, applied: bool) -> str:
    """Return a note if a decision has become applied since it was made, or no longer is; otherwise empty.

    Args:
        state: The node.
        key: The id of the container, or of the sandbox for a decision about a pod.
        applied: Whether the decision was applied when it was made.
    """
    container = state.containers.get(key)
    pod = state.pods.get(key) if container is None else container.pod
    if pod is None or applies_to(state, pod) is applied:
        return ""
    if applied:
        return "the plan is no longer applied to this pod: topoproxy status shows which CPUs it has"
    return "the plan is applied to this pod since then: topoproxy status shows which CPUs it has"
