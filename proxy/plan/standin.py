"""Owners of whose CPUs some are away, and which other CPUs can stand in for them meanwhile.

Theory. What an owner was given stays his: a CPU that went offline comes back, and is his then. Until then he
has what is left, and as many free CPUs as are missing, if there are any:

* Only CPUs that were our own choice have a substitute. Those that a scheduler or kubelet named are in their
  books too, and they would give ours to somebody else.
* They are chosen as for a new container, on the NUMA nodes where the others are; elsewhere only where the
  topology policy does not mind. Where whole cores are wanted, only whole cores stand in (with SMT switched
  off, a core is one CPU).
* They are never the last CPUs of the shared pool nor those of its floors, and never those on which somebody
  else counts.

They are part of the placement (``Placement.instead``), so a restart finds them again. ``NodeState.wanted``
uses as many of them as are missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.model.idset import CpuSet, union
from proxy.model.koordinator import BindPolicy
from proxy.model.workload import Container, Phase, Pool
from proxy.place.cpu_policy import take
from proxy.plan.admission import assigned_cpus
from proxy.plan.limits import floor_cpus
from proxy.plan.state import NodeState


@dataclass(frozen=True, slots=True)
class MissingCpus:
    """An owner of whose CPUs some are away, or who has others instead.

    Attributes:
        owner: Who, as ``Container.owner``.
        containers: Those that share the CPUs.
        own: What was promised.
        away: The part of it that is offline.
        instead: What stands in, as far as it is online.
    """

    owner: str
    containers: tuple[Container, ...]
    own: CpuSet
    away: CpuSet
    instead: CpuSet

    @property
    def missing(self) -> int:
        """How many CPUs it still lacks."""
        return max(len(self.away) - len(self.instead), 0)


def owners_missing_cpus(state: NodeState) -> list[MissingCpus]:
    """Give those who lack CPUs of their own, or have others instead; mostly nobody."""
    online = state.node.machine.online
    groups: dict[str, list[Container]] = {}
    for container in state.containers.values():
        placement = container.placement
        if placement.pool is not Pool.OWN or container.phase in (Phase.EXITED, Phase.CREATING):
            continue
        if placement.instead or not placement.own <= online:
            groups.setdefault(container.owner, []).append(container)
    found = []
    for owner, group in sorted(groups.items()):
        own = CpuSet.from_bits(union(c.placement.own.bits for c in group))
        instead = CpuSet.from_bits(union(c.placement.instead.bits for c in group)) & online
        found.append(MissingCpus(owner, tuple(group), own, own - online, instead))
    return found


def choose_replacements(state: NodeState, short: MissingCpus) -> CpuSet:
    """Choose CPUs that stand in for those that are missing; fewer, or none, where there are not enough."""
    node, wanted = state.node, short.missing
    first = short.containers[0]
    if not wanted or any(cpus_are_named(state, c) for c in short.containers):
        return CpuSet()
    mine = state.owners[short.owner].cpus if short.owner in state.owners else CpuSet()
    taken = union(owner.cpus.bits for owner in state.owners.values())
    kept = (node.cpu.reserved | node.withheld | state.aside(first.pod.key) | state.promised(short.owner)).bits
    free = CpuSet.from_bits(node.topology.cpus.bits & node.shareable.bits & ~(taken | kept))
    free -= floor_cpus(state, first.pod)
    wanted = min(wanted, len(state.pools.shared - state.aside()) - 1)
    if wanted <= 0:
        return CpuSet()
    homes = node.machine.nodes_of(mine) or first.placement.mems
    near = free & node.machine.cpus_of(homes)
    whole = node.options.full_pcpus_only or first.pod.bind_required is BindPolicy.FULL_PCPUS
    crosses = not node.policy.is_strict
    if whole:
        return _whole_cores(state, near, free - near if crosses else CpuSet(), wanted)
    found = take(node.topology, node.options, near, min(wanted, len(near)))
    if crosses and len(found) < wanted:
        far = free - near
        found |= take(node.topology, node.options, far, min(wanted - len(found), len(far)))
    return found


def cpus_are_named(state: NodeState, container: Container) -> bool:
    """Tell whether somebody else has named a container's CPUs: a scheduler, or kubelet's CPU manager."""
    pod, own = container.pod, str(container.placement.own)
    if not pod.chosen and assigned_cpus(state.node, pod):
        return True
    if container.name in state.kubelet.get(pod.uid, ()):
        return True
    return not state.node.static and not pod.chosen and container.request.cpuset_cpus == own


def _whole_cores(state: NodeState, near: CpuSet, far: CpuSet, wanted: int) -> CpuSet:
    """Choose whole cores, near ones first, as many as fit into what is wanted."""
    found = 0
    for place in (near, far):
        for bits in state.node.topology.cores.values():
            if not bits & ~place.bits and (found | bits).bit_count() <= wanted:
                found |= bits
    return CpuSet.from_bits(found)
