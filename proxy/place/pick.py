"""Picking CPUs for a container that owns some: packed on NUMA nodes, whole cores first.

The packed allocator (kubelet 1.36, reference C.4) keeps sockets, nodes and cores whole, but on its own it may
split a request over two nodes although one of them could hold it, because it fills the fullest core first.
So it is asked node by node. Of the nodes that can hold the request alone, those come first that have enough
wholly free cores for it (a thread beside somebody else's on one core is not worth much to a container that
wants CPUs of its own), then the one with the fewest free CPUs (best fit), then the lowest id. Only when no
node can hold it, all free CPUs are offered at once.
"""

from __future__ import annotations

from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.place.cputopo import CpuTopology
from proxy.place.packed import take_packed


def pick(machine: Machine, topology: CpuTopology, available: CpuSet, count: int) -> CpuSet:
    """Pick CPUs.

    Args:
        machine: The machine.
        topology: The same machine as the allocator reads it.
        available: CPUs that may be given.
        count: How many are wanted, at least 1.

    Raises:
        NotEnoughCpus: ``available`` holds fewer.
    """
    fitting = [free for node in machine.nodes if len(free := node.cpus & available) >= count]

    def cost(free: CpuSet) -> tuple[int, int]:
        whole = sum(len(core) for core in machine.cores.values() if core <= free)
        threads = max(len(core) for core in machine.cores.values())
        return max(0, count - count % threads - whole), len(free)

    return take_packed(topology, min(fitting, key=cost, default=available), count)


def memory_for(machine: Machine, cpus: CpuSet) -> Mask:
    """Give the memory nodes nearest to CPUs: their own nodes, or where one has no memory the next.

    Returns:
        Their mask; all memory nodes where the machine does not tell distances and no own node has memory.
    """
    found: set[int] = set()
    ids = [node.id for node in machine.nodes]
    for node in machine.nodes:
        if node.cpus.isdisjoint(cpus):
            continue
        if node.id in machine.memory_nodes:
            found.add(node.id)
        elif len(node.distance) == len(ids):
            near = [(d, i) for d, i in zip(node.distance, ids, strict=True) if i in machine.memory_nodes]
            best = min((d for d, _ in near), default=0)
            found.update(i for d, i in near if d == best)
    return Mask(found) if found else machine.memory_nodes
