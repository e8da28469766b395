"""Creates that another program sends to the runtime, and repeated creates."""

from __future__ import annotations

import pytest

from proxy.engine.container_events import (
    ContainerCreated,
    ContainersRemoved,
    CreateDelegated,
    CreateRequested,
)
from proxy.engine.handle import handle
from proxy.engine.node_effects import NotifyFailed, PlanDecided, PutRecord
from proxy.engine.node_events import LedgerRead, SandboxRunning, SandboxStopped
from proxy.engine.runtime_knowledge import (
    REMEMBERED_DELEGATED,
    CreateKey,
    DelegatedCreate,
    clients_request,
)
from proxy.engine.state import NodeState
from proxy.model.workload import Pod, Request
from tests.engine.test_handle import EMPTY, FOUR, LSE, OWN, changed_copy

RETURNED = DelegatedCreate("t-1", "0-3", "0", -1)
SENT = Request(4096, -1, 100_000, cpuset_cpus="0-3", cpuset_mems="0")


def delegated() -> NodeState:
    """The node with the create of an owner, whose decision was returned to a caller."""
    state, _ = handle(EMPTY, CreateRequested(LSE, "c", 0, FOUR, "t-1"))
    state, effects = handle(state, CreateDelegated("t-1", "0-3", "0", -1))
    assert not effects
    return state


def test_a_repeated_create_replaces_the_first_decision() -> None:
    state, effects = handle(delegated(), CreateRequested(LSE, "c", 0, SENT, "t-2"))
    assert (PutRecord("i/t-1", None), NotifyFailed("t-1")) == (effects[0], effects[-3])
    decided = effects[-1]
    assert isinstance(decided, PlanDecided)
    assert decided.withdrawn == "t-1"
    assert list(state.containers) == ["t-2"]
    assert state.containers["t-2"].request == FOUR, "the values of the client count"
    assert state.containers["t-2"].placement.exclusive == OWN
    assert not state.runtime.delegated_creates


def test_a_create_of_another_or_of_a_created_container_replaces_no_decision() -> None:
    for state, attempt in ((delegated(), 1), (handle(delegated(), ContainerCreated("t-1", "id"))[0], 0)):
        *_, decided = handle(state, CreateRequested(LSE, "c", attempt, SENT, "t-2"))[1]
        assert isinstance(decided, PlanDecided)
        assert not decided.withdrawn


def test_a_create_that_is_not_known_is_not_remembered() -> None:
    assert handle(EMPTY, CreateDelegated("t-9", "", "", 0)) == (EMPTY, ())


@pytest.mark.parametrize(
    ("again", "meant"),
    [
        (SENT, FOUR),
        (Request(4096, 5, 100_000, cpuset_cpus="1", cpuset_mems="1"), None),
        (Request(4096, 400_000, 100_000, cpuset_cpus="0-3"), FOUR),
    ],
)
def test_changes_by_the_caller_since_the_first_create_count(again: Request, meant: Request | None) -> None:
    assert clients_request(again, RETURNED, FOUR) == (meant or again)


def test_the_oldest_decisions_are_forgotten_first() -> None:
    first = delegated().containers["t-1"]
    keys = [CreateKey(first.pod.sandbox_id, "c", attempt) for attempt in range(REMEMBERED_DELEGATED + 1)]
    known = EMPTY.runtime
    for attempt in range(REMEMBERED_DELEGATED + 1):
        known = known.with_delegated_create(changed_copy(first, attempt=attempt), RETURNED)
    assert list(known.delegated_creates) == keys[1:]
    known = known.with_delegated_create(changed_copy(first, attempt=1), RETURNED)
    assert list(known.delegated_creates) == [*keys[2:], keys[1]]


def test_a_later_pod_of_the_same_name_supersedes_the_earlier_one() -> None:
    old = Pod("s-1", "u-1", "ns", "web")
    again, new = (
        changed_copy(old, sandbox_id="s-3", attempt=1),
        changed_copy(old, sandbox_id="s-2", uid="u-2"),
    )
    other, elsewhere = Pod("s-4", "u-4", "ns", "db"), Pod("s-5", "u-5", "other", "web")
    state = EMPTY
    for pod in (old, other, elsewhere):
        state, _ = handle(state, SandboxRunning(pod))
    assert not state.runtime.superseded
    state, _ = handle(state, SandboxRunning(new))
    assert state.runtime.superseded == {"u-1"}
    state, _ = handle(state, SandboxRunning(again))
    assert state.runtime.superseded == {"u-1"}, "another sandbox does not make it newer"
    read, _ = handle(EMPTY, LedgerRead((old, other, elsewhere, new, again), (), {}, (), 0.0))
    assert read.runtime.superseded == {"u-1"}
    state, _ = handle(state, SandboxStopped("s-1"))
    assert state.runtime.superseded == {"u-1"}
    state, _ = handle(state, SandboxStopped("s-3"))
    assert not state.runtime.superseded


def test_what_happens_to_containers_leaves_superseded_pods_as_they_are() -> None:
    state, _ = handle(EMPTY, SandboxRunning(LSE))
    state, _ = handle(state, SandboxRunning(changed_copy(LSE, sandbox_id="s-2", uid="u-2")))
    state, _ = handle(state, CreateRequested(LSE, "c", 0, FOUR, "t-1"))
    state, _ = handle(state, ContainerCreated("t-1", "id"))
    state, _ = handle(state, ContainersRemoved(("id",)))
    assert state.runtime.superseded == {LSE.uid}
