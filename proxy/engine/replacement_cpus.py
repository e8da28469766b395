"""Choose CPUs that replace the offline CPUs of owners.

An owner keeps what it was given: when a CPU that went offline comes back, the owner has it again. Until then
the owner has its remaining CPUs, and as many free CPUs as are missing, if there are any:

* Only CPUs that topoproxy chose are replaced. A scheduler or kubelet that named CPUs does not know of
  replacements, and would assign them to another container.
* Replacements are chosen as for a new container, on the NUMA nodes of the owner's remaining CPUs, and
  elsewhere only if the topology policy is not strict. If all CPUs of the owner are offline, replacements are
  on the nodes of its memory, and under a strict policy on as few of these as suffice. If whole cores are
  required, only whole cores are replacements (with SMT switched off, a core is one CPU).
* Replacements are never the last CPUs of the shared pool, those of its floors, or those that are promised to
  another container.

Replacements are part of the placement (``Placement.replacement``), so they survive a restart of the daemon.
``NodeState.desired_cpus`` uses as many of them as CPUs are missing.
"""

from __future__ import annotations

from msgspec import Struct

from proxy.allocation.cpu_policy import take
from proxy.engine.admission import assigned_cpus
from proxy.engine.node import Node
from proxy.engine.owners import cpus_to_avoid
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask, union
from proxy.model.koordinator import BindPolicy, NodeBindPolicy
from proxy.model.options import TopologyPolicy
from proxy.model.workload import Container, Phase, Pod, Pool


class MissingCpus(Struct, frozen=True):
    """An owner with offline CPUs, or with replacements.

    Attributes:
        owner: The owner, as ``Container.owner``.
        containers: The containers that share the CPUs.
        offline: The promised CPUs that are offline.
        replacement: The replacements that are online.
    """

    owner: str
    containers: tuple[Container, ...]
    offline: CpuSet
    replacement: CpuSet

    @property
    def missing(self) -> int:
        """How many CPUs are still missing."""
        return max(len(self.offline) - len(self.replacement), 0)


def owners_missing_cpus(state: NodeState) -> list[MissingCpus]:
    """Return the owners with offline CPUs or with replacements; usually there are none."""
    online = state.node.machine.online
    groups: dict[str, list[Container]] = {}
    for container in state.containers.values():
        placement = container.placement
        if placement.pool is not Pool.OWN or container.phase in (Phase.EXITED, Phase.CREATING):
            continue
        if placement.replacement or not placement.exclusive <= online:
            groups.setdefault(container.owner, []).append(container)
    missing = []
    for owner, group in sorted(groups.items()):
        own = CpuSet.union_of(c.placement.exclusive for c in group)
        instead = CpuSet.union_of(c.placement.replacement for c in group) & online
        missing.append(MissingCpus(owner, tuple(group), own - online, instead))
    return missing


def choose_replacements(state: NodeState, shortage: MissingCpus) -> CpuSet:
    """Choose CPUs that replace the missing ones; fewer, or none, if there are not enough."""
    node, count = state.node, shortage.missing
    first = shortage.containers[0]
    if not count or any(cpus_are_named(state, c) for c in shortage.containers):
        return CpuSet()
    if any(reserved.owner == shortage.owner for reserved in state.reservation_cpus.values()):
        return CpuSet()  # its CPUs are being changed; those still missing afterwards are replaced then
    own = state.owners[shortage.owner].cpus if shortage.owner in state.owners else CpuSet()
    taken = union(owner.cpus.bits for owner in state.owners.values())
    unavailable = (
        node.cpu.reserved
        | node.withheld
        | state.cpus_set_aside(first.pod.key)
        | state.promised_cpus(shortage.owner)
    ).bits
    free = CpuSet.from_bits(node.topology.cpus.bits & node.shareable.bits & ~(taken | unavailable))
    free -= cpus_to_avoid(state, first.pod)
    count = min(count, len(state.pools.shared - state.cpus_set_aside()) - 1)
    if count <= 0:
        return CpuSet()
    whole = node.options.full_pcpus_only or required_binding(node, first.pod) is BindPolicy.FULL_PCPUS
    if whole:
        free = _in_whole_cores(state, free)
    homes = node.machine.nodes_of(own) or _homes(node, first.placement.mems, free, count)
    near = free & node.machine.cpus_of(homes)
    crosses = not node.policy.is_strict
    if whole:
        return _whole_cores(state, near, free - near if crosses else CpuSet(), count)
    chosen = take(node.topology, node.options, near, min(count, len(near)))
    if crosses:
        far = free - near
        chosen |= take(node.topology, node.options, far, min(count - len(chosen), len(far)))
    return chosen


def required_binding(node: Node, pod: Pod) -> BindPolicy:
    """Return which CPUs an owner requires: whole cores, one CPU of each core, or ``NONE`` for any CPUs."""
    if pod.bind_required in (BindPolicy.FULL_PCPUS, BindPolicy.SPREAD_BY_PCPUS):
        return pod.bind_required
    if node.bind is NodeBindPolicy.SPREAD_BY_PCPUS:
        return BindPolicy.SPREAD_BY_PCPUS
    full = node.bind is NodeBindPolicy.FULL_PCPUS_ONLY or node.options.full_pcpus_only
    return BindPolicy.FULL_PCPUS if full else BindPolicy.NONE


def cpus_are_named(state: NodeState, container: Container) -> bool:
    """Return whether a scheduler, or kubelet's CPU manager, has named a container's CPUs."""
    pod, own = container.pod, str(container.placement.exclusive)
    if not pod.cpuset_chosen_locally and assigned_cpus(state.node, pod):
        return True
    if container.name in state.kubelet_cpus.get(pod.uid, ()):
        return True
    return not state.node.static and not pod.cpuset_chosen_locally and container.request.cpuset_cpus == own


def _homes(node: Node, nodes: Mask, free: CpuSet, count: int) -> Mask:
    """Return the NUMA nodes for an owner without online CPUs, among those where its memory is.

    The nodes of its offline CPUs are unknown, because the kernel does not report them. So under a strict
    policy the result is the fewest nodes that have enough free CPUs, and only one node under
    ``single-numa-node``.
    """
    if not node.policy.is_strict:
        return nodes
    sizes = {each: len(free & node.machine.cpus_of(Mask([each]))) for each in nodes}
    homes: list[int] = []
    for each in sorted(sizes, key=lambda at: (-sizes[at], at)):
        homes.append(each)
        count -= sizes[each]
        if count <= 0 or node.policy is TopologyPolicy.SINGLE_NUMA_NODE:
            break
    return Mask(homes)


def _in_whole_cores(state: NodeState, cpus: CpuSet) -> CpuSet:
    """Return the CPUs of those cores that lie completely within a set of CPUs."""
    return CpuSet.from_bits(
        union(bits for bits in state.node.topology.cores.values() if not bits & ~cpus.bits)
    )


def _whole_cores(state: NodeState, near: CpuSet, far: CpuSet, count: int) -> CpuSet:
    """Choose whole cores, near ones first, without exceeding the number of CPUs that are wanted."""
    chosen = 0
    for place in (near, far):
        for bits in state.node.topology.cores.values():
            if not bits & ~place.bits and (chosen | bits).bit_count() <= count:
                chosen |= bits
    return CpuSet.from_bits(chosen)
