from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.adoption import adopt
from proxy.engine.container_create import place
from proxy.engine.container_events import ContainerFound
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRules, ResourceStatusMode
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import KubeQos, Phase, Pod, Pool, QosClass, Request, SetAside
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)


def found(
    container_id: str, pod: Pod, request: Request, *, attempt: int = 0, phase: Phase = Phase.RUNNING
) -> ContainerFound:
    return ContainerFound(container_id, pod, "c", attempt, request, phase)


def empty() -> NodeState:
    return NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), static=True))


def pod(uid: str, qos: QosClass = QosClass.NONE, kube: KubeQos = KubeQos.GUARANTEED, cpus: str = "") -> Pod:
    return Pod(f"s-{uid}", uid, "ns", uid, 0, qos, kube, "", CpuSet.parse(cpus) or None)


def runs_on(cpus: str, count: int = 2, mems: str = "") -> Request:
    return Request(1024 * count, 100_000 * count, 100_000, 0, cpus, mems)


def test_a_running_owner_keeps_the_cpus_that_it_has() -> None:
    plan = adopt(empty(), found("id", pod("g"), runs_on("5,13", mems="1")))
    assert plan.container is not None
    assert (plan.container.placement.exclusive, plan.container.placement.mems) == (
        CpuSet.parse("5,13"),
        Mask((1,)),
    )
    assert plan.state.pools.shared == MACHINE.online - CpuSet.parse("5,13")


def test_a_running_container_without_exclusive_cpus_is_not_given_any() -> None:
    plan = adopt(empty(), found("id", pod("g"), runs_on("0-15")))
    assert plan.container is not None
    assert plan.container.placement.pool is Pool.SHARED
    assert "while it runs" in plan.container.placement.reasons[0]


@pytest.mark.parametrize(
    ("qos", "kube", "pool"),
    [
        (QosClass.BE, KubeQos.BURSTABLE, Pool.BE),
        (QosClass.NONE, KubeQos.BEST_EFFORT, Pool.BE),
        (QosClass.LS, KubeQos.BURSTABLE, Pool.SHARED),
    ],
)
def test_a_running_container_without_exclusive_cpus_is_in_the_pool_of_its_class(
    qos: QosClass, kube: KubeQos, pool: Pool
) -> None:
    request = Request(512, 0, 100_000, 0, "0-15")
    plan = adopt(empty(), found("id", pod("p", qos, kube), request))
    assert plan.container is not None
    assert plan.container.placement.pool is pool


def test_a_running_container_is_in_the_part_of_the_pool_to_which_its_pod_is_bound() -> None:
    bound = changed_copy(pod("p", QosClass.LS, KubeQos.BURSTABLE), nodes=Mask((1,)))
    plan = adopt(empty(), found("id", bound, Request(512, 0, 100_000, 0, "0-15")))
    assert plan.container is not None
    assert plan.container.placement.pool_numa_limit == Mask((1,))
    borrowing = pod("p", QosClass.BE, KubeQos.BURSTABLE, cpus="2-3")
    plan = adopt(empty(), found("id", borrowing, Request(512, 0, 100_000, 0, "0-15")))
    assert plan.container is not None
    assert plan.container.placement.pool_cpus_limit == CpuSet.parse("2-3")


@pytest.mark.parametrize("cpus", ["5,40", "4-6", "x"])
def test_cpus_that_differ_from_the_request_are_not_adopted_as_exclusive(cpus: str) -> None:
    plan = adopt(empty(), found("id", pod("g"), runs_on(cpus)))
    assert plan.container is not None
    assert plan.container.placement.pool is Pool.SHARED


def test_several_owners_are_adopted_and_sharing_containers_move() -> None:
    state = adopt(empty(), found("ls", pod("ls", QosClass.LS), runs_on("0-15"))).state
    for key, uid, attempt, cpus in (("a", "g", 0, "5,13"), ("b", "g", 1, "5,13"), ("c", "h", 0, "6,14")):
        plan = adopt(state, found(key, pod(uid), runs_on(cpus), attempt=attempt))
        assert plan.container is not None
        assert plan.container.placement.exclusive == CpuSet.parse(cpus)
        assert plan.shrink == (() if key == "b" else ("ls",))
        state = plan.state


def test_foreign_cpus_are_not_adopted() -> None:
    state = place(empty(), pod("lse", QosClass.LSE, cpus="5"), "c", 0, runs_on(""), "x").state
    plan = adopt(state, found("id", pod("g"), runs_on("5,13")))
    assert plan.container is not None
    assert plan.container.placement.pool is Pool.SHARED


def test_cpus_that_are_set_aside_for_another_pod_are_not_adopted() -> None:
    aside = SetAside(None, preferred=True, cpus=CpuSet.parse("5-6"))
    state = empty().with_pod(changed_copy(pod("lse", QosClass.LSE), reserved_for_pod=aside))
    plan = adopt(state, found("id", pod("g"), runs_on("5,13")))
    assert plan.container is not None
    assert plan.container.placement.pool is Pool.SHARED
    own = changed_copy(pod("g"), reserved_for_pod=aside)
    plan = adopt(empty().with_pod(own), found("id", own, runs_on("5,13")))
    assert plan.container is not None
    assert plan.container.placement.exclusive == CpuSet.parse("5,13")


def test_a_created_container_is_placed_as_a_new_one() -> None:
    plan = adopt(empty(), found("id", pod("g"), runs_on("0-15"), phase=Phase.CREATED))
    assert plan.container is not None
    assert (plan.container.id, plan.container.phase) == ("id", Phase.CREATED)
    assert len(plan.container.placement.exclusive) == 2


def test_a_claim_that_would_be_refused_shares_and_is_reported() -> None:
    plan = adopt(empty(), found("id", pod("lse", QosClass.LSE, cpus="40"), runs_on("")))
    assert plan.container is not None
    assert (plan.verdict.admitted, plan.container.placement.pool) == (True, Pool.SHARED)
    assert plan.problem == "resource-status names CPU 40, but CPU 40 is not online here"
    assert plan.container.placement.reasons == (plan.problem,)
    state = place(empty(), pod("one", QosClass.LSE, cpus="4"), "c", 0, runs_on(""), "x").state
    plan = adopt(state, found("id", pod("lse", QosClass.LSE, cpus="4"), runs_on("4")))
    assert plan.problem == "cannot give CPU 4 to ns/lse/c: CPU 4 is owned by ns/one already"


def test_annotated_pods_keep_their_cpus_and_other_containers_move() -> None:
    ls = adopt(empty(), found("ls", pod("ls", QosClass.LS), runs_on("0-15")))
    plan = adopt(
        ls.state,
        found("id", pod("lse", QosClass.LSE, cpus="3"), runs_on("3")),
    )
    assert plan.shrink == ("ls",)
    assert plan.state.owners["lse"].cpus == CpuSet.parse("3")


def test_an_exited_container_holds_no_cpus() -> None:
    plan = adopt(empty(), found("id", pod("lse", QosClass.LSE, cpus="3"), runs_on("3"), phase=Phase.EXITED))
    assert plan.state.pools == empty().pools


def test_the_memory_of_a_live_container_stays_where_it_is() -> None:
    lse = pod("lse", QosClass.LSE, cpus="3")
    plan = adopt(empty(), found("id", lse, runs_on("3", mems="0-1")))
    assert plan.container is not None
    assert plan.container.placement.mems == Mask((0, 1))


MIB = 1 << 20


def counting() -> NodeState:
    machine = regular_machine(2, 1, 4, 2, mem_bytes_per_node=100 * MIB)
    node = Node(machine, CpuTopology.of(machine), static=True, reserved_memory={0: {"memory": 10 * MIB}})
    return NodeState.empty(node)


def with_memory(cpus: str, mems: str, count: int = 2) -> Request:
    pages = (("hugepages-2Mi", 4 * MIB), ("hugepages-1Gi", 0))
    return Request(1024 * count, 100_000 * count, 100_000, 60 * MIB, cpus, mems, pages)


@pytest.mark.parametrize(
    ("the_pod", "request_", "pool"),
    [
        (pod("g"), with_memory("5,13", "1"), Pool.OWN),
        (pod("g"), with_memory("0-15", "1"), Pool.SHARED),
        (pod("g"), Request(512, 0, 0, 60 * MIB, "", "1", (("hugepages-2Mi", 4 * MIB),)), Pool.SHARED),
        (pod("l", QosClass.LSR, cpus="5,13"), with_memory("5,13", "1"), Pool.OWN),
    ],
)
def test_bound_memory_counts_for_its_container(the_pod: Pod, request_: Request, pool: Pool) -> None:
    plan = adopt(counting(), found("id", the_pod, request_))
    assert plan.container is not None
    placement = plan.container.placement
    assert (placement.pool, placement.mems, plan.container.request) == (pool, Mask([1]), request_)
    assert [(b.affinity, b.resource, b.size) for b in placement.blocks] == [
        (Mask([1]), "memory", 60 * MIB),
        (Mask([1]), "hugepages-2Mi", 4 * MIB),
    ]
    assert plan.state.memory is not None
    assert plan.state.memory.nodes[1].table("memory").reserved == 60 * MIB
    assert plan.state.changed(drop=["id"]).memory == counting().memory


def test_memory_is_assigned_to_a_created_container_of_a_pool_and_not_to_a_running_one() -> None:
    request = Request(512, memory_limit=60 * MIB)
    created = adopt(counting(), found("id", pod("g"), request, phase=Phase.CREATED))
    assert created.container is not None
    assert [(b.affinity, b.size) for b in created.container.placement.blocks] == [(Mask([0]), 60 * MIB)]
    running = adopt(counting(), found("id", pod("g"), request))
    assert running.container is not None
    assert running.container.placement.blocks == ()
    assert running.explanation is None, "nothing was decided"


@pytest.mark.parametrize(
    ("the_pod", "mems"), [(pod("g"), ""), (pod("g"), "0-1"), (pod("b", kube=KubeQos.BURSTABLE), "1")]
)
def test_memory_without_a_binding_is_charged_to_no_node(the_pod: Pod, mems: str) -> None:
    plan = adopt(counting(), found("id", the_pod, with_memory("5,13", mems)))
    assert plan.container is not None
    assert plan.container.placement.blocks == ()
    assert adopt(empty(), found("id", pod("g"), with_memory("5", "1"))).container is not None


def test_named_cpus_are_kept_although_their_memory_is_no_longer_available() -> None:
    state = adopt(counting(), found("a", pod("a"), with_memory("5,13", "1"))).state
    lsr = pod("l", QosClass.LSR, cpus="6,14")
    plan = adopt(state, found("id", lsr, with_memory("6,14", "0-1")))
    assert plan.container is not None
    assert (plan.container.placement.exclusive, plan.container.placement.mems) == (
        CpuSet.parse("6,14"),
        Mask([0, 1]),
    )
    plain = changed_copy(with_memory("", ""), huge_pages=())
    created = adopt(state, found("id", lsr, plain, phase=Phase.CREATED))
    assert created.container is not None
    assert created.container.placement.mems == Mask([0]), "nothing is in use yet"
    assert created.container.placement.exclusive == CpuSet.parse("6,14")


def test_cpus_are_not_adopted_if_the_shared_pool_would_be_empty() -> None:
    plan = adopt(empty(), found("id", pod("g"), runs_on("0-15", 16)))
    assert plan.container is not None
    assert plan.container.placement.pool is Pool.SHARED


def test_an_owner_by_count_keeps_its_cpus_if_the_annotation_of_its_pod_is_ignored() -> None:
    rules = AdmissionRules(resource_status=ResourceStatusMode.IGNORE)
    node = Node(MACHINE, CpuTopology.of(MACHINE), static=True, admission=rules)
    plan = adopt(
        NodeState.empty(node),
        found("id", pod("g", cpus="2"), runs_on("5,13")),
    )
    assert plan.container is not None
    assert plan.container.placement.exclusive == CpuSet.parse("5,13")
