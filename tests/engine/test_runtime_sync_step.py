"""The containers whose CPUs are sent to the runtime, as a table."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.engine.call_events import CallSent, SavedCpusLearned
from proxy.engine.container_events import PhaseChanged
from proxy.engine.handle import handle
from proxy.engine.inflight import InflightCall
from proxy.engine.node_events import ModeChanged
from proxy.engine.quotas import RemovedQuotas
from proxy.engine.runtime_sync_step import SyncStep, is_transient, sync_step
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.workload import Phase, Placement, Pool
from tests.engine.test_handle import ALL, LS, NODE, OWNED, REST, SHARER
from tests.testkit.changed_copy import changed_copy

AWAITED = InflightCall(1, "ls", ALL)
STRAY = structs.replace(AWAITED, orphaned_since=1.0)
SUSPECTED = structs.replace(STRAY, resend=False, suspected=True)


@pytest.mark.parametrize(
    ("saved", "call", "unsent", "step"),
    [
        (REST, None, False, SyncStep.NOTHING),
        (ALL, None, False, SyncStep.SEND),
        (REST, None, True, SyncStep.SEND),
        (None, None, False, SyncStep.LEARN),
        (ALL, AWAITED, False, SyncStep.SEND),
        (ALL, STRAY, False, SyncStep.AWAIT),
        (ALL, STRAY, True, SyncStep.AWAIT),
        (ALL, SUSPECTED, False, SyncStep.AWAIT),
        (ALL, SUSPECTED, True, SyncStep.SEND),
    ],
)
def test_the_next_step(saved: CpuSet | None, call: InflightCall | None, unsent: bool, step: SyncStep) -> None:
    state, _ = handle(OWNED, SavedCpusLearned("ls", saved))
    if call is not None:
        state, _ = handle(state, CallSent(call))
    if unsent:
        quotas = RemovedQuotas(unsent=frozenset(("ls",)))
        state = state.with_facts(quotas=quotas)
    assert sync_step(state, "ls") is step
    ended, _ = handle(state, PhaseChanged("ls", Phase.EXITED))
    released, _ = handle(state, ModeChanged(NodeMode.RELEASED))
    assert [sync_step(other, "ls") for other in (ended, released)] == [SyncStep.NOTHING] * 2


def test_a_cpuset_that_is_narrow_while_be_is_suppressed_is_not_made_lasting() -> None:
    be = changed_copy(SHARER, placement=Placement(Pool.BE, CpuSet(), SHARER.placement.mems))
    state, _ = handle(NodeState.of(NODE, [LS], [be]), SavedCpusLearned("ls", ALL))
    assert not is_transient(state, be, ALL)
    suppressed = state.with_be_limit(CpuSet.parse("0-1"))
    assert is_transient(suppressed, be, ALL)
    assert sync_step(suppressed, "ls") is SyncStep.NOTHING
    assert not is_transient(suppressed, SHARER, ALL), "only BE is suppressed"
    assert not is_transient(suppressed, be, CpuSet()), "its saved cpuset is not known"
    assert not is_transient(suppressed, be, ALL | CpuSet((99,))), (
        "an update would bring CPUs that are not BE's"
    )


def test_what_is_saved_is_unknown_once_a_release_was_undone() -> None:
    """Updates of clients pass unread while the node is released."""
    state, _ = handle(OWNED, SavedCpusLearned("ls", ALL))
    for mode in (NodeMode.RELEASING, NodeMode.RELEASED):
        state, _ = handle(state, ModeChanged(mode))
        assert state.runtime.saved["ls"] == ALL, "else a release would update each container"
    state, _ = handle(state, ModeChanged(NodeMode.ENFORCE))
    assert sync_step(state, "ls") is SyncStep.LEARN
