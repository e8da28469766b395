"""List free CPUs by NUMA node, by socket and by core, in the order in which they are taken.

Source: koordinator a7a1b76, pkg/scheduler/plugins/nodenumaresource/cpu_accumulator.go. ``MostAllocated``
takes units with few free CPUs first and ``LeastAllocated`` those with many; here the sign of a count does
that. If several pods may have the same CPU, the CPUs that fewer pods have come first.

A unit is whole when all its CPUs that the machine has are usable. Koordinator compares with the average size
of its kind, which fits no core of a machine with an offline thread or with two kinds of cores; if all cores
are alike, the two rules agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from proxy.allocation.cpu_topology import CpuTopology, Units
from proxy.model.idset import CpuSet
from proxy.model.koordinator import NumaStrategy


class CpuGroup(Struct, frozen=True):
    """Usable CPUs of one NUMA node or socket, in the order in which they are taken.

    Attributes:
        unit: Id of the node or socket.
        cpus: The CPUs.
    """

    unit: int
    cpus: Sequence[int]


class Groups:
    """The orders of a machine for one request.

    Attributes:
        topo: The machine.
        refs: CPU to the number of pods that have it; empty if only one pod may have a CPU.
        sign: 1 to start with units that have few free CPUs, -1 with those that have many.
        core_of: CPU to its core.
    """

    def __init__(
        self, topo: CpuTopology, strategy: NumaStrategy, refs: Mapping[int, int] | None = None
    ) -> None:
        self.topo = topo
        self.refs = refs or {}
        self.sign = 1 if strategy is NumaStrategy.MOST_ALLOCATED else -1
        self.core_of = {cpu: core for core, bits in topo.cores.items() for cpu in CpuSet.from_bits(bits)}
        self._socket_of = _outer(topo.nodes, topo.sockets)

    def whole_by_node(self, usable: int) -> list[CpuGroup]:
        """List the CPUs of whole cores, node by node."""
        topo = self.topo
        groups = self._whole(topo.nodes, topo.node_cores, usable)

        def rank(group: CpuGroup) -> tuple[int, int, int]:
            socket = topo.sockets[self._socket_of[group.unit]]
            return self.sign * len(group.cpus), self.sign * (socket & usable).bit_count(), group.unit

        return sorted(groups, key=rank)

    def whole_by_socket(self, usable: int) -> list[CpuGroup]:
        """List the CPUs of whole cores, socket by socket."""
        groups = self._whole(self.topo.sockets, self.topo.socket_cores, usable)
        return sorted(groups, key=lambda group: (self.sign * len(group.cpus), group.unit))

    def single_by_node(self, usable: int, *, one_each: bool) -> list[CpuGroup]:
        """List the CPUs node by node; with ``one_each`` only the first of each core."""
        topo = self.topo

        def rank(group: CpuGroup) -> tuple[int, int, int]:
            node, socket = topo.nodes[group.unit], topo.sockets[self._socket_of[group.unit]]
            free = (node & usable).bit_count(), (socket & usable).bit_count()
            return self.sign * free[0], self.sign * free[1], group.unit

        return sorted(self._single(topo.nodes, usable, one_each=one_each), key=rank)

    def single_by_socket(self, usable: int, *, one_each: bool) -> list[CpuGroup]:
        """List the CPUs socket by socket."""
        groups = self._single(self.topo.sockets, usable, one_each=one_each)
        return sorted(groups, key=lambda group: (self.sign * len(group.cpus), group.unit))

    def by_core(self, usable: int, chosen: int) -> list[int]:
        """List all CPUs core by core: close to the chosen CPUs first, broken cores before whole ones."""
        topo = self.topo
        ranked: list[tuple[tuple[int, ...], int]] = []
        for node, cores in topo.node_cores.items():
            socket = self._socket_of[node]
            bits = topo.sockets[socket]
            near = (bits & chosen).bit_count()
            place = (
                -near,
                self.sign * (bits & usable).bit_count(),
                self.sign * (topo.nodes[node] & usable).bit_count(),
            )
            for core, threads in cores:
                if free := threads & usable:
                    ranked.append(((*place, free.bit_count(), socket, self._refs(free), core), free))
        ranked.sort()
        return [cpu for _, free in ranked for cpu in self._ids(free)]

    def spread(self, cpus: Sequence[int]) -> list[int]:
        """Reorder CPUs: one of each core, then a second one of each core, and so on."""
        if len(cpus) <= self.topo.cpus_per_core:
            return list(cpus)
        used_of_core: dict[int, int] = {}
        rounds: list[tuple[int, int]] = []
        for cpu in cpus:
            core = self.core_of[cpu]
            rounds.append((used_of_core.get(core, 0), cpu))
            used_of_core[core] = used_of_core.get(core, 0) + 1
        return [cpu for _, cpu in sorted(rounds, key=lambda entry: entry[0])]

    def first_of_cores(self, cpus: Iterable[int]) -> list[int]:
        """Keep the first CPU of each core."""
        first: dict[int, int] = {}
        for cpu in cpus:
            first.setdefault(self.core_of[cpu], cpu)
        return list(first.values())

    def _whole(
        self, units: Units, inner: Mapping[int, tuple[tuple[int, int], ...]], usable: int
    ) -> list[CpuGroup]:
        groups: list[CpuGroup] = []
        for unit in units:
            whole = [
                (-bits.bit_count(), self._refs(bits), core, bits)
                for core, bits in inner[unit]
                if not bits & ~usable
            ]
            if whole:
                cpus = [cpu for *_, bits in sorted(whole) for cpu in CpuSet.from_bits(bits)]
                groups.append(CpuGroup(unit, cpus))
        return groups

    def _single(self, units: Units, usable: int, *, one_each: bool) -> list[CpuGroup]:
        groups: list[CpuGroup] = []
        for unit, bits in units.items():
            if bits & usable:
                cpus = self._ids(bits & usable)
                groups.append(CpuGroup(unit, self.first_of_cores(cpus) if one_each else cpus))
        return groups

    def _ids(self, bits: int) -> list[int]:
        cpus = list(CpuSet.from_bits(bits))
        return sorted(cpus, key=lambda cpu: self.refs.get(cpu, 0)) if self.refs else cpus

    def _refs(self, bits: int) -> int:
        return sum(self.refs.get(cpu, 0) for cpu in CpuSet.from_bits(bits)) if self.refs else 0


def _outer(inner: Units, outer: Units) -> dict[int, int]:
    """Map each inner unit to the first outer one that has CPUs of it."""
    return {unit: next(o for o, whole in outer.items() if whole & bits) for unit, bits in inner.items()}
