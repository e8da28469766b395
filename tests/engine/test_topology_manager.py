"""One decision: hints of the providers, the policy that merges them, and the granted resources.

The tests also cover the input of a decision: the request, and the providers prepared for it.
"""

from __future__ import annotations

from typing import TypeVar

import pytest

from proxy.allocation.cpu_policy import CpuState
from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import RegisteredDevice
from proxy.allocation.providers.cpu import CpuProvider
from proxy.allocation.providers.memory import MemoryProvider
from proxy.allocation.providers.provider import Provider, ProviderRequest
from proxy.allocation.rejection import AllocationRejectedError
from proxy.engine.container_create import Plan, place
from proxy.engine.held_devices import granted
from proxy.engine.node import Node
from proxy.engine.pod_admission import admit
from proxy.engine.state import NodeState
from proxy.engine.topology_manager import (
    AdmissionContext,
    build_context,
    conflict_verdict,
    pod_requests,
    requests_devices,
)
from proxy.model.explanation import AllocationStep
from proxy.model.grants import Block
from proxy.model.idset import CpuSet, Mask
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
    SetAside,
)
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MIB = 1 << 20
MACHINE = regular_machine(2, 1, 4, 2, mem_bytes_per_node=100 * MIB)  # node 0: 0-3,8-11; node 1: 4-7,12-15
NODE0, NODE1 = (node.cpus for node in MACHINE.nodes)
RESERVED = {0: {"memory": 10 * MIB}}
GPU0, GPU1 = (LocatedDevice(f"/dev/gpu{i}", "vendor/gpu", Mask([i]), "sysfs") for i in (0, 1))
NIC1 = LocatedDevice("mlx5_1", "vendor/nic", Mask([1]), "sysfs")
NOWHERE = LocatedDevice("/dev/fuse")
POLICIES = (
    TopologyPolicy.NONE,
    TopologyPolicy.BEST_EFFORT,
    TopologyPolicy.RESTRICTED,
    TopologyPolicy.SINGLE_NUMA_NODE,
)


def empty(
    policy: TopologyPolicy = TopologyPolicy.NONE, scope: Scope = Scope.CONTAINER, **more: object
) -> NodeState:
    fields = {"static": True, "policy": policy, "scope": scope} | more
    return NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), **fields))


def pod(uid: str, cpus: int = 0, *, known: bool = False, mib: int = 0, **more: object) -> Pod:
    amounts = {"cpu": cpus * 1000, **({"memory": mib * MIB} if mib else {})}
    requests = (
        PodRequests(uid, (ContainerResources("c", requests=amounts, limits=amounts),)) if known else None
    )
    return changed_copy(Pod(f"s-{uid}", uid, "ns", uid, requests=requests), **more)


def whole(cpus: int, mib: int = 0, *devices: LocatedDevice) -> Request:
    return Request(cpus * 1024, cpus * 100_000, 100_000, mib * MIB, devices=devices)


def arrives(state: NodeState, the_pod: Pod, request: Request) -> Plan:
    """Create a pod of one container: first its sandbox, then the container."""
    result = admit(state, the_pod, request)
    if not result.verdict.admitted:
        assert result.state is state
        return Plan(result.verdict, state, explanation=result.explanation)
    plan = place(result.state, result.pod, "c", 0, request, f"{the_pod.uid}/c")
    assert plan.verdict.admitted or plan.state is result.state
    return plan


def halves(state: NodeState) -> NodeState:
    """Leave three CPUs free on each node."""
    for uid, cpus in (("x", "0-3,8"), ("y", "4-7,12")):
        lse = Pod(f"s-{uid}", uid, "ns", uid, 0, QosClass.LSE, cpuset=CpuSet.parse(cpus))
        state = place(state, lse, "c", 0, Request(), f"{uid}/c").state
    return state


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize(
    ("policy", "split", "apart"),
    [
        (TopologyPolicy.NONE, True, True),
        (TopologyPolicy.BEST_EFFORT, True, True),
        (TopologyPolicy.RESTRICTED, False, False),
        (TopologyPolicy.SINGLE_NUMA_NODE, False, False),
    ],
)
def test_each_topology_policy_admits_and_rejects_as_in_kubelet(
    policy: TopologyPolicy, scope: Scope, *, known: bool, split: bool, apart: bool
) -> None:
    state = empty(policy, scope)
    easy = arrives(state, pod("p", 4, known=known), whole(4))
    assert easy.container is not None
    assert easy.container.placement.exclusive == CpuSet.parse("0-1,8-9")
    near = arrives(state, pod("p", 4, known=known), whole(4, 0, GPU1))
    assert near.container is not None
    assert near.container.placement.exclusive == CpuSet.parse("4-5,12-13")
    assert near.container.placement.mems == Mask([1])
    over_two = arrives(halves(state), pod("p", 4, known=known), whole(4))
    assert over_two.verdict.admitted is split
    across = arrives(state, pod("p", 4, known=known), whole(4, 0, GPU0, NIC1))
    assert across.verdict.admitted is apart
    more = arrives(state, pod("p", 10, known=known), whole(10))
    assert more.verdict.admitted is (policy is not TopologyPolicy.SINGLE_NUMA_NODE), (
        "two nodes are the fewest for ten"
    )
    for plan in (over_two, across, more):
        why = plan.explanation
        assert why is not None
        if plan.verdict.admitted and scope is Scope.POD:
            continue  # the considered hints are in the record of the pod
        assert (why.merge is None) is (policy is TopologyPolicy.NONE)
        if why.merge is not None:
            assert (why.merge.policy, why.merge.scope) == (policy.value, scope.value)
        if not plan.verdict.admitted:
            assert plan.verdict.reason == "TopologyAffinityError"
            ref = "ns/p" if scope is Scope.POD else "ns/p/c"
            assert why.ref == ref
            assert f" ({ref}: " in plan.verdict.message


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kube", [KubeQos.BURSTABLE, KubeQos.GUARANTEED])
def test_devices_without_a_numa_node_change_nothing(policy: TopologyPolicy, kube: KubeQos) -> None:
    plan = arrives(empty(policy), pod("p", kube_qos=kube), Request(512, devices=(NOWHERE,)))
    assert plan.container is not None
    assert (plan.container.placement.pool, plan.container.placement.mems) == (Pool.SHARED, Mask([0, 1]))
    assert plan.explanation is not None
    assert plan.explanation.devices == ("/dev/fuse",)
    assert plan.explanation.merge is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("kube", "scope"), [(KubeQos.BURSTABLE, Scope.CONTAINER), (KubeQos.BURSTABLE, Scope.POD)]
)
def test_devices_on_different_nodes_refuse_pods_of_any_class(
    policy: TopologyPolicy, kube: KubeQos, scope: Scope
) -> None:
    plan = arrives(empty(policy, scope), pod("p", kube_qos=kube), Request(512, devices=(GPU0, NIC1)))
    assert plan.verdict.admitted is (policy in (TopologyPolicy.NONE, TopologyPolicy.BEST_EFFORT))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("known", [True, False])
def test_counted_memory_is_bound_and_kept(policy: TopologyPolicy, *, known: bool) -> None:
    state = empty(policy, reserved_memory=RESERVED)
    plan = arrives(state, pod("p", 2, known=known, mib=60), whole(2, 60))
    assert plan.container is not None
    assert plan.container.placement.mems == Mask([0])
    other = arrives(plan.state, pod("q", 2, known=known, mib=60), whole(2, 60))
    assert other.container is not None
    assert other.container.placement.mems == Mask([1])
    assert (other.container.placement.exclusive <= NODE1) is (policy is not TopologyPolicy.NONE)
    full = arrives(other.state, pod("r", 2, known=known, mib=60), whole(2, 60))
    assert not full.verdict.admitted
    assert full.verdict.reason == "UnexpectedAdmissionError"
    assert full.verdict.message.endswith(" (ns/r/c)")
    ended = plan.state.changed(put=[plan.container.in_phase(Phase.EXITED)])
    again = place(
        ended.with_pod(plan.container.pod), plan.container.pod, "c", 1, whole(2, 60), "again"
    ).container
    assert again is not None
    assert (again.placement.exclusive, again.placement.mems) == (
        plan.container.placement.exclusive,
        Mask([0]),
    )


def test_memory_follows_the_nodes_of_the_cpus_first() -> None:
    state = halves(empty(reserved_memory=RESERVED))
    filled = arrives(state, pod("f", kube_qos=KubeQos.GUARANTEED), Request(512, memory_limit=50 * MIB)).state
    for follow, mems in ((True, Mask([1])), (False, Mask([0]))):
        node = changed_copy(filled.node, follow_mems=follow)
        fresh = NodeState.of(node, filled.pods.values(), filled.containers.values())
        near = arrives(fresh, pod("p"), whole(2, 30, GPU1))
        assert near.container is not None
        assert near.container.placement.exclusive <= NODE1
        assert near.container.placement.mems == mems
        too_much = arrives(fresh, pod("p"), whole(2, 120, GPU1))
        assert not too_much.verdict.admitted
    full = arrives(filled, pod("g"), Request(512, memory_limit=95 * MIB)).state
    plan = arrives(full, pod("p"), whole(2, 30, GPU1))
    assert plan.container is not None
    assert plan.container.placement.mems == Mask([0])
    assert plan.explanation is not None
    assert any(s.what.startswith("not on the nodes 1 of its CPUs: ") for s in plan.explanation.steps)


def test_memory_bound_by_the_request_is_not_counted_again() -> None:
    state = empty(TopologyPolicy.SINGLE_NUMA_NODE, reserved_memory=RESERVED)
    request = changed_copy(whole(2, 99), cpuset_mems="1")
    plan = arrives(state, pod("p"), request)
    assert plan.container is not None
    assert (plan.container.placement.blocks, plan.container.placement.mems) == ((), Mask([1]))
    assert plan.state.memory == state.memory


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("known", [True, False])
def test_whole_cores_only(policy: TopologyPolicy, *, known: bool) -> None:
    state = empty(policy, options=CpuOptions(full_pcpus_only=True), reserved=CpuSet([0]))
    odd = arrives(state, pod("p", 3, known=known), whole(3))
    assert odd.verdict.message == (
        "SMTAlignmentError: SMT Alignment Error: requested 3 cpus not multiple cpus per core = 2 (ns/p/c)"
    )
    plan = arrives(state, pod("p", 8, known=known), whole(8))
    if policy is TopologyPolicy.SINGLE_NUMA_NODE:
        assert plan.container is not None
        assert plan.container.placement.exclusive == NODE1
    first = arrives(state, pod("p", 6, known=known), whole(6)).container
    assert first is not None
    second = arrives(state.changed(put=[first]), pod("q", 6, known=known), whole(6))
    assert second.container is not None
    few = arrives(second.state, pod("r", 4, known=known), whole(4))
    assert few.verdict.reason in ("SMTAlignmentError", "TopologyAffinityError")
    ended = second.state.with_pod(first.pod).changed(put=[first.in_phase(Phase.EXITED)])
    again = place(ended, first.pod, "c", 1, whole(6), "again")
    assert again.container is not None, "it keeps its own CPUs, which are not free"
    assert again.container.placement.exclusive == first.placement.exclusive
    assert "keeps the CPUs of its earlier attempt" in again.container.placement.reasons[0]
    assert again.explanation is not None
    assert again.explanation.steps == (AllocationStep("cpu", f"keeps CPUs {first.placement.exclusive}"),)


def test_resources_missing_in_the_pods_sum_stay_under_its_hint() -> None:
    aside = SetAside(Mask([1]), True, CpuSet())
    for policy in POLICIES[1:]:
        held = pod("p", reserved_for_pod=aside)
        plan = place(empty(policy, Scope.POD).with_pod(held), held, "c", 0, whole(2), "t")
        assert plan.container is not None
        assert plan.container.placement.exclusive <= NODE1
        assert plan.explanation is not None
        assert [reported.provider for reported in plan.explanation.answers] == ["cpu", "pod"]
    anywhere = pod("p", reserved_for_pod=changed_copy(aside, affinity=None))
    plan = place(
        empty(TopologyPolicy.RESTRICTED, Scope.POD).with_pod(anywhere), anywhere, "c", 0, whole(2), "t"
    )
    assert plan.explanation is not None
    assert [reported.provider for reported in plan.explanation.answers] == ["cpu"]


def test_devices_that_topoproxy_assigns_are_near_to_the_cpus() -> None:
    devices = {
        "gpu": {
            "a": RegisteredDevice("a", Mask([0])),
            "b": RegisteredDevice("b", Mask([1])),
            "c": RegisteredDevice("c", Mask([1])),
        }
    }
    amounts = {"cpu": 2000, "gpu": 2}
    known = pod("p", requests=PodRequests("p", (ContainerResources("c", requests=amounts, limits=amounts),)))
    for scope in Scope:
        plan = arrives(empty(TopologyPolicy.RESTRICTED, scope, devices=devices), known, whole(2))
        assert plan.container is not None
        assert plan.container.placement.devices == (("gpu", ("b", "c")),)
        assert plan.container.placement.exclusive <= NODE1
        assert plan.explanation is not None
        assert plan.explanation.devices == ("gpu=b", "gpu=c")
        held = granted(plan.state.with_pod(known), plan.container)
        second = arrives(held, changed_copy(known, sandbox_id="s", uid="q"), whole(2))
        assert second.verdict.reason == "TopologyAffinityError"
    plan = arrives(empty(devices=devices), known, whole(2))
    assert plan.container is not None
    held = granted(plan.state.with_pod(known), plan.container)
    more = arrives(held, changed_copy(known, sandbox_id="s", uid="q"), whole(2))
    assert more.verdict.message == (
        "UnexpectedAdmissionError: Allocate failed due to requested number of devices unavailable for gpu. "
        "Requested: 2, Available: 1, which is unexpected (ns/p/c)"
    )


def test_named_cpus_determine_the_nodes_of_memory_and_devices() -> None:
    devices = {"gpu": {"a": RegisteredDevice("a", Mask([0])), "b": RegisteredDevice("b", Mask([1]))}}
    amounts = {"cpu": 2000, "memory": 60 * MIB, "gpu": 1}
    lsr = pod("p", requests=PodRequests("p", (ContainerResources("c", requests=amounts, limits=amounts),)))
    lsr = changed_copy(lsr, qos=QosClass.LSR, cpuset=CpuSet.parse("4,12"))
    for policy, scope in (
        (TopologyPolicy.NONE, Scope.CONTAINER),
        (TopologyPolicy.RESTRICTED, Scope.CONTAINER),
    ):
        state = empty(policy, scope, devices=devices, reserved_memory=RESERVED)
        plan = arrives(state, lsr, whole(2, 60))
        assert plan.container is not None
        placement = plan.container.placement
        assert (placement.exclusive, placement.mems) == (CpuSet.parse("4,12"), Mask([1]))
        assert [(b.affinity, b.size) for b in placement.blocks] == [(Mask([1]), 60 * MIB)]
        assert placement.devices == (("gpu", ("b",)),)
        twin = changed_copy(lsr, sandbox_id="t", uid="t", cpuset=CpuSet.parse("5,13"))
        second = arrives(plan.state.with_pod(lsr), twin, whole(2, 60)).container
        assert second is not None
        assert second.placement.exclusive == CpuSet.parse("5,13")
        assert second.placement.mems == Mask([0]), "the nearest node is full"
        third = changed_copy(lsr, sandbox_id="u", uid="u", cpuset=CpuSet.parse("6,14"))
        assert not arrives(plan.state.changed(put=[second]), third, whole(2, 60)).verdict.admitted
        free = changed_copy(twin, kube_qos=KubeQos.BURSTABLE, requests=None)
        assert arrives(plan.state, free, Request(memory_limit=99 * MIB)).verdict.admitted


def test_a_container_without_named_cpus_still_gets_counted_memory() -> None:
    state = halves(empty(reserved_memory=RESERVED))
    ls = pod("p", qos=QosClass.LS, cpuset=CpuSet([0]))
    plan = arrives(state, ls, Request(512, memory_limit=60 * MIB))
    assert plan.container is not None
    assert plan.container.placement.pool is Pool.SHARED
    assert plan.container.placement.mems == Mask([0])
    assert plan.container.placement.blocks
    assert "CPU 0 is owned by ns/x already" in plan.problem


def test_refusal_messages_match_kubelet() -> None:
    verdict = conflict_verdict(AllocationRejectedError("not enough"))
    assert (verdict.code, verdict.reason) == (9, "UnexpectedAdmissionError")
    assert verdict.message == "Allocate failed due to not enough, which is unexpected"


TWO_NODES = regular_machine(2, 1, 4, 2)  # CPUs 0-15
NODE = Node(TWO_NODES, CpuTopology.of(TWO_NODES), static=True)
COUNTING = changed_copy(NODE, reserved_memory={0: {"memory": 1}})
P = TypeVar("P", bound=Provider)


def resources(name: str, cpus: int, kind: ContainerKind = ContainerKind.APP) -> ContainerResources:
    return ContainerResources(name, kind, {"cpu": cpus * 1000}, {"cpu": cpus * 1000})


POD_REQUESTS = PodRequests(
    "p",
    (
        resources("i", 4, ContainerKind.INIT),
        resources("s", 1, ContainerKind.SIDECAR),
        resources("a", 2),
        resources("b", 2),
    ),
)
POD = Pod("s-p", "p", "ns", "p", requests=POD_REQUESTS)
BARE = changed_copy(POD, requests=None)


def provider(context: AdmissionContext, kind: type[P]) -> P:
    (found,) = (each for each in context.providers if isinstance(each, kind))
    return found


def test_requests_come_from_kubelet_or_from_the_cri() -> None:
    request = Request(memory_limit=7, huge_pages=(("hugepages-2Mi", 2), ("hugepages-1Gi", 0)))
    assert pod_requests(POD, "a", request, 3) is POD_REQUESTS
    assert pod_requests(POD, "", request, 3) is POD_REQUESTS
    assert pod_requests(changed_copy(POD, uid="q"), "a", request, 3) == changed_copy(POD_REQUESTS, uid="q")
    amounts = {"cpu": 3000, "memory": 7, "hugepages-2Mi": 2}
    made = PodRequests("p", (ContainerResources("x", ContainerKind.APP, amounts, amounts),), guaranteed=True)
    assert pod_requests(POD, "x", request, 3) == made, "kubelet has not reported this container"
    assert pod_requests(BARE, "x", request, 3) == made
    burstable = changed_copy(BARE, kube_qos=KubeQos.BURSTABLE)
    assert pod_requests(burstable, "", Request(), 0) == PodRequests(
        "p", (ContainerResources(""),), guaranteed=False
    )


@pytest.mark.parametrize(
    ("bound", "whole", "binds"),
    [("", False, True), ("0", False, False), ("", True, False), ("0-1", True, False)],
)
def test_memory_bound_by_the_request_or_set_aside_for_the_pod_is_not_granted_again(
    bound: str, *, whole: bool, binds: bool
) -> None:
    blocks = (Block(Mask([0]), "memory", 5),) if whole else ()
    pod = changed_copy(POD, reserved_for_pod=SetAside(None, True, CpuSet(), blocks))
    request = Request(cpuset_mems=bound, devices=(LocatedDevice("x"),))
    provider_request = ProviderRequest(pod, POD_REQUESTS, "a", request, exclusive=False)
    context = build_context(NodeState.empty(COUNTING), provider_request)
    assert provider(context, MemoryProvider).bound is not binds
    assert provider(context, CpuProvider).state == CpuState(), "no CPUs are offered where none may be owned"
    assert context.request.assigned_devices == (LocatedDevice("x"),)


def test_only_a_container_that_lists_a_registered_resource_or_holds_a_device_requests_devices() -> None:
    gpus = {"v/gpu": {"a": RegisteredDevice("a", Mask([0]))}}
    state = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), devices=gpus))
    resources_of_c = ContainerResources("c", ContainerKind.APP, {}, {"v/gpu": 1})
    others = ContainerResources("d", ContainerKind.APP, {}, {"v/nic": 1})
    pod = Pod("s", "u", "ns", "p", requests=PodRequests("u", (resources_of_c, others)))
    assert [requests_devices(state, pod, name) for name in ("c", "d", "e")] == [True, False, False]
    unknown = changed_copy(pod, requests=None)
    assert not requests_devices(state, unknown, "c"), "kubelet has not reported its limits"
    holding = changed_copy(state, devices=state.devices.give("u", "c", "v/gpu", frozenset("a")))
    assert [requests_devices(holding, unknown, name) for name in ("c", "d")] == [True, False]
    nothing = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE)))
    assert not requests_devices(nothing, pod, "c")
    withdrawn = changed_copy(nothing, devices=nothing.devices.give("u", "c", "v/gpu", frozenset("a")))
    assert requests_devices(withdrawn, pod, "c"), "its device plugin is gone, and it keeps the device"


def test_devices_are_not_assigned_to_a_container_whose_sandbox_is_removed() -> None:
    gpus = {"v/gpu": {"a": RegisteredDevice("a", Mask([0]))}}
    state = NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), devices=gpus))
    pod = Pod("s", "u", "ns", "p")
    placement = Placement(Pool.SHARED, CpuSet(), Mask((0,)), devices=(("v/gpu", ("a",)),))
    container = Container("t", "c", pod, Request(), placement, Phase.CREATING)
    assert granted(state, container) is state
    given = granted(state.with_pod(pod), container)
    assert given.devices.of_container("u", "c", "v/gpu") == {"a"}
