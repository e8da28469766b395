"""Leave enough cores to the later containers of a pod, if each CPU of a container is on a core of its own.

Under a required ``SpreadByPCPUs`` a container takes at most one CPU of each core; several containers of a pod
may be on the same cores. A choice for one container may then leave enough CPUs for the next one, but on too
few cores: of four cores with two threads, containers of 2, 2 and 3 CPUs fill all but one CPU, and the last of
them gets none if the first two have taken all threads of two cores.

Whether the containers that run at the same time fit is known in advance. Containers of c1 >= c2 >= ... CPUs
fit on cores with f1, f2, ... free CPUs exactly if, for every k, c1 + ... + ck is at most the sum of min(f, k)
over all cores (the theorem of Gale and Ryser). A CPU of a core with f free CPUs costs that sum nothing as
long as k < f. So a choice from the cores with the most free CPUs leaves the most for every k: if even such a
choice leaves too little, every other one does, too.

Koordinator has no such rule, because its scheduler assigns CPUs to a pod as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from proxy.allocation.cpu_topology import CpuTopology
from proxy.model.idset import CpuSet

Stage = tuple[int, ...]
"""The CPUs of each container of a pod that needs them at the same time."""


class LaterContainers(Struct, frozen=True):
    """The containers of a pod that get CPUs after the one that is being decided.

    Attributes:
        stages: How many CPUs they need, for each set of containers that runs at the same time.
        under_hint: Whether the hint is that of the pod, so that they get CPUs of the same NUMA nodes.
        may_leave_hint: Whether a container may leave the NUMA nodes of its hint for their sake.
    """

    stages: tuple[Stage, ...] = ()
    under_hint: bool = False
    may_leave_hint: bool = False


NO_LATER_CONTAINERS = LaterContainers()


def fit(topology: CpuTopology, free: CpuSet, stages: Sequence[Stage]) -> bool:
    """Return whether the containers of each stage fit on the free CPUs, with one CPU of a core at most.

    Args:
        topology: The machine.
        free: CPUs to choose from.
        stages: Each stage has all the free CPUs.
    """
    if not any(stages):
        return True
    sizes = Counter((core & free.bits).bit_count() for core in topology.cores.values())
    return all(_fits(sizes, stage) for stage in stages)


def _fits(sizes: Counter[int], stage: Stage) -> bool:
    needed = 0
    for k, count in enumerate(sorted(stage, reverse=True), start=1):
        needed += count
        if needed > sum(min(size, k) * cores for size, cores in sizes.items()):
            return False
    return True


def fullest_cores(topology: CpuTopology, free: CpuSet, count: int) -> tuple[CpuSet, CpuSet]:
    """Return the cores with the most free CPUs, for a choice of one CPU of each of ``count`` cores.

    Returns:
        The free CPUs of the cores of which each must be chosen, and of those of which the rest may be chosen.
    """
    inside = sorted((core & free.bits for core in topology.cores.values()), key=int.bit_count, reverse=True)
    fewest = inside[count - 1].bit_count() if 0 < count <= len(inside) else 0
    must, may = CpuSet(), CpuSet()
    for bits in inside:
        if bits.bit_count() > fewest:
            must |= CpuSet.from_bits(bits)
        elif bits.bit_count() == fewest:
            may |= CpuSet.from_bits(bits)
    return must, may
