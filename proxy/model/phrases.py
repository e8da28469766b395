"""Formatting numbers, CPUs and NUMA nodes in sentences, the same everywhere."""

from __future__ import annotations

from proxy.model.idset import CpuSet, IdSet, Mask

ROOM = 120
"""Characters of a set in a sentence; a longer one is cut."""


def counted(number: int, thing: str) -> str:
    """Return a number with its noun: ``1 whole core``, ``4 whole cores``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def listed(ids: IdSet) -> str:
    """Write a set in a sentence: ``0-3,8``, and of a long one its beginning: ``0,2,4,... (4096 CPUs)``."""
    text = str(ids)
    if len(text) <= ROOM:
        return text
    return f"{text[:ROOM].rpartition(',')[0]},... ({counted(len(ids), ids.NOUN)})"


def cpus(ids: CpuSet) -> str:
    """Name CPUs: ``CPU 6``, ``CPUs 0-15``."""
    return f"CPU{'' if len(ids) == 1 else 's'} {listed(ids)}"


def cpus_are(ids: CpuSet) -> str:
    """Begin a sentence about CPUs: ``CPU 6 is``, ``CPUs 0-15 are``."""
    return f"{cpus(ids)} {'is' if len(ids) == 1 else 'are'}"


def no_cpus(absent: CpuSet) -> str:
    """Say that CPUs do not exist: ``there is no CPU 6``, ``there are no CPUs 7-8``."""
    return f"there {'is' if len(absent) == 1 else 'are'} no {cpus(absent)}"


def numa_nodes_text(mask: Mask) -> str:
    """Name nodes: ``NUMA node 2``, ``NUMA nodes 0-1``."""
    return f"NUMA node{'' if len(mask) == 1 else 's'} {listed(mask)}"
