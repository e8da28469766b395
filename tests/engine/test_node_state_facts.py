"""Facts about the node: events replace them, and the ledger stores some of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Struct

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.handle import handle
from proxy.engine.node import Node
from proxy.engine.node_effects import PutRecord, fact_records
from proxy.engine.node_events import LedgerRead, NodeEvent
from proxy.engine.node_policy import NodePolicy
from proxy.engine.node_state_facts import NodeStateFacts
from proxy.engine.partition import PartitionFacts, PartitionRecord
from proxy.engine.quotas import QuotaRecord, RemovedQuotas
from proxy.engine.state import NodeState
from proxy.engine.suppression import SUPPRESSION_RECORD, BeSuppression
from proxy.engine.systemd_masks import MaskOrder
from proxy.engine.write_conflicts import CpusetsRepaired, FindWriters
from proxy.model.idset import CpuSet
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(1, 1, 4, 2)
EMPTY = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE)))
RECORD = PartitionRecord("kubepods/x", CpuSet([1]), "root", {})
QUOTAS = RemovedQuotas({"q/a": QuotaRecord(1, "kubepods/a"), "qc/x": QuotaRecord(2)})


def test_the_ledger_is_updated_with_the_facts_that_it_stores() -> None:
    state = EMPTY.with_facts(quotas=QUOTAS)
    assert fact_records(EMPTY, state) == (
        PutRecord("q/a", {"quota": 1, "group": "kubepods/a"}),
        PutRecord("qc/x", {"quota": 2, "group": ""}),
    )
    before, state = (
        state,
        state.with_facts(quotas=QUOTAS.forget(("q/a",)), partitions=PartitionFacts({"x": RECORD})),
    )
    assert fact_records(before, state) == (PutRecord("q/a", None), PutRecord("x/x", RECORD.dump()))
    before, state = state, state.with_facts(suppression=BeSuppression(written=frozenset("ba")))
    assert fact_records(before, state) == (PutRecord(SUPPRESSION_RECORD, {"quota": ["a", "b"]}),)
    before, state = state, state.with_facts(suppression=BeSuppression(failures=1))
    assert fact_records(before, state) == (PutRecord(SUPPRESSION_RECORD, None),)
    after = state.with_facts(suppression=BeSuppression(failures=2), losses={"x": "its CPU 1 is offline"})
    assert fact_records(state, after) == ()


def test_facts_outlive_another_machine_and_the_ledger() -> None:
    state = EMPTY.with_facts(quotas=QUOTAS)
    assert state.with_machine(regular_machine(1, 1, 2, 2)).facts == state.facts
    assert handle(state, LedgerRead((), (), {}, (), 0.0))[0].facts == state.facts


def test_writes_of_other_programs_are_events_of_the_node() -> None:
    state, effects = handle(EMPTY, CpusetsRepaired(1.0, {"x": None}))
    assert effects == (FindWriters({"x": None}),)
    assert state.facts.drift.finding


# -- events report, the engine concludes --------------------------------------------------------------------


def types_in(hint: Any) -> Iterator[type]:
    """Yield the types that a type hint is made of."""
    if parts := get_args(hint):
        for part in parts:
            yield from types_in(part)
    elif isinstance(hint, type):
        yield hint


def types_of_fields(kind: type) -> set[type]:
    hints = get_type_hints(kind, localns={"NodePolicy": NodePolicy})
    return {each for hint in hints.values() for each in types_in(hint)}


def carried_by(event: type) -> set[type]:
    """Return the types of an event's fields, of the fields of those, and so on."""
    found, due = set[type](), {event}
    while due:
        found |= due
        due = {each for kind in due if issubclass(kind, Struct) for each in types_of_fields(kind)} - found
    return found


CONCLUSIONS = {NodeStateFacts, NodeState} | {
    kind for kind in types_of_fields(NodeStateFacts) if kind.__module__.startswith("proxy.engine.")
}
"""What only the engine makes; facts of other types are what was read."""


def test_no_event_carries_conclusions_of_the_engine() -> None:
    assert {MaskOrder, NodePolicy, RemovedQuotas, PartitionFacts, BeSuppression} < CONCLUSIONS
    found = {event.__name__: carried_by(event) & CONCLUSIONS for event in get_args(NodeEvent)}
    assert {event: kinds for event, kinds in found.items() if kinds} == {}


class PolicyDecided(Struct):
    policy: NodePolicy | None


class PoliciesDecided(Struct):
    decided: Mapping[str, tuple[PolicyDecided, ...]]


class FactsReplaced(Struct):
    facts: NodeStateFacts


class OrderFound(Struct):
    masks: MaskOrder = MaskOrder.UNKNOWN


@pytest.mark.parametrize("event", [PolicyDecided, PoliciesDecided, FactsReplaced, OrderFound])
def test_an_event_with_a_conclusion_is_found(event: type) -> None:
    assert carried_by(event) & CONCLUSIONS
