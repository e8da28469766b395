"""The record of a decision: facts and their sources, considered hints, and moved containers."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_create import place
from proxy.engine.explain_record import MAX_MOVED, explain, explain_pooled, facts_of
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.engine.topology_manager import ANYWHERE, TopologyDecision
from proxy.model.defects import InputDefect
from proxy.model.explanation import Fact, MovedContainer
from proxy.model.grants import Grants
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, NumaPolicy
from proxy.model.options import TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import KubeQos, LocatedDevice, Pod, QosClass, Request, Verdict
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MIB, GIB = 1 << 20, 1 << 30
MACHINE = regular_machine(2, 1, 4, 2)
POD = Pod("s", "u", "ns", "p")
EMPTY = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), static=True, policy=TopologyPolicy.RESTRICTED))
CRI = "the CRI request"
POD_FACTS = changed_copy(
    POD,
    source="kubelet's /pods",
    requests=PodRequests(
        "u",
        (
            ContainerResources(
                "i", ContainerKind.INIT, {"cpu": 1500, "memory": GIB}, {"cpu": 2000, "hugepages-2Mi": 4 * MIB}
            ),
            ContainerResources(
                "c", ContainerKind.APP, {"memory": 3 * 1024, "vendor/gpu": 2}, {"memory": 1000}
            ),
        ),
    ),
)


def facts(pod: Pod, name: str, request: Request) -> list[Fact]:
    found = facts_of(pod, name, request)
    assert found[0] == Fact("QoS class", "Guaranteed", "the pod's cgroup parent")
    return list(found[1:])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(), []),
        (Request(cpu_shares=2), []),
        (
            Request(2048, 200_000, 100_000),
            [
                Fact("cpu request", "2 CPUs", f"cpu_shares 2048 of {CRI}"),
                Fact("cpu limit", "2 CPUs", f"cpu_quota and cpu_period of {CRI}"),
            ],
        ),
        (
            Request(512, 50_000, 0),
            [
                Fact("cpu request", "about 500m", f"cpu_shares 512 of {CRI}"),
                Fact("cpu limit", "500m", f"cpu_quota and cpu_period of {CRI}"),
            ],
        ),
        (Request(3, -1), [Fact("cpu request", "about 2m", f"cpu_shares 3 of {CRI}")]),
        (
            Request(memory_limit=5 * GIB, huge_pages=(("hugepages-2Mi", 6 * MIB),)),
            [Fact("memory limit", "5Gi", CRI), Fact("hugepages-2Mi limit", "6Mi", CRI)],
        ),
        (
            Request(memory_limit=1000, cpuset_cpus="1-2", cpuset_mems="0"),
            [
                Fact("memory limit", "1000", CRI),
                Fact("CPUs named", "1-2", f"cpuset_cpus of {CRI}"),
                Fact("memory nodes named", "0", f"cpuset_mems of {CRI}"),
            ],
        ),
        (
            Request(devices=(LocatedDevice("/dev/a", "v/gpu", Mask([1]), "sysfs"), LocatedDevice("/dev/b"))),
            [
                Fact("device v/gpu /dev/a", "near NUMA node 1", "sysfs"),
                Fact("device /dev/b", "near no NUMA node", ""),
            ],
        ),
    ],
)
def test_facts_of_the_cri(request_: Request, expected: list[Fact]) -> None:
    assert facts(POD, "c", request_) == expected


def test_facts_of_kubelet_replace_those_of_the_cri() -> None:
    request, source = Request(2048, 200_000, 100_000, GIB), "kubelet's /pods"
    assert facts(POD_FACTS, "i", request) == [
        Fact("kind of container", "init", source),
        Fact("cpu request", "1500m", source),
        Fact("memory request", "1Gi", source),
        Fact("cpu limit", "2 CPUs", source),
        Fact("hugepages-2Mi limit", "4Mi", source),
    ]
    assert facts(POD_FACTS, "c", request) == [
        Fact("kind of container", "app", source),
        Fact("memory request", "3Ki", source),
        Fact("vendor/gpu request", "2", source),
        Fact("memory limit", "1000", source),
    ]
    assert facts(POD_FACTS, "", request) == [Fact("containers", "i, c", source)]


def test_the_label_and_the_annotation_are_facts_too() -> None:
    lsr = changed_copy(POD, qos=QosClass.LSR, cpuset=CpuSet.parse("3-4"))
    assert facts_of(lsr, "c", Request()) == (
        Fact("QoS class", "LSR", "the pod's label"),
        Fact("the pod's CPUs:", "3-4", "its resource-status annotation"),
    )


def test_cpus_that_were_chosen_here_are_not_attributed_to_an_annotation() -> None:
    lse = changed_copy(POD, qos=QosClass.LSE, cpuset=CpuSet.parse("3-4"), cpuset_chosen_locally=True)
    assert list(facts_of(lse, "c", Request()))[1:] == [
        Fact("the pod's CPUs:", "3-4", "the decision for the pod as a whole")
    ]


def test_preferences_of_a_pod_and_ignored_preferences_are_facts() -> None:
    pod = changed_copy(
        POD,
        bind_required=BindPolicy.FULL_PCPUS,
        aligned=NumaPolicy.RESTRICTED,
        volcano_policy=TopologyPolicy.BEST_EFFORT,
        volcano_nodes=Mask((0, 1)),
        defects=(InputDefect("annotation x: nonsense"),),
    )
    assert facts(pod, "c", Request()) == [
        Fact("bind policy, required", "FullPCPUs", "annotation resource-spec"),
        Fact("NUMA topology policy", "Restricted", "annotation numa-topology-spec"),
        Fact("preferred topology policy", "best-effort", "Volcano's annotation"),
        Fact("preferred NUMA nodes", "0-1", "Volcano's annotation"),
        Fact("ignored:", "annotation x: nonsense", ""),
    ]


def test_a_record_contains_the_outcome_of_the_decision() -> None:
    request = Request(2048, 200_000, 100_000, devices=(LocatedDevice("/dev/a", "v/gpu", Mask([1])),))
    plan = place(EMPTY, POD, "c", 3, request, "t")
    why = plan.explanation
    assert why is not None
    assert plan.container is not None
    assert (why.event, why.ref, why.uid, why.attempt) == ("CreateContainer", "ns/p/c", "u", 3)
    assert (why.pool, why.cpus, why.mems) == ("own", CpuSet.parse("4,12"), Mask([1]))
    assert (why.devices, why.reasons) == (("v/gpu=/dev/a",), plan.container.placement.reasons)
    assert [(s.provider, s.resource, s.count) for s in why.answers] == [
        ("devices", "v/gpu", 1),
        ("cpu", "cpu", 3),
    ]
    assert why.merge is not None
    assert why.merge.best.affinity == Mask([1])
    assert [step.provider for step in why.steps] == ["cpu"]
    assert (why.moved, why.more_moved, why.shortfalls, why.verdict) == ((), 0, (), Verdict())


def test_a_refusal_records_the_considered_hints_and_grants_nothing() -> None:
    far = (LocatedDevice("/dev/a", "v/gpu", Mask([0])), LocatedDevice("/dev/b", "v/nic", Mask([1])))
    plan = place(EMPTY, POD, "c", 0, Request(2048, 200_000, 100_000, devices=far), "t")
    why = plan.explanation
    assert why is not None
    assert plan.state is EMPTY
    assert (why.pool, why.cpus, why.mems, why.reasons, why.steps) == ("", CpuSet(), None, (), ())
    assert why.devices == ("v/gpu=/dev/a", "v/nic=/dev/b")
    assert {s.resource for s in why.answers} == {"v/gpu", "v/nic", "cpu"}
    assert why.merge is not None
    assert plan.verdict.message.endswith(f"(ns/p/c: {'; '.join(why.merge.conflicts)})")
    assert why.merge.conflicts
    blank = explain("RunPodSandbox", POD, "", 0, Request(), plan.verdict)
    assert (blank.ref, blank.answers, blank.merge, blank.cpus) == ("ns/p", (), None, CpuSet())


def test_a_container_of_a_pool_with_devices_is_recorded_with_the_cpus_of_the_pool() -> None:
    burstable = changed_copy(POD, kube_qos=KubeQos.BURSTABLE)
    request = Request(cpu_shares=512, devices=(LocatedDevice("/dev/a", "v/gpu", Mask([1])),))
    plan = place(EMPTY, burstable, "c", 0, request, "t")
    why = plan.explanation
    assert why is not None
    assert (why.pool, why.cpus, why.devices) == ("shared", MACHINE.online, ("v/gpu=/dev/a",))
    assert [step.resource for step in why.answers] == ["v/gpu"]


def test_the_cpus_of_a_decision_are_recorded_only_if_it_is_admitted() -> None:
    cpus = CpuSet.parse("4,12")
    decision = TopologyDecision(Verdict(), ANYWHERE, Grants(cpus))
    admitted = explain("RunPodSandbox", POD, "", 0, Request(), Verdict(), decision)
    assert (admitted.pool, admitted.cpus) == ("", cpus)
    refusal = Verdict(GrpcStatus.FAILED_PRECONDITION, "SharedPoolExhausted", "nothing would be left")
    refused = explain("CreateContainer", POD, "c", 0, Request(), refusal, decision)
    assert refused.cpus == CpuSet()


def test_a_placement_in_a_pool_is_explained_by_the_class() -> None:
    be = changed_copy(POD, kube_qos=KubeQos.BEST_EFFORT)
    plan = place(EMPTY, be, "c", 0, Request(cpu_shares=2), "t")
    assert plan.explanation is None
    assert plan.container is not None
    why = explain_pooled(plan.container, plan.state.desired_cpus(plan.container))
    assert (why.pool, why.cpus, why.mems, why.reasons) == (
        "be",
        MACHINE.online,
        Mask([0, 1]),
        ("BestEffort pod runs on the BE pool",),
    )
    assert why.facts == (Fact("QoS class", "BestEffort", "the pod's cgroup parent"),)


@pytest.mark.parametrize("count", [1, MAX_MOVED, MAX_MOVED + 3])
def test_a_record_names_the_first_of_the_moved_containers(count: int) -> None:
    state = EMPTY
    burstable = changed_copy(POD, kube_qos=KubeQos.BURSTABLE)
    for number in range(count):
        state = place(state, burstable, f"c{number:02}", 0, Request(), f"t{number:02}").state
    plan = place(state, changed_copy(POD, uid="g"), "g", 0, Request(2048, 200_000, 100_000), "t")
    why = plan.explanation
    assert why is not None
    assert len(plan.shrink) == count
    assert (len(why.moved), why.more_moved) == (min(count, MAX_MOVED), max(0, count - MAX_MOVED))
    assert why.moved[0] == MovedContainer("ns/p/c00", MACHINE.online, CpuSet.parse("1-7,9-15"))
