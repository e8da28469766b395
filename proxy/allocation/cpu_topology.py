"""The units of a machine (cores, sockets, NUMA nodes, caches) and their CPUs, as the allocators read them.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/topology/topology.go ``Discover``. A CPU has four units
above it: its core, its socket, its NUMA node and its uncore (last-level) cache. Unit ids are unique
machine-wide. Allocators ask two kinds of question:

- which CPUs are in a unit - answered here by bit masks, so that 512 CPUs cost as much as 8;
- how large a unit ought to be - kubelet answers with averages (``CPUs div cores`` and so on). On a machine
  with an offline hyperthread or with two kinds of cores the average fits no unit, and such units are never
  recognised as whole. Therefore a topology read from a ``Machine`` uses the true size of each unit. If all
  units of a kind are alike, the two rules give the same sizes. ``CpuTopology.of_rows`` with declared counts
  reproduces kubelet's averages; zero there means "not stated", as in kubelet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from proxy.model.idset import CpuSet, union
from proxy.model.machine import Cpu, Machine

UNCORE_LEVEL = 3
"""Caches below this level belong to a core or to a few of them and are not uncore caches."""


class CpuRow(Struct, frozen=True):
    """One CPU and the ids of the units it is in."""

    cpu: int
    core: int
    socket: int
    numa: int
    uncore: int


class Counts(Struct, frozen=True):
    """How many units of each kind there are (0: not stated)."""

    cpus: int = 0
    cores: int = 0
    sockets: int = 0
    numa_nodes: int = 0
    uncore_caches: int = 0


Units = Mapping[int, int]
"""Unit id to the bit mask of its CPUs, ascending by id."""

Inner = Mapping[int, tuple[tuple[int, int], ...]]
"""Unit id to the smaller units that share CPUs with it: pairs of id and bit mask, ascending by id."""


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """The CPUs of a machine by unit.

    Attributes:
        cpus: All CPUs.
        cores, sockets, nodes, uncores: The units of each kind.
        counts: The counts that formulas use.
        declared: True when ``counts`` were stated rather than counted; sizes are then averages.
        socket_nodes, socket_cores, node_sockets, node_cores, node_uncores, uncore_cores: The second kind of
            units inside each unit of the first kind; computed once, because every order uses them.
    """

    cpus: CpuSet
    cores: Units
    sockets: Units
    nodes: Units
    uncores: Units
    counts: Counts = field(default_factory=Counts)
    declared: bool = False
    socket_nodes: Inner = field(init=False, repr=False)
    socket_cores: Inner = field(init=False, repr=False)
    node_sockets: Inner = field(init=False, repr=False)
    node_cores: Inner = field(init=False, repr=False)
    node_uncores: Inner = field(init=False, repr=False)
    uncore_cores: Inner = field(init=False, repr=False)

    def __post_init__(self) -> None:
        def set_pairs(name: str, outer: Units, inner: Units) -> None:
            pairs = {
                o: tuple((i, bits) for i, bits in inner.items() if bits & whole) for o, whole in outer.items()
            }
            object.__setattr__(self, name, pairs)

        set_pairs("socket_nodes", self.sockets, self.nodes)
        set_pairs("socket_cores", self.sockets, self.cores)
        set_pairs("node_sockets", self.nodes, self.sockets)
        set_pairs("node_cores", self.nodes, self.cores)
        set_pairs("node_uncores", self.nodes, self.uncores)
        set_pairs("uncore_cores", self.uncores, self.cores)

    def largest_cores(self, among: CpuSet) -> CpuSet:
        """Return the CPUs of wholly contained cores that have as many threads as the largest core."""
        threads, outside = self.cpus_per_core, ~among.bits
        whole = (core for core in self.cores.values() if not core & outside and core.bit_count() == threads)
        return CpuSet.from_bits(union(whole))

    def one_of_each_core(self, among: CpuSet) -> CpuSet:
        """Return the lowest CPU of each core that has some of these."""
        bits = among.bits
        return CpuSet.from_bits(union(core & bits & -(core & bits) for core in self.cores.values()))

    @classmethod
    def of(cls, machine: Machine) -> CpuTopology:
        """Read the online CPUs of a machine.

        A CPU in no NUMA node joins a node of its package, or the lowest node if its package has none. A CPU
        without a cache of level 3 or above shares one "uncore" with the other such CPUs of its package
        (kubelet: the socket).
        """
        nodes = machine.assigned_nodes
        return cls.of_rows(
            CpuRow(c.id, c.core, c.package, nodes[c.id], uncore) for c, uncore in _with_uncore(machine)
        )

    @classmethod
    def of_rows(cls, rows: Iterable[CpuRow], declared: Counts | None = None) -> CpuTopology:
        """Build a topology from rows.

        Args:
            rows: One row per CPU, in any order.
            declared: Counts to use in formulas instead of those of the rows.
        """
        all_rows = tuple(rows)
        cores = _units((r.core, r.cpu) for r in all_rows)
        sockets = _units((r.socket, r.cpu) for r in all_rows)
        nodes = _units((r.numa, r.cpu) for r in all_rows)
        uncores = _units((r.uncore, r.cpu) for r in all_rows)
        counted = Counts(len({r.cpu for r in all_rows}), len(cores), len(sockets), len(nodes), len(uncores))
        cpus = CpuSet(r.cpu for r in all_rows)
        return cls(cpus, cores, sockets, nodes, uncores, declared or counted, declared is not None)

    @property
    def cpus_per_core(self) -> int:
        """Threads of a core: kubelet's average with declared counts, otherwise those of the largest core."""
        if self.declared:
            return _average(self.counts.cpus, self.counts.cores)
        return max((bits.bit_count() for bits in self.cores.values()), default=0)

    def core_size(self, core: int) -> int:
        """Return the number of available CPUs at which a core counts as wholly free."""
        if self.declared:
            return _average(self.counts.cpus, self.counts.cores)
        return self.cores[core].bit_count()

    def socket_size(self, socket: int) -> int:
        """Return the number of available CPUs at which a socket counts as wholly free."""
        if self.declared:
            return _average(self.counts.cpus, self.counts.sockets)
        return self.sockets[socket].bit_count()

    @property
    def cpus_per_uncore(self) -> int:
        """Average size of an uncore cache, in CPUs."""
        return _average(self.counts.cpus, self.counts.uncore_caches)

    @property
    def nodes_first(self) -> bool:
        """Return whether a socket is at most as large as a NUMA node, so that nodes are above sockets."""
        return self.counts.sockets >= self.counts.numa_nodes


def _average(cpus: int, units: int) -> int:
    return cpus // units if units else 0


def _units(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    bits: dict[int, int] = {}
    for unit, cpu in pairs:
        bits[unit] = bits.get(unit, 0) | 1 << cpu
    return dict(sorted(bits.items()))


def _with_uncore(machine: Machine) -> Iterable[tuple[Cpu, int]]:
    """Pair every CPU with its uncore id: the lowest CPU of those that share it."""
    names: dict[tuple[str, int], int] = {}
    for cpu in machine.cpus:  # ascending, so the first CPU of a group names it
        cache = None if cpu.llc is None else machine.caches.get(cpu.llc)
        if cpu.llc is not None and cache is not None and cache.level >= UNCORE_LEVEL:
            key = ("cache", cpu.llc)
        else:
            key = ("package", cpu.package)
        yield cpu, names.setdefault(key, cpu.id)
