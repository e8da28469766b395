"""Pools as Koordinator's hook server writes them."""

from __future__ import annotations

from collections.abc import Iterable

from proxy.model.idset import CpuSet
from proxy.pools.published_pools import NodePool


def without_cpus(pools: Iterable[NodePool], cpus: CpuSet) -> tuple[NodePool, ...]:
    """Remove CPUs from pools; a pool without CPUs stays as an empty part."""
    return tuple(NodePool(pool.socket, pool.node, pool.cpus - cpus) for pool in pools)


def union(pools: Iterable[NodePool]) -> CpuSet:
    """Return all CPUs of pools."""
    bits = 0
    for pool in pools:
        bits |= pool.cpus.bits
    return CpuSet.from_bits(bits)


def on_nodes(pools: Iterable[NodePool], nodes: Iterable[int]) -> tuple[NodePool, ...]:
    """Return the pools of some nodes, node by node in their order."""
    kept = tuple(pools)
    return tuple(pool for node in nodes for pool in kept if pool.node == node)


def joined_text(pools: Iterable[NodePool]) -> str:
    """Write pools as Koordinator's hook server does: part by part, with bare commas between them.

    This is not a canonical list, and not even a list if a part is empty; ``str(union(pools))`` is one.
    """
    return ",".join(str(pool.cpus) for pool in pools)
