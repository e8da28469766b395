"""Computes the zones of a node's topology object: what each NUMA node has.

See Koordinator v1.8.0 pkg/koordlet/statesinformer/impl/states_noderesourcetopology.go, calTopologyZoneList.

Theory. A zone is a NUMA node, called by its kernel id: ids may have gaps, and a node may have no CPU or no
memory. What is allocatable is all of it, unless the node is labelled for NUMA reservation: then kubelet's
reserve (capacity - allocatable of the node) is spread evenly over the nodes that have the resource, rounded
up, so that together the zones never promise what kubelet keeps back.

All amounts are in thousandths: milli-CPUs, and thousandths of a byte, for shares are exact in Koordinator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from proxy.model.machine import Machine, NumaNode
from proxy.model.quantity import show_quantity
from proxy.pools.cpu_location import CpuLocation

CPU, MEMORY, HUGE_PAGES = "cpu", "memory", "hugepages-"
_ALWAYS_KB = (2048, 1_048_576)
"""Sizes of huge pages that every zone has."""

Amounts = Mapping[str, int]


class Zone(Struct, frozen=True):
    """One NUMA node."""

    node: int
    capacity: Amounts
    allocatable: Amounts

    def data(self) -> dict[str, object]:
        """Return it as the object has it."""
        return {
            "name": f"node-{self.node}",
            "type": "Node",
            "resources": [
                {"name": name, "capacity": _shown(name, self.capacity[name])}
                | dict.fromkeys(("allocatable", "available"), _shown(name, self.allocatable[name]))
                for name in sorted(self.capacity)
            ],
        }


def _shown(name: str, milli: int) -> str:
    # Bytes are whole: what a share leaves of one is lost.
    return show_quantity(milli, milli=True) if name == CPU else show_quantity(milli // 1000)


def zones_of(machine: Machine, locations: Iterable[CpuLocation]) -> tuple[Zone, ...]:
    """Return the zones of a machine, ascending by id, with nothing kept back."""
    cpus: dict[int, int] = {}
    for location in locations:
        cpus[location.node] = cpus.get(location.node, 0) + 1
    found = []
    for node in machine.nodes:
        capacity = {CPU: 1000 * cpus.get(node.id, 0), **_memory(node)}
        found.append(Zone(node.id, capacity, capacity))
    return tuple(found)


def _memory(node: NumaNode) -> dict[str, int]:
    """Return the memory of a node; huge pages are not memory."""
    pages = {size: pages.nr * size << 10 for size, pages in (node.hugepages or {}).items()}
    known = {size: pages.get(size, 0) for size in {*_ALWAYS_KB, *(size for size in pages if pages[size])}}
    huge = {f"{HUGE_PAGES}{show_quantity(size << 10)}": 1000 * known[size] for size in known}
    return {MEMORY: 1000 * max(0, (node.mem_bytes or 0) - sum(pages.values())), **huge}


def kubelet_reserve(capacity: Amounts, allocatable: Amounts) -> dict[str, int]:
    """Return what kubelet keeps back of CPU and memory, in the unit given; what it does not is left out."""
    kept = {
        name: capacity[name] - allocatable[name]
        for name in (CPU, MEMORY)
        if name in capacity and name in allocatable
    }
    return {name: amount for name, amount in kept.items() if amount > 0}


def divide(milli: int, count: int) -> int:
    """Return one of equal shares, rounded up to a thousandth; nothing where no zone shares."""
    return -(-milli // count) if count > 0 else 0


def less(zones: Iterable[Zone], share: Amounts) -> tuple[Zone, ...]:
    """Take a share out of what is allocatable in each zone, down to nothing."""
    return tuple(
        replace(
            zone,
            allocatable={
                name: max(0, amount - share[name]) if share.get(name, 0) > 0 else amount
                for name, amount in zone.allocatable.items()
            },
        )
        for zone in zones
    )


def with_reserve(zones: Iterable[Zone], reserve: Amounts) -> tuple[Zone, ...]:
    """Spread kubelet's reserve over the zones that have the resource.

    Args:
        zones: All of them.
        reserve: In thousandths.
    """
    existing = tuple(zones)
    for name, milli in reserve.items():
        having = sum(1 for zone in existing if zone.capacity.get(name, 0) > 0)
        existing = tuple(
            less((zone,), {name: divide(milli, having)})[0] if zone.capacity.get(name, 0) > 0 else zone
            for zone in existing
        )
    return existing
