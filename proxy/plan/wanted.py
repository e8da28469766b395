"""The CPUs of a container that owns none: its pool, or the part of it to which it is narrowed."""

from __future__ import annotations

from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Placement, Pool
from proxy.plan.node import Node
from proxy.pools.pools import Pools


def limit_of(node: Node, within: CpuSet | None, nodes: Mask | None) -> CpuSet | None:
    """Give the CPUs to which a pool is narrowed by CPUs or by NUMA nodes; None where it is not."""
    return within if nodes is None else node.machine.cpus_of(nodes)


def in_pool(node: Node, pools: Pools, placement: Placement) -> CpuSet:
    """Give the CPUs of a placement that owns none: its pool, narrowed as far as that leaves any.

    Suppression does not lead a container out of its own limit: it keeps that where nothing of it is left.
    """
    pool = pools.of(placement.pool)
    limit = limit_of(node, placement.within, placement.nodes)
    if limit is None:
        return pool
    whole = pools.be if placement.pool is Pool.BE else pool
    return pool & limit or whole & limit or pool
