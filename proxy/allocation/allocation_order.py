"""The order in which an allocator visits sockets, NUMA nodes, caches, cores and CPUs.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/cpu_assignment.go ``cpuAccumulator``. Units with the
fewest free CPUs come first, ties by id; units without a free CPU are left out. Inner units are listed per
outer unit, in the order of the outer units. If there are at least as many sockets as NUMA nodes, nodes are
above sockets; otherwise sockets are above nodes. Cores are inside the second level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from proxy.allocation.cpu_topology import CpuTopology, Inner, Units
from proxy.model.idset import CpuSet


class Orders:
    """The orders of a machine's units for a set of free CPUs.

    Attributes:
        topo: The machine.
        free: Bits of the CPUs that are free.
    """

    def __init__(self, topo: CpuTopology, free: int) -> None:
        self.topo = topo
        self.free = free

    # Each order yields the ids of units with free CPUs, fewest free CPUs first, every unit once. Orders are
    # computed lazily, always against the mask ``free`` at the time when the step started.

    def sort(self, units: Iterable[tuple[int, int]], within: int, free: int) -> list[int]:
        """Order the units that have free CPUs inside the mask ``within``."""
        inside = within & free
        counted = [((bits & free).bit_count(), unit) for unit, bits in units if bits & inside]
        counted.sort()
        return [unit for _, unit in counted]

    def nested(self, inner: Inner, outer: Units, order: Iterable[int], free: int) -> Iterator[int]:
        """Order the units by the outer units that they are in, and inside each as ``sort`` does."""
        # A unit that straddles two outer ones belongs to the first. If it were listed twice, it would be
        # counted twice.
        listed: set[int] = set()
        for o in order:
            for unit in self.sort(inner[o], outer[o], free):
                if unit not in listed:
                    listed.add(unit)
                    yield unit

    def node_order(self, free: int) -> Iterable[int]:
        """Order the NUMA nodes that have any of the CPUs in ``free``."""
        topo = self.topo
        if topo.nodes_first:
            return self.sort(topo.nodes.items(), free, free)
        return self.nested(topo.socket_nodes, topo.sockets, self.socket_order(free), free)

    def socket_order(self, free: int) -> Iterable[int]:
        """Order the sockets that have any of the CPUs in ``free``."""
        topo = self.topo
        if topo.nodes_first:
            return self.nested(topo.node_sockets, topo.nodes, self.node_order(free), free)
        return self.sort(topo.sockets.items(), free, free)

    def core_order(self, free: int) -> Iterable[int]:
        """Order the cores that have any of the CPUs in ``free``."""
        topo = self.topo
        if topo.nodes_first:
            return self.nested(topo.socket_cores, topo.sockets, self.socket_order(free), free)
        return self.nested(topo.node_cores, topo.nodes, self.node_order(free), free)

    def uncore_order(self, free: int) -> Iterable[int]:
        """Order the uncore caches that have any of the CPUs in ``free``, node by node."""
        return self.nested(self.topo.node_uncores, self.topo.nodes, self.node_order(free), free)

    def cpus_by_core(self) -> Iterator[int]:
        """Order the free CPUs core by core."""
        free = self.free
        for core in self.core_order(free):
            yield from CpuSet.from_bits(self.topo.cores[core] & free)

    def cpus_by_socket(self) -> Iterator[int]:
        """Order the free CPUs by id within each socket."""
        free = self.free
        for socket in self.socket_order(free):
            yield from CpuSet.from_bits(self.topo.sockets[socket] & free)

    # Whole units, in their orders.

    def whole_nodes(self) -> Iterator[int]:
        """Order the nodes that are free as a whole."""
        nodes, free = self.topo.nodes, self.free
        return (n for n in self.node_order(free) if not nodes[n] & ~free)

    def whole_sockets(self) -> Iterator[int]:
        """Order the sockets that are free as a whole."""
        topo, free = self.topo, self.free
        order = self.socket_order(free)
        return (s for s in order if (topo.sockets[s] & free).bit_count() == topo.socket_size(s))

    def whole_cores(self) -> Iterator[int]:
        """Order the cores that are free as a whole."""
        topo, free = self.topo, self.free
        order = self.core_order(free)
        return (c for c in order if (topo.cores[c] & free).bit_count() == topo.core_size(c))
