"""Pods of several containers of which each must have one CPU of each core (a required ``SpreadByPCPUs``).

Each container of a random pod is created on a random node. If the free CPUs suffice for the whole pod, no
container is refused because its CPUs are on too few cores, and a pod with a hint of its own stays on the NUMA
nodes of the hint.
"""

from __future__ import annotations

import random

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.container_create import place
from proxy.engine.node import Node
from proxy.engine.pod_admission import admit
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NodeBindPolicy, NumaStrategy
from proxy.model.machine import Cpu, Machine, NumaNode
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import KubeQos, Phase, Pod, QosClass, Request
from tests.testkit.changed_copy import changed_copy

SPREAD = BindPolicy.SPREAD_BY_PCPUS
APP, INIT, SIDECAR = ContainerKind.APP, ContainerKind.INIT, ContainerKind.SIDECAR
Containers = list[tuple[int, ContainerKind]]


def machine(nodes: int, cores: int, *, neighbours: bool) -> Machine:
    """Return a machine; the two threads of a core have consecutive ids (``neighbours``), or distant ones."""
    count = nodes * cores
    cpus = sorted(
        (
            Cpu(2 * core + thread if neighbours else core + count * thread, core, node, numa=node)
            for core in range(count)
            for node in [core // cores]
            for thread in (0, 1)
        ),
        key=lambda cpu: cpu.id,
    )
    numa_nodes = [NumaNode(n, CpuSet(c.id for c in cpus if c.numa == n), 1 << 30) for n in range(nodes)]
    online = CpuSet(cpu.id for cpu in cpus)
    return Machine(tuple(cpus), tuple(numa_nodes), online, online, extra={"arch": "x86_64"})


def whole(count: int) -> Request:
    return Request(cpu_shares=1024 * count, cpu_quota=100_000 * count, cpu_period=100_000)


def pod(containers: Containers, **fields: object) -> Pod:
    each = [
        ContainerResources(f"c{number}", kind, amounts, amounts)
        for number, (count, kind) in enumerate(containers)
        for amounts in [{"cpu": 1000 * count, "memory": 1}]
    ]
    made = Pod("s-p", "p", "ns", "p", 0, QosClass.NONE, KubeQos.GUARANTEED)
    return changed_copy(made, requests=PodRequests("p", tuple(each)), **fields)


def created(state: NodeState, the_pod: Pod) -> list[CpuSet] | str:
    """Admit a pod and create its containers in order: their CPUs, or the reason of a refusal."""
    assert the_pod.requests is not None
    total = sum(container.requests["cpu"] for container in the_pod.requests.containers) // 1000
    admission = admit(state, the_pod, whole(total))
    if not admission.verdict.admitted:
        return admission.verdict.reason
    state, given = admission.state, list[CpuSet]()
    for container in the_pod.requests.containers:
        count = container.requests["cpu"] // 1000
        plan = place(state, admission.pod, container.name, 0, whole(count), container.name)
        if plan.container is None:
            return plan.verdict.reason
        given.append(plan.container.placement.exclusive)
        assert len(given[-1]) == count
        phase = Phase.EXITED if container.kind is INIT else Phase.RUNNING
        state = plan.state.changed(put=[plan.container.in_phase(phase)])
    return given


def enough(free_of_cores: list[int], counts: list[int]) -> bool:
    """Return whether containers fit: each in turn, the largest first, from the cores with the most free."""
    left = list(free_of_cores)
    for count in sorted(counts, reverse=True):
        left.sort(reverse=True)
        if count > sum(1 for size in left if size):
            return False
        left[:count] = [size - 1 for size in left[:count]]
    return True


def all_fit(free_of_cores: list[int], containers: Containers) -> bool:
    staying: list[int] = []
    for count, kind in containers:
        if kind is INIT and not enough(free_of_cores, [*staying, count]):
            return False
        staying += [count] if kind is not INIT else []
    return enough(free_of_cores, staying)


def owned(state: NodeState, named: CpuSet) -> NodeState:
    """Return the node with an LSR pod on CPUs that the scheduler has named."""
    owner = Pod("s-o", "o", "ns", "o", 0, QosClass.LSR, KubeQos.GUARANTEED, cpuset=named)
    plan = place(state, owner, "c", 0, whole(len(named)), "o")
    assert plan.container is not None
    return plan.state.changed(put=[plan.container.in_phase(Phase.RUNNING)])


def random_node(dice: random.Random, policy: TopologyPolicy, scope: Scope) -> NodeState:
    """Return a node that prescribes the policy or not, empty or with single CPUs that are owned."""
    hardware = machine(dice.choice((1, 2)), dice.choice((2, 3, 4)), neighbours=dice.random() < 0.5)
    node = Node(hardware, CpuTopology.of(hardware), static=True, policy=policy, scope=scope)
    bind = dice.choice((NodeBindPolicy.NONE, NodeBindPolicy.SPREAD_BY_PCPUS))
    state = NodeState.empty(changed_copy(node, bind=bind, strategy=dice.choice(list(NumaStrategy))))
    if dice.random() < 0.5:
        cpus = sorted(hardware.online)
        state = owned(state, CpuSet(dice.sample(cpus, dice.randint(1, len(cpus) // 3))))
    return state


@pytest.mark.parametrize("policy", TopologyPolicy)
@pytest.mark.parametrize("scope", Scope)
def test_no_container_is_refused_for_lack_of_cores_if_the_pod_fits(
    policy: TopologyPolicy, scope: Scope
) -> None:
    dice = random.Random(f"{policy} {scope}")
    placed = 0
    for _ in range(250):
        state = random_node(dice, policy, scope)
        topology = state.node.topology
        free = state.pools.shared
        left = len(free) - dice.randint(1, 3)
        containers: Containers = []
        while left > 0 and len(containers) < 5:
            containers.append(
                (dice.randint(1, min(left, len(topology.cores))), dice.choice((APP, APP, SIDECAR, INIT)))
            )
            left -= containers[-1][0]
        containers.sort(key=lambda container: container[1] is APP)
        exclusive = dice.choice((ExclusivePolicy.NONE, *ExclusivePolicy))
        the_pod = pod(containers, bind_required=SPREAD, exclusive=exclusive)
        free_of_cores = [(core & free.bits).bit_count() for core in topology.cores.values()]
        if not containers or not all_fit(free_of_cores, containers):
            continue
        given = created(state, the_pod)
        if isinstance(given, str):
            assert policy.is_strict
            assert given == "TopologyAffinityError", (containers, free)
            continue
        placed += 1
        for cpus in given:
            assert len(topology.one_of_each_core(cpus)) == len(cpus)
        if policy is TopologyPolicy.SINGLE_NUMA_NODE and scope is Scope.POD:
            assert len(state.node.machine.nodes_of(CpuSet.union_of(given))) == 1
    assert placed > 50


@pytest.mark.parametrize("policy", TopologyPolicy)
@pytest.mark.parametrize("scope", Scope)
def test_the_first_containers_leave_cores_to_the_last_one(policy: TopologyPolicy, scope: Scope) -> None:
    """Containers of 1, 1 and 3 CPUs on three cores: the first two must not take both threads of one."""
    hardware = machine(1, 3, neighbours=True)
    node = Node(hardware, CpuTopology.of(hardware), static=True, policy=policy, scope=scope)
    given = created(NodeState.empty(node), pod([(1, APP), (1, APP), (3, APP)], bind_required=SPREAD))
    assert [str(cpus) for cpus in given] == ["0", "2", "1,3-4"]


@pytest.mark.parametrize("policy", TopologyPolicy)
@pytest.mark.parametrize("scope", Scope)
def test_a_choice_that_leaves_enough_cores_stays_as_it_is(policy: TopologyPolicy, scope: Scope) -> None:
    hardware = machine(1, 3, neighbours=True)
    node = Node(hardware, CpuTopology.of(hardware), static=True, policy=policy, scope=scope)
    given = created(NodeState.empty(node), pod([(1, APP), (1, APP), (2, APP)], bind_required=SPREAD))
    assert [str(cpus) for cpus in given] == ["0", "1", "2,4"]


def test_a_pod_stays_on_the_numa_node_of_its_hint() -> None:
    """Node 1 is free: its containers must not take both threads of two cores before the third needs three."""
    hardware = machine(2, 3, neighbours=True)
    node = Node(hardware, CpuTopology.of(hardware), static=True, scope=Scope.POD)
    state = owned(
        NodeState.empty(changed_copy(node, policy=TopologyPolicy.RESTRICTED)), CpuSet.parse("0-1,4-5")
    )
    given = created(state, pod([(1, APP), (1, APP), (3, APP), (1, APP)], bind_required=SPREAD))
    assert not isinstance(given, str)
    assert hardware.nodes_of(CpuSet.union_of(given)) == Mask([1])


def test_a_narrow_hint_is_left_where_later_containers_need_its_cores() -> None:
    """Node 0 has one free thread of each core. Under best-effort, CPUs of the other node are admissible."""
    hardware = machine(2, 2, neighbours=True)
    node = Node(hardware, CpuTopology.of(hardware), static=True, policy=TopologyPolicy.BEST_EFFORT)
    state = owned(NodeState.empty(node), CpuSet((0, 2)))
    given = created(state, pod([(2, APP), (3, APP)], bind_required=SPREAD))
    assert [str(cpus) for cpus in given] == ["4,6", "1,3,5"]
