"""Choosing CPUs where no topology policy names NUMA nodes: on one NUMA node, whole cores first.

The packed allocator (``proxy.allocation.packed``) keeps sockets, nodes and cores whole, but on its own it may
split a request over two nodes although one of them could hold it, because it fills the fullest core first. So
it is called node by node. Of the nodes that can hold the request alone, those come first that have enough
wholly free cores for it (a thread that shares a core with another container's is not worth much to a
container that wants exclusive CPUs), then those that its devices are near to, then those that have memory,
then the one with the fewest free CPUs (best fit), then the lowest id. Only when no node can hold it, all free
CPUs are offered at once. Inside a node the CPU manager's options decide.
"""

from __future__ import annotations

from proxy.allocation.cpu_policy import take
from proxy.allocation.cpu_topology import CpuTopology
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.options import CpuOptions


def pick_unpoliced(
    machine: Machine,
    topology: CpuTopology,
    available: CpuSet,
    count: int,
    options: CpuOptions | None = None,
    near: Mask | None = None,
    steps: list[str] | None = None,
) -> CpuSet:
    """Choose CPUs.

    Args:
        machine: The machine.
        topology: The same machine as the allocator reads it.
        available: CPUs to choose from.
        count: How many are wanted, at least 1.
        options: How CPUs are chosen inside a node.
        near: NUMA nodes to prefer; None for no preference.
        steps: Sentences about what was done are added here; None for no record.

    Raises:
        NotEnoughCpus: ``available`` holds fewer.
    """
    threads = max(len(core) for core in machine.cores.values())
    fitting: list[tuple[int, bool, bool, int, int, CpuSet]] = []
    for node in machine.nodes:
        free = node.cpus & available
        if len(free) >= count:
            whole = sum(len(core) for core in machine.cores.values() if core <= free)
            short = max(0, count - count % threads - whole)
            far = near is not None and node.id not in near
            fitting.append((short, far, node.mem_bytes == 0, len(free), node.id, free))
    best = min(fitting)[-1] if fitting else available
    return take(topology, options or CpuOptions(), best, count, steps)
