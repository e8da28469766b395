"""The CPUs of containers that own none, the memory nodes of all containers, and which containers must move.

A container that owns no CPUs has those of its pool, or the part of them to which it is limited. A pod may be
limited to certain CPUs or NUMA nodes of its pool: because a scheduler has bound the pod to NUMA nodes, or
because the pod wants ``ConstrainedBurst``, so that its threads stay on as few NUMA nodes as have shared CPUs
for its limit (see ``proxy.allocation.koordinator.burst``). All containers of a pod are limited alike: by the
limits that kubelet reported for the pod, or else by the limit of the container that was created first. Hooks
may limit the remaining CPUs further.

As the pool shrinks and grows, the container follows within its limit. If no CPU of the pool is left within
the limit, the limit is ignored (that of hooks first), because a container must never be without CPUs.

The memory nodes of a container are one of these: the nodes that its request names; the nodes on which its
memory is counted; the nodes of its CPUs, and as many more as its memory needs; or all nodes. A container that
is bound to a node cannot use more memory than the node has, and when the node is full, the kernel kills
processes of any container there. So the nodes of the CPUs are only enough if they can hold the container's
limit in addition to what other owners were promised there; otherwise the next nearest nodes are added. Nodes
that kubelet's memory manager named are kept, because kubelet relies on them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import structs

from proxy.allocation.cpu_request import CPU
from proxy.allocation.koordinator.burst import burst_nodes
from proxy.model.grants import Blocks
from proxy.model.idset import CpuSet, Mask, union
from proxy.model.koordinator import BindPolicy, NumaStrategy
from proxy.model.machine import Machine
from proxy.model.phrases import listed, numa_nodes_text
from proxy.model.requests import ContainerKind, peak_request
from proxy.model.workload import Phase, Placement, Pod, Pool, Request
from proxy.pools.claims import Claim
from proxy.pools.pools import pool_limit

if TYPE_CHECKING:
    from proxy.engine.state import NodeState


@functools.lru_cache(maxsize=64)
def pool_placement(
    pool: Pool, mems: Mask, reason: str, within: CpuSet | None = None, nodes: Mask | None = None
) -> Placement:
    """Return the placement of a container that owns no CPUs; cached, because many are alike."""
    return Placement(pool, CpuSet(), mems, (reason,), pool_cpus_limit=within, pool_numa_limit=nodes)


def unmet_limit(state: NodeState, claimed: Claim) -> str:
    """Return the message that a pool has no CPU within the limit of a claim; empty if it has one."""
    if claimed.pool is Pool.OWN:
        return ""
    limit = pool_limit(state.node.machine, claimed.within, claimed.nodes)
    if limit is None or not state.pools.cpus_of(claimed.pool).isdisjoint(limit):
        return ""
    where = (
        numa_nodes_text(claimed.nodes)
        if claimed.nodes is not None
        else f"CPUs {listed(claimed.within or CpuSet())}"
    )
    pool = claimed.pool if claimed.pool is Pool.SHARED else claimed.pool.upper()
    return f"nothing is left of the {pool} pool on {where}: it runs on the whole pool"


def with_burst_limit(state: NodeState, pod: Pod, request: Request, claimed: Claim) -> Claim:
    """Return the claim of a pod that wants ``ConstrainedBurst`` with its limit; other claims unchanged."""
    wants = BindPolicy.CONSTRAINED_BURST in (pod.bind_required, pod.bind_preferred)
    if not wants or claimed.pool is not Pool.SHARED or claimed.nodes is not None:
        return claimed
    for sibling in state.in_sandbox(pod.sandbox_id):
        if sibling.placement.pool_numa_limit is not None and sibling.phase is not Phase.EXITED:
            return structs.replace(
                claimed,
                nodes=sibling.placement.pool_numa_limit,
                reason=f"{claimed.reason}, as its pod is bound",
            )
    machine = state.node.machine
    pools = {node: part.shared for node, part in state.pools.per_node(machine).items()}
    nodes = burst_nodes(pools, _limit(pod, request), state.node.strategy or NumaStrategy.MOST_ALLOCATED)
    if not nodes or nodes == Mask(node for node, cpus in pools.items() if cpus):
        return claimed
    return structs.replace(
        claimed, nodes=nodes, reason=f"{claimed.reason}, of {numa_nodes_text(nodes)} (ConstrainedBurst)"
    )


def _limit(pod: Pod, request: Request) -> int | None:
    """Return the CPU limit of the pod or container in thousandths of a CPU; None if there is none.

    The limit of a pod is the most that its containers may use at the same time: init containers end before
    the others start. An init container without a limit does not remove the limit of the pod.
    """
    if pod.requests is None:
        return request.limit_milli if request.cpu_quota > 0 else None
    staying = pod.requests.of_kinds(ContainerKind.APP, ContainerKind.SIDECAR)
    if not staying or not all(container.limits.get(CPU) for container in staying):
        return None
    return peak_request(pod.requests.containers, lambda container: container.limits)[CPU]


def moves(before: NodeState, after: NodeState) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the containers whose CPUs change from one state to the next because a pool changed.

    Returns:
        Ids of containers that lose CPUs (they must leave them before the owner starts), and ids of those that
        only gain some. Containers that have exited, or are not in both states, do not move.
    """
    same_node = before.node is after.node
    if same_node and before.pools == after.pools:
        return (), ()
    shrink: list[str] = []
    grow: list[str] = []
    online = after.node.machine.online
    # The CPUs of a container follow from its placement, and there are few different placements.
    unlimited = {id(pool): _direction(before.pools.cpus_of(pool), after.pools.cpus_of(pool)) for pool in Pool}
    directions: dict[tuple[Pool, CpuSet | None, Mask | None, CpuSet | None, CpuSet], int] = {}
    for key, container, old in after.containers.compared(before.containers):
        if old is None or container.phase is Phase.EXITED:
            continue
        placement = container.placement
        if not (old is container or old.placement == placement):
            direction = _direction(before.desired_cpus(old), after.desired_cpus(container))
        elif placement.pool is Pool.OWN:
            if same_node and not placement.exclusive.isdisjoint(online):
                continue
            direction = _direction(before.desired_cpus(old), after.desired_cpus(container))
        elif _is_unlimited(placement):
            direction = unlimited[id(placement.pool)]
        else:
            kind = (
                placement.pool,
                placement.pool_cpus_limit,
                placement.pool_numa_limit,
                placement.hook_cpus,
                placement.hook_extra_cpus,
            )
            if kind not in directions:
                directions[kind] = _direction(before.desired_cpus(old), after.desired_cpus(container))
            direction = directions[kind]
        if direction < 0:
            shrink.append(key)
        elif direction:
            grow.append(key)
    return tuple(sorted(shrink)), tuple(sorted(grow))


def _is_unlimited(placement: Placement) -> bool:
    """Return whether a placement in a shared pool follows the whole pool."""
    return (
        placement.hook_cpus is None
        and placement.pool_cpus_limit is None
        and placement.pool_numa_limit is None
    )


def _direction(before: CpuSet, after: CpuSet) -> int:
    """Return -1 if the container loses CPUs, 1 if it only gains some, 0 if nothing changes."""
    if before == after:
        return 0
    return 1 if before <= after else -1


def memory_nodes_for(
    machine: Machine, cpus: CpuSet, need: int = 0, promised: Iterable[tuple[Mask, int]] = ()
) -> Mask:
    """Choose the memory nodes for a set of CPUs.

    Args:
        machine: The machine.
        cpus: The CPUs.
        need: Bytes that the container may use; 0 for no limit, so that the nodes of the CPUs are enough.
        promised: The memory that other owners may use: nodes and bytes.

    Returns:
        The nodes of the CPUs that have memory, and the next nearest until the need is met; all nodes with
        memory if it cannot be met.
    """
    order = _by_distance(machine, cpus)
    own_nodes = machine.nodes_of(cpus) & machine.memory_nodes
    if not own_nodes:
        own_nodes = Mask(node for d, node in order if d == order[0][0])
    free = _free(machine, promised)
    chosen = set(own_nodes)
    for _, node in order:
        if sum(free[i] for i in chosen) >= need:
            break
        chosen.add(node)
    return Mask(chosen)


def _by_distance(machine: Machine, cpus: CpuSet) -> list[tuple[int, int]]:
    """Return (distance, node) of all memory nodes, nearest first; equal distances if none are known."""
    ids = [node.id for node in machine.nodes]
    homes = [n for n in machine.nodes if not n.cpus.isdisjoint(cpus)]
    known_rows = [dict(zip(ids, n.distance, strict=True)) for n in homes if len(n.distance) == len(ids)]
    far = [(min((row[i] for row in known_rows), default=0), i) for i in ids if i in machine.memory_nodes]
    return sorted(far)


def _free(machine: Machine, promised: Iterable[tuple[Mask, int]]) -> dict[int, float]:
    """Return the free bytes of each node; a promise over several nodes counts evenly."""
    free = {n.id: float("inf") if n.mem_bytes is None else float(n.mem_bytes) for n in machine.nodes}
    for nodes, amount in promised:
        known = [i for i in nodes if i in free]
        for i in known:
            free[i] = max(0.0, free[i] - amount / len(known))
    return free


def counted_nodes(pod: Pod, blocks: Blocks) -> Mask | None:
    """Return the nodes of counted memory: the container's own, or the pod's; None if there is none."""
    bits = union(
        block.affinity.bits
        for block in blocks or (pod.reserved_for_pod.blocks if pod.reserved_for_pod else ())
    )
    return Mask.from_bits(bits) if bits else None


def owner_memory_nodes(
    state: NodeState, request: Request, cpus: CpuSet, claimant: str, bound: Mask | None = None
) -> tuple[Mask, tuple[str, ...]]:
    """Return the memory nodes of an owner, and sentences that explain them."""
    machine = state.node.machine
    named = _named(machine, request)
    if named is not None:
        return named, (f"memory of {numa_nodes_text(named)}, which the request names",)
    if bound is not None:
        return bound, (counted_memory_reason(bound),)
    if not state.node.follow_mems:
        return machine.memory_nodes, ()
    promised = [
        (c.placement.mems, c.request.memory_limit)
        for c in state.containers.values()
        if c.owns_cpus and f"{c.owner} {c.name}" != claimant
    ]
    near = memory_nodes_for(machine, cpus)
    mems = memory_nodes_for(machine, cpus, request.memory_limit, promised)
    if mems == near:
        return mems, ()
    cause = f"{numa_nodes_text(near)} cannot hold its limit in addition to what is promised there"
    return mems, (f"memory of {numa_nodes_text(mems)}: {cause}",)


def named_memory_nodes(state: NodeState, request: Request) -> Mask:
    """Return the memory nodes that a request names (by kubelet's memory manager), or else all with memory."""
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
    """Return the memory nodes of a container on a pool: those of the request, of its NUMA nodes, or all."""
    machine = state.node.machine
    if nodes is None or not state.node.follow_mems or request.cpuset_mems:
        return named_memory_nodes(state, request)
    return nodes & machine.memory_nodes or machine.memory_nodes


def counted_memory_reason(nodes: Mask) -> str:
    """Return the sentence for memory that is counted by NUMA node."""
    return f"memory of {numa_nodes_text(nodes)}, where its limit is counted"
