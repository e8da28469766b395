"""``ConstrainedBurst``: the NUMA nodes whose shared pools a pod without exclusive CPUs may use.

Koordinator's code has only the name; its design says that a burstable pod is bound to the shared pools of
NUMA nodes that suit its *limit*, so that it can still use its whole limit while its threads stay close. Here
suitable means: the fewest NUMA nodes whose pools add up to the limit. The strategy decides between several
such choices: ``MostAllocated`` takes the smallest pools that are large enough, any other strategy the
largest; then the lowest node ids are taken. If all pools together are smaller than the limit, or if there is
no limit, the pod keeps all of them.

All sums that k nodes can have are computed node by node; of equal sums the lowest ids are kept. That is
``nodes * k * sums`` steps, and sums are at most the CPUs of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import NumaStrategy


def burst_nodes(
    pools: Mapping[int, CpuSet],
    limit: int | None,
    strategy: NumaStrategy = NumaStrategy.MOST_ALLOCATED,
) -> Mask:
    """Choose the nodes of a pod.

    Args:
        pools: NUMA node to its shared pool.
        limit: The pod's CPU limit in thousandths; None or less than 1 if it has none.
        strategy: Which pools are chosen among equally many.

    Returns:
        Nodes whose pools are not empty; empty only if all pools are.
    """
    sizes = {node: len(pool) for node, pool in sorted(pools.items()) if pool}
    everywhere = Mask(sizes)
    if limit is None or limit < 1:
        return everywhere
    missing = -(-limit // 1000)
    fewest = 0
    for size in sorted(sizes.values(), reverse=True):
        fewest += 1
        missing -= size
        if missing <= 0:
            break
    else:
        return everywhere
    sums = {total: bits for total, bits in _sums(sizes, fewest).items() if total * 1000 >= limit}
    chosen = min(sums) if strategy is NumaStrategy.MOST_ALLOCATED else max(sums)
    return Mask.from_bits(sums[chosen])


def _sums(sizes: Mapping[int, int], most: int) -> dict[int, int]:
    """Return the sums that ``most`` nodes can have, each with the lowest nodes that have it."""
    by_count: list[dict[int, int]] = [{0: 0}, *({} for _ in range(most))]
    for node, size in sizes.items():
        for count in range(most, 0, -1):
            table = by_count[count]
            for total, bits in by_count[count - 1].items():
                bits |= 1 << node
                table[total + size] = min(table.get(total + size, bits), bits)
    return by_count[most]
