"""Decide the next step before a created container may start.

The runtime makes the container's cgroup at the start, with the cpuset that it has saved last. So before the
start it must have saved the currently planned CPUs, and if these are the container's own, other containers
must have left them.
"""

from __future__ import annotations

from enum import Enum

from proxy.engine.enforcement import applies_to
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BeCpuset
from proxy.model.workload import Container, KubeQos, Phase, Pool

_ANY_UPDATE = CpuSet()


class StartStep(Enum):
    """The next step before a start."""

    READY = "it may start"
    AWAIT_OTHERS = "updates in flight that carry other CPUs have to complete"
    AWAIT_ALL = (
        "all updates in flight have to complete: while one is in flight, another would not show what is saved"
    )
    SEND = "the runtime has to be sent the container's CPUs"
    CLEAR = "other containers have to leave the container's CPUs"


def start_step(state: NodeState, container_id: str) -> StartStep:
    """Return the next step before a container may start; ``READY`` if it is not about to be started."""
    container = state.containers.get(container_id)
    if container is None or container.phase is not Phase.CREATED:
        return StartStep.READY
    is_owner = container.placement.pool is Pool.OWN
    if not is_owner and state.node.erases(container.placement):
        return StartStep.READY  # it starts with the CPUs of its pod's cgroup
    planned = state.desired_cpus(container)
    if state.inflight.conflicting_updates(container_id, planned):
        return StartStep.AWAIT_OTHERS
    is_sent = container_id not in state.facts.quotas.unsent
    if not is_sent or state.runtime.saved.get(container_id) != planned:
        is_alone = not state.inflight.conflicting_updates(container_id, _ANY_UPDATE)
        return StartStep.SEND if is_alone else StartStep.AWAIT_ALL
    return StartStep.CLEAR if is_owner else StartStep.READY


def is_ready(state: NodeState, container: Container) -> bool:
    """Return whether a container may start at once.

    That is, the runtime has saved the right CPUs for it, and the cgroups above it have them.
    """
    if not applies_to(state, container.pod):
        return True
    if container.pod.cgroup_parent in state.runtime.inherited_cgroups or is_below_class(state, container):
        return False  # the cgroups above it may be too narrow
    return start_step(state, container.id) is StartStep.READY


def is_below_class(state: NodeState, container: Container) -> bool:
    """Return whether the cgroups above a container are narrowed to what its class may use."""
    return state.node.be_cpuset is BeCpuset.ERASE and container.pod.kube_qos is KubeQos.BEST_EFFORT
