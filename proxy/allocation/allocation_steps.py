"""Describe the steps of an allocator in sentences, for explanations.

An allocator notes the CPUs that it takes, unit by unit, and only if a record is requested. This module turns
the notes into sentence fragments: consecutive notes of one unit become one fragment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from proxy.allocation.cpu_topology import CpuTopology, Units
from proxy.model.idset import CpuSet, Mask, union
from proxy.model.phrases import counted, cpus

Note = tuple[str, int, int]
"""Kind of unit (``SOCKET`` and so on), its id, and the bits of the CPUs that were taken."""

SOCKET, NODE, UNCORE, PART, CORE, SINGLE = "socket", "NUMA node", "uncore cache", "part", "core", "single"
"""A whole socket, node or cache; a part of a cache; a whole core; a single CPU."""


def step_texts(topo: CpuTopology, notes: Iterable[Note]) -> list[str]:
    """Return notes as sentence fragments, in their order."""
    lines: list[str] = []
    for (kind, where), row in itertools.groupby(notes, lambda note: (note[0], _where(topo, note))):
        row_notes = list(row)
        bits = union(more for _, _, more in row_notes)
        if kind in (SOCKET, NODE, UNCORE):
            message = f"{kind} {where} whole"
        elif kind == PART:
            message = f"all that was still wanted from uncore cache {where}"
        elif kind == CORE:
            message = f"{counted(len(row_notes), 'whole core')} of NUMA node {where}"
        else:
            cores = [core for core, core_bits in topo.cores.items() if core_bits & bits]
            home = f"core {cores[0]}" if len(cores) == 1 else f"NUMA node {where}"
            message = f"{counted(len(row_notes), 'single CPU')} of {home}"
        lines.append(f"{message}: {cpus(CpuSet.from_bits(bits))}")
    return lines


def nodes_of(topo: CpuTopology, chosen_cpus: CpuSet) -> Mask:
    """Return the NUMA nodes that CPUs are on."""
    return Mask(node for node, bits in topo.nodes.items() if bits & chosen_cpus.bits)


def _where(topo: CpuTopology, note: Note) -> int:
    """Return the unit under which a note is listed; cores and CPUs are listed under their NUMA node."""
    kind, unit, bits = note
    return unit if kind in (SOCKET, NODE, UNCORE, PART) else _first(topo.nodes, bits)


def _first(units: Units, bits: int) -> int:
    return next(unit for unit, unit_bits in units.items() if unit_bits & bits)
