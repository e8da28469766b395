"""The quality of a simulation's result: how many containers are aligned, and how fragmented free CPUs are.

Theory. A container that was given CPUs of its own, memory of NUMA nodes, or devices, is placed *together*
when it touches no more NUMA nodes than any placement of it must touch on the empty machine; otherwise it is
*spread*. The least number is exact (``allocation.demand``): CPUs, memory and devices must be available on the
same nodes. Devices that are near to no node count nowhere.

Free CPUs are measured in two units, as in the allocators: CPUs (threads), and cores that are free as a whole.
A request fits on one NUMA node if one node has that many; so the most that one node has, in addition to the
sum over all nodes, shows how fragmented a machine is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.allocation.demand import Demand, best_mask, least_node_count
from proxy.engine.node import Node
from proxy.model.idset import CpuSet, Mask, union
from proxy.model.requests import in_bytes
from proxy.model.workload import Container, Phase, Pool


@dataclass(frozen=True, slots=True)
class Alignment:
    """The NUMA nodes of a container's CPUs, memory and devices.

    Attributes:
        nodes: The NUMA nodes.
        least: The least number of nodes that could hold it on the empty machine.
    """

    nodes: Mask
    least: int

    @property
    def together(self) -> bool:
        """Whether no placement touches fewer nodes."""
        return len(self.nodes) <= self.least


@dataclass(frozen=True, slots=True)
class RemainingCpus:
    """The free CPUs of a machine that can still be owned.

    Attributes:
        cpus: All CPUs that can still become exclusive.
        whole: The part of them in cores that are free as a whole.
        largest: The most CPUs that one NUMA node has left.
        largest_whole: The same, counting whole cores only.
        largest_when_empty: The most CPUs that one NUMA node had when the machine was empty.
    """

    cpus: int
    whole: int
    largest: int
    largest_whole: int
    largest_when_empty: int


def remaining_cpus_of(node: Node, ownable: CpuSet) -> RemainingCpus:
    """Measure the free CPUs of a machine.

    Args:
        node: The machine.
        ownable: CPUs that can still become exclusive.
    """
    whole = whole_cores(node, ownable)
    free = [numa.cpus & ownable for numa in node.machine.nodes]
    empty = [numa.cpus - node.reserved for numa in node.machine.nodes]
    return RemainingCpus(
        len(ownable),
        len(whole),
        max(map(len, free), default=0),
        max((len(cpus & whole) for cpus in free), default=0),
        max(map(len, empty), default=0),
    )


def whole_cores(node: Node, cpus: CpuSet) -> CpuSet:
    """Return the CPUs whose cores are in the set as a whole."""
    bits = 0
    for core in node.machine.cores.values():
        if core <= cpus:
            bits |= core.bits
    return CpuSet.from_bits(bits)


class AlignmentMeter:
    """Measures the alignment of containers; caches results for equal requests."""

    def __init__(self) -> None:
        self._least: dict[object, int] = {}

    def alignment(self, node: Node, container: Container) -> Alignment | None:
        """Return the alignment of a container; None if none of its resources is on a NUMA node."""
        placement = container.placement
        bits = 0
        wants: list[tuple[str, int]] = []
        if placement.pool is Pool.OWN:
            bits |= node.machine.nodes_of(placement.exclusive).bits
            wants.append(("cpu", len(placement.exclusive)))
        for block in placement.blocks:
            bits |= block.affinity.bits
            wants.append((block.resource, block.size))
        for resource, ids in placement.devices:
            near = [nodes for name in ids if (nodes := node.devices[resource][name].nodes)]
            if near:
                bits |= _nodes_of_devices(bits, near)
                wants.append((resource, len(near)))
        if not bits:
            return None
        return Alignment(Mask.from_bits(bits), self._fewest(node, tuple(wants)))

    def _fewest(self, node: Node, wants: tuple[tuple[str, int], ...]) -> int:
        key = id(node), wants
        cached = self._least.get(key)
        if cached is None:
            demands = [Demand(amount, _amounts_by_node(node, resource)) for resource, amount in wants]
            least = least_node_count([numa.id for numa in node.machine.nodes], demands)
            cached = self._least[key] = len(node.machine.nodes) if least is None else least
        return cached


def alignments_of(meter: AlignmentMeter, node: Node, containers: Iterable[Container]) -> list[Alignment]:
    """Return the alignments of those containers that keep running and have one."""
    alignments = (meter.alignment(node, c) for c in containers if c.phase is not Phase.EXITED)
    return [alignment for alignment in alignments if alignment is not None]


def _nodes_of_devices(bits: int, near: Iterable[Mask]) -> int:
    """Return the fewest nodes that have one of each device; those of ``bits`` are touched in any case."""
    for group in _apart([nodes.bits for nodes in near if not nodes.bits & bits]):
        demands = [Demand(1, ((nodes, 1),)) for nodes in group]
        chosen = best_mask(list(Mask.from_bits(union(group))), demands)
        assert chosen is not None, "all nodes together have one of each device"
        bits |= chosen
    return bits


def _apart(devices: Iterable[int]) -> list[set[int]]:
    """Return the bits of devices in groups that have no node in common."""
    groups: list[set[int]] = []
    for nodes in devices:
        near = [group for group in groups if union(group) & nodes]
        groups = [group for group in groups if group not in near]
        groups.append({nodes}.union(*near))
    return groups


def _amounts_by_node(node: Node, resource: str) -> tuple[tuple[int, int], ...]:
    """Return the amounts of a resource by NUMA node on the empty machine."""
    machine = node.machine
    if resource == "cpu":
        return tuple((1 << n.id, len(n.cpus - node.reserved)) for n in machine.nodes)
    if in_bytes(resource):
        tables: Mapping[int, int] = (
            {n: existing.table(resource).allocatable for n, existing in node.memory.nodes.items()}
            if node.memory is not None
            else {n.id: n.mem_bytes or 0 for n in machine.nodes}
        )
        return tuple((1 << n, size) for n, size in tables.items())
    return tuple((d.nodes.bits, 1) for d in node.devices.get(resource, {}).values() if d.nodes and d.healthy)
