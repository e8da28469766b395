"""Preferences of Volcano's scheduler."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_create import Plan, place
from proxy.engine.node import Node
from proxy.engine.pod_admission import admit
from proxy.engine.state import NodeState
from proxy.model.defects import DefectKind
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.workload import KubeQos, Phase, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15
NODE0, NODE1 = (node.cpus for node in MACHINE.nodes)
SINGLE, BEST = TopologyPolicy.SINGLE_NUMA_NODE, TopologyPolicy.BEST_EFFORT


def empty(policy: TopologyPolicy = TopologyPolicy.NONE, **more: object) -> NodeState:
    return NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE), True, policy=policy, **more))


def pod(uid: str, **requested: object) -> Pod:
    return changed_copy(Pod(f"s-{uid}", uid, "ns", uid), **requested)


def put(state: NodeState, the_pod: Pod, cpus: int) -> Plan:
    return place(state, the_pod, "c", 0, Request(cpus * 1024, cpus * 100_000, 100_000), f"{the_pod.uid}/c")


def own(plan: Plan) -> CpuSet:
    assert plan.container is not None, plan.verdict.message
    assert plan.container.placement.pool is Pool.OWN
    return plan.container.placement.exclusive


def taken(state: NodeState, cpus: str) -> NodeState:
    plan = place(state, pod("other", cpuset=CpuSet.parse(cpus)), "c", 0, Request(), "other/c")
    assert plan.container is not None
    return plan.state.changed(put=(plan.container.in_phase(Phase.RUNNING),))


def test_numa_nodes_chosen_by_a_scheduler_are_used() -> None:
    plan = put(empty(), pod("a", volcano_nodes=Mask((1,))), 4)
    assert own(plan) <= NODE1
    assert not plan.problem
    assert own(put(empty(), pod("a"), 4)) <= NODE0, "without the preference it would be elsewhere"


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (TopologyPolicy.NONE, "they have too little"),
        (BEST, "they have too little"),
        (TopologyPolicy.RESTRICTED, "Resources cannot be allocated with Topology locality"),
    ],
)
def test_preferred_nodes_without_enough_room_are_ignored_and_reported(
    policy: TopologyPolicy, why: str
) -> None:
    state = taken(empty(policy), "4-7,12-13")
    plan = put(state, pod("a", volcano_nodes=Mask((1,))), 4)
    assert own(plan) <= NODE0
    assert plan.problem == f"cannot meet what Volcano's scheduler prefers (NUMA node 1): {why}"
    assert getattr(plan.problem, "kind", None) is DefectKind.WISH


def test_preferred_nodes_that_do_not_exist_are_ignored() -> None:
    plan = put(empty(), pod("a", volcano_nodes=Mask((7,))), 4)
    assert own(plan)
    assert plan.problem.endswith(": NUMA node 7 cannot be found here")
    half = put(empty(), pod("a", volcano_nodes=Mask((1, 7))), 4)
    assert own(half) <= NODE1


def test_a_stricter_policy_of_the_pod_is_tried() -> None:
    state = taken(empty(), "0-1,4-5")  # 6 CPUs left on each node
    met = put(state, pod("a", volcano_policy=SINGLE), 6)
    assert len(MACHINE.nodes_of(own(met))) == 1
    assert not met.problem
    both = put(state, pod("a", volcano_policy=SINGLE, volcano_nodes=Mask((7,))), 6)
    assert len(MACHINE.nodes_of(own(both))) == 1
    assert "(NUMA node 7)" in both.problem, "the policy was met, the nodes were not"
    unmet = put(state, pod("a", volcano_policy=SINGLE), 7)
    assert len(own(unmet)) == 7
    assert "policy single-numa-node" in unmet.problem
    assert "Resources cannot be allocated with Topology locality" in unmet.problem
    assert unmet.explanation is not None
    assert any(step.provider == "volcano" for step in unmet.explanation.steps)


def test_a_less_strict_policy_than_that_of_the_node_is_ignored() -> None:
    state = taken(empty(SINGLE), "0-1,4-5")
    refused = put(state, pod("a", volcano_policy=BEST), 7)
    assert refused.verdict.reason == "TopologyAffinityError"
    assert put(state, pod("a"), 7).verdict.reason == "TopologyAffinityError"


def test_volcanos_hint_is_met_for_a_whole_pod_or_reported() -> None:
    state = taken(empty(BEST, scope=Scope.POD), "0-1,4-5")
    total = Request(7 * 1024, 700_000, 100_000)
    result = admit(state, pod("a", volcano_policy=SINGLE), total)
    assert result.verdict.admitted
    assert "policy single-numa-node" in result.problem
    met = admit(state, pod("a", volcano_nodes=Mask((1,))), Request(4096, 400_000, 100_000))
    assert met.pod.reserved_for_pod is not None
    assert met.pod.reserved_for_pod.cpus <= NODE1
    assert not met.problem


def test_a_sharing_container_runs_on_the_preferred_nodes() -> None:
    shares = pod("a", kube_qos=KubeQos.BURSTABLE, volcano_nodes=Mask((1,)))
    plan = place(empty(), shares, "c", 0, Request(512), "a/c")
    assert plan.container is not None
    assert plan.state.desired_cpus(plan.container) == NODE1
    assert "Volcano's scheduler chose" in plan.container.placement.reasons[0]
    nowhere = place(empty(), changed_copy(shares, volcano_nodes=Mask((7,))), "c", 0, Request(512), "a/c")
    assert nowhere.container is not None
    assert nowhere.state.desired_cpus(nowhere.container) == MACHINE.online
    assert "nothing is left of the shared pool" in nowhere.problem
