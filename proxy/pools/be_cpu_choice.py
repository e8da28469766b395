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


def pick(count: int, seats: Iterable[CpuLocation]) -> tuple[int, ...]:
    """Pick CPUs.

    Args:
        count: How many.
        seats: Those to pick from, in any order.

    Returns:
        The CPUs in the order of picking; none where there are too few.
    """
    there = tuple(seats)
    if not 0 < count <= len(there):
        return ()
    buckets = _buckets(there)
    pairs = [_pairs(bucket) for bucket in buckets]
    chosen: list[int] = []
    at, found = 0, True
    while count - len(chosen) >= 2:
        if at == 0:
            if not found:
                break
            found = False
        if pairs[at]:
            chosen += pairs[at].pop(0)
            found = True
        at = (at + 1) % len(buckets)
    taken = set(chosen)
    rest = [[seat.cpu for seat in bucket if seat.cpu not in taken] for bucket in buckets]
    while len(chosen) < count:
        if rest[at]:
            chosen.append(rest[at].pop(0))
        at = (at + 1) % len(buckets)
    return tuple(chosen)


def _buckets(seats: Iterable[CpuLocation]) -> list[list[CpuLocation]]:
    """Sort the CPUs into buckets, by core in each."""
    found: dict[tuple[int, int], list[CpuLocation]] = {}
    for seat in sorted(seats, key=lambda seat: (seat.core, seat.cpu)):
        found.setdefault((seat.node, seat.socket), []).append(seat)
    return sorted(found.values(), key=lambda bucket: (-len(bucket), bucket[0].cpu))


def _pairs(bucket: list[CpuLocation]) -> list[tuple[int, int]]:
    """Return the siblings of a bucket two by two, each CPU once."""
    found: list[tuple[int, int]] = []
    at = 0
    while at + 1 < len(bucket):
        first, second = bucket[at : at + 2]
        together = first.core == second.core
        if together:
            found.append((first.cpu, second.cpu))
        at += 2 if together else 1
    return found
