"""A place in a pool: whole, or narrowed to some CPUs or NUMA nodes.

A pool is narrowed for a pod that the scheduler has bound to NUMA nodes, and for one that wants
``ConstrainedBurst``: its threads stay on as few NUMA nodes as have shared CPUs for its limit (see
``proxy.place.binding.burst``). All containers of a pod are narrowed alike: by what kubelet told of the pod's
limits, else by the limit of the first container that came.
"""

from __future__ import annotations

import dataclasses
import functools

from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, NumaStrategy
from proxy.model.wording import listed
from proxy.model.wording import nodes as named
from proxy.model.workload import Phase, Placement, Pod, Pool, Request
from proxy.place.binding.burst import burst_nodes
from proxy.place.cpu_request import CPU, MILLI
from proxy.plan.state import NodeState
from proxy.plan.wanted import limit_of
from proxy.pools.claims import Claim


@functools.lru_cache(maxsize=64)
def pooled(
    pool: Pool, mems: Mask, why: str, within: CpuSet | None = None, nodes: Mask | None = None
) -> Placement:
    """Give the placement of a container that owns no CPUs; the same value for the many that are alike."""
    return Placement(pool, CpuSet(), mems, (why,), within=within, nodes=nodes)


def unmet(state: NodeState, wish: Claim) -> str:
    """Tell that nothing is left where a pool should be narrowed to; empty where something is."""
    if wish.pool is Pool.OWN:
        return ""
    limit = limit_of(state.node, wish.within, wish.nodes)
    if limit is None or not state.pools.of(wish.pool).isdisjoint(limit):
        return ""
    where = named(wish.nodes) if wish.nodes is not None else f"CPUs {listed(wish.within or CpuSet())}"
    return f"nothing is left of the {wish.pool} pool on {where}: it runs on the whole pool"


def constrained(state: NodeState, pod: Pod, request: Request, wish: Claim) -> Claim:
    """Narrow the shared pool for a pod that wants ``ConstrainedBurst``; the claim as it is for all others."""
    wants = BindPolicy.CONSTRAINED_BURST in (pod.bind_required, pod.bind_preferred)
    if not wants or wish.pool is not Pool.SHARED or wish.nodes is not None or wish.within is not None:
        return wish
    for sibling in state.in_sandbox(pod.sandbox_id):
        if sibling.placement.nodes is not None and sibling.phase is not Phase.EXITED:
            return dataclasses.replace(
                wish, nodes=sibling.placement.nodes, why=f"{wish.why}, as its pod is bound"
            )
    machine = state.node.machine
    pools = {node: part.shared for node, part in state.pools.per_node(machine).items()}
    nodes = burst_nodes(pools, _limit(pod, request), state.node.strategy or NumaStrategy.MOST_ALLOCATED)
    if not nodes or nodes == Mask(node for node, cpus in pools.items() if cpus):
        return wish
    return dataclasses.replace(wish, nodes=nodes, why=f"{wish.why}, of {named(nodes)} (ConstrainedBurst)")


def _limit(pod: Pod, request: Request) -> int | None:
    """Give the CPU limit that counts, in thousandths; None where there is none."""
    if pod.asks is not None:
        limits = [ask.limits.get(CPU, 0) for ask in pod.asks.containers]
        return sum(limits) if limits and all(limits) else None
    if request.cpu_quota <= 0:
        return None
    return request.cpu_quota * MILLI // (request.cpu_period or 100_000)
