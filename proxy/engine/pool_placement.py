"""Containers that own no CPUs: their pool, or the part of it to which they are limited.

A pool is limited for a pod by CPUs or by NUMA nodes: because a scheduler has bound it to NUMA nodes, or
because it wants ``ConstrainedBurst`` and its threads stay on as few NUMA nodes as have shared CPUs for its
limit (see ``proxy.allocation.koordinator.burst``). All containers of a pod are limited alike: by the limits
that kubelet reported for the pod, else by the limit of the first container that came. Hooks may limit what is
left further.

As the pool shrinks and grows the container follows, within its limit. Where nothing of the pool is left
within it, the limit is ignored, that of hooks first: a container is never without CPUs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from msgspec import structs

from proxy.allocation.cpu_request import CPU, MILLI
from proxy.allocation.koordinator.burst import burst_nodes
from proxy.engine.node import Node
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, NumaStrategy
from proxy.model.phrases import listed
from proxy.model.phrases import nodes as named
from proxy.model.workload import Phase, Placement, Pod, Pool, Request
from proxy.pools.claims import Claim
from proxy.pools.pools import CpuPools

if TYPE_CHECKING:
    from proxy.engine.state import NodeState


def pool_limit(node: Node, within: CpuSet | None, nodes: Mask | None) -> CpuSet | None:
    """Return the CPUs to which a pool is limited by CPUs or by NUMA nodes; None where it is not."""
    return within if nodes is None else node.machine.cpus_of(nodes)


def pool_cpus(node: Node, pools: CpuPools, placement: Placement) -> CpuSet:
    """Return the CPUs of a placement that owns none: its pool, limited as far as that leaves any.

    Suppression does not lead a container out of its limit: where the suppressed pool has nothing within the
    limit, the whole BE pool within it counts.
    """
    pool = pools.of(placement.pool)
    limit = pool_limit(node, placement.pool_cpus_limit, placement.pool_numa_limit)
    hooked = placement.hook_cpus
    if limit is None and hooked is None:
        return pool
    whole = pools.be if placement.pool is Pool.BE else pool
    if hooked is not None:
        both = hooked if limit is None else hooked & limit
        if found := (pool & both or whole & both) | placement.hook_extra_cpus & node.machine.online:
            return found
    return pool if limit is None else pool & limit or whole & limit or pool


def without_hook_limits(placement: Placement) -> Placement:
    """Return a placement without the limits of hooks."""
    if placement.hook_cpus is None:
        return placement
    return structs.replace(placement, hook_cpus=None, hook_extra_cpus=CpuSet())


@functools.lru_cache(maxsize=64)
def pool_placement(
    pool: Pool, mems: Mask, why: str, within: CpuSet | None = None, nodes: Mask | None = None
) -> Placement:
    """Return the placement of a container that owns no CPUs; the same value for the many that are alike."""
    return Placement(pool, CpuSet(), mems, (why,), pool_cpus_limit=within, pool_numa_limit=nodes)


def unmet_limit(state: NodeState, claimed: Claim) -> str:
    """Return a sentence if a pool has nothing left within its limit; else empty."""
    if claimed.pool is Pool.OWN:
        return ""
    limit = pool_limit(state.node, claimed.within, claimed.nodes)
    if limit is None or not state.pools.of(claimed.pool).isdisjoint(limit):
        return ""
    where = (
        named(claimed.nodes) if claimed.nodes is not None else f"CPUs {listed(claimed.within or CpuSet())}"
    )
    pool = claimed.pool if claimed.pool is Pool.SHARED else claimed.pool.upper()
    return f"nothing is left of the {pool} pool on {where}: it runs on the whole pool"


def with_burst_limit(state: NodeState, pod: Pod, request: Request, claimed: Claim) -> Claim:
    """Return the claim of a pod that wants ``ConstrainedBurst`` with its limit; others unchanged."""
    wants = BindPolicy.CONSTRAINED_BURST in (pod.bind_required, pod.bind_preferred)
    if not wants or claimed.pool is not Pool.SHARED or claimed.nodes is not None:
        return claimed
    for sibling in state.in_sandbox(pod.sandbox_id):
        if sibling.placement.pool_numa_limit is not None and sibling.phase is not Phase.EXITED:
            return structs.replace(
                claimed, nodes=sibling.placement.pool_numa_limit, why=f"{claimed.why}, as its pod is bound"
            )
    machine = state.node.machine
    pools = {node: part.shared for node, part in state.pools.per_node(machine).items()}
    nodes = burst_nodes(pools, _limit(pod, request), state.node.strategy or NumaStrategy.MOST_ALLOCATED)
    if not nodes or nodes == Mask(node for node, cpus in pools.items() if cpus):
        return claimed
    return structs.replace(claimed, nodes=nodes, why=f"{claimed.why}, of {named(nodes)} (ConstrainedBurst)")


def _limit(pod: Pod, request: Request) -> int | None:
    """Return the CPU limit of the pod or container in thousandths; None where there is none."""
    if pod.asks is not None:
        limits = [ask.limits.get(CPU, 0) for ask in pod.asks.containers]
        return sum(limits) if limits and all(limits) else None
    if request.cpu_quota <= 0:
        return None
    return request.cpu_quota * MILLI // (request.cpu_period or 100_000)
