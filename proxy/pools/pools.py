"""The pools: a pure function of the machine and of who owns CPUs. Never stored.

    shared pool = online CPUs - everything that is owned
    BE pool     = online CPUs - what LSE and exclusive Guaranteed containers own

So the BE pool always holds the shared pool, and an empty shared pool is the first sign of exhaustion
(reference koordinator c.4; kubelet's reserved CPUs stay in both, so that small pods always have a CPU).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.model.workload import Pool


@dataclass(frozen=True, slots=True)
class Owner:
    """Exclusive CPUs and who owns them.

    Attributes:
        cpus: The CPUs.
        hard: True when the CPUs are out of the BE pool too.
    """

    cpus: CpuSet
    hard: bool


@dataclass(frozen=True, slots=True)
class Pools:
    """What containers without CPUs of their own run on."""

    shared: CpuSet
    be: CpuSet

    def of(self, pool: Pool) -> CpuSet:
        """Give the CPUs of the shared or the BE pool."""
        return self.be if pool is Pool.BE else self.shared

    def per_node(self, machine: Machine) -> Mapping[int, Pools]:
        """Give the part of the pools on each NUMA node that has CPUs."""
        return {
            node.id: Pools(self.shared & node.cpus, self.be & node.cpus)
            for node in machine.nodes
            if node.cpus
        }


def pools_of(online: CpuSet, owners: Iterable[Owner]) -> Pools:
    """Compute the pools.

    Args:
        online: The machine's online CPUs.
        owners: Everybody who owns CPUs.
    """
    taken = hard = 0
    for owner in owners:
        taken |= owner.cpus.bits
        if owner.hard:
            hard |= owner.cpus.bits
    return Pools(CpuSet.from_bits(online.bits & ~taken), CpuSet.from_bits(online.bits & ~hard))
