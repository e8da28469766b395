"""The order in which CPUs are bound one by one, and which can still be bound."""

from __future__ import annotations

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.koordinator.bind_request import Allocated
from proxy.allocation.koordinator.groups import Groups
from proxy.model.idset import CpuSet
from proxy.model.koordinator import NumaStrategy


def spread_order(topo: CpuTopology, free: CpuSet, strategy: NumaStrategy) -> list[int]:
    """Return the free CPUs in the order of step 3 with nothing taken yet."""
    groups = Groups(topo, strategy)
    return groups.spread(groups.by_core(free.bits & topo.cpus.bits, 0))


def free_cpus(taken: Allocated, cpus: CpuSet, most: int = 1) -> CpuSet:
    """Return the CPUs that fewer than ``most`` pods have."""
    return CpuSet(cpu for cpu in cpus if taken.counts.get(cpu, 0) < most)
