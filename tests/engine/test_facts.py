"""Facts of the node's matters: events replace them, and the ledger follows those that it keeps."""

from __future__ import annotations

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.handle import handle
from proxy.engine.node import Node
from proxy.engine.node_effects import PutRecord
from proxy.engine.node_events import FactsLearned, LedgerRead
from proxy.engine.partition import PartitionFacts, PartitionRecord
from proxy.engine.quotas import QuotaRecord, RemovedQuotas
from proxy.engine.state import NodeState
from proxy.engine.suppression import KEY, BeSuppression
from proxy.engine.write_conflicts import CpusetsRepaired, FindWriters
from proxy.model.idset import CpuSet
from proxy.topology.build import described
from tests.testkit.changed_copy import changed_copy

MACHINE = described(1, 1, 4, 2)
EMPTY = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE)))
RECORD = PartitionRecord("kubepods/x", CpuSet([1]), "root", {})
QUOTAS = RemovedQuotas({"q/a": QuotaRecord(1, "kubepods/a"), "qc/x": QuotaRecord(2)})


def learn(
    state: NodeState, *, recorded: bool = True, **facts: object
) -> tuple[NodeState, tuple[object, ...]]:
    return handle(state, FactsLearned(changed_copy(state.facts, **facts), recorded))


def test_the_ledger_follows_what_it_keeps() -> None:
    state, effects = learn(EMPTY, quotas=QUOTAS)
    assert effects == (
        PutRecord("q/a", {"quota": 1, "group": "kubepods/a"}),
        PutRecord("qc/x", {"quota": 2, "group": ""}),
    )
    state, effects = learn(state, quotas=QUOTAS.forget(("q/a",)), partitions=PartitionFacts({"x": RECORD}))
    assert effects == (PutRecord("q/a", None), PutRecord("x/x", RECORD.dump()))
    state, effects = learn(state, suppression=BeSuppression(written=frozenset("ba")))
    assert effects == (PutRecord(KEY, {"quota": ["a", "b"]}),)
    state, effects = learn(state, suppression=BeSuppression(failures=1))
    assert effects == (PutRecord(KEY, None),)
    _, effects = learn(state, suppression=BeSuppression(failures=2), losses={"x": "its CPU 1 is offline"})
    assert effects == ()


def test_what_comes_from_the_ledger_is_not_written_to_it() -> None:
    state, effects = learn(EMPTY, recorded=False, quotas=QUOTAS)
    assert effects == ()
    assert learn(state, quotas=RemovedQuotas())[1] == (PutRecord("q/a", None), PutRecord("qc/x", None))


def test_facts_outlive_another_machine_and_the_ledger() -> None:
    state, _ = learn(EMPTY, recorded=False, quotas=QUOTAS)
    assert state.on(described(1, 1, 2, 2)).facts == state.facts
    assert handle(state, LedgerRead((), (), {}, (), 0.0))[0].facts == state.facts


def test_writes_of_other_programs_are_events_of_the_node() -> None:
    state, effects = handle(EMPTY, CpusetsRepaired(1.0, {"x": None}))
    assert effects == (FindWriters({"x": None}),)
    assert state.facts.drift.finding
