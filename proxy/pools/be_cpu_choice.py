"""Picking CPUs for BE (best effort) pods: spread over the machine, but on whole cores.

See Koordinator v1.8.0 pkg/koordlet/qosmanager/plugins/cpusuppress/cpu_suppress.go,
calculateBESuppressCPUSetPolicy.

Theory. BE pods disturb others least if their CPUs are spread evenly, so CPUs come from all NUMA nodes and
sockets in turn; and if they have whole cores to themselves, so siblings are chosen together. The CPUs are put
into buckets by node and socket, the largest bucket first (then by lowest CPU). In rounds over the buckets,
each bucket gives two siblings while two CPUs are missing and some bucket has two; then, from the bucket where
that ended, each bucket gives one CPU.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxy.pools.cpu_location import CpuLocation


def pick(count: int, locations: Iterable[CpuLocation]) -> tuple[int, ...]:
    """Pick a number of CPUs.

    Args:
        count: How many.
        locations: The CPUs to pick from, in any order.

    Returns:
        The CPUs in the order of picking; none if there are too few.
    """
    cpus = tuple(locations)
    if not 0 < count <= len(cpus):
        return ()
    buckets = _buckets(cpus)
    pairs = [_pairs(bucket) for bucket in buckets]
    chosen: list[int] = []
    index, any_pair = 0, True
    while count - len(chosen) >= 2:
        if index == 0:
            if not any_pair:
                break
            any_pair = False
        if pairs[index]:
            chosen += pairs[index].pop(0)
            any_pair = True
        index = (index + 1) % len(buckets)
    chosen_cpus = set(chosen)
    singles = [[location.cpu for location in bucket if location.cpu not in chosen_cpus] for bucket in buckets]
    while len(chosen) < count:
        if singles[index]:
            chosen.append(singles[index].pop(0))
        index = (index + 1) % len(buckets)
    return tuple(chosen)


def _buckets(locations: Iterable[CpuLocation]) -> list[list[CpuLocation]]:
    """Sort CPUs into buckets by NUMA node and socket, and by core in each bucket."""
    buckets: dict[tuple[int, int], list[CpuLocation]] = {}
    for location in sorted(locations, key=lambda location: (location.core, location.cpu)):
        buckets.setdefault((location.node, location.socket), []).append(location)
    return sorted(buckets.values(), key=lambda bucket: (-len(bucket), bucket[0].cpu))


def _pairs(bucket: list[CpuLocation]) -> list[tuple[int, int]]:
    """Return the siblings of a bucket two by two, each CPU once."""
    pairs: list[tuple[int, int]] = []
    index = 0
    while index + 1 < len(bucket):
        first, second = bucket[index : index + 2]
        siblings = first.core == second.core
        if siblings:
            pairs.append((first.cpu, second.cpu))
        index += 2 if siblings else 1
    return pairs
