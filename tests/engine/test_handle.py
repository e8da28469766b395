"""Events of a node as playbooks: each event with its effects, and the state after it."""

from __future__ import annotations

import ast
import typing
from pathlib import Path

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine import handle as engine
from proxy.engine import runtime_knowledge
from proxy.engine.call_answers import Refuse
from proxy.engine.call_events import (
    CallCompleted,
    CallConfined,
    CallOrphaned,
    CallSent,
    OrphanEnded,
    OrphanListed,
    ResendWanted,
    RuntimeSyncDue,
    RuntimeSyncStarted,
    SavedCpusLearned,
    StartEnded,
    StartRefused,
    UpdateEnded,
    UpdateRequested,
)
from proxy.engine.container_events import (
    ContainerCreated,
    ContainerFound,
    ContainerIsBack,
    ContainersRemoved,
    ContainersUpdated,
    ContainerTouched,
    CpusAssigned,
    CpusNotFreed,
    CreateFailed,
    CreateLost,
    CreateRequested,
    PhaseChanged,
)
from proxy.engine.handle import handle
from proxy.engine.inflight import InflightCall
from proxy.engine.inflight_call_rules import ORPHAN_GRACE_S
from proxy.engine.node import Node
from proxy.engine.node_effects import (
    CallOver,
    Change,
    CompareCpusets,
    CompareUnits,
    KubeletCpusChanged,
    NodePolicyApplied,
    NotifyCpusAssigned,
    NotifyCreated,
    NotifyEntered,
    NotifyFailed,
    NotifyListed,
    NotifyPodFound,
    NotifyPodRemoved,
    NotifyPodStopped,
    NotifyRemoved,
    OrphanOver,
    PlanDecided,
    PodDecided,
    PutRecord,
    SyncRuntimeSoon,
    WriteCpusets,
    WriteScope,
)
from proxy.engine.node_events import (
    EnforcementChanged,
    HardwareChanged,
    KubeletCpusRead,
    LedgerRead,
    ModeChanged,
    NodeEvent,
    NodePolicyRead,
    ReservationCpusChanged,
    RuntimeListed,
    TakeoverChanged,
)
from proxy.engine.owners import ReservationCpus
from proxy.engine.pod_events import (
    PodChangedByHook,
    PodLearned,
    SandboxFailed,
    SandboxRemoved,
    SandboxRequested,
    SandboxRunning,
    SandboxStopped,
)
from proxy.engine.reservation_effects import AbortReason, RequestReconcile
from proxy.engine.runtime_knowledge import ChangeSequence
from proxy.engine.runtime_sync_step import SyncStep, sync_step
from proxy.engine.state import NodeState
from proxy.model.admission import Namespaces
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BeCpuset
from proxy.model.kubelet import CpuManager
from proxy.model.mode import NodeMode
from proxy.model.options import TopologyOptions
from proxy.model.pod_selection import PodSelection
from proxy.model.requests import ContainerResources, PodRequests
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy
from tests.testkit.playbook import Playbook

MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
SMALLER = changed_copy(MACHINE, cpus=tuple(cpu for cpu in MACHINE.cpus if cpu.id != 3))
ALL, REST, OWN = CpuSet.parse("0-15"), CpuSet.parse("4-15"), CpuSet.parse("0-3")
LS = Pod("s-ls", "ls", "ns", "ls", qos=QosClass.LS, kube_qos=KubeQos.BURSTABLE)
LSE = Pod("s-lse", "lse", "ns", "lse", qos=QosClass.LSE, kube_qos=KubeQos.GUARANTEED, cpuset=OWN)
FOUR = Request(cpu_shares=4096, cpu_quota=400_000, cpu_period=100_000)
SHARER = Container("ls", "c", LS, Request(), Placement(Pool.SHARED, CpuSet(), Mask((0, 1))), Phase.RUNNING)
OWNER = Container(
    "lse", "c", LSE, FOUR, Placement(Pool.OWN, OWN, Mask((0,)), excludes_be=True), Phase.RUNNING, 0, "lse"
)
EMPTY = NodeState.empty(NODE)
SHARED = NodeState.of(NODE, [LS], [SHARER])
OWNED = NodeState.of(NODE, [LS, LSE], [SHARER, OWNER])


class ExpectedPoolChange:
    """Matches a change of the pools with any states before and after it."""

    def __init__(self, write_scope: WriteScope = WriteScope.MOVED, moved: str = "ls") -> None:
        self.wanted = write_scope, moved

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Change) and (other.write_scope, ",".join(other.moved)) == self.wanted

    def __repr__(self) -> str:
        return f"ExpectedPoolChange{self.wanted}"


class AnyPlan:
    """Matches the answer to a request by the placed container, or by none."""

    def __init__(self, token: str = "") -> None:
        self.token = token

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlanDecided):
            return False
        return (other.plan.container.id if other.plan.container else "") == self.token


def scenario(state: NodeState) -> Playbook[NodeState]:
    return Playbook(state, handle)


def creating(token: str = "t", pod: Pod = LS) -> NodeState:
    """Return a node on which a create is in flight."""
    return handle(SHARED.with_pod(pod), CreateRequested(pod, "d", 0, FOUR, token))[0]


def number(state: NodeState) -> int:
    return state.runtime.changes.number


# -- creates ------------------------------------------------------------------------------------------------


def test_a_create_of_a_container_that_shares() -> None:
    play = scenario(SHARED)
    assert play >> CreateRequested(LS, "d", 0, Request(cpu_shares=2), "t") << AnyPlan("t")
    made = changed_copy(play.state.containers["t"], id="d", phase=Phase.CREATED)
    assert play >> ContainerCreated("t", "d", ALL) << PutRecord("c/d", made) << NotifyCreated("t", made)
    assert (set(play.state.containers), play.state.runtime.saved["d"]) == ({"ls", "d"}, ALL)
    assert not play.state.runtime.changes.is_unchanged("d", 0)


def test_a_create_of_an_owner() -> None:
    play = scenario(SHARED.with_pod(LSE))
    change = ExpectedPoolChange(WriteScope.CALLER)
    assert play >> CreateRequested(LSE, "c", 0, FOUR, "t") << change << AnyPlan("t")
    assert play.state.pools.shared == REST
    made = changed_copy(play.state.containers["t"], id="o", phase=Phase.CREATED)
    play >> ContainerCreated("t", "o")
    assert play << PutRecord("c/o", made) << PutRecord("i/t", None) << NotifyCreated("t", made)
    assert "o" not in play.state.runtime.saved, "the cpuset that the runtime applied is not known"


def test_the_pools_follow_the_create_of_an_observed_owner_at_once() -> None:
    """The create is forwarded unchanged; no reservation writes the containers that lose CPUs by the plan."""
    selection = PodSelection(Namespaces(("others",)))
    enforcing = structs.replace(SHARED.with_pod(LSE), mode=NodeMode.ENFORCE)
    play = scenario(handle(enforcing, EnforcementChanged(selection))[0])
    change = ExpectedPoolChange(WriteScope.MOVED)
    assert play >> CreateRequested(LSE, "c", 0, FOUR, "t") << change << AnyPlan("t")


def test_a_pool_without_cpus_gives_none() -> None:
    """Owners of an earlier run own all that the rules leave; to the runtime, an empty set means all CPUs."""
    kept = changed_copy(NODE, node_reservation=REST)
    play = scenario(handle(NodeState.empty(kept), LedgerRead((LS, LSE), (SHARER, OWNER), {}, (), 0.0))[0])
    assert not play.state.pools.shared
    _, effects = handle(play.state, CreateRequested(LS, "d", 0, Request(cpu_shares=2), "t"))
    decided = effects[-1]
    assert isinstance(decided, PlanDecided)
    assert decided.plan.container is None
    assert decided.answer == Refuse(
        GrpcStatus.FAILED_PRECONDITION,
        "cannot place ns/ls/d: its pool has no CPUs: owners have all that are online and not reserved",
    )
    _, effects = handle(play.state, UpdateRequested("ls", "", "", 0))
    assert isinstance(effects[-1], Refuse)
    unsaved = handle(play.state, SavedCpusLearned("ls", ALL))[0]
    assert sync_step(unsaved, "ls") is SyncStep.NOTHING
    # The next reading of the rules keeps only what leaves the shared pool some CPUs.
    play = scenario(play.state)
    play >> NodePolicyRead(kept, TopologyOptions(), None, None)
    assert play.state.pools.shared == REST
    policy = play.state.facts.policy
    assert policy is not None
    assert policy.reservation.problem == (
        "cannot keep CPUs 4-15 back: they would leave the shared pool empty"
        " (the previous value stays in effect: none)"
    )
    again, _ = handle(play.state, NodePolicyRead(kept, TopologyOptions(), None, None))
    assert (again.pools.shared, again.facts.policy) == (REST, policy)


def test_a_create_that_is_refused_changes_nothing() -> None:
    taken = changed_copy(LSE, uid="other", sandbox_id="s-other")
    play = scenario(OWNED.with_pod(taken))
    before = play.state
    assert play >> CreateRequested(taken, "c", 0, FOUR, "t") << AnyPlan()
    assert play.state is before


def test_a_failed_create_releases_its_cpus() -> None:
    play = scenario(creating(pod=LSE))
    play >> CreateFailed("t")
    assert play << PutRecord("i/t", None) << ExpectedPoolChange() << NotifyFailed("t")
    assert play.state.pools.shared == ALL
    assert play >> CreateFailed("t"), "a second event changes nothing"


def test_the_cpus_of_a_container_are_unknown_after_a_failed_create() -> None:
    play = scenario(handle(creating(), CreateFailed("t"))[0])
    play >> CreateRequested(LS, "d", 0, FOUR, "u") << AnyPlan("u")
    state, _ = handle(play.state, ContainerCreated("u", "d", ALL))
    assert "d" not in state.runtime.saved
    again, _ = handle(
        handle(state, CreateRequested(LS, "d", 0, FOUR, "v"))[0], ContainerCreated("v", "e", ALL)
    )
    assert again.runtime.saved["e"] == ALL, "the failed create was remembered for one answer"


def test_only_the_newest_failed_creates_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_knowledge, "REMEMBERED_FAILURES", 2)
    known = EMPTY.runtime
    for name in "abc":
        known = known.with_failed_create(changed_copy(SHARER, name=name))
    assert [name for _, name, _ in known.failed_creates] == ["b", "c"]


def test_a_create_whose_client_has_disconnected() -> None:
    play = scenario(creating())
    assert play >> CreateLost("t", 5.0) << RequestReconcile()
    assert dict(play.state.runtime.lost_creates) == {"t": 5.0}
    made = changed_copy(play.state.containers["t"], id="d", phase=Phase.CREATED)
    assert play >> ContainerCreated("t", "d") << PutRecord("c/d", made) << NotifyCreated("t", made)
    assert dict(play.state.runtime.lost_creates) == {}
    assert play >> CreateLost("t", 6.0), "the outcome of the create is known already"
    assert play >> ContainerCreated("t", "d"), "a duplicate answer changes nothing"


def test_a_create_whose_cpus_cannot_be_freed_is_placed_elsewhere() -> None:
    pod = changed_copy(LSE, cpuset=None)
    play = scenario(creating(pod=pod))
    first = play.state.containers["t"].placement.exclusive
    play >> CpusNotFreed("t", AbortReason("stuck", first), "u")
    play << PutRecord("i/t", None) << ExpectedPoolChange() << NotifyFailed("t")
    assert play << ExpectedPoolChange(WriteScope.CALLER) << AnyPlan("u")
    placement = play.state.containers["u"].placement
    assert placement.exclusive.isdisjoint(first)
    assert placement.reasons[-1] == f"not on CPUs {first}, which could not be freed: stuck"
    assert "t" not in play.state.containers
    assert play >> CpusNotFreed("t", AbortReason("stuck", first), "v"), "the container is gone"


def test_a_resized_container_that_is_placed_elsewhere_keeps_its_new_number_of_cpus() -> None:
    two = ContainerResources("c", requests={"cpu": 2000}, limits={"cpu": 2000})
    pod = Pod("s-g", "g", "ns", "g", requests=PodRequests("g", (two,)))
    state, _ = handle(SHARED.with_pod(pod), CreateRequested(pod, "c", 0, FOUR, "t"))
    first = state.containers["t"].placement.exclusive
    assert len(first) == 4
    after, _ = handle(state, CpusNotFreed("t", AbortReason("stuck", first), "u"))
    elsewhere = after.containers["u"]
    assert (len(elsewhere.placement.exclusive), elsewhere.pod) == (4, state.containers["t"].pod)


def test_a_sandbox_that_is_reported_late_ends_no_container_of_a_later_one() -> None:
    newer = changed_copy(LSE, sandbox_id="s-2", attempt=1)
    running = changed_copy(OWNER, pod=newer)
    state = NodeState.of(NODE, [newer], [running])
    after, _ = handle(state, SandboxRunning(LSE))
    assert after.containers["lse"].phase is Phase.RUNNING
    newest, _ = handle(state, SandboxRunning(changed_copy(newer, sandbox_id="s-3", attempt=2)))
    assert newest.containers["lse"].phase is Phase.EXITED


def test_a_later_sandbox_ends_no_create_that_is_under_way() -> None:
    state = NodeState.of(NODE, [LSE], [changed_copy(OWNER, phase=Phase.CREATING)])
    after, _ = handle(state, SandboxRunning(changed_copy(LSE, sandbox_id="s-2", attempt=1)))
    assert after.containers["lse"].phase is Phase.CREATING


def test_a_create_on_named_cpus_cannot_be_placed_elsewhere() -> None:
    play = scenario(creating(pod=LSE))
    before = play.state
    assert play >> CpusNotFreed("t", AbortReason("stuck", OWN), "u")
    assert play.state is before


def test_a_container_found_at_the_runtime_keeps_its_cpus() -> None:
    play = scenario(SHARED.with_pod(LSE))
    request = changed_copy(FOUR, cpuset_cpus="0-3")
    play >> ContainerFound("o", LSE, "c", 0, request, Phase.RUNNING, OWN)
    assert play << PutRecord("c/o", play.state.containers["o"]) << ExpectedPoolChange() << AnyPlan("o")
    assert (play.state.pools.shared, play.state.runtime.saved["o"]) == (REST, OWN)


RIVAL = Pod("s-u", "u", "ns", "u", qos=QosClass.LSE, kube_qos=KubeQos.GUARANTEED, cpuset=CpuSet((3, 4)))
RIVAL_CREATE = Container(
    "t", "c", RIVAL, Request(), Placement(Pool.OWN, CpuSet((3, 4)), Mask((0,))), Phase.CREATING, 0, "u"
)


@pytest.mark.parametrize("pod", [LSE, changed_copy(LSE, cpuset=None)])
def test_an_owner_that_runs_keeps_the_cpus_that_the_record_of_a_lost_create_still_has(pod: Pod) -> None:
    """The ledger could not be written when the create failed, and another container got its CPUs."""
    play = scenario(handle(EMPTY, LedgerRead((LS, RIVAL, pod), (SHARER, RIVAL_CREATE), {}, ("t",), 5.0))[0])
    request = changed_copy(FOUR, cpuset_cpus="0-3")
    play >> ContainerFound("o", pod, "c", 0, request, Phase.RUNNING, OWN)
    play << PutRecord("i/t", None) << ExpectedPoolChange() << NotifyFailed("t")
    assert play << PutRecord("c/o", play.state.containers["o"]) << ExpectedPoolChange() << AnyPlan("o")
    assert play.state.containers["o"].placement.exclusive == OWN
    assert not play.state.runtime.lost_creates


@pytest.mark.parametrize(
    ("phase", "cpus", "lost"),
    [(Phase.CREATED, "0-3", ("t",)), (Phase.RUNNING, "0-2,4-7", ("t",)), (Phase.RUNNING, "0-3", ())],
)
def test_a_create_in_flight_keeps_its_cpus_if_no_owner_can_run_on_them(
    phase: Phase, cpus: str, lost: tuple[str, ...]
) -> None:
    """The container has not started, does not run as an owner would, or the create is not lost."""
    play = scenario(handle(EMPTY, LedgerRead((LS, RIVAL, LSE), (SHARER, RIVAL_CREATE), {}, lost, 5.0))[0])
    play >> ContainerFound("o", LSE, "c", 0, changed_copy(FOUR, cpuset_cpus=cpus), phase, None)
    assert play.state.containers["t"].placement.exclusive == CpuSet((3, 4))
    assert play.state.containers["o"].placement.pool is not Pool.OWN


# -- phases -------------------------------------------------------------------------------------------------


def test_an_exited_container_releases_its_cpus_permanently() -> None:
    play, gone = scenario(OWNED), changed_copy(OWNER, phase=Phase.EXITED)
    play >> PhaseChanged("lse", Phase.EXITED) << PutRecord("c/lse", gone)
    assert play << ExpectedPoolChange() << NotifyEntered(gone, Phase.EXITED)
    assert play.state.pools.shared == ALL
    assert play >> PhaseChanged("lse", Phase.RUNNING), "a container that has exited stays so"
    began = number(play.state)
    assert play >> PhaseChanged("unknown", Phase.EXITED)
    assert not play.state.runtime.changes.is_unchanged("unknown", began), "a list from before is stale"
    assert play >> PhaseChanged("unknown", Phase.RUNNING)


def test_a_container_that_runs_without_a_known_start_is_sent_its_cpus() -> None:
    """The start was forwarded while the node was released, hung, and ended after the release was undone."""
    created = changed_copy(SHARER, phase=Phase.CREATED)
    running = changed_copy(SHARER, phase=Phase.RUNNING)
    play = scenario(NodeState.of(NODE, [LS], [created]))
    play >> PhaseChanged("ls", Phase.RUNNING) << PutRecord("c/ls", running) << WriteCpusets(("ls",))
    assert play << SyncRuntimeSoon() << NotifyEntered(running, Phase.RUNNING)
    assert list(play.state.runtime.awaiting_sync) == ["ls"]
    known = changed_copy(SHARER, phase=Phase.STARTING)
    play = scenario(NodeState.of(NODE, [LS], [known]))
    play >> PhaseChanged("ls", Phase.RUNNING) << PutRecord("c/ls", running)
    assert play << NotifyEntered(running, Phase.RUNNING), "its start was prepared"
    assert not play.state.runtime.awaiting_sync


def test_the_removal_of_a_container_deletes_all_facts_about_it() -> None:
    state = handle(OWNED, SavedCpusLearned("lse", OWN))[0]
    both = state.changed(put=(SHARER,))
    play = scenario(handle(both, RuntimeSyncDue(("lse", "ls")))[0])
    play >> ContainersRemoved(("lse", "unknown")) << PutRecord("c/lse", None)
    assert play << ExpectedPoolChange() << NotifyRemoved(OWNER)
    assert not play.state.runtime.saved
    assert list(play.state.runtime.awaiting_sync) == ["ls"]
    assert not play.state.runtime.changes.is_unchanged("unknown", 0)


def test_the_placement_and_the_cgroup_of_a_container_are_replaced() -> None:
    located, token = changed_copy(SHARER, cgroup="here"), changed_copy(SHARER, id="t", phase=Phase.CREATING)
    play = scenario(SHARED)
    assert play >> ContainersUpdated((located,)) << PutRecord("c/ls", located)
    assert play >> ContainersUpdated((token,)) << PutRecord("i/t", token)
    assert play >> ContainersUpdated((SHARER,), recorded=False)
    assert play.state.containers["ls"] == SHARER


def test_observers_are_notified_of_assigned_cpus() -> None:
    assert scenario(SHARED) >> CpusAssigned(("ls", "unknown")) << NotifyCpusAssigned(SHARER)


def test_a_change_makes_earlier_lists_of_the_runtime_stale() -> None:
    play = scenario(SHARED)
    assert play >> ContainerTouched("ls")
    began = number(play.state)
    assert play.state.runtime.changes.is_unchanged("ls", began)
    assert not play.state.runtime.changes.is_unchanged("ls", began - 1)
    assert play >> ContainerIsBack("ls")
    assert play.state.runtime.changes.is_unchanged("ls", 0)


def test_a_list_older_than_all_remembered_changes_is_ignored() -> None:
    changes = ChangeSequence()
    for turn in range(3 * 2048):
        changes = changes.touched(f"id-{turn % 2048}")
    assert changes.is_unchanged("id-0", changes.number)
    assert changes.is_unchanged("other", changes.number - 1024)
    assert not changes.is_unchanged("other", 0), "the oldest changes are not remembered"
    assert changes.older_since >= changes.number - 2 * 2048
    back = changes.forgotten("id-0")
    assert back.is_unchanged("id-0", changes.older_since)
    assert not back.is_unchanged("id-1", changes.older_since)


# -- sandboxes ----------------------------------------------------------------------------------------------


def test_a_sandbox_without_a_set_aside() -> None:
    play = scenario(EMPTY)
    play >> SandboxRequested(LS, Request())
    (decided,) = play._unnamed
    assert isinstance(decided, PodDecided)
    assert decided.admission.verdict.admitted
    assert play << decided
    assert play >> SandboxRunning(LS) << PutRecord("p/s-ls", LS)
    assert play.state.pods["s-ls"] == LS


def arriving(state: NodeState) -> NodeState:
    """Return the node with a sandbox in progress that has a set-aside."""
    state = state.with_pod(changed_copy(LSE, sandbox_id="token"))
    return state.with_runtime(state.runtime.with_arriving_sandbox("token"))


def test_a_pod_that_hooks_have_changed_is_recorded_until_its_sandbox_has_an_id() -> None:
    play, expected = scenario(EMPTY), changed_copy(LS, sandbox_id="token")
    assert play >> PodChangedByHook(expected) << PutRecord("p/token", expected)
    assert play.state.runtime.arriving_sandboxes == {"token"}
    assert play >> PodChangedByHook(expected), "the set-aside is recorded already"
    play >> SandboxRunning(LS, "token", is_relayed_elsewhere=True) << PutRecord("p/token", None)
    assert play << PutRecord("p/s-ls", LS) << NotifyPodFound(LS)
    assert list(play.state.pods) == ["s-ls"]
    assert not play.state.runtime.arriving_sandboxes


def test_a_sandbox_takes_the_place_of_its_token_and_of_an_older_one() -> None:
    play = scenario(arriving(OWNED))
    new, gone = changed_copy(LSE, sandbox_id="s-new", attempt=1), changed_copy(OWNER, phase=Phase.EXITED)
    play >> SandboxRunning(new, "token") << PutRecord("p/token", None) << PutRecord("c/lse", gone)
    play << ExpectedPoolChange() << NotifyEntered(gone, Phase.EXITED)
    assert play << PutRecord("p/s-new", new)
    assert set(play.state.pods) == {"s-ls", "s-lse", "s-new"}


def test_a_failed_sandbox_releases_its_set_aside() -> None:
    play = scenario(arriving(SHARED))
    assert play >> SandboxFailed("token") << PutRecord("p/token", None)
    assert set(play.state.pods) == {"s-ls"}
    assert play >> SandboxFailed("token"), "a second event changes nothing"


def test_a_stopped_sandbox_ends_its_containers() -> None:
    play, gone = scenario(OWNED), changed_copy(OWNER, phase=Phase.EXITED)
    play >> SandboxStopped("s-lse") << PutRecord("c/lse", gone) << ExpectedPoolChange()
    play << NotifyEntered(gone, Phase.EXITED) << PutRecord("p/s-lse", None)
    assert play << NotifyPodStopped(LSE)
    assert not play.state.runtime.changes.is_unchanged("s-lse", 0)
    assert play >> SandboxStopped("s-lse"), "a second event changes nothing"


def test_a_removed_sandbox_removes_its_containers() -> None:
    play = scenario(handle(OWNED, CreateRequested(LSE, "d", 0, Request(), "t"))[0])
    (play >> SandboxRemoved("s-lse") << PutRecord("c/lse", None) << ExpectedPoolChange(moved=""))
    play << NotifyRemoved(OWNER) << PutRecord("p/s-lse", None) << NotifyPodStopped(LSE)
    assert play << NotifyPodRemoved("s-lse")
    assert "t" in play.state.containers, "the create of it ends by itself"
    assert play >> SandboxRemoved("s-lse") << NotifyPodRemoved("s-lse")


def test_new_facts_about_a_pod_are_recorded() -> None:
    play, more = scenario(SHARED), changed_copy(LS, source="kubelet")
    assert play >> PodLearned(more, recorded=False)
    assert play >> PodLearned(LS) << PutRecord("p/s-ls", LS)


# -- reservations, rules, machine ---------------------------------------------------------------------------


def test_a_reservation_holds_cpus() -> None:
    play = scenario(SHARED)
    assert (
        play
        >> ReservationCpusChanged("r", ReservationCpus("o", OWN, True))
        << ExpectedPoolChange(WriteScope.CALLER)
    )
    assert play.state.pools.shared == REST
    gone = ReservationCpusChanged("r", ReservationCpus("o", CpuSet(), True))
    released, _ = handle(play.state, gone)
    assert scenario(play.state) >> gone << ExpectedPoolChange(), "its containers were removed"
    assert released.pools.shared == ALL
    assert play >> ReservationCpusChanged("r", None) << ExpectedPoolChange()
    assert play.state.pools.shared == ALL
    assert (
        play
        >> ReservationCpusChanged("r", ReservationCpus("o", CpuSet(), True), (OWNER,))
        << ExpectedPoolChange()
    )
    assert play.state.pools.shared == REST


def test_new_rules_and_a_new_machine_are_applied() -> None:
    play = scenario(handle(SHARED, SavedCpusLearned("ls", ALL))[0])
    reserved = changed_copy(NODE, node_reservation=CpuSet.parse("0"))
    nothing = NodePolicyApplied({}, ())
    read = NodePolicyRead(reserved, TopologyOptions(), None, None)
    assert play >> read << ExpectedPoolChange() << nothing
    assert play >> read << nothing, "the same rules"
    assert (
        play
        >> TakeoverChanged(static=False, reserved=CpuSet())
        << ExpectedPoolChange(WriteScope.ALL, moved="")
    )
    assert play >> TakeoverChanged(static=False, reserved=OWN), "the rules follow with the policy"
    assert play.state.facts.kubelet_reserved == OWN
    assert play >> HardwareChanged(SMALLER) << ExpectedPoolChange(WriteScope.ALL)
    assert play.state.runtime.saved["ls"] == ALL, "the facts about the runtime are kept"


def test_the_state_of_kubelets_cpu_manager_is_recorded() -> None:
    play, four, none = scenario(SHARED), CpuSet.parse("4-5"), CpuSet()
    manager = CpuManager("static", held={"g": {"c": four}})
    change = ExpectedPoolChange()
    assert play >> KubeletCpusRead(manager, manager.held) << change << KubeletCpusChanged(four, none)
    assert (play.state.facts.cpu_manager, play.state.pools.shared) == (manager, ALL - four)
    assert play >> KubeletCpusRead(manager, manager.held), "nothing has changed"
    other = changed_copy(manager, default=OWN)
    assert play >> KubeletCpusRead(other, manager.held)
    assert play.state.facts.cpu_manager == other
    assert play >> KubeletCpusRead(other, {}) << change << KubeletCpusChanged(none, four)
    assert play.state.pools.shared == ALL, "its allocations do not count any more"


def test_the_mode_is_kept_whenever_the_state_is_rebuilt() -> None:
    play = scenario(SHARED)
    assert play >> ModeChanged(NodeMode.RELEASING)
    read = LedgerRead((LS, LSE), (SHARER, OWNER), {}, ("lse",), 3.0)
    assert play >> read << ExpectedPoolChange()
    assert (play.state.mode, dict(play.state.runtime.lost_creates)) == (NodeMode.RELEASING, {"lse": 3.0})
    assert play.state.with_machine(SMALLER).mode is NodeMode.RELEASING


def test_the_ledger_has_that_cgroups_of_best_effort_were_narrowed_until_the_node_is_released() -> None:
    def narrowed(state: NodeState, event: NodeEvent) -> tuple[NodeState, list[object]]:
        after, effects = handle(state, event)
        return after, [effect.record for effect in effects if isinstance(effect, PutRecord)]

    read, released = LedgerRead((), (), {}, (), 3.0), ModeChanged(NodeMode.RELEASED)
    erasing, records = narrowed(NodeState.empty(changed_copy(NODE, be_cpuset=BeCpuset.ERASE)), read)
    assert records == [{}]
    erasing, _ = narrowed(erasing, released)
    assert erasing.facts.be_groups, "they are narrowed again, once the release is undone"
    narrowing, records = narrowed(EMPTY, read)
    assert (narrowing.facts.be_groups, records) == (False, [])
    changed, _ = narrowed(EMPTY, structs.replace(read, be_groups=True))
    changed, _ = narrowed(changed, ModeChanged(NodeMode.RELEASING))
    assert changed.facts.be_groups
    changed, records = narrowed(changed, released)
    assert (changed.facts.be_groups, records) == (False, [None])


def test_a_sandbox_that_a_replaced_daemon_has_made_takes_the_place_of_its_token() -> None:
    play, admitted = scenario(NodeState.empty(NODE)), changed_copy(LSE, sandbox_id="token")
    read = LedgerRead((admitted,), (), {}, (), 3.0, arriving_sandboxes=frozenset({"token"}))
    assert play >> read << ExpectedPoolChange(moved="")
    assert play.state.runtime.arriving_sandboxes == {"token"}, (
        "it is in no list of the runtime, and is not removed"
    )
    play >> SandboxRunning(LSE, "token") << PutRecord("p/token", None)
    assert play << PutRecord("p/s-lse", LSE)
    assert list(play.state.pods) == ["s-lse"]


def test_observers_are_notified_of_lists() -> None:
    assert scenario(SHARED) >> RuntimeListed(["p"], ["c"], 4) << NotifyListed(["p"], ["c"], 4)


def test_containers_are_synced_in_their_order() -> None:
    play = scenario(SHARED.changed(put=(OWNER,)))
    assert play >> RuntimeSyncDue(("ls", "lse")) << SyncRuntimeSoon()
    assert play >> RuntimeSyncDue(("ls",)) << SyncRuntimeSoon()
    assert play >> RuntimeSyncStarted("ls")
    assert list(play.state.runtime.awaiting_sync) == ["lse"]
    assert play >> RuntimeSyncStarted("ls")


def test_a_removed_container_is_not_synced() -> None:
    play = scenario(SHARED)
    assert play >> RuntimeSyncDue(("gone",))
    assert play >> RuntimeSyncDue(("gone", "ls")) << SyncRuntimeSoon()
    assert list(play.state.runtime.awaiting_sync) == ["ls"]


def test_a_saved_cpuset_of_an_unknown_container_is_not_recorded() -> None:
    play = scenario(SHARED)
    assert play >> SavedCpusLearned("unknown", ALL) >> SavedCpusLearned("ls", REST)
    assert dict(play.state.runtime.saved) == {"ls": REST}
    assert play >> SavedCpusLearned("ls", None)
    assert not play.state.runtime.saved


# -- calls in flight ----------------------------------------------------------------------------------------

MADE = changed_copy(SHARER, phase=Phase.CREATED)
STARTABLE = NodeState.of(NODE, [LS], [MADE])
START, UPDATE = InflightCall(1, "ls", ALL, is_start=True), InflightCall(2, "ls", ALL)


def flying(state: NodeState, *calls: InflightCall) -> Playbook[NodeState]:
    """A scenario that begins with calls in flight."""
    for call in calls:
        state, effects = handle(state, CallSent(call))
        assert effects == ()
    return scenario(state)


def test_a_successful_start_makes_the_container_running() -> None:
    play = flying(STARTABLE, START)
    assert play.state.containers["ls"].phase is Phase.STARTING
    play >> StartEnded(START, Phase.RUNNING) << CallOver(1) << PutRecord("c/ls", SHARER)
    assert play << NotifyEntered(SHARER, Phase.RUNNING) << WriteCpusets(("ls",))
    assert not play.state.inflight.calls


def test_a_start_of_a_confined_container_saves_the_cpuset_that_it_carried() -> None:
    play = flying(STARTABLE, START)
    assert play >> CallConfined(START, confined=True) >> CallConfined(START, confined=True)
    assert play.state.inflight.is_confined("ls")
    play >> StartEnded(START, Phase.RUNNING) << CallOver(1) << PutRecord("c/ls", SHARER)
    assert play << NotifyEntered(SHARER, Phase.RUNNING) << WriteCpusets(("ls",)) << SyncRuntimeSoon()
    assert list(play.state.runtime.awaiting_sync) == ["ls"]
    assert play >> CallConfined(START, confined=True), "it has completed"


def test_after_a_start_beside_an_update_the_runtime_is_sent_the_cpus() -> None:
    """The update was relayed during a release, with a cpuset of the client that the runtime has saved."""
    play = flying(STARTABLE, START, UPDATE)
    assert play >> UpdateEnded(UPDATE, None) << CallOver(2) << WriteCpusets(("ls",))
    play >> StartEnded(START, Phase.RUNNING) << CallOver(1) << PutRecord("c/ls", SHARER)
    assert play << NotifyEntered(SHARER, Phase.RUNNING) << WriteCpusets(("ls",)) << SyncRuntimeSoon()
    assert list(play.state.runtime.awaiting_sync) == ["ls"]


def test_a_refused_start_is_over_with_the_next_list() -> None:
    play = flying(STARTABLE, START)
    assert play >> StartRefused(START, 5.0) << RequestReconcile()
    (orphan,) = play.state.inflight.orphans()
    assert play >> OrphanListed(orphan, None, 6.0, 6.1, is_exempt_from_timeout=False), (
        "the list does not contain the container"
    )
    assert (
        play
        >> OrphanListed(orphan, Phase.CREATED, 6.0, 6.1, is_exempt_from_timeout=False)
        << OrphanOver(orphan, Phase.CREATED)
    )
    assert play >> OrphanListed(orphan, Phase.CREATED, 6.0, 6.1, is_exempt_from_timeout=False), (
        "it is being ended"
    )
    play >> OrphanEnded(orphan, Phase.CREATED) << CallOver(1) << PutRecord("c/ls", MADE)
    assert play << NotifyEntered(MADE, Phase.CREATED) << SyncRuntimeSoon()
    assert play >> StartRefused(START, 7.0), "it has completed"


def test_a_start_of_a_removed_container_changes_nothing() -> None:
    play = flying(STARTABLE, START)
    handled, _ = handle(play.state, ContainersRemoved(("ls",)))
    assert scenario(handled) >> StartEnded(START, None) << CallOver(1)
    assert scenario(handled) >> StartEnded(START, Phase.RUNNING) << CallOver(1)


def test_a_container_stays_starting_as_long_as_another_start_is_in_flight() -> None:
    second = InflightCall(3, "ls", ALL, is_start=True)
    play = flying(STARTABLE, START, second)
    assert play >> StartEnded(START, Phase.CREATED) << CallOver(1)
    assert play.state.containers["ls"].phase is Phase.STARTING
    gone = changed_copy(SHARER, phase=Phase.EXITED)
    play >> StartEnded(second, Phase.EXITED) << CallOver(3) << PutRecord("c/ls", gone)
    assert play << NotifyEntered(gone, Phase.EXITED)


def test_a_completed_update_determines_the_cpuset_saved_by_the_runtime() -> None:
    play = flying(SHARED, UPDATE)
    assert play >> UpdateEnded(UPDATE, ALL) << CallOver(2) << CompareCpusets(("ls",))
    assert play.state.runtime.saved["ls"] == ALL
    assert not play.state.runtime.awaiting_sync
    narrow = InflightCall(4, "ls", REST)
    older = flying(play.state, narrow) >> UpdateEnded(narrow, REST)
    assert older << CallOver(4) << SyncRuntimeSoon() << WriteCpusets(("ls",))
    assert list(older.state.runtime.awaiting_sync) == ["ls"], (
        "also where the kernel has the right CPUs by now"
    )
    failed = flying(play.state, narrow)
    assert failed >> UpdateEnded(narrow, None) << CallOver(4) << WriteCpusets(("ls",))
    assert not failed.state.runtime.saved
    assert failed >> UpdateEnded(narrow, REST), "it has completed"


def test_overlapping_updates_leave_the_saved_cpuset_unknown_and_another_is_sent() -> None:
    other = InflightCall(4, "ls", REST, resend=False)
    play = flying(SHARED, UPDATE, other)
    assert play >> UpdateEnded(UPDATE, ALL) << CallOver(2) << WriteCpusets(("ls",))
    assert play.state.inflight.of("ls")[0].resend
    assert play >> UpdateEnded(other, REST) << CallOver(4) << SyncRuntimeSoon() << WriteCpusets(("ls",))
    assert not play.state.runtime.saved
    assert list(play.state.runtime.awaiting_sync) == ["ls"]


def test_an_update_of_a_removed_container_changes_nothing() -> None:
    gone, _ = handle(flying(SHARED, UPDATE).state, ContainersRemoved(("ls",)))
    assert scenario(gone) >> UpdateEnded(UPDATE, ALL) << CallOver(2)
    assert scenario(gone) >> CallCompleted(UPDATE) << CallOver(2) >> CallCompleted(UPDATE)


def test_an_unanswered_update_is_over_once_the_runtime_has_answered_later_calls_for_long_enough() -> None:
    play = flying(SHARED, UPDATE)
    assert play >> CallOrphaned(UPDATE, 5.0) << RequestReconcile()
    assert play >> ResendWanted("ls")
    first = InflightCall(2, "ls", ALL)
    assert play >> OrphanListed(first, Phase.RUNNING, 4.0, 4.1, is_exempt_from_timeout=False), (
        "the list was requested before the update was orphaned"
    )
    assert play >> OrphanListed(first, Phase.RUNNING, 6.0, 6.1, is_exempt_from_timeout=False)
    late = 6.1 + ORPHAN_GRACE_S
    assert play >> OrphanListed(first, Phase.RUNNING, late, late, is_exempt_from_timeout=True), (
        "a confined start continues"
    )
    assert (
        play
        >> OrphanListed(first, Phase.RUNNING, late, late, is_exempt_from_timeout=False)
        << OrphanOver(first, Phase.CREATED)
    )
    play >> OrphanEnded(first, Phase.CREATED) << CallOver(2) << CompareUnits(("ls",))
    assert play << SyncRuntimeSoon()
    assert play >> CallOrphaned(UPDATE, 9.0), "it has completed"


def test_a_start_may_carry_the_cpuset_of_a_concurrent_update() -> None:
    play = flying(STARTABLE, InflightCall(1, "ls", CpuSet.parse("0-1"), is_start=True))
    play >> CallSent(InflightCall(2, "ls", CpuSet.parse("2-3")))
    play >> UpdateEnded(InflightCall(2, "ls", CpuSet.parse("2-3")), CpuSet.parse("2-3"))
    (start,) = play.state.inflight.of("ls")
    assert (start.is_start, str(start.carries)) == (True, "0-3")


def test_a_stray_call_of_an_exited_container_is_dropped() -> None:
    gone = changed_copy(SHARER, phase=Phase.EXITED)
    play = flying(SHARED, UPDATE)
    play >> CallOrphaned(UPDATE, 5.0) << RequestReconcile()
    assert (
        play
        >> OrphanListed(UPDATE, Phase.EXITED, 6.0, 6.1, is_exempt_from_timeout=True)
        << OrphanOver(UPDATE, Phase.EXITED)
    )
    play >> OrphanEnded(UPDATE, Phase.EXITED) << CallOver(2) << CompareUnits(("ls",))
    assert play << PutRecord("c/ls", gone) << NotifyEntered(gone, Phase.EXITED)


def test_a_call_that_is_only_suspected_changes_no_phase_and_is_not_resent() -> None:
    suspected = InflightCall(5, "ls", ALL, is_start=True, orphaned_since=1.0, resend=False, suspected=True)
    play = scenario(STARTABLE)
    assert play >> CallSent(suspected) << RequestReconcile()
    assert play.state.containers["ls"].phase is Phase.CREATED
    assert play >> OrphanEnded(suspected, Phase.CREATED) << CallOver(5)
    assert not play.state.runtime.awaiting_sync


# -- all of them --------------------------------------------------------------------------------------------


def test_every_event_has_one_rule() -> None:
    assert set(engine._RULES) == set(typing.get_args(NodeEvent))


def test_every_event_occurs_in_a_playbook() -> None:
    named = set[str]()
    for path in Path(__file__).parent.glob("test_*.py"):
        for tree in ast.walk(ast.parse(path.read_text())):
            if isinstance(tree, ast.ImportFrom) and (tree.module or "").startswith("proxy.engine"):
                named |= {alias.name for alias in tree.names}
    assert {event.__name__ for event in typing.get_args(NodeEvent)} <= named
