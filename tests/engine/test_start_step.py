"""The next step before a start, as a table."""

from __future__ import annotations

import pytest

from proxy.engine.call_events import CallSent, SavedCpusLearned
from proxy.engine.container_events import PhaseChanged
from proxy.engine.handle import handle
from proxy.engine.inflight import InflightCall
from proxy.engine.quotas import RemovedQuotas
from proxy.engine.start_step import StartStep, is_below_class, start_step
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BeCpuset
from proxy.model.workload import KubeQos, Phase
from tests.engine.test_handle import ALL, LS, LSE, NODE, OWN, OWNER, REST, SHARER
from tests.testkit.changed_copy import changed_copy

BOTH = NodeState.of(NODE, [LS, LSE], [changed_copy(one, phase=Phase.CREATED) for one in (SHARER, OWNER)])


@pytest.mark.parametrize(
    ("container", "saved", "carried", "unsent", "step"),
    [
        ("ls", REST, None, False, StartStep.READY),
        ("ls", ALL, None, False, StartStep.SEND),
        ("ls", None, None, False, StartStep.SEND),
        ("ls", REST, None, True, StartStep.SEND),
        ("ls", REST, ALL, False, StartStep.AWAIT_OTHERS),
        ("ls", REST, REST, False, StartStep.READY),
        ("ls", ALL, REST, False, StartStep.AWAIT_ALL),
        ("lse", OWN, None, False, StartStep.CLEAR),
        ("lse", ALL, None, False, StartStep.SEND),
        ("lse", OWN, ALL, False, StartStep.AWAIT_OTHERS),
        ("lse", OWN, None, True, StartStep.SEND),
        ("unknown", None, None, False, StartStep.READY),
    ],
)
def test_the_next_step(
    container: str, saved: CpuSet | None, carried: CpuSet | None, unsent: bool, step: StartStep
) -> None:
    state, _ = handle(BOTH, SavedCpusLearned(container, saved))
    if carried is not None:
        state, _ = handle(state, CallSent(InflightCall(1, container, carried)))
    if unsent:
        quotas = RemovedQuotas(unsent=frozenset((container,)))
        state = state.with_facts(quotas=quotas)
    assert start_step(state, container) is step


def test_a_running_container_needs_no_step() -> None:
    state, _ = handle(BOTH, PhaseChanged("lse", Phase.RUNNING))
    assert start_step(state, "lse") is StartStep.READY


def test_a_container_without_its_own_cpuset_starts_with_the_cpuset_of_its_pod() -> None:
    be = changed_copy(LS, kube_qos=KubeQos.BEST_EFFORT)
    node = changed_copy(NODE, be_cpuset=BeCpuset.ERASE)
    some = changed_copy(SHARER, pod=be, phase=Phase.CREATED)
    state = NodeState.of(node, [be], [some])
    assert is_below_class(state, some)
    assert not is_below_class(BOTH, some)
