from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.koordinator.bind_request import Allocated, BindError, BindRequest
from proxy.allocation.koordinator.selection import Binding, NodeBinding, binding_of, choose
from proxy.engine.container_create import Plan, place
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NodeBindPolicy, NumaStrategy
from proxy.model.options import TopologyPolicy
from proxy.model.requests import ContainerResources, PodRequests
from proxy.model.workload import (
    Container,
    KubeQos,
    LocatedDevice,
    Phase,
    Placement,
    Pod,
    Pool,
    Request,
)
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15; cores 0,8 1,9 ...
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
FULL, SPREAD = BindPolicy.FULL_PCPUS, BindPolicy.SPREAD_BY_PCPUS


def whole(count: int, **more: object) -> Request:
    return Request(count * 1024, count * 100_000, 100_000, **more)  # type: ignore[arg-type]


def pod(uid: str, **fields: object) -> Pod:
    return Pod(f"s-{uid}", uid, "ns", uid, **fields)  # type: ignore[arg-type]


def on(state: NodeState, pod: Pod, count: int, **more: object) -> Plan:
    return place(state, pod, "c", 0, whole(count, **more), f"t-{pod.uid}")


def cpus(node: Node, count: int, **fields: object) -> str:
    plan = on(NodeState.empty(node), pod("a", **fields), count)
    assert plan.container is not None, plan.verdict
    assert plan.container.placement.pool is Pool.OWN
    return str(plan.container.placement.exclusive)


@pytest.mark.parametrize(
    ("fields", "prescribed", "expected"),
    [
        ({}, NodeBindPolicy.NONE, "0-1,8-9"),
        ({"bind_preferred": SPREAD}, NodeBindPolicy.NONE, "0-3"),
        ({"bind_required": SPREAD}, NodeBindPolicy.NONE, "0-3"),
        ({"bind_preferred": FULL}, NodeBindPolicy.NONE, "0-1,8-9"),
        ({}, NodeBindPolicy.SPREAD_BY_PCPUS, "0-3"),
        ({"bind_preferred": SPREAD}, NodeBindPolicy.FULL_PCPUS_ONLY, "0-1,8-9"),
        ({"bind_preferred": BindPolicy.CONSTRAINED_BURST}, NodeBindPolicy.NONE, "0-1,8-9"),
    ],
)
def test_the_policy_that_holds(fields: dict[str, object], prescribed: NodeBindPolicy, expected: str) -> None:
    assert cpus(changed_copy(NODE, bind=prescribed), 4, **fields) == expected


def test_a_pod_without_alignment_fills_one_node_before_the_next() -> None:
    node = changed_copy(NODE, policy=TopologyPolicy.BEST_EFFORT)
    given = CpuSet.parse(cpus(node, 12, bind_required=FULL))
    assert sorted(len(given & each.cpus) for each in MACHINE.nodes) == [4, 8]


def test_a_required_policy_that_cannot_hold_refuses() -> None:
    state = NodeState.empty(changed_copy(NODE, bind=NodeBindPolicy.FULL_PCPUS_ONLY))
    plan = on(state, pod("a"), 3)
    assert (plan.verdict.code, plan.verdict.reason, plan.state) == (9, "CPUBindPolicyError", state)
    assert plan.verdict.message.endswith("requested=3, cpus per core=2 (ns/a/c)")
    assert cpus(NODE, 3, bind_preferred=FULL) == "0-1,8", "a preferred policy may be violated"
    clash = on(state, pod("a", bind_required=SPREAD), 4)
    assert "the pod requires SpreadByPCPUs and the node requires FullPCPUs" in clash.verdict.message
    assert (clash.verdict.code, clash.container, clash.state) == (9, None, state)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (NumaStrategy.MOST_ALLOCATED, "1-2,9-10"),
        (NumaStrategy.LEAST_ALLOCATED, "4-5,12-13"),
        (NumaStrategy.DISTRIBUTE_EVENLY, "4-5,12-13"),
    ],
)
def test_the_strategy_of_the_node_determines_which_numa_node_is_filled(
    strategy: NumaStrategy, expected: str
) -> None:
    node = changed_copy(NODE, strategy=strategy)
    state = on(NodeState.empty(node), pod("first", bind_preferred=FULL), 2).state
    assert next(iter(state.owners.values())).cpus == CpuSet((0, 8))
    if strategy is NumaStrategy.DISTRIBUTE_EVENLY:
        assert cpus(node, 12) == "0-2,4-6,8-10,12-14", (
            "a request for two nodes takes the same number from both"
        )
    plan = on(state, pod("second"), 4)
    assert plan.container is not None
    assert str(plan.container.placement.exclusive) == expected


def test_pods_that_avoid_each_other_share_no_core_if_possible() -> None:
    shy = {"bind_preferred": SPREAD, "exclusive": ExclusivePolicy.PCPU_LEVEL}
    state = NodeState.empty(NODE)
    for uid, expected in (("a", "0-1"), ("b", "2-3")):
        plan = on(state, pod(uid, **shy), 2)
        assert plan.container is not None
        assert str(plan.container.placement.exclusive) == expected
        state = plan.state.changed(put=[plan.container.in_phase(Phase.RUNNING)])
    bold = on(state, pod("c", bind_preferred=SPREAD), 2).container
    assert bold is not None
    assert str(bold.placement.exclusive) == "8-9", "only pods of the same bind policy are avoided"
    gone = state.changed(put=[c.in_phase(Phase.EXITED) for c in state.containers.values()])
    again = on(gone, pod("d", **shy), 8).container
    assert again is not None
    assert len(again.placement.exclusive) == 8
    few = on(gone, pod("e", **shy), 2).container
    assert few is not None
    assert str(few.placement.exclusive) == "0-1", "an ended container is not avoided"


def test_numa_nodes_that_were_decided_on_come_first() -> None:
    node = changed_copy(NODE, policy=TopologyPolicy.RESTRICTED, bind=NodeBindPolicy.SPREAD_BY_PCPUS)
    gpu = LocatedDevice("g0", "gpu", Mask((1,)))
    plan = on(NodeState.empty(node), pod("a"), 4, devices=(gpu,))
    assert plan.container is not None
    assert str(plan.container.placement.exclusive) == "4-7"
    reported = [step.what for step in plan.explanation.steps if step.provider == "cpu"]  # type: ignore[union-attr]
    assert reported[0] == "bind policy SpreadByPCPUs, required"
    few = changed_copy(node, policy=TopologyPolicy.BEST_EFFORT, reserved=CpuSet((5, 6, 7, 13, 14, 15)))
    wide = on(NodeState.empty(few), pod("a", bind_preferred=FULL), 4, devices=(gpu,))
    assert wide.verdict.admitted
    assert wide.explanation is not None
    assert any("had only 1 free for it" in step.what for step in wide.explanation.steps)


def test_cpus_that_a_required_policy_cannot_take_do_not_count_on_the_nodes_decided_on() -> None:
    """Node 0 has six free CPUs on three cores."""
    steps = list[str]()
    binding = Binding(BindRequest(SPREAD, required=True), Allocated())
    chosen = choose(NODE.topology, MACHINE.online - CpuSet((0, 8)), 4, binding, Mask([0]), steps)
    assert str(chosen) == "4-7"
    assert "NUMA node 0 had only 3 free for it" in steps


def test_a_restart_keeps_the_cpus_under_any_later_policy() -> None:
    first = on(NodeState.empty(NODE), pod("a"), 4)
    assert first.container is not None
    ended = first.state.changed(put=[first.container.in_phase(Phase.EXITED)]).with_pod(pod("a"))
    spread = changed_copy(ended, node=changed_copy(NODE, bind=NodeBindPolicy.SPREAD_BY_PCPUS))
    again = place(spread, pod("a"), "c", 1, whole(4), "t2")
    assert again.container is not None
    assert again.container.placement.exclusive == first.container.placement.exclusive


BURST = {"bind_preferred": BindPolicy.CONSTRAINED_BURST, "kube_qos": KubeQos.BURSTABLE}


def shared(state: NodeState, pod: Pod, milli: int, name: str = "c") -> Plan:
    request = Request(512, milli * 100, 100_000)
    plan = place(state, pod, name, 0, request, f"t-{pod.uid}-{name}")
    assert plan.container is not None
    assert plan.container.placement.pool is Pool.SHARED
    return plan


def runs_on(plan: Plan) -> str:
    assert plan.container is not None
    return str(plan.state.desired_cpus(plan.container))


def test_constrained_burst_keeps_a_pod_on_as_few_nodes_as_its_limit_needs() -> None:
    state = on(NodeState.empty(NODE), pod("owner"), 2).state  # 6 CPUs left on node 0, 8 on node 1
    assert runs_on(shared(state, pod("a", **BURST), 6000)) == "1-3,9-11"
    plan = shared(state, pod("b", **BURST), 6001)
    assert runs_on(plan) == "4-7,12-15"
    assert plan.container is not None
    assert plan.container.placement.mems == Mask((1,))
    assert plan.container.placement.reasons[0].endswith("of NUMA node 1 (ConstrainedBurst)")
    for milli in (0, 8001, 99_000):
        assert runs_on(shared(state, pod("c", **BURST), milli)) == "1-7,9-15"
    assert runs_on(shared(state, pod("d", kube_qos=KubeQos.BURSTABLE), 1000)) == "1-7,9-15"
    emptiest = NodeState.of(
        changed_copy(NODE, strategy=NumaStrategy.LEAST_ALLOCATED), (), state.containers.values()
    )
    assert runs_on(shared(emptiest, pod("e", **BURST), 6000)) == "4-7,12-15"


def test_all_containers_of_a_pod_are_narrowed_alike() -> None:
    state = on(NodeState.empty(NODE), pod("owner"), 2).state
    first = shared(state, pod("a", **BURST), 1000)
    second = shared(first.state, pod("a", **BURST), 8000, "d")
    assert runs_on(second) == runs_on(first) == "1-3,9-11"
    requests = PodRequests(
        "b", tuple(ContainerResources(name, limits={"cpu": 3500}) for name in ("c", "d")), guaranteed=False
    )
    known = pod("b", **BURST, requests=requests)
    assert runs_on(shared(state, known, 1000)) == "4-7,12-15", "7 CPUs are the pod's limit"
    loose = changed_copy(requests, containers=(*requests.containers, ContainerResources("e")))
    assert runs_on(shared(state, pod("b", **BURST, requests=loose), 1000)) == "1-7,9-15"


def on_arm(node: Node) -> Node:
    return changed_copy(node, machine=changed_copy(node.machine, extra={"arch": "aarch64"}))


def test_arm_binds_whole_cores_only_and_reports_it() -> None:
    node = on_arm(NODE)
    plan = on(NodeState.empty(node), pod("a", bind_preferred=SPREAD), 4)
    assert plan.container is not None
    assert str(plan.container.placement.exclusive) == "0-1,8-9", "it would be 0-3 on another architecture"
    assert plan.explanation is not None
    steps = [step.what for step in plan.explanation.steps]
    assert "FullPCPUs instead of SpreadByPCPUs: aarch64 offers nothing else" in steps
    refused = on(NodeState.empty(node), pod("b", bind_required=SPREAD), 4)
    assert refused.container is None
    assert refused.verdict.code == 9
    assert "SpreadByPCPUs is required, which aarch64 does not offer" in refused.verdict.message
    assert on(NodeState.empty(NODE), pod("b", bind_required=SPREAD), 4).container is not None


def test_arm_keeps_apart_by_node_and_not_by_core() -> None:
    level = ExclusivePolicy.PCPU_LEVEL
    node = on_arm(NODE)
    plan = on(NodeState.empty(node), pod("a", exclusive=level), 2)
    assert plan.container is not None
    assert plan.explanation is not None
    assert any(step.what.startswith("PCPULevel left out") for step in plan.explanation.steps)


def test_even_parts_of_whole_cores_that_are_not_there_are_refused() -> None:
    binding, steps = Binding(BindRequest(FULL, required=True), Allocated()), list[str]()
    free = CpuSet.parse("0-2,4,8,12")  # of each node one whole core, and two CPUs of other cores
    assert str(choose(NODE.topology, free, 4, binding, Mask([0, 1]), steps, even=True)) == "0,4,8,12"
    some_offline = changed_copy(MACHINE, cpus=tuple(cpu for cpu in MACHINE.cpus if cpu.id not in (8, 12)))
    free = CpuSet.parse("0,4-5,13")  # the cores of CPUs 0 and 4 have one thread
    with pytest.raises(BindError, match="Insufficient NUMA cpu"):
        choose(CpuTopology.of(some_offline), free, 4, binding, Mask([0, 1]), steps, even=True)


def owning(uid: str, cpus: str, pool: Pool = Pool.OWN, phase: Phase = Phase.RUNNING) -> Container:
    placement = Placement(pool, CpuSet.parse(cpus), Mask([0]))
    of = pod(uid, exclusive=ExclusivePolicy.PCPU_LEVEL)
    return Container(f"id-{uid}-{cpus}", "c", of, Request(), placement, phase)


def test_only_cpus_that_other_pods_own_are_avoided() -> None:
    shy = pod("a", exclusive=ExclusivePolicy.PCPU_LEVEL)
    containers = [
        owning("a", "0"),
        owning("b", "1-2"),
        owning("c", "2-3"),
        owning("d", "4", Pool.SHARED),
        owning("e", "5", phase=Phase.EXITED),
        owning("f", "6", phase=Phase.CREATING),
    ]
    found = binding_of(NodeBinding(), shy, containers)
    assert found is not None
    assert found.taken.counts == {1: 1, 2: 2, 3: 1, 6: 1}
    assert found.taken.under(ExclusivePolicy.PCPU_LEVEL) == CpuSet.parse("1-3,6")
    assert found.request.exclusive is ExclusivePolicy.PCPU_LEVEL


@pytest.mark.parametrize("exclusive", [ExclusivePolicy.NONE, ExclusivePolicy.DEFAULT])
def test_a_pod_without_an_exclusive_policy_avoids_no_pod(exclusive: ExclusivePolicy) -> None:
    found = binding_of(NodeBinding(), pod("a", bind_preferred=FULL, exclusive=exclusive), [owning("b", "1")])
    assert found is not None
    assert (found.taken, found.request.exclusive) == (Allocated(), ExclusivePolicy.NONE)


@pytest.mark.parametrize(
    ("node", "fields", "bound"),
    [
        (NodeBinding(), {}, False),
        (NodeBinding(architecture="aarch64"), {}, False),
        (NodeBinding(NodeBindPolicy.SPREAD_BY_PCPUS), {}, True),
        (NodeBinding(strategy=NumaStrategy.LEAST_ALLOCATED), {}, True),
        (NodeBinding(), {"bind_required": FULL}, True),
        (NodeBinding(), {"bind_preferred": FULL}, True),
        (NodeBinding(), {"exclusive": ExclusivePolicy.NUMA_NODE_LEVEL}, True),
        (NodeBinding(), {"aligned": True}, True),
    ],
)
def test_one_setting_of_the_pod_or_of_the_node_is_enough(
    node: NodeBinding, fields: dict[str, object], *, bound: bool
) -> None:
    found = binding_of(node, pod("a", **fields), ())
    assert (found is not None) == bound
    if found is not None:
        assert found.request.strategy is (node.strategy or NumaStrategy.MOST_ALLOCATED)
