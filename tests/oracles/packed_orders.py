"""The orders in which the packed allocator takes what is wholly available."""

from __future__ import annotations

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.packed import _start
from proxy.model.idset import CpuSet


def free_sockets(topo: CpuTopology, available: CpuSet) -> list[int]:
    """List the wholly available sockets in allocation order."""
    return list(_start(topo, available).whole_sockets())


def free_nodes(topo: CpuTopology, available: CpuSet) -> list[int]:
    """List the wholly available NUMA nodes in allocation order."""
    return list(_start(topo, available).whole_nodes())


def free_cores(topo: CpuTopology, available: CpuSet) -> list[int]:
    """List the wholly available cores in allocation order."""
    return list(_start(topo, available).whole_cores())


def free_cpus(topo: CpuTopology, available: CpuSet, *, spread: bool = False) -> list[int]:
    """List the available CPUs in the order in which single CPUs are taken."""
    work = _start(topo, available)
    return list(work.cpus_by_socket() if spread else work.cpus_by_core())
