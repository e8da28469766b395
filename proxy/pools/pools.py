"""The pools, a pure function of the machine and of the owners of CPUs; and the floor of the shared pool.

    shared pool = usable CPUs - all owned CPUs
    BE pool     = usable CPUs - CPUs of LSE and exclusive Guaranteed containers
    SYSTEM pool = the CPUs that the node keeps for that class - all owned CPUs; without any, the shared pool

Usable CPUs are online, not in the node's reservation, and not SYSTEM's alone. So the BE pool
always holds the shared pool, and an empty shared pool is the first sign of exhaustion (Koordinator v1.8.0
pkg/koordlet/statesinformer/impl/states_noderesourcetopology.go; kubelet's reserved CPUs stay in both, so that
small pods always have a CPU). ``proxy.pools`` spells out the QoS classes.

The floor is how many CPUs no owner may take, on the node and on each of its NUMA nodes. Whatever pods claim,
containers without CPUs of their own, kubelet's probes and the node's agents must continue running. So
exclusive CPUs are given only if enough of the shared pool is left. If the configuration names no number, the
floor is the larger of one core with all its threads and 5 % of the CPUs that the pool has when nothing is
owned, rounded up, and at most half of them: on a machine with two CPUs one can still be owned. The floor
applies to CPUs that are newly taken. A pool that is below the floor for another reason (CPUs that went
offline, another configuration) takes nothing away from an owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field, structs

from proxy.model.admission import AdmissionRule, AdmissionRules, Breach
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.phrases import counted
from proxy.model.workload import Placement, Pool


class Owner(Struct, frozen=True):
    """Exclusive CPUs of one owner.

    Attributes:
        cpus: The CPUs.
        excludes_be: True when the CPUs are out of the BE pool too.
    """

    cpus: CpuSet
    excludes_be: bool


class CpuPools(Struct, frozen=True):
    """The CPUs on which containers without CPUs of their own run."""

    shared: CpuSet
    be: CpuSet
    system: CpuSet = field(default_factory=CpuSet)
    be_now: CpuSet | None = None
    """The part of the BE pool that is in use while BE is suppressed; None if all of it is."""

    def cpus_of(self, pool: Pool) -> CpuSet:
        """Return the CPUs of the shared, the BE or the SYSTEM pool."""
        if pool is Pool.SYSTEM and self.system:
            return self.system
        if pool is Pool.BE:
            return self.be if self.be_now is None else self.be_now
        return self.shared

    def per_node(self, machine: Machine) -> Mapping[int, CpuPools]:
        """Return the part of the pools on each NUMA node that has CPUs."""
        return {
            node.id: CpuPools(self.shared & node.cpus, self.be & node.cpus, self.system & node.cpus)
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
        be_limit: CPUs to which BE is suppressed; None if it is not suppressed. If none of these CPUs is left
            in the BE pool, BE has the whole pool: no container is left without CPUs.
    """
    owned = outside_be = 0
    for owner in owners:
        owned |= owner.cpus.bits
        if owner.excludes_be:
            outside_be |= owner.cpus.bits
    system_cpus = CpuSet.from_bits(system.bits & ~owned) if system else CpuSet()
    be = CpuSet.from_bits(usable.bits & ~outside_be)
    be_now = None if be_limit is None else be & be_limit or None
    return CpuPools(CpuSet.from_bits(usable.bits & ~owned), be, system_cpus, be_now)


PERCENT = 5


class Floor(Struct, frozen=True):
    """A number of CPUs that stay in the shared pool.

    Attributes:
        least: The number.
        cpus: The CPUs among which they are; None for all.
        node: The NUMA node that has these CPUs; None for the whole node.
    """

    least: int
    cpus: CpuSet | None = None
    node: int | None = None

    @property
    def setting(self) -> str:
        """The key of the configuration that decides."""
        return f"admission.sharedFloor{'' if self.node is None else 'PerNUMANode'}"


class Floors(Struct, frozen=True):
    """All floors of a node; falsy if the node has none."""

    floors: tuple[Floor, ...] = field(default=())

    def __bool__(self) -> bool:
        return bool(self.floors)

    def breach(self, remaining: CpuSet, newly_owned: CpuSet) -> Breach | None:
        """Return the breach of the first floor that is not kept once CPUs are taken; None if all are kept.

        Args:
            remaining: The shared pool without these CPUs.
            newly_owned: The CPUs.
        """
        for floor in self.floors:
            bits = remaining.bits if floor.cpus is None else remaining.bits & floor.cpus.bits
            if bits.bit_count() < floor.least and (
                floor.cpus is None or not newly_owned.isdisjoint(floor.cpus)
            ):
                where = "this node" if floor.node is None else f"NUMA node {floor.node}"
                message = (
                    f"the shared pool must keep {counted(floor.least, 'CPU')} of {where} ({floor.setting}),"
                    f" and {bits.bit_count()} would be left"
                )
                return Breach(AdmissionRule.SHARED_FLOOR, message) if newly_owned else None
        return None

    def choose(self, pool: CpuSet, machine: Machine, unownable: CpuSet) -> CpuSet:
        """Choose CPUs of the pool that meet all floors as long as nothing takes them.

        CPUs that can have no owner come first, then those of cores that are not wholly in the pool, then the
        last ones.

        Args:
            pool: The shared pool.
            machine: The machine.
            unownable: CPUs that are never owned.
        """
        order = _least_wanted_first(pool, machine, unownable)
        chosen = 0
        for floor in sorted(self.floors, key=lambda floor: floor.node is None):  # NUMA nodes first
            inside = order if floor.cpus is None else [cpu for cpu in order if cpu in floor.cpus]
            present = chosen if floor.cpus is None else chosen & floor.cpus.bits
            missing = floor.least - present.bit_count()
            for cpu in inside:
                if missing <= 0:
                    break
                if not chosen >> cpu & 1:
                    chosen |= 1 << cpu
                    missing -= 1
        return CpuSet.from_bits(chosen)


def _least_wanted_first(pool: CpuSet, machine: Machine, unownable: CpuSet) -> list[int]:
    whole = CpuSet()
    for core in machine.cores.values():
        if core <= pool and core.isdisjoint(unownable):
            whole |= core
    core_of = {cpu.id: cpu.core for cpu in machine.cpus}

    def order(cpu: int) -> tuple[bool, bool, int, int]:
        return cpu not in unownable, cpu in whole, -core_of.get(cpu, cpu), -cpu

    return sorted(pool, key=order)


def floors_of(rules: AdmissionRules, machine: Machine, shareable: CpuSet) -> Floors:
    """Compute the floors of a node.

    Args:
        rules: The node's rules.
        machine: The machine.
        shareable: The CPUs of the shared pool when nothing is owned.
    """
    least = default_floor(machine, shareable) if rules.floor is None else rules.floor
    floors = [Floor(least)] if least else []
    for node in machine.nodes if rules.numa_floor != 0 else ():
        node_cpus = node.cpus & shareable
        least = default_floor(machine, node_cpus) if rules.numa_floor is None else rules.numa_floor
        if least and node.cpus:
            floors.append(Floor(least, node.cpus, node.id))
    return Floors(tuple(floors))


def default_floor(machine: Machine, cpus: CpuSet) -> int:
    """Return the floor among some CPUs if the configuration names no number."""
    core = max((len(core) for core in machine.cores.values() if not core.isdisjoint(cpus)), default=0)
    share = -(-len(cpus) * PERCENT // 100)
    return min(max(core, share), len(cpus) // 2)


def pool_limit(machine: Machine, within: CpuSet | None, nodes: Mask | None) -> CpuSet | None:
    """Return the CPUs to which a pool is limited by CPUs or by NUMA nodes; None if it is not limited."""
    return within if nodes is None else machine.cpus_of(nodes)


def pool_cpus(machine: Machine, pools: CpuPools, placement: Placement) -> CpuSet:
    """Return the CPUs of a placement that owns none: its pool, limited if that leaves any.

    Suppression does not lead a container out of its limit: if the suppressed pool has nothing within the
    limit, the whole BE pool within the limit counts.
    """
    pool = pools.cpus_of(placement.pool)
    limit = pool_limit(machine, placement.pool_cpus_limit, placement.pool_numa_limit)
    named_by_hooks = placement.hook_cpus
    if limit is None and named_by_hooks is None:
        return pool
    whole = pools.be if placement.pool is Pool.BE else pool
    if named_by_hooks is not None:
        limited = named_by_hooks if limit is None else named_by_hooks & limit
        if within_limits := (pool & limited or whole & limited) | placement.hook_extra_cpus & machine.online:
            return within_limits
    return pool if limit is None else pool & limit or whole & limit or pool


def without_hook_limits(placement: Placement) -> Placement:
    """Return a placement without the limits of hooks."""
    if placement.hook_cpus is None:
        return placement
    return structs.replace(placement, hook_cpus=None, hook_extra_cpus=CpuSet())
