"""Owners on nodes where some cores are half free, with ``full-pcpus-only`` or with a required bind policy."""

from __future__ import annotations

import random

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_create import Plan, place
from proxy.engine.node import Node
from proxy.engine.pod_admission import admit
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.koordinator import BindPolicy, NodeBindPolicy
from proxy.model.options import CpuOptions, Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import KubeQos, Phase, Pod, QosClass, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15; cores 0,8 1,9 ...
FULL, SPREAD = BindPolicy.FULL_PCPUS, BindPolicy.SPREAD_BY_PCPUS
WHOLE_CORES = CpuOptions(full_pcpus_only=True)
MERGING = (TopologyPolicy.BEST_EFFORT, TopologyPolicy.RESTRICTED, TopologyPolicy.SINGLE_NUMA_NODE)


def empty(
    policy: TopologyPolicy = TopologyPolicy.NONE, scope: Scope = Scope.CONTAINER, **more: object
) -> NodeState:
    node = Node(MACHINE, CpuTopology.of(MACHINE), static=True, policy=policy, scope=scope)
    return NodeState.empty(changed_copy(node, **more))


def pod(uid: str, qos: QosClass = QosClass.NONE, **fields: object) -> Pod:
    return changed_copy(Pod(f"s-{uid}", uid, "ns", uid, 0, qos, KubeQos.GUARANTEED), **fields)


def whole(count: int) -> Request:
    return Request(cpu_shares=1024 * count, cpu_quota=100_000 * count, cpu_period=100_000)


def create(state: NodeState, of: Pod, count: int) -> Plan:
    """Admit a pod and create its container."""
    admission = admit(state, of, whole(count))
    if not admission.verdict.admitted:
        return Plan(admission.verdict, state)
    plan = place(admission.state, admission.pod, "c", 0, whole(count), f"{of.uid}/c")
    if plan.container is None:
        return plan
    return changed_copy(plan, state=plan.state.changed(put=[plan.container.in_phase(Phase.RUNNING)]))


def cpus(plan: Plan) -> str:
    assert plan.container is not None, plan.verdict
    return str(plan.container.placement.exclusive)


def owned(state: NodeState, named: str) -> NodeState:
    """Return the node with an LSR pod on CPUs that the scheduler has named."""
    return create(state, pod("named", QosClass.LSR, cpuset=CpuSet.parse(named)), 0).state


@pytest.mark.parametrize("policy", TopologyPolicy)
@pytest.mark.parametrize("scope", Scope)
def test_half_cores_are_not_given_away_under_full_pcpus_only(policy: TopologyPolicy, scope: Scope) -> None:
    state = owned(empty(policy, scope, options=WHOLE_CORES), "0-6")
    first = create(state, pod("first"), 2)
    assert cpus(first) == "7,15", "the only core that is wholly free"
    second = create(first.state, pod("second"), 2)
    reason = "TopologyAffinityError" if policy.is_strict else "SMTAlignmentError"
    assert second.verdict.reason == reason


def test_cores_of_owners_from_before_the_option_are_not_shared() -> None:
    state = empty(TopologyPolicy.SINGLE_NUMA_NODE)
    for uid, count, expected in (("a", 3, "0-1,8"), ("b", 1, "9"), ("c", 1, "2")):
        plan = create(state, pod(uid), count)
        assert cpus(plan) == expected
        state = plan.state
    state = state.changed(drop=["b/c"])
    state = state.with_node(changed_copy(state.node, options=WHOLE_CORES))
    plan = create(state, pod("new"), 4)
    assert cpus(plan) == "4-5,12-13", "node 0 has four free CPUs, and one core"
    assert cpus(create(plan.state, pod("small"), 2)) == "3,11"


def test_siblings_of_reserved_cpus_are_given_away_as_kubelet_does() -> None:
    state = empty(TopologyPolicy.SINGLE_NUMA_NODE, options=WHOLE_CORES, reserved=CpuSet((0, 1)))
    assert cpus(create(state, pod("p"), 6)) == "2-3,8-11"


def test_no_core_has_two_owners_once_full_pcpus_only_is_set() -> None:
    """Random owners before and after the option is set, with ends and restarts."""
    dice = random.Random(41)
    placed = refused = 0
    for _ in range(120):
        policy, scope = dice.choice(list(TopologyPolicy)), dice.choice(list(Scope))
        reserved = CpuSet.parse(dice.choice(("", "0,8", "0")))
        state = empty(policy, scope, reserved=reserved)
        for number in range(dice.randint(0, 4)):
            state = create(state, pod(f"old{number}"), dice.randint(1, 3)).state
        free = sorted(state.pools.shared - reserved)
        if dice.random() < 0.5 and len(free) > 3:
            state = owned(state, str(CpuSet(dice.sample(free, 3))))
        state = state.with_node(changed_copy(state.node, options=WHOLE_CORES))
        for number in range(6):
            ending = dice.choice(sorted(state.containers) or [""])
            if ending and dice.random() < 0.3:
                state = state.changed(drop=[ending])
            required = dice.choice((BindPolicy.NONE, BindPolicy.NONE, FULL, SPREAD))
            plan = create(state, pod(f"new{number}", bind_required=required), dice.choice((2, 4, 6)))
            refused += plan.container is None
            if plan.container is None:
                continue
            placed += 1
            state = plan.state
            own = plan.container.placement.exclusive
            others = [owner.cpus for key, owner in state.owners.items() if key != plan.container.owner]
            for core in MACHINE.cores.values():
                assert core.isdisjoint(own) or all(core.isdisjoint(other) for other in others)
                assert core.isdisjoint(own) or core <= own or required is SPREAD or reserved == CpuSet((0,))
    assert placed > 200
    assert refused > 50


@pytest.mark.parametrize("policy", MERGING)
@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("qos", [QosClass.NONE, QosClass.LSR])
@pytest.mark.parametrize(
    ("required", "prescribed", "named", "expected"),
    [
        (FULL, NodeBindPolicy.NONE, "0-3", "4-5,12-13"),
        (BindPolicy.NONE, NodeBindPolicy.FULL_PCPUS_ONLY, "0-3", "4-5,12-13"),
        (SPREAD, NodeBindPolicy.NONE, "0-1,8-9", "4-7"),
        (BindPolicy.NONE, NodeBindPolicy.SPREAD_BY_PCPUS, "0-1,8-9", "4-7"),
    ],
)
def test_a_required_bind_policy_leads_to_a_numa_node_that_has_the_cores(
    policy: TopologyPolicy,
    scope: Scope,
    qos: QosClass,
    required: BindPolicy,
    prescribed: NodeBindPolicy,
    named: str,
    expected: str,
) -> None:
    state = owned(empty(policy, scope, bind=prescribed), named)
    assert len(state.pools.shared & MACHINE.nodes[0].cpus) == 4, "as many as are requested, on fewer cores"
    plan = create(state, pod("p", qos, bind_required=required), 4)
    assert cpus(plan) == expected


@pytest.mark.parametrize(("required", "named"), [(FULL, "0-7"), (SPREAD, "0-1,4-5,8-9,12-13")])
def test_where_no_numa_node_has_the_cores_the_pod_is_not_aligned(required: BindPolicy, named: str) -> None:
    state = owned(empty(TopologyPolicy.SINGLE_NUMA_NODE), named)
    plan = create(state, pod("p", bind_required=required), 4)
    assert plan.verdict.reason == "TopologyAffinityError"


@pytest.mark.parametrize("policy", MERGING)
@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("qos", [QosClass.NONE, QosClass.LSR])
def test_as_many_empty_nodes_as_have_the_cores_are_preferred(
    policy: TopologyPolicy, scope: Scope, qos: QosClass
) -> None:
    """One node has eight CPUs, and four cores."""
    plan = create(empty(policy, scope), pod("p", qos, bind_required=SPREAD), 6)
    if policy is TopologyPolicy.SINGLE_NUMA_NODE:
        assert plan.verdict.reason == "TopologyAffinityError"
    else:
        assert cpus(plan) == "0-5"


@pytest.mark.parametrize("policy", MERGING)
def test_containers_of_a_pod_that_is_decided_as_a_whole_share_cores(policy: TopologyPolicy) -> None:
    def parts(**counts: int) -> list[str]:
        each = (
            ContainerResources(name, ContainerKind.APP, amounts, amounts)
            for name, count in counts.items()
            for amounts in [{"cpu": 1000 * count, "memory": 1}]
        )
        of = pod("p", bind_required=SPREAD, requests=PodRequests("p", tuple(each)))
        admission = admit(empty(policy, Scope.POD), of, whole(sum(counts.values())))
        if admission.pod.reserved_for_pod is None:
            return [admission.verdict.reason]
        return [str(part.cpus) for part in admission.pod.reserved_for_pod.parts]

    assert parts(a=4, b=4) == ["0-3", "8-11"]
    single = policy is TopologyPolicy.SINGLE_NUMA_NODE
    assert parts(a=6, b=2) == (["TopologyAffinityError"] if single else ["0-5", "8-9"])


def test_a_number_of_cpus_that_fills_no_core_is_still_reported() -> None:
    plan = create(owned(empty(TopologyPolicy.BEST_EFFORT), "0-3"), pod("p", bind_required=FULL), 3)
    assert plan.verdict.reason == "CPUBindPolicyError"
    assert "requested cpus not multiple cpus per core" in plan.verdict.message
