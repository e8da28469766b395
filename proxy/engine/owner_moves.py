"""Check whether a running owner can be moved to other CPUs of its own.

Theory. A move changes which CPUs an owner has, and nothing else. The owner gets as many CPUs as before, on
the NUMA nodes where its memory may be. Everything else that was decided for it must still be true afterwards:
whole cores, or one CPU of each core, if that is required; and under a strict topology policy no more NUMA
nodes than it has now. So an owner stays on its CPUs

* if another party depends on its CPUs: a scheduler or kubelet has named them, the node chose them for the pod
  as a whole, or hooks have narrowed the container to some of them;
* while its own CPUs are changing: some are offline or replaced, or the owner is being moved already;
* while one of its containers is not running: the runtime may be executing a create or a start with the old
  CPUs.

The new CPUs must be free: no other owner has them, they are not promised to an ended container or to a pod,
they are not reserved, and the shared pool keeps its floors and at least one CPU, even while both the old and
the new CPUs are held.
"""

from __future__ import annotations

from proxy.allocation.koordinator.bind import holds
from proxy.engine.admission import EMPTY_SHARED_POOL
from proxy.engine.owners import cpus_to_avoid
from proxy.engine.replacement_cpus import cpus_are_named, required_binding
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, union
from proxy.model.koordinator import BindPolicy
from proxy.model.phrases import counted, listed, numa_nodes_text
from proxy.model.workload import Container, Phase, Pool


def containers_of(state: NodeState, owner: str) -> tuple[Container, ...]:
    """Return the containers that have an owner's CPUs, without those that have exited."""
    containers = state.containers.values()
    own = (c for c in containers if c.owner == owner and c.placement.pool is Pool.OWN)
    return tuple(c for c in own if c.phase is not Phase.EXITED)


def why_not_movable(state: NodeState, owner: str, cpus: CpuSet) -> str:
    """Return why an owner cannot be moved to some CPUs, as text; empty if it can.

    Args:
        state: The node as it is.
        owner: The owner, as ``Container.owner``.
        cpus: The CPUs that it is to have.
    """
    containers = containers_of(state, owner)
    if not containers:
        return "it owns no CPUs"
    if any(reserved.owner == owner for reserved in state.reservation_cpus.values()):
        return "its CPUs are being changed already"
    return (
        _why_fixed(state, containers)
        or _placement_difference(state, containers[0], cpus)
        or _why_not_free(state, containers[0], cpus)
    )


def _why_fixed(state: NodeState, containers: tuple[Container, ...]) -> str:
    """Return why the containers must stay on their CPUs."""
    own, online = containers[0].placement.exclusive, state.node.machine.online
    for container in containers:
        placement, pod = container.placement, container.pod
        if container.phase is not Phase.RUNNING:
            return f"{container.ref} is not running"
        if placement.exclusive != own or placement.replacement or not own <= online:
            return f"{container.ref} does not have the CPUs that it was given"
        if placement.hook_cpus is not None or placement.hook_extra_cpus:
            return f"a hook has narrowed {container.ref}"
        current = state.current_pod(pod)
        if (
            current.cpuset_chosen_locally
            or current.reserved_for_pod is not None
            or cpus_are_named(state, container)
        ):
            return f"the CPUs of {container.ref} were named for it, or chosen for its pod"
    return ""


def _placement_difference(state: NodeState, container: Container, cpus: CpuSet) -> str:
    """Return why the new CPUs cannot replace the owner's: their number, NUMA nodes or cores."""
    node, own = state.node, container.placement.exclusive
    if cpus == own:
        return f"it is on CPUs {listed(own)} already"
    if len(cpus) != len(own):
        return f"it has {counted(len(own), 'CPU')}, not {len(cpus)}"
    on_nodes, mems = node.machine.nodes_of(cpus), state.desired_mems(container)
    location = f"CPUs {listed(cpus)} are on {numa_nodes_text(on_nodes)}"
    if not on_nodes <= mems:
        return f"{location}, and its memory may be on {numa_nodes_text(mems)} only"
    if node.policy.is_strict and len(on_nodes) > len(has := node.machine.nodes_of(own)):
        return f"{location}, and it is on {numa_nodes_text(has)} only"
    binding = required_binding(node, state.current_pod(container.pod))
    if binding is not BindPolicy.NONE and not holds(node.topology, cpus, binding):
        wanted = "whole cores" if binding is BindPolicy.FULL_PCPUS else "one CPU of each core"
        return f"CPUs {listed(cpus)} are not {wanted}, which it requires"
    return ""


def _why_not_free(state: NodeState, container: Container, cpus: CpuSet) -> str:
    """Return why the CPUs are not free."""
    node, own = state.node, container.placement.exclusive
    others = union(owner.cpus.bits for key, owner in state.owners.items() if key != container.owner)
    unavailable = node.cpu.reserved | node.withheld | state.cpus_set_aside(container.pod.key)
    unavailable |= (
        state.promised_cpus(container.owner) | cpus_to_avoid(state, container.pod) | CpuSet.from_bits(others)
    )
    usable = node.topology.cpus & node.shareable & node.machine.online
    if not_free := cpus - own - (usable - unavailable):
        return f"CPUs {listed(not_free)} are not free"
    if not state.pools.shared - state.cpus_set_aside() - cpus:
        return EMPTY_SHARED_POOL
    return ""
