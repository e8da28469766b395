"""The order in which CPUs are bound one by one."""

from __future__ import annotations

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.koordinator.groups import Groups
from proxy.model.idset import CpuSet
from proxy.model.koordinator import NumaStrategy


def spread_order(topo: CpuTopology, free: CpuSet, strategy: NumaStrategy) -> list[int]:
    """Give the free CPUs in the order of step 3 with nothing taken yet."""
    groups = Groups(topo, strategy)
    return groups.spread(groups.by_core(free.bits & topo.cpus.bits, 0))
