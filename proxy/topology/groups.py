"""Derives groups that partition the CPUs from the group that each CPU reports.

The kernel reports a level (core, package, last-level cache ...) as one set per CPU: the CPUs that share it
with this CPU. On a live kernel those sets agree: all members of a set report that same set, and the sets are
the groups. They disagree while CPUs come and go, on some firmware, and in edited snapshots. Then a set has as
many votes as members that report it, and each CPU joins the set with most votes among those that contain it;
among equals its own, else the one of the lowest CPU (machine facts, rule 6). The CPUs that joined one set are
a group.

Groups are named by their lowest CPU: kernel ids restart in every package, or are -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from proxy.model.idset import CpuSet


def each(bits: int) -> Iterable[int]:
    """Return the ids in a set of bits, ascending."""
    return CpuSet.from_bits(bits)


def lowest(bits: int) -> int:
    """Return the lowest id of a set that is not empty."""
    return (bits & -bits).bit_length() - 1


def partition(reported: Mapping[int, int]) -> dict[int, int]:
    """Make groups of what the CPUs say.

    Args:
        reported: CPU to the set that it says it is in, itself included. CPUs that say nothing are left out.

    Returns:
        CPU to its group, as bits; a group holds only CPUs of ``said``.
    """
    votes: dict[int, int] = {}
    for cpu, bits in reported.items():
        votes[bits] = votes.get(bits, 0) | 1 << cpu
    if all(bits == members for bits, members in votes.items()):
        return dict(reported)
    chosen: dict[int, int] = {}
    for cpu, own in reported.items():
        claims = [bits for bits in votes if bits >> cpu & 1]
        best = max(claims, key=lambda bits: (votes[bits].bit_count(), bits == own, -lowest(bits)))
        chosen[best] = chosen.get(best, 0) | 1 << cpu
    return {cpu: members for members in chosen.values() for cpu in each(members)}


def by_key(keys: Mapping[int, int]) -> dict[int, int]:
    """Group CPUs that have an equal key: CPU to its group, as bits."""
    members: dict[int, int] = {}
    for cpu, key in keys.items():
        members[key] = members.get(key, 0) | 1 << cpu
    return {cpu: members[key] for cpu, key in keys.items()}
