"""Reading memory states, pods and hints of the vectors, and writing them down for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.model.asks import Ask, Kind, PodAsk
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask
from proxy.model.memory import Block
from proxy.place.memory.state import MemoryState, Node, NodeMemory, Table
from tests.conformance.cases import Case

MANAGED = "PodLevelResourceManagers"


def pod(case: Case) -> PodAsk:
    """Read the pod of a case."""
    raw, gates = case.value("pod", dict), case.fields.get("gates") or []
    init = tuple(_ask(c, Kind.SIDECAR if c.get("restartable") else Kind.INIT) for c in raw["init"])
    own = raw.get("resources")
    return PodAsk(
        raw["uid"],
        init + tuple(_ask(c, Kind.APP) for c in raw["containers"]),
        raw.get("qos_with_pod_level_resources", raw["qos"]) == "Guaranteed",
        None if own is None else _amounts(own.get("requests") or {}),
        MANAGED in gates,
    )


def _ask(raw: Mapping[str, Any], kind: Kind) -> Ask:
    return Ask(raw["name"], kind, _amounts(raw["requests"]), _amounts(raw["limits"]))


def _amounts(raw: Mapping[str, Any]) -> dict[str, int]:
    return {name: round(amount * 1000) if name == "cpu" else int(amount) for name, amount in raw.items()}


def state(case: Case) -> MemoryState:
    """Read the machine state and the assignments of a case."""
    nodes = {int(i): _node(raw) for i, raw in (case.fields.get("machine_state") or {}).items()}
    assignments = {
        uid: {name: tuple(_block(b) for b in blocks) for name, blocks in containers.items()}
        for uid, containers in (case.fields.get("assignments") or {}).items()
    }
    return MemoryState(dict(sorted(nodes.items())), assignments)


def _node(raw: Mapping[str, Any]) -> Node:
    tables = {name: Table(**table) for name, table in raw["memory"].items()}
    return Node(tables, Mask(raw["cells"]), raw["assignments"])


def _block(raw: Mapping[str, Any]) -> Block:
    return Block(Mask(raw["numa"]), raw["type"], raw["size"])


def machine(case: Case) -> tuple[NodeMemory, ...]:
    """Read what the nodes of a case have."""
    return tuple(
        NodeMemory(n["id"], n["memory"], {h["page_kib"]: h["pages"] for h in n.get("hugepages") or ()})
        for n in case.fields.get("machine_info") or ()
    )


def reserved(case: Case) -> dict[int, dict[str, int]]:
    """Read the reserves of a case."""
    return {int(i): own for i, own in (case.fields.get("system_reserved") or {}).items()}


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


def _table(got: MemoryState, node: Node, name: str, i: int) -> dict[str, int]:
    own, group = node.tables[name], [got.nodes[j].table(name) for j in node.cells or (i,)]
    return {
        "total": own.total,
        "system_reserved": own.system_reserved,
        "allocatable": own.allocatable,
        "reserved": sum(table.reserved for table in group),
        "free": sum(table.free for table in group),
    }


def expected_state(case: Case) -> MemoryState:
    """Read the state that a case expects."""
    fields = {
        "machine_state": case.fields["expected_machine_state"],
        "assignments": case.fields["expected_assignments"],
    }
    return state(Case(case.index, fields))


def hints_shown(hints: Hints) -> dict[str, list[tuple[list[int] | None, bool]] | None]:
    """Write down a provider's answer; nothing at all is an empty answer."""
    return {name: None if each is None else [_hint(h) for h in each] for name, each in (hints or {}).items()}


def _hint(each: TopologyHint) -> tuple[list[int] | None, bool]:
    return None if each.affinity is None else list(each.affinity), each.preferred


def hints(raw: Mapping[str, Any] | None) -> Hints:
    """Read hints by resource."""
    return {n: None if each is None else [hint(h) for h in each] for n, each in (raw or {}).items()}


def hint(raw: Mapping[str, Any]) -> TopologyHint:
    """Read one hint."""
    affinity = raw["affinity"]
    return TopologyHint(None if affinity is None else Mask(affinity), raw["preferred"])
