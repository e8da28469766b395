"""Pods that request an alignment of their own (numa-topology-spec)."""

from __future__ import annotations

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import RegisteredDevice
from proxy.engine.container_create import place
from proxy.engine.node import Node
from proxy.engine.pod_admission import PodAdmission, admit, decides_pod
from proxy.engine.state import NodeState
from proxy.model.defects import InputDefect
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, NumaExclusive, NumaPolicy, NumaStrategy
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import Container, KubeQos, LocatedDevice, Phase, Pod, Pool, QosClass, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MIB = 1 << 20
MACHINE = regular_machine(2, 2, 4, 2, mem_bytes_per_node=100 * MIB)  # 4 nodes of 8 CPUs; siblings 16 apart
NODES = [node.cpus for node in MACHINE.nodes]
SINGLE, RESTRICTED, BEST = NumaPolicy.SINGLE_NUMA_NODE, NumaPolicy.RESTRICTED, NumaPolicy.BEST_EFFORT


def empty(**more: object) -> NodeState:
    return NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), **({"static": True} | more)))


def pod(uid: str, policy: NumaPolicy = NumaPolicy.NONE, **more: object) -> Pod:
    return changed_copy(Pod(f"s-{uid}", uid, "ns", uid), aligned=policy, **more)


def lsr(uid: str, policy: NumaPolicy = NumaPolicy.NONE, **more: object) -> Pod:
    return pod(uid, policy, qos=QosClass.LSR, **more)


def burstable(uid: str, policy: NumaPolicy = NumaPolicy.NONE, **more: object) -> Pod:
    return pod(uid, policy, qos=QosClass.LS, kube_qos=KubeQos.BURSTABLE, **more)


def whole(cpus: int, mib: int = 0, *devices: LocatedDevice) -> Request:
    return Request(cpus * 1024, cpus * 100_000, 100_000, mib * MIB, devices=devices)


def shares(milli: int) -> Request:
    return Request(milli * 1024 // 1000, 0, 100_000)


def add(state: NodeState, the_pod: Pod, request: Request) -> tuple[NodeState, Container]:
    result = admit(state, the_pod, request)
    assert result.verdict.admitted, result.verdict.message
    return start(result.state.with_pod(result.pod), result.pod, request)


def start(state: NodeState, the_pod: Pod, request: Request) -> tuple[NodeState, Container]:
    plan = place(state, the_pod, "c", 0, request, f"{the_pod.uid}/c")
    assert plan.container is not None, plan.verdict.message
    running = plan.container.in_phase(Phase.RUNNING)
    return plan.state.changed(put=(running,)), running


def nodes_of(result: PodAdmission) -> Mask | None:
    assert result.verdict.admitted, result.verdict.message
    assert result.pod.reserved_for_pod is not None
    return result.pod.reserved_for_pod.affinity


def test_owners_on_one_node_or_several() -> None:
    state = empty()
    fits = admit(state, lsr("a", SINGLE), whole(8))
    assert nodes_of(fits) == Mask((0,))
    assert fits.pod.cpuset == NODES[0]
    refused = admit(state, lsr("a", SINGLE), whole(9))
    assert (refused.verdict.code, refused.verdict.reason) == (9, "TopologyAffinityError")
    assert "Unaligned NUMA Hint cause" in refused.verdict.message
    assert refused.explanation is not None
    assert refused.explanation.merge is not None
    assert refused.explanation.merge.policy == "single-numa-node"
    assert [reported.resource for reported in refused.explanation.answers] == ["cpu"]
    assert admit(state, lsr("b"), whole(9)).verdict.admitted, (
        "a pod that requests no alignment is not aligned"
    )


def test_only_a_pod_that_shares_cpus_and_wants_to_be_aligned_is_bound_to_the_pool_of_its_nodes() -> None:
    owner = admit(empty(), lsr("a", SINGLE), whole(2))
    assert (nodes_of(owner), owner.pod.nodes) == (Mask((0,)), None)
    by_pods = empty(policy=TopologyPolicy.SINGLE_NUMA_NODE, scope=Scope.POD)
    nic = LocatedDevice("nic", "vendor/nic", Mask((2,)), "sysfs")
    silent = admit(by_pods, burstable("a"), changed_copy(shares(2000), devices=(nic,)))
    assert (nodes_of(silent), silent.pod.nodes) == (Mask((2,)), None)


def test_cpus_on_several_nodes_are_divided_evenly() -> None:
    result = admit(empty(), lsr("a", RESTRICTED), whole(12))
    assert nodes_of(result) == Mask((0, 1))
    assert [len(result.pod.cpuset & node) for node in NODES] == [6, 6, 0, 0]
    spread = lsr("a", BEST, bind_required=BindPolicy.SPREAD_BY_PCPUS)
    result = admit(empty(), spread, whole(6))
    assert result.verdict.admitted
    assert [len(result.pod.cpuset & node) for node in NODES] == [3, 3, 0, 0], "one thread of each core"
    odd = admit(empty(), lsr("a", RESTRICTED, bind_required=BindPolicy.FULL_PCPUS), whole(10))
    assert sorted(len(odd.pod.cpuset & node) for node in NODES) == [0, 0, 4, 6], "whole cores stay whole"


def test_the_strategy_chooses_among_equally_good_nodes() -> None:
    state, _ = add(empty(), lsr("first", SINGLE), whole(2))
    fullest = admit(state, lsr("a", SINGLE), whole(2))
    assert nodes_of(fullest) == Mask((0,))
    state, _ = add(empty(strategy=NumaStrategy.LEAST_ALLOCATED), lsr("first", SINGLE), whole(2))
    emptiest = admit(state, lsr("a", SINGLE), whole(2))
    assert nodes_of(emptiest) == Mask((1,))


def test_a_sharing_container_is_bound_to_a_part_of_its_pool() -> None:
    state, owner = add(empty(), lsr("owner", SINGLE), whole(6))
    assert owner.placement.exclusive <= NODES[0]
    state, one = add(state, burstable("a", SINGLE), shares(4000))
    assert (one.placement.pool, one.placement.pool_numa_limit) == (Pool.SHARED, Mask((1,)))
    assert state.desired_cpus(one) == NODES[1]
    assert one.placement.mems == Mask((1,))
    assert "aligned" in one.placement.reasons[0]
    small = admit(state, burstable("b", SINGLE), shares(2000))
    assert nodes_of(small) == Mask((0,)), "the fullest node that has two shared CPUs"
    wide = admit(state, burstable("c", SINGLE), shares(9000))
    assert wide.verdict.reason == "TopologyAffinityError"
    two = admit(state, burstable("c", RESTRICTED), shares(9000))
    assert len(nodes_of(two) or ()) == 2
    everywhere = admit(state, burstable("d", BEST), shares(25_000))
    assert everywhere.pod.nodes is None, "all nodes are no part"
    assert everywhere.verdict.admitted


def test_the_smallest_request_for_cpu_aligns_a_pod() -> None:
    app = ContainerResources("c", ContainerKind.APP, {"cpu": 1})
    requests = PodRequests("a", (app,), guaranteed=False)
    result = admit(empty(), burstable("a", SINGLE, requests=requests), Request(cpu_shares=2))
    assert result.pod.nodes == Mask((0,))


def test_pods_with_named_cpus_or_without_a_request_are_not_aligned() -> None:
    state = empty()
    for decided in (
        lsr("a", SINGLE, cpuset=CpuSet.parse("0-11")),
        burstable("a", SINGLE, nodes=Mask((0, 1))),
        burstable("a", SINGLE, defects=(InputDefect("faulty", decisive=True),)),
    ):
        assert not decides_pod(state.node, decided)
    silent = admit(state, burstable("a", SINGLE), Request(cpu_shares=2))
    assert silent.verdict.admitted
    assert silent.pod.reserved_for_pod is None
    assert silent.pod.nodes is None


def test_contradicting_policies_of_pod_and_node_are_refused() -> None:
    node = empty(policy=TopologyPolicy.RESTRICTED)
    assert admit(node, lsr("a", RESTRICTED), whole(2)).verdict.admitted
    refused = admit(node, lsr("a", SINGLE), whole(2))
    assert refused.verdict.reason == "CPUBindPolicyError"
    assert "SingleNUMANode" in refused.verdict.message
    assert "the node has Restricted" in refused.verdict.message


def test_devices_take_part_in_the_alignment() -> None:
    nic = LocatedDevice("nic", "vendor/nic", Mask((2,)), "sysfs")
    result = admit(empty(), lsr("a", SINGLE), whole(4, 0, nic))
    assert nodes_of(result) == Mask((2,))
    assert result.pod.cpuset <= NODES[2]
    both = LocatedDevice("nic", "vendor/nic", Mask((1,)), "sysfs")
    apart = admit(empty(), lsr("a", SINGLE), whole(4, 0, nic, changed_copy(both, resource="v/gpu")))
    assert apart.verdict.reason == "TopologyAffinityError"


def test_memory_takes_part_in_the_alignment() -> None:
    state = empty(reserved_memory={0: {"memory": MIB}})
    state, _ = add(state, pod("first", SINGLE), whole(1, 80))
    result = admit(state, pod("second", SINGLE), whole(1, 50))
    assert nodes_of(result) == Mask((1,)), "node 0 has a CPU and not the memory"
    assert admit(state, pod("third", SINGLE), whole(1, 101)).verdict.reason == "TopologyAffinityError"


def test_single_node_pods_and_spanning_pods_avoid_each_others_nodes() -> None:
    """A pod on one node avoids nodes of pods that span several, and the other way round."""
    required = {"numa_exclusive": NumaExclusive.REQUIRED}
    state, wide = add(empty(), lsr("wide", RESTRICTED), whole(10))
    assert MACHINE.nodes_of(wide.placement.exclusive) == Mask((0, 1))
    assert nodes_of(admit(state, lsr("a", SINGLE), whole(2))) in (Mask((0,)), Mask((1,)))
    state, _ = add(state, lsr("a", SINGLE, **required), whole(2))
    single = state.containers["a/c"].placement.exclusive
    assert MACHINE.nodes_of(single) == Mask((2,))
    assert 2 not in (nodes_of(admit(state, lsr("b", RESTRICTED, **required), whole(9))) or ())
    beside = admit(state, lsr("b", RESTRICTED, **required), whole(15))
    assert beside.verdict.reason == "TopologyAffinityError", "all but node 2, which has a single, have 14"
    preferred = admit(state, lsr("b", RESTRICTED, numa_exclusive=NumaExclusive.PREFERRED), whole(15))
    assert preferred.verdict.admitted


def test_a_pod_avoids_nodes_of_a_pod_whose_containers_are_not_yet_created() -> None:
    required = {"numa_exclusive": NumaExclusive.REQUIRED}
    first = admit(empty(), lsr("first", SINGLE, **required), whole(2))
    assert nodes_of(first) == Mask((0,))
    assert not first.state.containers
    wide = admit(first.state, lsr("wide", RESTRICTED, **required), whole(10))
    assert 0 not in (nodes_of(wide) or ())


def test_a_pod_does_not_avoid_its_own_containers() -> None:
    state, _ = start(empty(), pod("a"), whole(2))
    assert MACHINE.nodes_of(state.containers["a/c"].placement.exclusive) == Mask((0,))
    claiming = lsr("a", RESTRICTED, numa_exclusive=NumaExclusive.REQUIRED)
    assert admit(state, claiming, whole(28)).verdict.admitted
    other = lsr("b", RESTRICTED, numa_exclusive=NumaExclusive.REQUIRED)
    assert not admit(state, other, whole(28)).verdict.admitted


def test_a_pod_created_again_keeps_its_nodes() -> None:
    result = admit(empty(), burstable("a", SINGLE), shares(4000))
    state = result.state.with_pod(result.pod)
    state, _ = add(state, lsr("owner", SINGLE), whole(8))
    again = admit(state, changed_copy(burstable("a", SINGLE), sandbox_id="s-2", attempt=1), shares(4000))
    assert again.pod.nodes == result.pod.nodes


def test_exhausted_nodes_refuse_only_pods_that_need_them() -> None:
    for class_, admitted in ((QosClass.LS, True), (QosClass.LSR, False), (QosClass.LSE, False)):
        lost = pod("a", qos=class_, kube_qos=KubeQos.BURSTABLE, nodes=Mask((7,)))
        plan = place(empty(), lost, "c", 0, whole(2), "a/c")
        assert plan.verdict.admitted is admitted
        reported = plan.problem or plan.verdict.message
        assert "nothing is left of the shared pool on NUMA node 7" in reported


def test_hints_of_providers_are_reported_by_name() -> None:
    state = empty(reserved_memory={0: {"memory": MIB}})
    nic = LocatedDevice("nic", "vendor/nic", Mask((1,)), "sysfs")
    result = admit(state, pod("a", SINGLE), whole(2, 50, nic))
    assert result.explanation is not None
    reported = {(each.provider, each.resource) for each in result.explanation.answers}
    assert reported == {("cpu", "cpu"), ("memory", "memory"), ("devices", "vendor/nic")}
    hints = {
        each.resource: [str(hint.affinity) for hint in each.hints] for each in result.explanation.answers
    }
    assert hints["vendor/nic"] == ["1"]
    assert hints["cpu"][:4] == ["0", "1", "2", "3"]


def test_uncounted_memory_is_not_part_of_the_pods_sum() -> None:
    state = empty(reserved_memory={0: {"memory": MIB}})
    result = admit(state, burstable("a", SINGLE), changed_copy(shares(2000), memory_limit=1000 * MIB))
    assert nodes_of(result) == Mask((0,)), "a Burstable pod's memory is not counted"


def test_devices_alone_align_a_pod() -> None:
    nic = LocatedDevice("nic", "vendor/nic", Mask((2,)), "sysfs")
    result = admit(empty(), burstable("a", SINGLE), Request(cpu_shares=2, devices=(nic,)))
    assert nodes_of(result) == Mask((2,))
    assert result.pod.nodes == Mask((2,))


def test_devices_without_a_numa_node_are_near_to_all() -> None:
    app = ContainerResources("c", ContainerKind.APP, {"cpu": 2000, "v/x": 1}, {"cpu": 2000, "v/x": 1})
    requests = PodRequests("a", (app,))
    state = empty(devices={"v/x": {"0": RegisteredDevice("0")}})
    result = admit(state, burstable("a", SINGLE, requests=requests), shares(2000))
    assert nodes_of(result) == Mask((0,))


def test_cpus_on_one_node_are_chosen_as_without_alignment() -> None:
    state, _ = add(empty(), pod("first"), whole(3))
    result = admit(state, lsr("a", SINGLE), whole(4))
    assert result.pod.cpuset == CpuSet((2, 3, 18, 19)), "whole cores"


def test_a_pod_with_a_request_of_its_own_is_decided_by_that() -> None:
    state = empty()
    containers = (ContainerResources("a"), ContainerResources("b"))
    requests = PodRequests("u", containers, pod_level_requests={"cpu": 8000, "memory": MIB})
    owner = admit(state, lsr("a", requests=requests), whole(8))
    assert owner.verdict.admitted, owner.verdict.message
    assert owner.pod.cpuset == NODES[0]
    shared = admit(state, pod("b", SINGLE, qos=QosClass.LS, requests=requests), whole(8))
    assert shared.pod.nodes == Mask((0,))
