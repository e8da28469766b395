"""Placement on CPUs that kubelet or a scheduler names, and the devices and memory that go with them."""

from __future__ import annotations

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.devices.state import RegisteredDevice
from proxy.engine.container_create import Plan, place
from proxy.engine.node import Node
from proxy.engine.pod_admission import admit
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MIB = 1 << 20
MACHINE = regular_machine(2, 1, 4, 2, mem_bytes_per_node=100 * MIB)  # node 0: 0-3,8-11; node 1: 4-7,12-15
GUARANTEED = Pod("s-u", "u", "ns", "p")
NAMED = CpuSet.parse("0-1")
GPUS = {"gpu": {name: RegisteredDevice(name, Mask([node])) for name, node in (("a", 0), ("b", 1), ("c", 1))}}


def empty(machine: Machine = MACHINE, **rules: object) -> NodeState:
    return NodeState.empty(Node(machine, CpuTopology.of(machine), **rules))


def exclusive(plan: Plan) -> CpuSet:
    assert plan.container is not None, plan.verdict
    return plan.container.placement.exclusive


def pinned_by_kubelet(state: NodeState) -> Plan:
    return place(state, GUARANTEED, "main", 0, Request(2048, cpuset_cpus=str(NAMED)), "t")


@pytest.mark.parametrize(
    ("phase", "gets_them"),
    [(None, True), (Phase.EXITED, True), (Phase.RUNNING, False), (Phase.CREATED, False)],
)
def test_a_container_takes_over_the_cpus_of_an_init_container_that_has_ended(
    phase: Phase | None, gets_them: bool
) -> None:
    state = empty().with_pod(GUARANTEED).with_kubelet_cpus({"u": {"init": NAMED, "main": NAMED}})
    if phase is not None:
        placement = Placement(Pool.OWN, NAMED, Mask((0,)))
        state = state.changed(
            put=(Container("i", "init", GUARANTEED, Request(2048), placement, phase, 0, "u/init"),)
        )
    plan = pinned_by_kubelet(state)
    assert (exclusive(plan) == NAMED) is gets_them
    assert len(exclusive(plan)) == 2
    assert bool(plan.problem) is not gets_them


def test_cpus_that_kubelet_holds_for_a_container_of_another_pod_are_not_assigned() -> None:
    plan = pinned_by_kubelet(empty().with_kubelet_cpus({"v": {"init": NAMED}}))
    assert exclusive(plan).isdisjoint(NAMED)
    assert plan.problem


def test_named_cpus_that_are_blocked_are_not_assigned() -> None:
    plan = pinned_by_kubelet(structs.replace(empty(), blocked_cpus=CpuSet([1])))
    assert 1 not in exclusive(plan)
    assert plan.problem == "CPU 1 is used by containers that cannot be moved"
    assert plan.state.pools.shared | exclusive(plan) == MACHINE.online, "blocked CPUs stay in the pools"


def lsr(cpus: str, memory: int = 0, **limits: int) -> Pod:
    amounts = {"cpu": 1000, **limits, **({"memory": memory * MIB} if memory else {})}
    containers = (ContainerResources("c", ContainerKind.APP, amounts, amounts),)
    pod = Pod("s-l", "l", "ns", "l", qos=QosClass.LSR, cpuset=CpuSet.parse(cpus))
    return changed_copy(pod, requests=PodRequests("l", containers, guaranteed=True))


@pytest.mark.parametrize(
    ("cpu", "count", "devices"),
    [("1", 1, ("a",)), ("5", 1, ("b",)), ("5", 2, ("b", "c")), ("5", 3, ("a", "b", "c"))],
)
def test_devices_come_from_the_numa_node_of_the_named_cpus_first(
    cpu: str, count: int, devices: tuple[str, ...]
) -> None:
    plan = place(empty(devices=GPUS), lsr(cpu, gpu=count), "c", 0, Request(1024), "t")
    assert plan.container is not None, plan.verdict
    assert plan.container.placement.devices == (("gpu", devices),)


@pytest.mark.parametrize(
    ("cpu", "held", "memory", "nodes"),
    [
        ("1", {}, 60, "0"),
        ("5", {}, 60, "1"),
        ("5", {}, 150, "0-1"),
        ("5", {1: 50}, 60, "0-1"),  # node 1 has too little free memory, and is among the nodes
        ("5", {0: 50, 1: 50}, 60, "0-1"),
    ],
)
def test_memory_comes_from_the_numa_node_of_the_named_cpus_first(
    cpu: str, held: dict[int, int], memory: int, nodes: str
) -> None:
    reserved = {node: {"memory": amount * MIB} for node, amount in (held or {0: 1}).items()}
    pod = lsr(cpu, memory)
    plan = place(empty(reserved_memory=reserved), pod, "c", 0, Request(1024, memory_limit=memory * MIB), "t")
    assert plan.container is not None, plan.verdict
    (block,) = plan.container.placement.blocks
    assert (block.affinity, block.size) == (Mask.parse(nodes), memory * MIB)


@pytest.mark.parametrize("policy", TopologyPolicy)
@pytest.mark.parametrize(
    ("cpu", "count", "memory", "devices", "nodes"),
    [
        ("1", 1, 60, ("a",), "0"),
        ("5", 1, 60, ("b",), "1"),
        ("5", 3, 60, ("a", "b", "c"), "1"),
        ("5", 1, 150, ("b",), "0-1"),
    ],
)
def test_what_is_set_aside_for_a_pod_is_near_to_its_named_cpus(
    policy: TopologyPolicy, cpu: str, count: int, memory: int, devices: tuple[str, ...], nodes: str
) -> None:
    rules = {"policy": policy, "scope": Scope.POD, "reserved_memory": {0: {"memory": MIB}}}
    pod, request = lsr(cpu, memory, gpu=count), Request(1024, memory_limit=memory * MIB)
    admission = admit(empty(devices=GPUS, static=True, **rules), pod, request)
    assert admission.verdict.admitted
    plan = place(admission.state.with_pod(admission.pod), admission.pod, "c", 0, request, "t")
    assert plan.container is not None, plan.verdict
    assert plan.container.placement.devices == (("gpu", devices),)
    (block,) = plan.container.placement.blocks
    assert (block.affinity, block.size) == (Mask.parse(nodes), memory * MIB)


def test_the_memory_of_cpus_on_a_numa_node_without_memory_comes_from_another_node() -> None:
    nodes = (MACHINE.nodes[0], changed_copy(MACHINE.nodes[1], mem_bytes=0))
    state = empty(changed_copy(MACHINE, nodes=nodes), reserved_memory={0: {"memory": 10 * MIB}})
    plan = place(state, lsr("5", 60), "c", 0, Request(1024, memory_limit=60 * MIB), "t")
    assert plan.container is not None, plan.verdict
    assert [block.affinity for block in plan.container.placement.blocks] == [Mask((0,))]
    assert plan.explanation is not None
    (step,) = plan.explanation.steps
    assert step.what == "no nodes were decided on; the best for its memory: NUMA node 0"
