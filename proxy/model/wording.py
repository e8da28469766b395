"""Numbers, CPUs and NUMA nodes in a sentence, the same everywhere."""

from __future__ import annotations

from proxy.model.idset import CpuSet, Mask


def counted(number: int, thing: str) -> str:
    """Give a number and what is counted: ``1 whole core``, ``4 whole cores``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def cpus(taken: CpuSet) -> str:
    """Name CPUs: ``CPU 6``, ``CPUs 0-15``."""
    return f"CPU{'' if len(taken) == 1 else 's'} {taken}"


def nodes(mask: Mask) -> str:
    """Name nodes: ``NUMA node 2``, ``NUMA nodes 0-1``."""
    return f"NUMA node{'' if len(mask) == 1 else 's'} {mask}"
