"""The pools: a pure function of the machine and of the owners of CPUs. Never stored.

    shared pool = usable CPUs - everything that is owned
    BE pool     = usable CPUs - what LSE and exclusive Guaranteed containers own
    SYSTEM pool = the CPUs that the node keeps for that class - everything that is owned; without any, the
                  shared pool

Usable is what is online, without the node's reservation and the CPUs that are SYSTEM's alone.
So the BE pool always holds the shared pool, and an empty shared pool is the first sign of exhaustion
(Koordinator v1.8.0 pkg/koordlet/statesinformer/impl/states_noderesourcetopology.go; kubelet's reserved CPUs
stay in both, so that small pods always have a CPU). ``proxy.pools`` spells out the QoS classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.model.workload import Pool


class Owner(Struct, frozen=True):
    """Exclusive CPUs of one owner.

    Attributes:
        cpus: The CPUs.
        hard: True when the CPUs are out of the BE pool too.
    """

    cpus: CpuSet
    hard: bool


class CpuPools(Struct, frozen=True):
    """What containers without CPUs of their own run on."""

    shared: CpuSet
    be: CpuSet
    system: CpuSet = field(default_factory=CpuSet)
    be_now: CpuSet | None = None
    """The part of the BE pool that is in use while BE is suppressed; None where all of it is."""

    def of(self, pool: Pool) -> CpuSet:
        """Return the CPUs of the shared, the BE or the SYSTEM pool."""
        if pool is Pool.SYSTEM and self.system:
            return self.system
        if pool is Pool.BE:
            return self.be if self.be_now is None else self.be_now
        return self.shared

    def per_node(self, machine: Machine) -> Mapping[int, CpuPools]:
        """Return the part of the pools on each NUMA node that has CPUs."""
        return {
            node.id: CpuPools(self.shared & node.cpus, self.be & node.cpus)
            for node in machine.nodes
            if node.cpus
        }


def pools_of(
    usable: CpuSet, owners: Iterable[Owner], system: CpuSet | None = None, be_limit: CpuSet | None = None
) -> CpuPools:
    """Compute the pools.

    Args:
        usable: The CPUs that pools may use.
        owners: All owners of CPUs.
        system: CPUs of class SYSTEM; None for none.
        be_limit: CPUs to which BE is suppressed; None where it is not. Where none of them is left in the BE
            pool, BE has all of it: no container is left without CPUs.
    """
    taken = hard = 0
    for owner in owners:
        taken |= owner.cpus.bits
        if owner.hard:
            hard |= owner.cpus.bits
    kept = CpuSet.from_bits(system.bits & ~taken) if system else CpuSet()
    be = CpuSet.from_bits(usable.bits & ~hard)
    be_now = None if be_limit is None else be & be_limit or None
    return CpuPools(CpuSet.from_bits(usable.bits & ~taken), be, kept, be_now)
