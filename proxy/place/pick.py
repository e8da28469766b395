"""Picking CPUs for a container that owns some: packed on NUMA nodes, whole cores first.

The packed allocator (kubelet 1.36, reference C.4) keeps sockets, nodes and cores whole, but on its own it may
split a request over two nodes although one of them could hold it, because it fills the fullest core first.
So it is asked node by node. Of the nodes that can hold the request alone, those come first that have enough
wholly free cores for it (a thread beside somebody else's on one core is not worth much to a container that
wants CPUs of its own), then those that have memory, then the one with the fewest free CPUs (best fit), then
the lowest id. Only when no node can hold it, all free CPUs are offered at once.
"""

from __future__ import annotations

from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.place.cputopo import CpuTopology
from proxy.place.packed import take_packed


def pick(
    machine: Machine,
    topology: CpuTopology,
    available: CpuSet,
    count: int,
    steps: list[str] | None = None,
) -> CpuSet:
    """Pick CPUs.

    Args:
        machine: The machine.
        topology: The same machine as the allocator reads it.
        available: CPUs that may be given.
        count: How many are wanted, at least 1.
        steps: What was done is added here in words; None where nobody wants to know.

    Raises:
        NotEnoughCpus: ``available`` holds fewer.
    """
    threads = max(len(core) for core in machine.cores.values())
    fitting: list[tuple[int, bool, int, int, CpuSet]] = []
    for node in machine.nodes:
        free = node.cpus & available
        if len(free) >= count:
            whole = sum(len(core) for core in machine.cores.values() if core <= free)
            short = max(0, count - count % threads - whole)
            fitting.append((short, node.mem_bytes == 0, len(free), node.id, free))
    best = min(fitting)[-1] if fitting else available
    return take_packed(topology, best, count, steps=steps)
