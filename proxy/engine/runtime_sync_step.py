"""Decide whether a running container's CPUs must be sent to the runtime, so that it saves the right ones."""

from __future__ import annotations

from enum import Enum

from proxy.engine.enforcement import applies_to
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase, Pool


class SyncStep(Enum):
    """The next step for a container whose CPUs the runtime may not have saved."""

    NOTHING = "it does not run, or has what the runtime has saved"
    AWAIT = "a call without an answer is in flight for it: it is sent its CPUs when that is over"
    LEARN = "what the runtime has saved is not known"
    SEND = "the runtime is to be sent its CPUs"


def sync_step(state: NodeState, container_id: str) -> SyncStep:
    """Return the next step for a container that awaits a sync."""
    container = state.containers.get(container_id)
    if container is None or container.phase is not Phase.RUNNING:
        return SyncStep.NOTHING
    if not applies_to(state, container.pod):
        return SyncStep.NOTHING
    if state.node.erases(container.placement):
        return SyncStep.NOTHING  # the container has the CPUs of the cgroups above it
    is_unsent = container_id in state.facts.quotas.unsent
    orphans = [call for call in state.inflight.of(container_id) if call.orphaned_since is not None]
    if any(call.resend for call in orphans) or (orphans and not is_unsent):
        return SyncStep.AWAIT
    saved = state.runtime.saved.get(container_id)
    if saved is None:
        return SyncStep.LEARN
    desired = state.desired_cpus(container)
    if not desired:  # its pool is empty; to a runtime, an empty set would mean all CPUs
        return SyncStep.NOTHING
    is_right = saved == desired or is_transient(state, container, saved)
    return SyncStep.SEND if is_unsent or not is_right else SyncStep.NOTHING


def is_transient(state: NodeState, container: Container, has: CpuSet) -> bool:
    """Return whether a container's cpuset is narrow only while BE is suppressed.

    Such a cpuset changes every second and is not sent to the runtime and systemd, unless the cpuset that they
    have for the container contains CPUs that are no longer in the BE (best effort) pool: an update would
    bring those back.
    """
    pools = state.pools
    return container.placement.pool is Pool.BE and pools.be_now is not None and bool(has) and has <= pools.be


def no_longer_transient(before: NodeState, after: NodeState) -> list[str]:
    """Return the containers whose cpuset may no longer be transient, because the BE pool has lost CPUs.

    Their own cpusets need not change, because they may have been narrowed to other CPUs before. So there may
    be no write to the kernel that would trigger the update of the runtime and systemd.
    """
    if after.pools.be_now is None or before.pools.be <= after.pools.be:
        return []
    containers = after.containers.values()
    return [c.id for c in containers if c.placement.pool is Pool.BE and c.phase is Phase.RUNNING]
