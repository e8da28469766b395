"""The distributing allocator: choose n CPUs so that several NUMA nodes give the same number.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/cpu_assignment.go ``takeByTopologyNUMADistributed``. A
workload whose threads move in step is as fast as its slowest part, so a request that needs two nodes is
better served with half from each than with all of one and a bit of the other. ``split`` decides which nodes
give how much; inside a node the packed allocator chooses. If no even split exists, or if the request is not a
whole number of groups, the packed allocator chooses among all nodes.

The search starts at the number of nodes that would suffice if all were empty, whatever is free now. Uncore
caches are ignored.
"""

from __future__ import annotations

from proxy.allocation.allocation_steps import nodes_of
from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.even_split import Split, split
from proxy.allocation.packed import open_nodes, take_packed
from proxy.model.idset import CpuSet, Mask
from proxy.model.phrases import counted, cpus, numa_nodes_text


def take_distributed(
    topo: CpuTopology, available: CpuSet, n: int, *, group: int = 1, steps: list[str] | None = None
) -> CpuSet:
    """Choose n of the available CPUs, evenly from as few NUMA nodes as can share them.

    Args:
        topo: The machine.
        available: CPUs to choose from; those that the machine does not have are ignored.
        n: How many.
        group: CPUs that are given together: the threads of a core with ``full-pcpus-only``, otherwise 1.
        steps: Sentences about what was done are added here; None for no record.

    Returns:
        Exactly n CPUs, a subset of ``available``; the same for the same arguments.

    Raises:
        NotEnoughCpus: Fewer than n are available.
        ValueError: n is negative or ``group`` is not positive.
    """
    if group < 1:
        raise ValueError(f"cannot take {n} CPUs in groups of {group}: a group has at least one")
    free = available & topo.cpus
    if n % group or not 0 < n <= len(free):
        return take_packed(topo, free, n, steps=steps)
    nodes = open_nodes(topo, free)
    parts = [CpuSet.from_bits(topo.nodes[node] & free.bits) for node in nodes]
    groups_per_node = _ceil(_ceil(len(topo.cpus), group), len(topo.nodes))
    chosen = split([len(part) for part in parts], n, group, _ceil(n // group, groups_per_node))
    if chosen is None:
        return take_packed(topo, free, n, steps=steps)
    even_cpus, extra_cpus = _gather(topo, parts, chosen, group)
    if steps is not None:
        many = "from each of " if len(chosen.members) > 1 else "of "
        members = numa_nodes_text(Mask(nodes[i] for i in chosen.members))
        steps.append(f"{counted(chosen.per_node, 'CPU')} {many}{members}: {cpus(even_cpus)}")
        if extra_cpus:
            steps.append(
                f"{len(extra_cpus)} more of {numa_nodes_text(nodes_of(topo, extra_cpus))}: {cpus(extra_cpus)}"
            )
    return even_cpus | extra_cpus


def _gather(topo: CpuTopology, parts: list[CpuSet], chosen: Split, group: int) -> tuple[CpuSet, CpuSet]:
    """Take the even part of every member node, then the extra groups."""
    even_cpus = CpuSet()
    for i in chosen.members:
        even_cpus |= take_packed(topo, parts[i], chosen.per_node)
    extra_cpus = CpuSet()
    for i in chosen.extra:
        extra_cpus |= take_packed(topo, parts[i] - even_cpus - extra_cpus, group)
    return even_cpus, extra_cpus


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
