"""The answers to calls that the daemon holds, as playbooks."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.call_answers import (
    CallAnswer,
    Forward,
    ForwardStart,
    ForwardUnchanged,
    PrepareStart,
    RecordFirst,
    Refuse,
    ReserveFirst,
    pod_answer,
)
from proxy.engine.call_events import SavedCpusLearned, StartRequested, UpdateRequested
from proxy.engine.container_events import CreateNotReserved, CreateRequested, CreateResumed
from proxy.engine.cpuset_mems import MemoryBindings
from proxy.engine.handle import handle
from proxy.engine.node import Node
from proxy.engine.node_effects import PlanDecided, PodDecided, PutRecord
from proxy.engine.node_events import LedgerRead, RuntimeListed
from proxy.engine.pod_events import PodLearned, SandboxRequested, SandboxRunning, SandboxStopped
from proxy.engine.quotas import CONTAINER_QUOTA, QuotaRecord, RemovedQuotas
from proxy.engine.reservation_effects import AbortReason
from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRules
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BeCpuset
from proxy.model.kubelet import CpuManager
from proxy.model.mode import NodeMode
from proxy.model.workload import KubeQos, Phase, QosClass, Request, SetAside, Verdict
from proxy.topology.regular_machine import regular_machine
from tests.engine.test_handle import (
    ALL,
    EMPTY,
    FOUR,
    LS,
    LSE,
    NODE,
    OWN,
    OWNED,
    OWNER,
    REST,
    SHARED,
    SHARER,
    scenario,
)
from tests.testkit.changed_copy import changed_copy

BOTH = Mask((0, 1))
UNCHANGED = ForwardUnchanged()
CREATING = changed_copy(OWNER, id="t", phase=Phase.CREATING)
RESERVED = NodeState.of(NODE, [LS, LSE], [SHARER, CREATING])
NOT_APPLIED = [mode for mode in NodeMode if mode is not NodeMode.ENFORCE]


def under(state: NodeState, mode: NodeMode) -> NodeState:
    return structs.replace(state, mode=mode)


def with_facts(state: NodeState, **facts: object) -> NodeState:
    return state.with_facts(**facts)


def played(*events: Any) -> NodeState:
    """Return the state of an empty node after some events."""
    state = NodeState.empty(NODE)
    for event in events:
        state, _ = handle(state, event)
    return state


def create(state: NodeState, request: CreateRequested) -> CallAnswer:
    *_, decided = handle(state, request)[1]
    assert isinstance(decided, PlanDecided)
    return decided.answer


# -- creates ------------------------------------------------------------------------------------------------


def test_a_create_of_a_sharing_container_is_forwarded_at_once() -> None:
    assert create(OWNED, CreateRequested(LS, "d", 0, Request(), "t")) == Forward(REST, REST, BOTH)


def test_a_create_with_the_cpuset_of_its_pod_carries_no_cpuset() -> None:
    pod = changed_copy(LS, qos=QosClass.BE, kube_qos=KubeQos.BEST_EFFORT)
    state = NodeState.empty(changed_copy(NODE, be_cpuset=BeCpuset.ERASE))
    assert create(state, CreateRequested(pod, "d", 0, Request(), "t")) == Forward(ALL, None, BOTH)


def test_a_create_of_an_owner_waits_for_its_reservation() -> None:
    answer = create(EMPTY, CreateRequested(LSE, "c", 0, FOUR, "t"))
    assert isinstance(answer, ReserveFirst)
    assert answer.container.placement.exclusive == OWN
    play = scenario(RESERVED)
    assert play >> CreateResumed(CREATING) << ReserveFirst(CREATING)
    assert play >> CreateResumed(CREATING, is_reserved=True) << Forward(OWN, OWN, Mask((0,)))


def test_the_quota_of_an_owner_is_carried_if_quotas_are_written() -> None:
    play = scenario(with_facts(RESERVED, has_cpu_controller=True))
    assert play >> CreateResumed(CREATING, is_reserved=True) << Forward(OWN, OWN, Mask((0,)), -1)


def test_cpus_named_by_hooks_are_recorded_before_the_create_is_forwarded() -> None:
    placement = changed_copy(SHARER.placement, hook_cpus=CpuSet.parse("4-5"))
    narrowed = changed_copy(SHARER, phase=Phase.CREATING, placement=placement)
    play = scenario(NodeState.of(NODE, [LS], [narrowed]))
    assert play >> CreateResumed(narrowed) << ReserveFirst(narrowed)
    cpus = CpuSet.parse("4-5")
    assert play >> CreateResumed(narrowed, is_reserved=True) << Forward(cpus, cpus, BOTH)


def test_a_create_without_enough_free_cpus_is_refused() -> None:
    other = changed_copy(LSE, uid="x", name="x", sandbox_id="s-x")
    answer = create(OWNED, CreateRequested(other, "c", 0, FOUR, "t"))
    assert isinstance(answer, Refuse)
    assert "ns/x" in answer.message
    assert create(under(OWNED, NodeMode.OBSERVE), CreateRequested(other, "c", 0, FOUR, "t")) == UNCHANGED


REASON = AbortReason("pod ns/ls is on CPU 0", OWN, public="another pod is on CPU 0")


@pytest.mark.parametrize(("name_others", "message"), [(True, REASON.message), (False, REASON.public_message)])
def test_a_create_whose_cpus_cannot_be_freed_is_refused(name_others: bool, message: str) -> None:
    play = scenario(NodeState.empty(changed_copy(NODE, admission=AdmissionRules(name_others=name_others))))
    refusal = Refuse(GrpcStatus.FAILED_PRECONDITION, f"cannot free CPUs for {CREATING.ref}: {message}")
    assert play >> CreateNotReserved(CREATING, REASON) << refusal


def test_a_create_that_is_no_longer_known_is_forwarded_unchanged() -> None:
    assert scenario(OWNED) >> CreateResumed(changed_copy(CREATING, id="gone"), is_reserved=True) << UNCHANGED


@pytest.mark.parametrize("mode", NOT_APPLIED)
def test_no_create_is_changed_if_the_plan_is_not_applied(mode: NodeMode) -> None:
    assert create(under(OWNED, mode), CreateRequested(LS, "d", 0, Request(), "t")) == UNCHANGED
    assert create(under(EMPTY, mode), CreateRequested(LSE, "c", 0, FOUR, "t")) == UNCHANGED
    play = scenario(under(RESERVED, mode))
    assert play >> CreateResumed(CREATING, is_reserved=True) << UNCHANGED
    assert play >> CreateNotReserved(CREATING, REASON) << UNCHANGED


# -- sandboxes ----------------------------------------------------------------------------------------------


def test_a_sandbox_without_a_decision_is_forwarded() -> None:
    *_, decided = handle(EMPTY, SandboxRequested(LS, Request()))[1]
    assert isinstance(decided, PodDecided)
    assert decided.answer == UNCHANGED


def test_the_set_aside_of_a_sandbox_is_recorded_before_it_is_forwarded() -> None:
    aside = changed_copy(LSE, reserved_for_pod=SetAside(None, preferred=True, cpus=OWN))
    assert pod_answer(EMPTY, aside, Verdict()) == RecordFirst()


def test_a_sandbox_is_refused_only_if_the_plan_is_applied() -> None:
    no = Verdict(GrpcStatus.FAILED_PRECONDITION, "TopologyAffinityError", "no")
    assert pod_answer(EMPTY, LSE, no) == Refuse(GrpcStatus.FAILED_PRECONDITION, "no")
    for mode in NOT_APPLIED:
        assert pod_answer(under(EMPTY, mode), LSE, no) == UNCHANGED


# -- starts -------------------------------------------------------------------------------------------------

TO_START = NodeState.of(NODE, [LS, LSE], [changed_copy(one, phase=Phase.CREATED) for one in (SHARER, OWNER)])


def test_a_start_with_the_cpuset_that_the_runtime_has_saved_is_forwarded_at_once() -> None:
    play = scenario(TO_START)
    assert play >> StartRequested("ls") << PrepareStart()
    assert play >> SavedCpusLearned("ls", REST)
    assert play >> StartRequested("ls") << ForwardStart(REST)


def test_a_prepared_start_carries_the_cpuset_that_the_runtime_has_saved() -> None:
    play = scenario(TO_START)
    assert play >> StartRequested("lse", is_prepared=True) << ForwardStart(OWN)
    assert play >> SavedCpusLearned("lse", ALL)
    assert play >> StartRequested("lse", is_prepared=True) << ForwardStart(ALL)


def test_a_start_that_cannot_be_prepared_is_refused() -> None:
    refusal = Refuse(GrpcStatus.FAILED_PRECONDITION, "cannot start container lse: busy")
    assert scenario(TO_START) >> StartRequested("lse", obstacle="busy") << refusal


def test_a_start_of_an_unknown_or_started_container_is_forwarded_unchanged() -> None:
    play = scenario(OWNED)
    assert play >> StartRequested("unknown") << PrepareStart()
    assert play >> StartRequested("unknown", is_prepared=True) << UNCHANGED
    assert play >> StartRequested("ls", is_prepared=True) << UNCHANGED


INHERITED = changed_copy(LS, cgroup_parent="/kubepods/podls")


@pytest.mark.parametrize("is_new", [True, False])
def test_a_start_in_a_pod_of_an_earlier_run_is_prepared_since_its_group_may_be_narrow(is_new: bool) -> None:
    again = changed_copy(INHERITED, sandbox_id="s-2", attempt=1)  # a new sandbox has the group of the old one
    earlier = [LedgerRead((INHERITED,), (), {}, (), 0.0), SandboxStopped(INHERITED.sandbox_id)]
    state = played(*([] if is_new else earlier), SandboxRunning(again))
    created = changed_copy(SHARER, pod=again, phase=Phase.CREATED)
    planned = state.desired_cpus(created)
    state, _ = handle(state.changed([created], []), SavedCpusLearned("ls", planned))
    answer = ForwardStart(planned) if is_new else PrepareStart()
    assert scenario(state) >> StartRequested("ls") << answer


@pytest.mark.parametrize(
    "event", [PodLearned(INHERITED), SandboxRunning(INHERITED, is_relayed_elsewhere=True)]
)
def test_a_pod_that_is_only_found_counts_as_one_of_an_earlier_run(event: object) -> None:
    more = PodLearned(changed_copy(INHERITED, source="kubelet"))
    assert played(event, more).runtime.inherited_cgroups == {"/kubepods/podls"}


def test_the_cgroup_of_a_found_pod_is_of_an_earlier_run_also_if_a_create_names_it_first() -> None:
    """The runtime's list has no cgroup parent of a sandbox without containers."""
    listed = PodLearned(changed_copy(INHERITED, cgroup_parent=""))
    assert played(listed, PodLearned(INHERITED)).runtime.inherited_cgroups == {"/kubepods/podls"}


def test_pods_of_an_earlier_run_that_have_ended_are_forgotten_once_they_are_many() -> None:
    pods = [changed_copy(LS, sandbox_id=f"s-{n}", cgroup_parent=f"/pod{n}") for n in range(100)]
    ends = [SandboxStopped(pod.sandbox_id) for pod in pods]
    read, listed = LedgerRead(tuple(pods), (), {}, (), 0.0), RuntimeListed((), (), 0)
    assert len(played(read, *ends[:30], listed).runtime.inherited_cgroups) == 100
    assert played(read, *ends[:98], listed).runtime.inherited_cgroups == {"/pod98", "/pod99"}


@pytest.mark.parametrize("mode", NOT_APPLIED)
def test_no_start_waits_if_the_plan_is_not_applied(mode: NodeMode) -> None:
    assert scenario(under(TO_START, mode)) >> StartRequested("lse") << ForwardStart(ALL), "it may have any"


# -- updates ------------------------------------------------------------------------------------------------


def test_an_update_is_forwarded_with_the_cpus_of_the_container() -> None:
    play = scenario(OWNED)
    assert play >> UpdateRequested("ls", "", "", 0) << Forward(REST, REST, BOTH)
    assert play >> UpdateRequested("lse", "", "", 0) << Forward(OWN, OWN, Mask((0,)))


def test_cpusets_that_a_client_names_are_recorded_for_the_release() -> None:
    request = changed_copy(SHARER.request, cpuset_cpus="0-7", cpuset_mems="0")
    updated, answer = changed_copy(SHARER, request=request), Forward(REST, REST, BOTH)
    play = scenario(OWNED)
    assert play >> UpdateRequested("ls", "0-7", "0", 0) << PutRecord("c/ls", updated) << answer
    assert play.state.containers["ls"] == updated
    assert play >> UpdateRequested("ls", "0-7", "", 0) << answer


def test_cpusets_of_kubelets_static_policy_are_not_recorded() -> None:
    play = scenario(with_facts(OWNED, cpu_manager=CpuManager("static")))
    assert play >> UpdateRequested("ls", "0-7", "0", 0) << Forward(REST, REST, BOTH)


def test_an_update_carries_the_quota_of_an_owner_and_the_quota_of_the_client_is_recorded() -> None:
    play = scenario(with_facts(OWNED, has_cpu_controller=True))
    record = PutRecord("qc/lse", {"quota": 170_000, "group": ""})
    play >> UpdateRequested("lse", "", "", 170_000) << record << Forward(OWN, OWN, Mask((0,)), -1)
    assert play.state.facts.quotas.records == {CONTAINER_QUOTA + "lse": QuotaRecord(170_000)}
    assert play >> UpdateRequested("ls", "", "", 170_000) << Forward(REST, REST, BOTH)


def test_the_record_of_a_quota_is_deleted_when_a_client_removes_the_quota() -> None:
    known = RemovedQuotas({CONTAINER_QUOTA + "ls": QuotaRecord(5)})
    play = scenario(with_facts(OWNED, quotas=known))
    assert play >> UpdateRequested("ls", "", "", -1) << PutRecord("qc/ls", None) << Forward(REST, REST, BOTH)


def test_an_update_names_the_memory_nodes_that_the_container_uses() -> None:
    wide = changed_copy(OWNER, placement=changed_copy(OWNER.placement, mems=Mask((0,))))
    state = with_facts(
        NodeState.of(NODE, [LSE], [wide]), mems=MemoryBindings(wider_than_planned={"lse": BOTH})
    )
    assert scenario(state) >> UpdateRequested("lse", "", "", 0) << Forward(OWN, OWN, BOTH)


def small_nodes(size: int) -> NodeState:
    machine = regular_machine(2, 1, 4, 2, mem_bytes_per_node=size)
    owner = changed_copy(
        OWNER,
        request=Request(memory_limit=40),
        placement=changed_copy(OWNER.placement, mems=Mask((0,))),
    )
    return NodeState.of(Node(machine, CpuTopology.of(machine)), [LSE], [owner])


def test_an_owner_gets_more_memory_nodes_with_an_update_that_needs_them() -> None:
    play = scenario(small_nodes(100))
    assert play >> UpdateRequested("lse", "", "", 0, 100) << Forward(OWN, OWN, Mask((0,)))
    assert play >> UpdateRequested("lse", "", "", 0, 150) << Forward(OWN, OWN, BOTH)
    play >> UpdateRequested("lse", "", "", 0) << Forward(OWN, OWN, Mask((0,)))  # not carried out yet


def test_an_update_of_an_unknown_or_exited_container_is_forwarded_unchanged() -> None:
    exited = NodeState.of(NODE, [LS], [changed_copy(SHARER, phase=Phase.EXITED)])
    assert scenario(exited) >> UpdateRequested("ls", "0-7", "", 5) << UNCHANGED
    assert scenario(SHARED) >> UpdateRequested("unknown", "0-7", "", 5) << UNCHANGED


@pytest.mark.parametrize("mode", NOT_APPLIED)
def test_no_update_is_changed_if_the_plan_is_not_applied(mode: NodeMode) -> None:
    request = changed_copy(SHARER.request, cpuset_cpus="0-7", cpuset_mems="0")
    updated = changed_copy(SHARER, request=request)
    play = scenario(under(OWNED, mode))
    assert play >> UpdateRequested("ls", "0-7", "0", 5) << PutRecord("c/ls", updated) << UNCHANGED
