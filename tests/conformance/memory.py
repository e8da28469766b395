"""Memory states of the vectors: reading them, and writing them down for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.allocation.memory.state import MemoryState, NodeMemory, NumaMemory, ResourceTable
from proxy.model.grants import Block
from proxy.model.idset import Mask
from tests.conformance.cases import Case

_AMOUNTS = ("total", "system_reserved", "allocatable", "reserved", "free")


def state(case: Case, prefix: str = "") -> MemoryState:
    """Read the machine state and the assignments of a case.

    Args:
        prefix: ``expected_`` for those that the case expects.
    """
    nodes = {int(i): _node(raw) for i, raw in case.optional(f"{prefix}machine_state", dict, {}).items()}
    assignments = {
        uid: {name: tuple(_block(b) for b in blocks or ()) for name, blocks in (containers or {}).items()}
        for uid, containers in case.optional(f"{prefix}assignments", dict, {}).items()
    }
    return MemoryState(dict(sorted(nodes.items())), assignments)


def _node(raw: Mapping[str, Any]) -> NumaMemory:
    reported = (raw.get("memory") or {}).items()
    tables = {name: ResourceTable(*(int(table.get(n) or 0) for n in _AMOUNTS)) for name, table in reported}
    return NumaMemory(tables, Mask(raw.get("cells") or ()), raw.get("assignments") or 0)


def _block(raw: Mapping[str, Any]) -> Block:
    return Block(Mask(raw["numa"]), raw["type"], raw["size"])


def machine(case: Case) -> tuple[NodeMemory, ...]:
    """Read what the nodes of a case have."""
    return tuple(
        NodeMemory(n["id"], n["memory"], {h["page_kib"]: h["pages"] for h in n.get("hugepages") or ()})
        for n in case.optional("machine_info", list, [])
    )


def reserved(case: Case) -> dict[int, dict[str, int]]:
    """Read the reserves of a case."""
    return {int(i): own or {} for i, own in case.optional("system_reserved", dict, {}).items()}


def shown(got: MemoryState) -> dict[str, object]:
    """Write down a state: free and reserved as sums over the group of each node, blocks in one order."""
    nodes = {
        i: (
            node.assignments,
            list(node.cells),
            {name: _table(got, node, name, i) for name in sorted(node.tables)},
        )
        for i, node in got.nodes.items()
    }
    assignments = {
        uid: {
            name: sorted((list(b.affinity), b.resource, b.size) for b in blocks)
            for name, blocks in pod.items()
        }
        for uid, pod in got.assignments.items()
        if pod
    }
    return {"machine_state": nodes, "assignments": assignments}


def _table(got: MemoryState, node: NumaMemory, name: str, i: int) -> dict[str, int]:
    own, group = node.tables[name], [got.nodes[j].table(name) for j in node.cells or (i,) if j in got.nodes]
    return {
        "total": own.total,
        "system_reserved": own.system_reserved,
        "allocatable": own.allocatable,
        "reserved": sum(table.reserved for table in group),
        "free": sum(table.free for table in group),
    }
