"""Picking CPUs for BE (best effort) pods: spread over the machine, but on whole cores.

See Koordinator v1.8.0 pkg/koordlet/qosmanager/plugins/cpusuppress/cpu_suppress.go,
calculateBESuppressCPUSetPolicy.

Theory. BE pods disturb others least if their CPUs are spread evenly, so CPUs come from all NUMA nodes and
sockets in turn; and if they have whole cores to themselves, so siblings come together. The
CPUs are put into buckets by node and socket, the largest bucket first (then by lowest CPU). In rounds over
the buckets, each gives two siblings as long as two are wanted and some bucket has two; then, from where that
ended, each gives one.
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
    index, found = 0, True
    while count - len(chosen) >= 2:
        if index == 0:
            if not found:
                break
            found = False
        if pairs[index]:
            chosen += pairs[index].pop(0)
            found = True
        index = (index + 1) % len(buckets)
    taken = set(chosen)
    rest = [[location.cpu for location in bucket if location.cpu not in taken] for bucket in buckets]
    while len(chosen) < count:
        if rest[index]:
            chosen.append(rest[index].pop(0))
        index = (index + 1) % len(buckets)
    return tuple(chosen)


def _buckets(locations: Iterable[CpuLocation]) -> list[list[CpuLocation]]:
    """Sort CPUs into buckets by NUMA node and socket, and by core in each bucket."""
    found: dict[tuple[int, int], list[CpuLocation]] = {}
    for location in sorted(locations, key=lambda location: (location.core, location.cpu)):
        found.setdefault((location.node, location.socket), []).append(location)
    return sorted(found.values(), key=lambda bucket: (-len(bucket), bucket[0].cpu))


def _pairs(bucket: list[CpuLocation]) -> list[tuple[int, int]]:
    """Return the siblings of a bucket two by two, each CPU once."""
    found: list[tuple[int, int]] = []
    index = 0
    while index + 1 < len(bucket):
        first, second = bucket[index : index + 2]
        together = first.core == second.core
        if together:
            found.append((first.cpu, second.cpu))
        index += 2 if together else 1
    return found
