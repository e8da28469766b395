"""The rules of a node, and the values that are derived from them."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import CpuOptions, Scope, TopologyPolicy
from proxy.model.workload import KubeQos, Pod, QosClass
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2, mem_bytes_per_node=100)
TOPOLOGY = CpuTopology.of(MACHINE)


@pytest.mark.parametrize(
    ("reserved", "strict", "shareable"),
    [
        ("0,8", False, "0-15"),
        ("0,8", True, "1-7,9-15"),
        ("", True, "0-15"),
        ("0-15", True, "0-15"),
        ("0,99", True, "1-15"),
    ],
)
def test_pools_exclude_strictly_reserved_cpus(reserved: str, *, strict: bool, shareable: str) -> None:
    options = CpuOptions(strict_cpu_reservation=strict)
    node = Node(MACHINE, TOPOLOGY, reserved=CpuSet.parse(reserved), options=options)
    assert str(node.shareable) == shareable
    assert str(NodeState.empty(node).pools.shared) == str(NodeState.empty(node).pools.be) == shareable
    assert node.cpu.reserved == CpuSet.parse(reserved) & MACHINE.online
    assert node.cpu.options is options


@pytest.mark.parametrize("policy", list(TopologyPolicy))
@pytest.mark.parametrize("scope", list(Scope))
def test_pods_are_decided_as_a_whole_only_with_a_policy_and_pod_scope(
    policy: TopologyPolicy, scope: Scope
) -> None:
    node = Node(MACHINE, TOPOLOGY, policy=policy, scope=scope)
    assert node.decides_pods is (scope is Scope.POD and policy is not TopologyPolicy.NONE)


@pytest.mark.parametrize(
    ("policy", "qos", "kube", "refused"),
    [
        (TopologyPolicy.NONE, QosClass.LSE, KubeQos.BURSTABLE, True),
        (TopologyPolicy.NONE, QosClass.LSR, KubeQos.BURSTABLE, True),
        (TopologyPolicy.NONE, QosClass.NONE, KubeQos.GUARANTEED, False),
        (TopologyPolicy.BEST_EFFORT, QosClass.NONE, KubeQos.GUARANTEED, False),
        (TopologyPolicy.RESTRICTED, QosClass.NONE, KubeQos.GUARANTEED, True),
        (TopologyPolicy.SINGLE_NUMA_NODE, QosClass.NONE, KubeQos.GUARANTEED, True),
        (TopologyPolicy.SINGLE_NUMA_NODE, QosClass.NONE, KubeQos.BURSTABLE, False),
    ],
)
def test_pods_that_rely_on_their_placement_must_not_run_without_it(
    policy: TopologyPolicy, qos: QosClass, kube: KubeQos, refused: bool
) -> None:
    pod = Pod("s", "u", "ns", "p", qos=qos, kube_qos=kube)
    assert Node(MACHINE, TOPOLOGY, policy=policy).refuses_unplaced(pod) is refused


def test_memory_and_distances_are_read_when_they_are_needed() -> None:
    node = Node(MACHINE, TOPOLOGY)
    assert (node.memory, node.distances, node.nodes) == (None, None, Mask([0, 1]))
    node = Node(MACHINE, TOPOLOGY, closest=True, reserved_memory={1: {"memory": 30}})
    assert node.distances is not None
    assert node.memory is not None
    assert [n.table("memory").allocatable for n in node.memory.nodes.values()] == [100, 70]


def test_another_machine_keeps_the_rules() -> None:
    node = Node(
        MACHINE,
        TOPOLOGY,
        static=True,
        reserved=CpuSet.parse("0,15"),
        policy=TopologyPolicy.RESTRICTED,
        options=CpuOptions(strict_cpu_reservation=True),
        reserved_memory={0: {"memory": 1}},
    )
    node.pool_placements["x"] = None
    gone = CpuSet([15])
    nodes = tuple(changed_copy(n, cpus=n.cpus - gone) for n in MACHINE.nodes)
    cpus = tuple(c for c in MACHINE.cpus if c.id not in gone)
    smaller = changed_copy(MACHINE, nodes=nodes, cpus=cpus)
    there = node.with_machine(smaller)
    assert (there.machine, there.topology.cpus) == (smaller, smaller.online)
    assert (str(there.shareable), str(there.cpu.reserved)) == ("1-14", "0")
    assert (there.static, there.policy, there.pool_placements) == (True, TopologyPolicy.RESTRICTED, {})
    assert there.memory == node.memory
    assert node.for_running(there) == there
    for other in (node.for_running(there), node.with_static(static=False)):
        assert other.pool_placements == {}, "placements are made again under other rules"
    back = there.with_machine(MACHINE)
    assert (str(back.shareable), back.cpu, back) == ("1-14", node.cpu, node), (
        "the previous reservation is in effect again"
    )
