"""The hardware of a node, as values.

Groups (core, package, die, cluster, last-level cache) are named by their lowest online CPU id and hold online
CPUs only; NUMA nodes keep the kernel's id. So names are unique on the machine, even if raw kernel ids restart
in every package or are -1.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from proxy.model.idset import CpuSet, Mask


class Bounds(Struct, frozen=True):
    """The ids that input may name.

    Attributes:
        cpus: CPUs that the machine may have, online or not.
        nodes: NUMA nodes that it may have, likewise.
    """

    cpus: CpuSet
    nodes: Mask


ANY_MACHINE = Bounds(CpuSet.from_bits((1 << 8192) - 1), Mask.from_bits((1 << 1024) - 1))
"""Bounds of every machine: the most that Linux is built for (NR_CPUS of x86 and powerpc, NODES_SHIFT 10)."""


class Cpu(Struct, frozen=True):
    """One online CPU and the groups it is in.

    Attributes:
        id: Kernel id of the logical processor.
        core, package, die, cluster, llc: Group names (lowest online CPU id of the group); None if the kernel
            does not report the level.
        numa: NUMA node id, or None if the CPU is in no node.
        core_id, package_id: Raw kernel ids (package_id may be -1), None if missing.
    """

    id: int
    core: int
    package: int
    die: int | None = None
    cluster: int | None = None
    llc: int | None = None
    numa: int | None = None
    core_id: int | None = None
    package_id: int | None = None


class HugePages(Struct, frozen=True):
    """Huge pages of one size on one node (counts; None if the kernel has no such file)."""

    nr: int
    free: int | None = None
    surplus: int | None = None


class NumaNode(Struct, frozen=True):
    """One NUMA node.

    Attributes:
        id: Kernel id.
        cpus: Online CPUs of the node; empty for a memory-only node.
        mem_bytes: MemTotal in bytes; 0 for a memoryless node, None if unknown.
        hugepages: Page size in kB to counts; None if the kernel has no directory.
        distance: Distances to the nodes of ``Machine.nodes``, in their order; empty if unknown.
    """

    id: int
    cpus: CpuSet
    mem_bytes: int | None = None
    hugepages: Mapping[int, HugePages] | None = None
    distance: tuple[int, ...] = ()


class Cache(Struct, frozen=True):
    """A last-level cache group (level >= 3 is an uncore cache)."""

    cpus: CpuSet
    level: int
    id: int | None = None
    size: str | None = None


@dataclass(frozen=True)
class Machine:
    """The hardware of a node.

    Attributes:
        cpus: Online CPUs, ascending by id.
        nodes: Online NUMA nodes, ascending by id; a machine without node directories has the one node 0.
        online, present, possible, isolated: CPU sets as the kernel reports them.
        caches: Last-level cache groups by name.
        extra: Facts that placement does not read but ``topoproxy topology`` shows (JSON-ready); machines
            that differ in nothing else are equal.
    """

    cpus: tuple[Cpu, ...]
    nodes: tuple[NumaNode, ...]
    present: CpuSet
    possible: CpuSet
    isolated: CpuSet = field(default_factory=CpuSet)
    caches: Mapping[int, Cache] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)

    @functools.cached_property
    def online(self) -> CpuSet:
        """All online CPUs."""
        return CpuSet(c.id for c in self.cpus)

    @property
    def architecture(self) -> str:
        """The kernel's name of the architecture, such as ``aarch64``; empty if unknown."""
        reported = self.extra.get("arch")
        return reported if isinstance(reported, str) else ""

    @functools.cached_property
    def by_id(self) -> Mapping[int, Cpu]:
        """Online CPUs by id."""
        return {c.id: c for c in self.cpus}

    def groups(self, level: str) -> dict[int, CpuSet]:
        """Return the groups of a level by name.

        Args:
            level: ``core``, ``package``, ``die``, ``cluster``, ``llc`` or ``numa``.

        Returns:
            Group name to CPUs, in ascending order of name; CPUs that are in no such group are left out.
        """
        bits: dict[int, int] = {}
        for cpu in self.cpus:
            name: int | None = getattr(cpu, level)
            if name is not None:
                bits[name] = bits.get(name, 0) | 1 << cpu.id
        return {name: CpuSet.from_bits(bits[name]) for name in sorted(bits)}

    @functools.cached_property
    def cores(self) -> Mapping[int, CpuSet]:
        """Physical cores by name."""
        return self.groups("core")

    @functools.cached_property
    def packages(self) -> Mapping[int, CpuSet]:
        """Packages (sockets) by name."""
        return self.groups("package")

    @functools.cached_property
    def node_by_id(self) -> Mapping[int, NumaNode]:
        """NUMA nodes by id."""
        return {n.id: n for n in self.nodes}

    @functools.cached_property
    def possible_nodes(self) -> Mask:
        """NUMA nodes that may exist, as the kernel reports them; otherwise those that exist."""
        numa = self.extra.get("numa")
        reported = numa.get("possible") if isinstance(numa, Mapping) else None
        existing = Mask(node.id for node in self.nodes)
        try:
            return existing | Mask.parse(reported) if isinstance(reported, str) else existing
        except ValueError:
            return existing

    @functools.cached_property
    def bounds(self) -> Bounds:
        """The CPUs and NUMA nodes that input may name."""
        return Bounds(self.possible | self.online, self.possible_nodes)

    @functools.cached_property
    def memory_nodes(self) -> Mask:
        """Nodes that hold memory (a node of unknown size counts)."""
        return Mask(n.id for n in self.nodes if n.mem_bytes != 0)

    @functools.cached_property
    def assigned_nodes(self) -> Mapping[int, int]:
        """The NUMA node of each online CPU.

        A CPU for which the kernel names none gets the lowest node of its package, or the lowest of all if its
        package has none.
        """
        lowest = min((node.id for node in self.nodes), default=0)
        of_package: dict[int, int] = {}
        for cpu in self.cpus:
            if cpu.numa is not None:
                of_package[cpu.package] = min(cpu.numa, of_package.get(cpu.package, cpu.numa))
        return {
            cpu.id: of_package.get(cpu.package, lowest) if cpu.numa is None else cpu.numa for cpu in self.cpus
        }

    def nodes_of(self, cpus: CpuSet) -> Mask:
        """Return the NUMA nodes that hold any of the CPUs."""
        return Mask(n.id for n in self.nodes if not n.cpus.isdisjoint(cpus))

    def cpus_of(self, nodes: Mask) -> CpuSet:
        """Return the online CPUs of the nodes."""
        return CpuSet.union_of(node.cpus for node in self.nodes if node.id in nodes)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A short name of the hardware, to check whether saved state belongs to this machine.

        It covers possible CPUs and nodes only: CPUs and NUMA nodes come and go while a machine runs, some
        permanently, and its containers continue.
        """
        numa = self.extra.get("numa")
        reported = numa.get("possible") if isinstance(numa, Mapping) else None
        nodes = reported if isinstance(reported, str) else str(Mask(node.id for node in self.nodes))
        text = repr((str(self.possible), nodes))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
