"""Pods as a whole: the decision at the sandbox, and how it applies to the containers that follow."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_create import place
from proxy.engine.node import Node
from proxy.engine.pod_admission import PodAdmission, admit
from proxy.engine.state import NodeState
from proxy.model.defects import InputDefect
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, NodeBindPolicy
from proxy.model.options import CpuOptions, Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import KubeQos, LocatedDevice, Phase, Pod, QosClass, Request, Verdict
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MIB = 1 << 20
MACHINE = regular_machine(2, 1, 4, 2, mem_bytes_per_node=100 * MIB)  # node 0: 0-3,8-11; node 1: 4-7,12-15
NODE0, NODE1 = (node.cpus for node in MACHINE.nodes)
RESERVED = {0: {"memory": 10 * MIB}}
GPU0, GPU1 = (LocatedDevice(f"/dev/gpu{i}", "vendor/gpu", Mask([i]), "sysfs") for i in (0, 1))
NOWHERE = LocatedDevice("/dev/fuse")
POLICIES = (TopologyPolicy.BEST_EFFORT, TopologyPolicy.RESTRICTED, TopologyPolicy.SINGLE_NUMA_NODE)


def empty(
    policy: TopologyPolicy = TopologyPolicy.RESTRICTED, scope: Scope = Scope.POD, **more: object
) -> NodeState:
    fields = {"static": True, "policy": policy, "scope": scope} | more
    return NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), **fields))


def resources(
    name: str, cpus: int = 0, mib: int = 0, kind: ContainerKind = ContainerKind.APP
) -> ContainerResources:
    amounts = {"cpu": cpus * 1000 or 500, **({"memory": mib * MIB} if mib else {})}
    return ContainerResources(name, kind, amounts, amounts)


def pod(uid: str, *containers: ContainerResources, **more: object) -> Pod:
    requests = PodRequests("as kubelet has it", containers) if containers else None
    return changed_copy(Pod(f"s-{uid}", uid, "ns", uid, requests=requests, source="kubelet"), **more)


def whole(cpus: int, mib: int = 0, *devices: LocatedDevice) -> Request:
    return Request(cpus * 1024, cpus * 100_000, 100_000, mib * MIB, devices=devices)


def cpus_of(admission: PodAdmission) -> str:
    assert admission.pod.reserved_for_pod is not None
    return str(admission.pod.reserved_for_pod.cpus)


@pytest.mark.parametrize(
    ("policy", "scope"), [(TopologyPolicy.NONE, Scope.POD), (TopologyPolicy.RESTRICTED, Scope.CONTAINER)]
)
def test_no_pod_is_decided_without_pod_scope_or_a_policy(policy: TopologyPolicy, scope: Scope) -> None:
    state, the_pod = empty(policy, scope), pod("a", resources("c", 2))
    assert admit(state, the_pod, whole(99)) == PodAdmission(Verdict(), the_pod, state)


@pytest.mark.parametrize(
    "the_pod",
    [
        pod("a", kube_qos=KubeQos.BURSTABLE),
        pod("a", qos=QosClass.LS),
        pod("a", defects=(InputDefect("no JSON", decisive=True),), qos=QosClass.LSR),
        pod("a", cpuset=CpuSet([4]), qos=QosClass.LSR),
    ],
)
def test_a_pod_that_needs_no_alignment_is_admitted_without_a_decision(the_pod: Pod) -> None:
    admission = admit(empty(), the_pod, whole(2, 0, NOWHERE))
    assert (admission.verdict.admitted, admission.pod, admission.explanation) == (True, the_pod, None)
    assert "a" not in {p.key for p in admission.state.pods.values()}


@pytest.mark.parametrize("policy", POLICIES)
def test_each_known_container_gets_a_part_of_the_set_aside(policy: TopologyPolicy) -> None:
    known = pod(
        "a",
        resources("i", 4, 30, ContainerKind.INIT),
        resources("s", 1, 10, ContainerKind.SIDECAR),
        resources("x", 2, 20),
        resources("y", 0, 5),
    )
    admission = admit(empty(policy, reserved_memory=RESERVED), known, whole(9, 999, GPU1))
    aside = admission.pod.reserved_for_pod
    assert aside is not None
    assert (aside.affinity, aside.preferred, aside.blocks) == (Mask([1]), True, ())
    cpus = {part.name: part.cpus for part in aside.parts}
    assert [len(cpus[name]) for name in "isxy"] == [4, 1, 2, 0]
    assert cpus["s"].isdisjoint(cpus["x"])
    assert cpus["s"] | cpus["x"] <= cpus["i"], "CPUs of the init container are reused first"
    assert aside.cpus == cpus["i"] <= NODE1
    sizes = {part.name: sum(b.size for b in part.blocks) // MIB for part in aside.parts}
    assert sizes == {"i": 0, "s": 10, "x": 20, "y": 5}
    assert admission.state.memory is not None
    assert admission.state.memory.nodes[1].table("memory").reserved == 35 * MIB
    assert admission.state.pods["s-a"] == admission.pod
    assert aside.part("x") == aside.parts[2]
    assert aside.part("z") is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pod_with_only_a_known_sum_gets_one_set_aside(policy: TopologyPolicy) -> None:
    admission = admit(empty(policy, reserved_memory=RESERVED), pod("a"), whole(3, 40, GPU1))
    aside = admission.pod.reserved_for_pod
    assert aside is not None
    assert (aside.affinity, aside.parts) == (Mask([1]), ())
    assert len(aside.cpus) == 3
    assert aside.cpus <= NODE1
    assert [(b.affinity, b.size) for b in aside.blocks] == [(Mask([1]), 40 * MIB)]
    state, taken = admission.state, CpuSet()
    for name, count in (("x", 2), ("y", 1)):
        plan = place(state, admission.pod, name, 0, whole(count, 20), name)
        assert plan.container is not None
        own = plan.container.placement.exclusive
        assert (len(own), own <= aside.cpus, own.isdisjoint(taken)) == (count, True, True)
        assert (plan.container.placement.mems, plan.container.placement.blocks) == (Mask([1]), ())
        assert "set aside for its pod" in plan.container.placement.reasons[0]
        taken |= own
        state = plan.state
    assert state.memory == admission.state.memory, "the containers share the memory of the pod"
    plan = place(state, admission.pod, "z", 0, whole(1), "z")
    assert plan.container is not None, "beyond the sum, it gets other CPUs under the pod's hint"
    assert plan.container.placement.exclusive.isdisjoint(aside.cpus)


def test_containers_get_their_parts_in_any_order_of_creation() -> None:
    known = pod("a", resources("x", 2, 20), resources("y", 4, 30))
    admission = admit(empty(reserved_memory=RESERVED), known, whole(6))
    state = admission.state
    for name in "yx":
        plan = place(state, admission.pod, name, 0, whole(2 if name == "x" else 4, 99), name)
        part = admission.pod.reserved_for_pod.part(name) if admission.pod.reserved_for_pod else None
        assert plan.container is not None
        assert part is not None
        assert (plan.container.placement.exclusive, plan.container.placement.blocks) == (
            part.cpus,
            part.blocks,
        )
        assert plan.container.placement.mems == Mask([0])
        state = plan.state
    assert state.memory is not None
    assert state.memory.nodes[0].table("memory").reserved == 50 * MIB


def test_parts_of_init_containers_pass_to_later_containers() -> None:
    known = pod("a", resources("i", 4, 0, ContainerKind.INIT), resources("x", 3))
    admission = admit(empty(), known, whole(4))
    first = place(admission.state, admission.pod, "i", 0, whole(4), "i").container
    assert first is not None
    state = admission.state.changed(put=[first.in_phase(Phase.EXITED)])
    second = place(state, admission.pod, "x", 0, whole(3), "x").container
    assert second is not None
    assert second.placement.exclusive < first.placement.exclusive


def test_a_set_aside_is_exclusive_and_pools_use_it_until_it_is_taken() -> None:
    admission = admit(empty(), pod("a"), whole(6))
    state = admission.state
    assert state.pools.shared == MACHINE.online
    assert state.cpus_set_aside() == state.cpus_set_aside("b") == admission.pod.reserved_for_pod.cpus
    assert state.cpus_set_aside("a") == CpuSet()
    other = admit(state, pod("b"), whole(4))
    assert CpuSet.parse(cpus_of(other)) <= NODE1
    refused = admit(other.state, pod("c"), whole(6))
    assert refused.verdict.reason == "TopologyAffinityError"
    assert refused.state is other.state
    assert refused.pod == pod("c")
    lse = Pod("s-l", "l", "ns", "l", 0, QosClass.LSE, cpuset=CpuSet([0]))
    clash = place(state, lse, "c", 0, Request(), "t")
    assert clash.verdict.message == "cannot give CPU 0 to ns/l/c: CPU 0 is owned by ns/a (set aside) already"
    assert admit(state.without_pod("s-a"), pod("c"), whole(6)).verdict.admitted


@pytest.mark.parametrize(
    ("policy", "admitted"),
    [
        (TopologyPolicy.BEST_EFFORT, True),
        (TopologyPolicy.RESTRICTED, False),
        (TopologyPolicy.SINGLE_NUMA_NODE, False),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_policies_refuse_pods_without_a_preferred_hint(
    policy: TopologyPolicy, *, admitted: bool, known: bool
) -> None:
    state = admit(empty(policy), pod("x"), whole(5)).state
    state = admit(state, pod("y"), whole(5)).state
    arriving = pod("p", resources("a", 2), resources("b", 2)) if known else pod("p")
    admission = admit(state, arriving, whole(4))
    assert admission.verdict.admitted is admitted
    why = admission.explanation
    assert why is not None
    assert (why.event, why.pod, why.container, why.verdict) == (
        "RunPodSandbox",
        "ns/p",
        "",
        admission.verdict,
    )
    assert why.merge is not None
    assert (why.merge.policy, why.merge.scope) == (policy.value, "pod")
    assert [reported.resource for reported in why.answers] == ["cpu"]
    if admitted:
        assert len(CpuSet.parse(cpus_of(admission))) == 4
        assert why.cpus == admission.pod.reserved_for_pod.cpus
        if known:
            assert all(step.what.startswith(("a: ", "b: ")) for step in why.steps)
        return
    assert admission.state is state
    assert admission.verdict.code == 9
    text = "TopologyAffinityError: Resources cannot be allocated with Topology locality (ns/p: "
    assert admission.verdict.message.startswith(text)
    assert admission.verdict.message.endswith(f"{'; '.join(why.merge.conflicts)})")
    assert why.shortfalls


def test_a_pod_that_requests_only_devices_is_decided() -> None:
    admission = admit(empty(), pod("a", kube_qos=KubeQos.BURSTABLE), whole(0, 0, GPU1))
    assert admission.pod.reserved_for_pod is not None
    assert (admission.pod.reserved_for_pod.affinity, admission.pod.reserved_for_pod.cpus) == (
        Mask([1]),
        CpuSet(),
    )
    apart = admit(
        empty(TopologyPolicy.SINGLE_NUMA_NODE),
        pod("a"),
        whole(2, 0, GPU0, changed_copy(GPU1, resource="nic")),
    )
    assert apart.verdict.reason == "TopologyAffinityError"


def test_set_asides_leave_the_shared_pool_at_least_one_cpu() -> None:
    state = admit(empty(TopologyPolicy.BEST_EFFORT), pod("a"), whole(12)).state
    admission = admit(state, pod("b"), whole(4))
    assert admission.verdict.reason == "SharedPoolExhausted"
    assert (
        admission.verdict.message
        == "cannot set CPUs 6-7,14-15 aside for ns/b: the shared pool would be left empty"
    )
    assert admission.state is state
    assert admission.pod.reserved_for_pod is None
    assert admission.explanation is not None
    assert (admission.explanation.verdict, admission.explanation.cpus) == (admission.verdict, CpuSet())
    assert admit(state, pod("b"), whole(3)).verdict.admitted
    lsr = Pod("s-l", "l", "ns", "l", 0, QosClass.LSR, cpuset=CpuSet.parse("6-7,14-15"))
    assert place(state, lsr, "c", 0, Request(), "t").verdict.reason == "SharedPoolExhausted"


def test_a_pod_whose_memory_no_node_has_is_refused_at_its_sandbox() -> None:
    state = empty(reserved_memory=RESERVED)
    admission = admit(state, pod("a", resources("x", 0, 100), resources("y", 0, 100)), whole(1, 200))
    assert admission.verdict.reason == "UnexpectedAdmissionError"
    assert admission.verdict.message == (
        "UnexpectedAdmissionError: Allocate failed due to [memorymanager] failed to find NUMA nodes to "
        "extend the current topology hint, which is unexpected (ns/a)"
    )
    assert admission.state is state
    assert not admit(state, pod("a"), whole(0, 200)).verdict.admitted
    assert admit(state, pod("a", kube_qos=KubeQos.BURSTABLE), whole(0, 200)).verdict.admitted


def test_a_pod_with_a_container_that_cannot_be_served_is_refused() -> None:
    state = empty(options=CpuOptions(full_pcpus_only=True))
    admission = admit(state, pod("a", resources("x", 2), resources("y", 3)), whole(5))
    assert (admission.verdict.reason, admission.pod.reserved_for_pod) == ("SMTAlignmentError", None)
    assert admission.verdict.message == (
        "SMTAlignmentError: SMT Alignment Error: requested 3 cpus not multiple cpus per core = 2 (ns/a)"
    )
    assert admission.state is state
    assert not admission.explanation.shortfalls, "no node lacks anything"


def test_a_sandbox_created_again_keeps_its_decision() -> None:
    first = admit(empty(), pod("a"), whole(4))
    state = admit(first.state, pod("b"), whole(2)).state
    again = admit(state, pod("a", sandbox_id="new", attempt=1), whole(7))
    assert again.pod.reserved_for_pod == first.pod.reserved_for_pod
    assert (again.pod.sandbox_id, again.explanation) == ("new", None)
    assert set(again.state.pods) == {"s-a", "s-b", "new"}
    assert again.state.without_pod("s-a").cpus_set_aside("b") == first.pod.reserved_for_pod.cpus


def test_a_forbidden_bind_policy_refuses_a_pod_that_would_own_cpus() -> None:
    state = empty(bind=NodeBindPolicy.FULL_PCPUS_ONLY)
    spread = {"bind_required": BindPolicy.SPREAD_BY_PCPUS}
    for claiming in (pod("a", **spread), pod("a", resources("c", 2), **spread)):
        admission = admit(state, claiming, whole(2))
        assert (admission.verdict.reason, admission.state, admission.pod) == (
            "CPUBindPolicyError",
            state,
            claiming,
        )
        assert admission.explanation is not None
        assert admission.explanation.verdict == admission.verdict
    some = Request(512, 50_000, 100_000)
    assert admit(state, pod("b", **spread), some).verdict.admitted, "it shares"
    assert admit(state, pod("b", resources("c"), **spread), some).verdict.admitted, "it shares"
