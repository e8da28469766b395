"""Choose the memory nodes of a container: named by its request, counted, those of its CPUs, or all."""

from __future__ import annotations

from proxy.allocation.memory_nodes import memory_for
from proxy.engine.state import NodeState
from proxy.model.grants import Blocks
from proxy.model.idset import CpuSet, Mask, union
from proxy.model.machine import Machine
from proxy.model.phrases import nodes as words
from proxy.model.workload import Pod, Request


def counted_nodes(pod: Pod, blocks: Blocks) -> Mask | None:
    """Return the nodes of counted memory: the container's own, or the pod's; None where there is none."""
    bits = union(
        block.affinity.bits
        for block in blocks or (pod.reserved_for_pod.blocks if pod.reserved_for_pod else ())
    )
    return Mask.from_bits(bits) if bits else None


def owner_memory_nodes(
    state: NodeState, request: Request, cpus: CpuSet, me: str, bound: Mask | None = None
) -> tuple[Mask, tuple[str, ...]]:
    """Return the memory nodes of an owner, and sentences that explain them."""
    machine = state.node.machine
    named = _named(machine, request)
    if named is not None:
        return named, (f"memory of {words(named)}, which the request names",)
    if bound is not None:
        return bound, (counted_memory_reason(bound),)
    if not state.node.follow_mems:
        return machine.memory_nodes, ()
    promised = [
        (c.placement.mems, c.request.memory_limit)
        for c in state.containers.values()
        if c.owns_cpus and f"{c.owner} {c.name}" != me
    ]
    near = memory_for(machine, cpus)
    mems = memory_for(machine, cpus, request.memory_limit, promised)
    if mems == near:
        return mems, ()
    return mems, (
        f"memory of {words(mems)}: {words(near)} cannot hold its limit in addition to what is promised there",
    )


def named_memory_nodes(state: NodeState, request: Request) -> Mask:
    """Return the memory nodes that a request names (kubelet's memory manager does), else all with memory."""
    named = _named(state.node.machine, request)
    return state.node.machine.memory_nodes if named is None else named


def _named(machine: Machine, request: Request) -> Mask | None:
    if not request.cpuset_mems:
        return None
    try:
        named = Mask.parse(request.cpuset_mems)
    except ValueError:
        return None
    return named if named and named <= Mask(machine.node_by_id) else None


def pool_memory_nodes(state: NodeState, request: Request, nodes: Mask | None) -> Mask:
    """Return the memory nodes of a container on a pool: named by the request, of its NUMA nodes, or all."""
    machine = state.node.machine
    if nodes is None or not state.node.follow_mems or request.cpuset_mems:
        return named_memory_nodes(state, request)
    return nodes & machine.memory_nodes or machine.memory_nodes


def counted_memory_reason(nodes: Mask) -> str:
    """Return the sentence for memory that is counted by NUMA node."""
    return f"memory of {words(nodes)}, where its limit is counted"
