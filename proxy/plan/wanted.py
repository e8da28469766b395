"""The CPUs of a container that owns none: its pool, or the part of it to which it is narrowed.

A pool is narrowed by what was decided (CPUs or NUMA nodes), and hooks may narrow what is left of it
further. As the pool shrinks and grows the container follows, within its limit; where nothing is left there,
the limit does not count, hooks' before ours: nobody is without CPUs.
"""

from __future__ import annotations

import dataclasses

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
    hooked = placement.narrowed
    if limit is None and hooked is None:
        return pool
    whole = pools.be if placement.pool is Pool.BE else pool
    if hooked is not None:
        both = hooked if limit is None else hooked & limit
        if found := (pool & both or whole & both) | placement.beyond & node.machine.online:
            return found
    return pool if limit is None else pool & limit or whole & limit or pool


def unhooked(placement: Placement) -> Placement:
    """Give a placement as it was before hooks narrowed it."""
    if placement.narrowed is None:
        return placement
    return dataclasses.replace(placement, narrowed=None, beyond=CpuSet())
