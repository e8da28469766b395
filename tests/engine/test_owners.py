from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.config.admission import AdmissionConfig
from proxy.engine.adoption import adopt
from proxy.engine.container_create import place
from proxy.engine.container_events import ContainerFound
from proxy.engine.invariants import violations
from proxy.engine.node import Node
from proxy.engine.owners import ReservationCpus, floor_cpus, request_is_known
from proxy.engine.pod_admission import PodAdmission, admit, decides_pod
from proxy.engine.replacement_cpus import choose_replacements, owners_missing_cpus
from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRule, AdmissionRules, BeyondLimit
from proxy.model.defects import InputDefect
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy
from proxy.model.machine import Machine
from proxy.model.options import CpuOptions, Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import (
    Container,
    KubeQos,
    LocatedDevice,
    Phase,
    Placement,
    Pod,
    Pool,
    QosClass,
    Request,
)
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15; cores 0,8 1,9 ...
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
GI = 1 << 30


def total(milli: int, limit: int | None = None, **more: object) -> Request:
    may = milli if limit is None else limit
    return Request(milli * 1024 // 1000, may * 100, 100_000, **more)  # type: ignore[arg-type]


def pod(qos: QosClass = QosClass.LSE, **more: object) -> Pod:
    return Pod("t-1", "u1", "ns", "p", qos=qos, **more)  # type: ignore[arg-type]


def admitted(state: NodeState, claiming: Pod, total_request: Request) -> PodAdmission:
    result = admit(state, claiming, total_request)
    assert result.verdict.admitted, result.verdict
    return result


@pytest.mark.parametrize("qos", [QosClass.LSE, QosClass.LSR])
def test_the_containers_of_a_pod_own_its_cpus_together(qos: QosClass) -> None:
    result = admitted(NodeState.empty(NODE), pod(qos), total(4000))
    assert result.pod.cpuset == CpuSet.parse("0-1,8-9")
    assert result.pod.cpuset_chosen_locally
    assert result.pod.reserved_for_pod is not None
    assert result.pod.reserved_for_pod.cpus == result.pod.cpuset
    state = result.state
    for name, milli in (("main", 3500), ("side", 500)):
        plan = place(state, result.pod, name, 0, total(milli), name)
        assert plan.container is not None
        placement = plan.container.placement
        assert (placement.pool, placement.exclusive, placement.mems) == (
            Pool.OWN,
            result.pod.cpuset,
            Mask((0,)),
        )
        assert "were chosen for it as a whole" in placement.reasons[0]
        state = plan.state
    assert list(state.owners) == ["u1"]
    assert state.pools.shared == CpuSet.parse("2-7,10-15")
    assert state.pools.be == (state.pools.shared if qos is QosClass.LSE else MACHINE.online)


@pytest.mark.parametrize(
    ("total_request", "message"),
    [
        (total(1500), "request about 1500m CPU together and are limited to 1500m"),
        (total(2000, 4000), "request about 2000m CPU together and are limited to 4000m"),
        (Request(2048, 0, 100_000), "limited to nothing"),
        (Request(2048, -1, 100_000), "limited to nothing"),
    ],
)
def test_a_fraction_of_cpus_is_refused(total_request: Request, message: str) -> None:
    state = NodeState.empty(NODE)
    result = admit(state, pod(kube_qos=KubeQos.BURSTABLE), total_request)
    assert (result.verdict.code, result.verdict.reason, result.state) == (3, "InvalidCPURequest", state)
    assert message in result.verdict.message
    assert result.verdict.message.startswith("cannot place ns/p: LSE pod: ")
    assert result.explanation is not None
    assert result.explanation.verdict == result.verdict


def known(*containers: ContainerResources) -> PodRequests:
    return PodRequests("u1", containers)


def even(name: str, milli: int, kind: ContainerKind = ContainerKind.APP) -> ContainerResources:
    return ContainerResources(name, kind, {"cpu": milli}, {"cpu": milli})


def test_kubelets_facts_count_containers_that_run_at_the_same_time() -> None:
    requests = known(
        even("i", 8000, ContainerKind.INIT), even("s", 500, ContainerKind.SIDECAR), even("a", 1500)
    )
    result = admitted(NodeState.empty(NODE), pod(requests=requests), total(8000))
    assert len(result.pod.cpuset or ()) == 2
    uneven = known(ContainerResources("a", ContainerKind.APP, {"cpu": 2000}, {"cpu": 3000}))
    reported = admit(NodeState.empty(NODE), pod(requests=uneven), total(2000)).verdict.message
    assert "container a requests 2000m CPU and is limited to 3000m" in reported


def test_the_topology_policy_and_the_bind_policy_apply_to_a_pod_as_owner() -> None:
    node = changed_copy(NODE, policy=TopologyPolicy.RESTRICTED)
    gpu = (LocatedDevice("g", "gpu", Mask((1,))),)
    spread = pod(bind_required=BindPolicy.SPREAD_BY_PCPUS)
    assert admitted(NodeState.empty(node), spread, total(4000, devices=gpu)).pod.cpuset == CpuSet.parse("4-7")
    wide = admit(NodeState.empty(node), pod(), total(10_000, devices=gpu))
    assert wide.verdict.reason == "TopologyAffinityError"
    full = pod(bind_required=BindPolicy.FULL_PCPUS)
    assert admit(NodeState.empty(NODE), full, total(3000)).verdict.reason == "CPUBindPolicyError"


@pytest.mark.parametrize("qos", [QosClass.LSE, QosClass.LSR])
def test_a_pod_as_owner_gets_cpus_of_one_numa_node_without_a_policy(qos: QosClass) -> None:
    """kubelet's allocator would take the three free cores of NUMA node 0, and one CPU of NUMA node 1."""
    named = Pod("a", "a", "ns", "a", qos=QosClass.LSE, cpuset=CpuSet.parse("3,11"))
    state = place(NodeState.empty(NODE).with_pod(named), named, "c", 0, total(2000), "a").state
    assert admitted(state, pod(qos), total(7000)).pod.cpuset == CpuSet.parse("4-7,12-14")


def test_memory_is_counted_for_the_pod_as_a_whole() -> None:
    node = changed_copy(NODE, reserved_memory={0: {"memory": GI}})
    result = admitted(NodeState.empty(node), pod(), total(2000, memory_limit=3 * GI))
    assert result.pod.reserved_for_pod is not None
    assert [(str(b.affinity), b.size) for b in result.pod.reserved_for_pod.blocks] == [("0", 3 * GI)]
    assert result.state.memory is not None
    assert result.state.memory.nodes[0].table("memory").reserved == 3 * GI
    plan = place(result.state, result.pod, "main", 0, total(2000, memory_limit=3 * GI), "x")
    assert plan.container is not None
    assert (plan.container.placement.mems, plan.container.placement.blocks) == (Mask((0,)), ())
    assert plan.state.memory is not None
    assert plan.state.memory.nodes[0].table("memory").reserved == 3 * GI


def test_pods_with_named_cpus_or_of_other_classes_are_not_decided() -> None:
    assert not decides_pod(changed_copy(NODE, static=False), pod())
    for claiming in (
        pod(cpuset=CpuSet((1,))),
        pod(nodes=Mask((0,))),
        pod(defects=(InputDefect("x", decisive=True),)),
        pod(QosClass.LS),
        pod(QosClass.NONE),
    ):
        assert not decides_pod(NODE, claiming)
        assert admit(NodeState.empty(NODE), claiming, total(2000)).pod == claiming
    silent = admitted(NodeState.empty(NODE), pod(), Request(cpu_shares=2))
    assert (silent.pod.cpuset, silent.pod.reserved_for_pod) == (None, None), "an old kubelet reports no sums"


def test_a_full_node_refuses_a_pod_and_keeps_its_state() -> None:
    state = admitted(NodeState.empty(NODE), pod(), total(12_000)).state
    other = changed_copy(pod(), uid="u2", name="q", sandbox_id="t-2")
    result = admit(state, other, total(6000))
    assert (result.verdict.code, result.verdict.reason, result.state) == (
        9,
        "UnexpectedAdmissionError",
        state,
    )
    last = admit(state, other, total(4000))
    assert (last.verdict.reason, last.state) == ("SharedPoolExhausted", state)


def test_a_sandbox_created_again_keeps_the_cpus() -> None:
    first = admitted(NodeState.empty(NODE), pod(), total(4000))
    plan = place(first.state, first.pod, "main", 0, total(4000), "x")
    assert plan.container is not None
    state = plan.state.changed(put=[plan.container.in_phase(Phase.EXITED)])
    again = changed_copy(pod(), sandbox_id="t-9", attempt=1)
    result = admitted(state, again, total(4000))
    assert (result.pod.cpuset, result.pod.cpuset_chosen_locally, result.pod.reserved_for_pod) == (
        first.pod.cpuset,
        True,
        first.pod.reserved_for_pod,
    )


MACHINES = [MACHINE, regular_machine(1, 2, 3, 2), regular_machine(2, 2, 4, 1), regular_machine(1, 1, 2, 1)]
DEFAULT = AdmissionConfig().rules


def state_of(rules: AdmissionRules = DEFAULT, machine: Machine = MACHINE, **more: Any) -> NodeState:
    return NodeState.empty(Node(machine, CpuTopology.of(machine), True, admission=rules, **more))


def whole(count: int) -> Request:
    return Request(max(2, 1024 * count), 100_000 * count, 100_000)


def pod_of(uid: str, count: int = 0, namespace: str = "a", **more: Any) -> Pod:
    return Pod(f"s-{uid}", uid, namespace, uid, total=whole(count) if count else None, **more)


def ends(state: NodeState, container_id: str) -> NodeState:
    return state.changed(put=(state.containers[container_id].in_phase(Phase.EXITED),))


def guaranteed(state: NodeState, uid: str, count: int, **more: Any) -> Any:
    pod = pod_of(uid, count, **more)
    return place(state.with_pod(pod), pod, "c", 0, whole(count), f"c-{uid}")


def named(state: NodeState, uid: str, cpus: str, **more: Any) -> Any:
    wanted = CpuSet.parse(cpus)
    pod = pod_of(uid, len(wanted), **{"qos": QosClass.LSR, "cpuset": wanted, **more})
    return place(state.with_pod(pod), pod, "c", 0, whole(len(wanted)), f"c-{uid}")


def test_the_floor_of_the_node_takes_precedence_over_named_cpus() -> None:
    rules = changed_copy(DEFAULT, floor=6, numa_floor=0)
    plan = named(state_of(rules), "u", "0-9")
    assert plan.container is not None
    plan = named(state_of(rules), "u", "0-10")
    assert (plan.container, plan.limit) == (None, AdmissionRule.SHARED_FLOOR)
    assert (plan.verdict.code, plan.verdict.reason) == (9, "AdmissionSharedFloor")
    assert plan.verdict.message == (
        "cannot give CPUs 0-10 to a/u/c: the shared pool must keep 6 CPUs of this node"
        " (admission.sharedFloor), and 5 would be left"
    )
    assert plan.explanation is not None
    assert plan.explanation.verdict == plan.verdict


def test_the_floor_of_a_numa_node_takes_precedence_over_named_cpus() -> None:
    assert named(state_of(), "u", "0-3,8-9").container is not None
    plan = named(state_of(), "u", "0-3,8-10")
    assert plan.limit is AdmissionRule.SHARED_FLOOR
    assert (
        "2 CPUs of NUMA node 0 (admission.sharedFloorPerNUMANode), and 1 would be left"
        in plan.verdict.message
    )


def test_a_choice_that_breaks_the_floor_of_a_numa_node_is_replaced() -> None:
    state = state_of()
    plan = guaranteed(state, "u", 7)
    assert plan.container is not None
    assert plan.container.placement.exclusive.isdisjoint(
        state.node.floors.choose(MACHINE.online, MACHINE, CpuSet())
    )
    for node in MACHINE.nodes:
        assert len(plan.state.pools.shared & node.cpus) >= 2
    free = guaranteed(state_of(AdmissionRules()), "u", 7)
    assert len(MACHINE.nodes_of(free.container.placement.exclusive)) == 1, "the first choice is one NUMA node"
    assert guaranteed(state, "v", 6).container.placement == changed_copy(
        guaranteed(state_of(AdmissionRules()), "v", 6).container.placement
    ), "a choice that breaks nothing is the same as without floors"


def test_a_single_node_policy_rejects_a_pod_that_the_floor_leaves_no_room_for() -> None:
    state = state_of(policy=TopologyPolicy.SINGLE_NUMA_NODE)
    plan = guaranteed(state, "u", 7)
    assert (plan.container, plan.limit) == (None, AdmissionRule.SHARED_FLOOR)
    assert guaranteed(state, "u", 6).container is not None


@pytest.mark.parametrize("scope", Scope)
def test_pods_that_are_decided_as_a_whole_keep_the_floor(scope: Scope) -> None:
    state = state_of(policy=TopologyPolicy.BEST_EFFORT, scope=scope)
    pod = pod_of("u", 12, qos=QosClass.LSR)
    admission = admit(state, pod, whole(12))
    assert admission.pod.reserved_for_pod is not None
    assert all(len(MACHINE.online - admission.pod.reserved_for_pod.cpus & n.cpus) >= 2 for n in MACHINE.nodes)
    more = admit(state, pod_of("u", 13, qos=QosClass.LSR), whole(13))
    assert (more.verdict.reason, more.limit) == ("AdmissionSharedFloor", AdmissionRule.SHARED_FLOOR)
    assert more.state == state
    sharing = state_of(
        changed_copy(DEFAULT, beyond=BeyondLimit.SHARE), policy=TopologyPolicy.BEST_EFFORT, scope=scope
    )
    shared = admit(sharing, pod_of("u", 13, qos=QosClass.LSR), whole(13))
    assert shared.verdict.admitted
    assert shared.pod.reserved_for_pod is None
    assert shared.limit is AdmissionRule.SHARED_FLOOR
    assert "shared-floor" in shared.problem
    plan = place(shared.state.with_pod(shared.pod), shared.pod, "c", 0, whole(13), "c1")
    assert plan.container is not None
    assert plan.container.placement.pool is Pool.SHARED


def test_set_aside_cpus_count_against_the_floor_of_the_pool() -> None:
    state = admit(state_of(), pod_of("u", 8, qos=QosClass.LSR), whole(8)).state
    assert state.pools.shared == MACHINE.online, "pools continue using it"
    assert guaranteed(state, "v", 4).container is not None
    assert guaranteed(state, "v", 5).limit is AdmissionRule.SHARED_FLOOR


@pytest.mark.parametrize(
    ("reported", "total_request", "is_known"),
    [
        (None, Request(), False),
        (None, Request(cpu_shares=2), False),
        (None, Request(cpu_shares=3), True),
        (PodRequests("u", ()), Request(cpu_shares=2), True),
    ],
)
def test_whether_it_is_known_what_a_pod_requests(
    reported: PodRequests | None, total_request: Request, is_known: bool
) -> None:
    assert request_is_known(pod_of("u", requests=reported), total_request) is is_known


@pytest.mark.parametrize(
    ("owner", "reserved", "hard"),
    [(True, False, True), (False, True, True), (True, True, True), (False, False, False)],
)
def test_cpus_excluded_from_the_be_pool_stay_excluded_while_they_change(
    owner: bool, reserved: bool, hard: bool
) -> None:
    qos = QosClass.LSE if owner else QosClass.LSR
    state = named(state_of(), "u", "0-1", qos=qos).state
    (key,) = state.owners
    changing = state.with_reservation("r", ReservationCpus(key, CpuSet([2]), excludes_be=reserved))
    assert changing.owners[key].excludes_be is hard
    assert changing.owners[key].cpus == CpuSet.parse("0-2")


def test_the_floors_hold_back_the_last_core_of_each_numa_node() -> None:
    assert str(floor_cpus(state_of())) == "3,7,11,15"
    owned = named(state_of(), "u", "3,11").state
    assert str(floor_cpus(owned)) == "2,7,10,15"
    assert str(floor_cpus(ends(owned, "c-u"))) == "2,7,10,15", "the container may come back"
    assert floor_cpus(state_of(AdmissionRules())) == CpuSet()


def test_cpus_are_kept_for_an_ended_container_that_may_return() -> None:
    state = named(state_of(), "u", "0-3,8-9").state
    state = ends(state, "c-u")
    other = named(state, "v", "4-7,12-13")
    assert other.container is not None
    assert named(state, "v", "10-11").limit is AdmissionRule.SHARED_FLOOR, (
        "they are part of the floor when the container returns"
    )
    pod = other.state.pods["s-u"]
    again = place(other.state, pod, "c", 1, whole(6), "c-u2")
    assert again.container is not None
    assert again.container.placement.exclusive == CpuSet.parse("0-3,8-9")
    gone = ends(other.state, "c-u").without_pod("s-u")
    assert named(gone, "w", "10-11").container is not None


def test_an_ended_container_of_the_same_pod_does_not_count() -> None:
    """The ended container may be an init container; only kubelet can distinguish that from a crashed one."""
    state = state_of(changed_copy(DEFAULT, pod_limit=8))
    pod = pod_of("u", 8)
    state = ends(place(state.with_pod(pod), pod, "prepare", 0, whole(8), "c1").state, "c1")
    plan = place(state, pod, "main", 0, whole(8), "c2")
    assert plan.container is not None
    assert guaranteed(state, "other", 5).limit is AdmissionRule.SHARED_FLOOR, (
        "for other pods, the container may come back"
    )
    again = place(plan.state, pod, "prepare", 1, whole(8), "c3")
    assert again.limit is AdmissionRule.POD_LIMIT, "it was not an init container: the limits apply to it"


def test_an_owner_is_not_checked_again_for_cpus_that_it_has() -> None:
    state = named(state_of(AdmissionRules()), "u", "0-14").state
    tight = state.with_node(state_of().node)
    assert tight.pools.shared == CpuSet([15])
    pod = tight.pods["s-u"]
    other = place(tight, pod, "d", 0, whole(15), "d-u")
    assert other.container is not None
    assert other.container.placement.exclusive == CpuSet.parse("0-14")
    assert guaranteed(tight, "v", 1).container is None
    assert violations(other.state) == []


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(
    ("runs_on", "phase", "requested", "limit"),
    [
        ("0-14", Phase.RUNNING, 15, None),
        ("0-14", Phase.CREATED, 15, AdmissionRule.SHARED_FLOOR),
        (
            "0-15",
            Phase.RUNNING,
            15,
            AdmissionRule.SHARED_FLOOR,
        ),  # it runs on the CPUs of all containers: it does not own them yet
        ("0-3", Phase.RUNNING, 15, AdmissionRule.SHARED_FLOOR),
        ("0-14", Phase.RUNNING, 14, AdmissionRule.REQUEST),
    ],
)
def test_an_adopted_container_keeps_the_cpus_that_it_runs_on(
    static: bool, runs_on: str, phase: Phase, requested: int, limit: AdmissionRule | None
) -> None:
    node = Node(MACHINE, CpuTopology.of(MACHINE), static, admission=DEFAULT)
    cpus = CpuSet.parse("0-14")
    pod = pod_of("u", requested, qos=QosClass.LSR, cpuset=cpus)
    request = changed_copy(whole(15), cpuset_cpus=runs_on)
    plan = adopt(NodeState.empty(node), ContainerFound("c1", pod, "c", 0, request, phase))
    assert plan.limit is limit
    assert plan.container is not None
    assert plan.container.placement.exclusive == (cpus if limit is None else CpuSet())
    assert plan.container.placement.pool is (Pool.OWN if limit is None else Pool.SHARED)
    assert bool(plan.problem) is (limit is not None)


def test_a_container_pinned_by_kubelet_beyond_the_floor_shares_and_is_not_rejected() -> None:
    """kubelet has admitted the pod and would retry the create again and again."""
    node = Node(MACHINE, CpuTopology.of(MACHINE), admission=DEFAULT)
    for count, pool in ((6, Pool.OWN), (13, Pool.SHARED)):
        pod = pod_of("u", count)
        cpus = CpuSet(range(count))
        request = changed_copy(whole(count), cpu_quota=-1, cpuset_cpus=str(cpus))
        plan = place(NodeState.empty(node).with_pod(pod), pod, "c", 0, request, "c1")
        assert plan.container is not None
        assert plan.container.placement.pool is pool
        assert plan.limit is (AdmissionRule.SHARED_FLOOR if pool is Pool.SHARED else None)
    request = changed_copy(whole(7), cpuset_cpus="0-3,8-10")
    pod = pod_of("u", 7)
    plan = place(NodeState.empty(node).with_pod(pod), pod, "c", 0, request, "c1")
    assert plan.container is not None
    assert len(plan.container.placement.exclusive) == 7, (
        "other CPUs instead, as where another pod owns the CPUs"
    )
    assert "other CPUs than kubelet's CPU manager named (shared-floor)" in plan.problem


def test_cpus_that_kubelet_holds_for_future_containers_keep_the_floor() -> None:
    state = state_of().with_kubelet_cpus({"u": {"a": CpuSet.parse("0-3,8-9"), "b": CpuSet.parse("10")}})
    assert state.owners.keys() == {"u/a"}
    assert state.pools.shared == MACHINE.online - CpuSet.parse("0-3,8-9")


@pytest.mark.parametrize(
    ("held_by", "owners"),
    [
        (pod_of("u"), {"u/a"}),
        (pod_of("v"), {"u/a"}),
        (pod_of("u", qos=QosClass.LS), set()),
        (pod_of("u", qos=QosClass.BE), set()),
        (pod_of("u", 2, cpuset=CpuSet.parse("4-5")), set()),
        (pod_of("u", 1, cpuset=CpuSet.parse("4-5")), {"u/a"}),  # more than it may claim
    ],
)
def test_kubelet_pins_no_pod_that_a_label_or_a_scheduler_puts_elsewhere(
    held_by: Pod, owners: set[str]
) -> None:
    state = state_of().with_pod(held_by).with_kubelet_cpus({"u": {"a": CpuSet.parse("0-1")}})
    assert state.owners.keys() == owners


def test_a_container_gets_the_set_aside_of_its_pod_although_the_floor_was_raised() -> None:
    rules = {"policy": TopologyPolicy.BEST_EFFORT, "scope": Scope.POD}
    requests = PodRequests("u", (even("c", 8000),))
    pod = pod_of("u", 8, requests=requests)
    admission = admit(state_of(**rules), pod, whole(8))
    assert admission.pod.reserved_for_pod is not None
    tight = admission.state.with_node(state_of(changed_copy(DEFAULT, floor=10, numa_floor=0), **rules).node)
    plan = place(tight, admission.pod, "c", 0, whole(8), "c-u")
    assert plan.container is not None, plan.verdict
    assert plan.container.placement.exclusive == admission.pod.reserved_for_pod.cpus


def test_replacement_cpus_keep_the_floor() -> None:
    for rules, count in ((AdmissionRules(), 2), (DEFAULT, 0)):
        state = named(state_of(rules), "u", "4-7,12-13").state
        pod = pod_of("v", 6)
        own = CpuSet.parse("0-3,8-9")
        placement = Placement(Pool.OWN, own, MACHINE.memory_nodes)
        container = Container("c-v", "c", pod, whole(6), placement, Phase.RUNNING, 0, "v/c")
        state = state.with_pod(pod).changed(put=(container,))
        left = MACHINE.online - CpuSet([0, 1])
        cpus = [cpu for cpu in MACHINE.cpus if cpu.id in left]
        nodes = [changed_copy(node, cpus=node.cpus & left) for node in MACHINE.nodes]
        state = state.with_machine(changed_copy(MACHINE, cpus=tuple(cpus), nodes=tuple(nodes)))
        (short,) = owners_missing_cpus(state)
        assert len(choose_replacements(state, short)) == count


LIMITS = {
    AdmissionRule.POD_LIMIT: changed_copy(DEFAULT, pod_limit=4, floor=0, numa_floor=0),
    AdmissionRule.NAMESPACE_LIMIT: changed_copy(DEFAULT, namespace_limit=6, floor=0, numa_floor=0),
    AdmissionRule.NODE_LIMIT: changed_copy(DEFAULT, node_limit=8, floor=0, numa_floor=0),
}


def test_one_pod_owns_no_more_than_its_limit() -> None:
    state = state_of(LIMITS[AdmissionRule.POD_LIMIT])
    assert guaranteed(state, "u", 4).container is not None
    assert guaranteed(state, "u", 5).limit is AdmissionRule.POD_LIMIT
    assert named(state, "u", "0-4").verdict.reason == "AdmissionPodLimit"
    assert admit(state, pod_of("u", 5, qos=QosClass.LSR), whole(5)).limit is AdmissionRule.POD_LIMIT
    other = admit(state, pod_of("v", 4, qos=QosClass.LSR), whole(4)).state
    assert guaranteed(other, "u", 4).container is not None, "set-asides of other pods do not count"
    pod = pod_of("u", 8)
    one = place(state.with_pod(pod), pod, "one", 0, whole(3), "c1")
    two = place(one.state, pod, "two", 0, whole(2), "c2")
    assert two.limit is AdmissionRule.POD_LIMIT, "the containers of a pod count together"
    assert two.verdict.message == (
        f"cannot give CPUs {two.verdict.message.split()[3]} to a/u/two: the pod would own 5 CPUs,"
        " and may own 4 (admission.maxCPUsPerPod)"
    )
    assert place(one.state, pod, "two", 0, whole(1), "c2").container is not None


def test_the_pods_of_one_namespace_own_no_more_than_its_limit() -> None:
    state = named(state_of(LIMITS[AdmissionRule.NAMESPACE_LIMIT]), "u", "0-3").state
    aside = admit(state, pod_of("v", 2, qos=QosClass.LSR), whole(2)).state
    assert guaranteed(aside, "w", 1).limit is AdmissionRule.NAMESPACE_LIMIT
    assert guaranteed(aside, "w", 1, namespace="b").container is not None
    assert guaranteed(state, "w", 2).container is not None
    assert guaranteed(state, "w", 3).limit is AdmissionRule.NAMESPACE_LIMIT
    elsewhere = admit(state, pod_of("v", 2, namespace="b", qos=QosClass.LSR), whole(2)).state
    assert guaranteed(elsewhere, "w", 2).container is not None, (
        "set-asides of other namespaces do not count either"
    )
    other = named(state, "x", "4-7", namespace="b").state
    assert guaranteed(other, "w", 2).container is not None, "owners of other namespaces do not count"
    ended = ends(state, "c-u")
    assert guaranteed(ended, "w", 3).limit is AdmissionRule.NAMESPACE_LIMIT, "the container may come back"
    assert guaranteed(ended.without_pod("s-u"), "w", 3).container is not None


def test_all_pods_of_a_node_own_no_more_than_its_limit() -> None:
    state = named(state_of(LIMITS[AdmissionRule.NODE_LIMIT]), "u", "0-3").state
    other = state.with_kubelet_cpus({"k": {"c": CpuSet([15])}})
    assert guaranteed(other, "w", 4, namespace="b").limit is AdmissionRule.NODE_LIMIT
    assert guaranteed(other, "w", 3, namespace="b").container is not None
    assert guaranteed(state, "w", 4, namespace="b").container is not None
    blocked = structs.replace(state, blocked_cpus=CpuSet([14, 15]))
    assert guaranteed(blocked, "w", 4, namespace="b").container is not None, "CPUs without an owner"
    ended = ends(state, "c-u")
    assert guaranteed(ended, "w", 5, namespace="b").limit is AdmissionRule.NODE_LIMIT, (
        "the container may come back"
    )
    assert guaranteed(ended.without_pod("s-u"), "w", 5, namespace="b").container is not None


class RandomPods:
    """Random pods on a node; the floors are checked after each step."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.machine = chance.choice(
            [MACHINE, regular_machine(1, 2, 3, 2), regular_machine(2, 2, 4, 1), regular_machine(1, 1, 2, 1)]
        )
        self.rules = changed_copy(
            DEFAULT,
            pod_limit=chance.choice([None, None, 3]),
            namespace_limit=chance.choice([None, None, 6]),
            node_limit=chance.choice([None, None, len(self.machine.online) // 2]),
            floor=chance.choice([None, None, 1, len(self.machine.online) // 3]),
            numa_floor=chance.choice([None, None, 0, 1]),
            beyond=chance.choice(list(BeyondLimit)),
        )
        options = CpuOptions(full_pcpus_only=chance.random() < 0.3)
        self.state = state_of(
            self.rules,
            self.machine,
            options=options,
            policy=chance.choice(list(TopologyPolicy)),
            scope=chance.choice(list(Scope)),
            reserved=CpuSet([0]) if chance.random() < 0.5 else CpuSet(),
        )
        self.serial = 0

    def step(self) -> None:
        more = (
            self.container_crashed,
            self.container_crashed,
            self.container_added,
            self.pod_removed,
            self.kubelet_changed,
        )
        self.chance.choice([self.pod_created, self.pod_created, self.pod_created, *more])()
        self.check()

    def pod_created(self) -> None:
        chance, self.serial = self.chance, self.serial + 1
        uid, count = f"u{self.serial}", chance.randint(0, 5)
        qos = chance.choice([QosClass.LSR, QosClass.LSE, QosClass.NONE, QosClass.LS])
        cpuset = None
        if chance.random() < 0.5:
            online = list(self.machine.online)
            size = min(len(online), chance.choice([count, count, count + 3, len(online) - 1]))
            cpuset = CpuSet(chance.sample(online, size)) or None
        kube = chance.choice([KubeQos.GUARANTEED, KubeQos.GUARANTEED, KubeQos.BURSTABLE])
        pod = pod_of(uid, count, chance.choice("ab"), qos=qos, kube_qos=kube, cpuset=cpuset)
        others = {c.id: c.placement.exclusive for c in self.state.containers.values()}
        admission = admit(self.state, pod, whole(count))
        if not admission.verdict.admitted:
            assert admission.state is self.state
            return
        state = admission.state.with_pod(admission.pod)
        plan = place(state, admission.pod, "c", 0, whole(count), uid)
        self.state = plan.state
        if plan.container is not None:
            self.state = self.state.changed(put=(plan.container.in_phase(Phase.RUNNING),))
            assert len(plan.container.placement.exclusive) <= count
        assert others == {i: self.state.containers[i].placement.exclusive for i in others}

    def container_crashed(self) -> None:
        running = [c for c in self.state.containers.values() if c.phase is Phase.RUNNING]
        if not running:
            return
        container = self.chance.choice(running)
        self.state = ends(self.state, container.id)
        if self.chance.random() < 0.6:
            for _ in range(self.chance.randint(0, 2)):
                self.pod_created()
            pod = self.state.pods[container.pod.sandbox_id]
            name, attempt = container.name, container.attempt + 1
            plan = place(self.state, pod, name, attempt, container.request, f"{container.id}x")
            if plan.container is not None:
                made = plan.container.in_phase(Phase.RUNNING)
                self.state = plan.state.changed(put=(made,), drop=(container.id,))

    def container_added(self) -> None:
        """Add a container to a pod that may have an ended container."""
        if not self.state.pods:
            return
        pod = self.state.pods[self.chance.choice(sorted(self.state.pods))]
        self.serial, name = self.serial + 1, self.chance.choice("cd")
        if any(c.name == name and c.phase is Phase.RUNNING for c in self.state.in_sandbox(pod.sandbox_id)):
            return
        request = whole(self.chance.randint(0, 4))
        old = [c.id for c in self.state.in_sandbox(pod.sandbox_id) if c.name == name]
        plan = place(self.state, pod, name, self.serial, request, f"{pod.uid}-{self.serial}")
        if plan.container is not None:
            self.state = plan.state.changed(put=(plan.container.in_phase(Phase.RUNNING),), drop=old)

    def pod_removed(self) -> None:
        if self.state.pods:
            sandbox = self.chance.choice(sorted(self.state.pods))
            gone = [c.id for c in self.state.in_sandbox(sandbox)]
            self.state = self.state.changed(drop=gone).without_pod(sandbox)

    def kubelet_changed(self) -> None:
        online = list(self.machine.online)
        held = {}
        if self.chance.random() < 0.5:
            held = {"k": {"c": CpuSet(self.chance.sample(online, self.chance.randint(1, len(online))))}}
        if not self.state.kubelet_cpus:
            self.state = self.state.with_kubelet_cpus(held)
        elif self.chance.random() < 0.5:
            self.state = self.state.with_kubelet_cpus({})

    def check(self) -> None:
        state, rules = self.state, self.rules
        assert violations(state) == []
        pool = state.pools.shared - state.cpus_set_aside()
        for floor in state.node.floors.floors:
            inside = pool if floor.cpus is None else pool & floor.cpus
            assert len(inside) >= floor.least, floor
        live = [c for c in state.containers.values() if c.placement.exclusive and c.phase is not Phase.EXITED]
        by_pod: dict[str, CpuSet] = {}
        by_namespace: dict[str, CpuSet] = {}
        for pod, cpus in [
            *((c.pod, c.placement.exclusive) for c in live),
            *((p, p.reserved_for_pod.cpus) for p in state.pods.values() if p.reserved_for_pod is not None),
        ]:
            by_pod[pod.uid] = by_pod.get(pod.uid, CpuSet()) | cpus
            by_namespace[pod.namespace] = by_namespace.get(pod.namespace, CpuSet()) | cpus
        assert all(len(cpus) <= (rules.pod_limit or 1000) for cpus in by_pod.values())
        assert all(len(cpus) <= (rules.namespace_limit or 1000) for cpus in by_namespace.values())
        owned = CpuSet()
        for cpus in by_pod.values():
            owned |= cpus
        if not state.kubelet_cpus:
            assert len(owned) <= (1000 if rules.node_limit is None else rules.node_limit)


@pytest.mark.parametrize("block", range(8))
def test_random_pods_leave_the_pool_its_floor(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        pods = RandomPods(seed)
        try:
            for _ in range(25):
                pods.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def created(state: NodeState, pod: Pod, name: str, count: int, attempt: int = 0) -> tuple[NodeState, Any]:
    plan = place(state, pod, name, attempt, whole(count), f"{pod.uid}/{name}/{attempt}")
    assert plan.container is not None, plan.verdict
    return plan.state.changed(put=(plan.container.in_phase(Phase.RUNNING),)), plan


def count_of(plan: Any) -> int:
    return len(plan.container.placement.exclusive)


def test_containers_own_no_more_cpus_than_their_pod_requests() -> None:
    """A pod with ``spec.resources`` of 4 CPUs: each create carries them."""
    pod = pod_of("u", 4)
    state = state_of().with_pod(pod)
    counts, problems = [], []
    for name in "abc":
        state, plan = created(state, pod, name, 4)
        counts.append(count_of(plan))
        problems.append(str(plan.problem))
    assert counts == [4, 0, 0]
    reason = (
        "it owns no CPUs: its create carries 4 CPUs, other containers of its pod own 4, and the pod requests"
        " 4 together; only kubelet reports which containers request CPUs of their own"
    )
    assert problems == ["", reason, reason]
    _, again = created(ends(state, "u/a/0"), pod, "a", 4, 1)
    assert count_of(again) == 4


@pytest.mark.parametrize(
    "total", [None, Request(), Request(2, 0, 100_000), Request(262_144, -1, 100_000)], ids=str
)
def test_the_request_of_a_pod_that_is_not_known_limits_nothing(total: Request | None) -> None:
    pod = changed_copy(pod_of("u"), total=total)
    state, first = created(state_of().with_pod(pod), pod, "a", 4)
    assert (count_of(first), count_of(created(state, pod, "b", 4)[1])) == (4, 4)


def test_the_request_of_a_pod_leaves_ordinary_containers_their_cpus() -> None:
    """A sidecar of 1 CPU, an init container of 4, and two app containers of 2 and 1 CPUs: 5 at most."""
    pod = pod_of("u", 5)
    state, sidecar = created(state_of().with_pod(pod), pod, "sidecar", 1)
    state, init = created(state, pod, "init", 4)
    state = ends(state, "u/init/0")
    state, app = created(state, pod, "app", 2)
    state, other = created(state, pod, "other", 1)
    assert [count_of(plan) for plan in (sidecar, init, app, other)] == [1, 4, 2, 1]
    smaller = pod_of("u", 3)  # the app container was resized in place and keeps its CPUs
    state, other = created(ends(state, "u/other/0"), smaller, "other", 1, 1)
    assert count_of(other) == 1


def test_an_ephemeral_container_owns_no_cpus_of_its_pod() -> None:
    reported = PodRequests(
        "u", (ContainerResources("a"),), pod_level_requests={"cpu": 4000}, pod_level_limits={"cpu": 4000}
    )
    pod = pod_of("u", requests=reported)
    _, plan = created(state_of().with_pod(pod), pod, "debugger", 4)
    assert count_of(plan) == 0
