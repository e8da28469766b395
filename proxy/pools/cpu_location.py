"""The location of each CPU as Koordinator writes it: CPU, core, socket, NUMA node.

Cores and sockets are numbered from 0 by their lowest CPU, as ``lscpu`` does, which Koordinator reads; so
numbers are unique on the machine, and the same whatever the firmware calls its packages. NUMA nodes keep the
kernel's ids, which may have gaps; ``Machine.assigned_nodes`` has the node of a CPU for which the kernel names
none.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.pools.published_pools import Groups


class CpuLocation(Struct, frozen=True, order=True):
    """The core, socket and NUMA node of one CPU."""

    cpu: int
    core: int
    socket: int
    node: int


def locations_of(machine: Machine) -> tuple[CpuLocation, ...]:
    """Return the locations of a machine's online CPUs, ascending by CPU."""
    cores = {name: number for number, name in enumerate(machine.cores)}
    sockets = {name: number for number, name in enumerate(machine.packages)}
    nodes = machine.assigned_nodes
    return tuple(
        CpuLocation(cpu.id, cores[cpu.core], sockets[cpu.package], nodes[cpu.id]) for cpu in machine.cpus
    )


def groups_of(locations: Iterable[CpuLocation]) -> Groups:
    """Return the CPUs of each socket and node."""
    bits: dict[tuple[int, int], int] = {}
    for location in locations:
        group = location.socket, location.node
        bits[group] = bits.get(group, 0) | 1 << location.cpu
    return {group: CpuSet.from_bits(bits[group]) for group in sorted(bits)}
