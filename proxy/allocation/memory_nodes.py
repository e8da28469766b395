"""Memory nodes of a container that owns CPUs: those of its CPUs, and as many more as its memory needs.

A container that is bound to a node cannot use more memory than the node has, and when the node is full, the
kernel kills processes there, of any container. So the nodes of the CPUs are only enough if they can hold the
container's limit in addition to what other owners were promised there; else the next nearest nodes are added.
What kubelet's memory manager named is kept, because kubelet counts on it.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine


def memory_for(
    machine: Machine, cpus: CpuSet, need: int = 0, promised: Iterable[tuple[Mask, int]] = ()
) -> Mask:
    """Return the memory nodes for CPUs.

    Args:
        machine: The machine.
        cpus: The CPUs.
        need: Bytes that the container may use; 0 for no limit, then the CPUs' nodes are taken as they are.
        promised: What other owners may use: nodes and bytes.

    Returns:
        Nodes with memory, nearest first added; all of them where even that is not enough.
    """
    order = _by_distance(machine, cpus)
    near = machine.nodes_of(cpus) & machine.memory_nodes
    if not near:
        near = Mask(node for d, node in order if d == order[0][0])
    free = _free(machine, promised)
    chosen = set(near)
    for _, node in order:
        if sum(free[i] for i in chosen) >= need:
            break
        chosen.add(node)
    return Mask(chosen)


def _by_distance(machine: Machine, cpus: CpuSet) -> list[tuple[int, int]]:
    """Return (distance, node) of all memory nodes, nearest first; equal distances where none are known."""
    ids = [node.id for node in machine.nodes]
    homes = [n for n in machine.nodes if not n.cpus.isdisjoint(cpus)]
    known_rows = [dict(zip(ids, n.distance, strict=True)) for n in homes if len(n.distance) == len(ids)]
    far = [(min((row[i] for row in known_rows), default=0), i) for i in ids if i in machine.memory_nodes]
    return sorted(far)


def _free(machine: Machine, promised: Iterable[tuple[Mask, int]]) -> dict[int, float]:
    """Return the free bytes of each node; a promise over several nodes counts evenly."""
    free = {n.id: float("inf") if n.mem_bytes is None else float(n.mem_bytes) for n in machine.nodes}
    for nodes, amount in promised:
        here = [i for i in nodes if i in free]
        for i in here:
            free[i] = max(0.0, free[i] - amount / len(here))
    return free
