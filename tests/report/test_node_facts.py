from __future__ import annotations

import json

from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import NodeBindPolicy
from proxy.model.options import Policy, Scope
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, QosClass, Request
from proxy.place.cputopo import CpuTopology
from proxy.plan.node import Node
from proxy.plan.state import NodeState
from proxy.report.koordinator import POD_ALLOCS, node_resource_topology
from proxy.report.node_facts import node_facts
from proxy.topology.build import described

MACHINE = described(2, 1, 4, 2)
NODE = Node(
    MACHINE,
    CpuTopology.of(MACHINE),
    static=True,
    policy=Policy.RESTRICTED,
    scope=Scope.POD,
    reservation=CpuSet((0,)),
    system=CpuSet((8,)),
    bind=NodeBindPolicy.FULL_PCPUS_ONLY,
)
LSR = Pod("s-1", "u1", "ns", "named", qos=QosClass.LSR, cpuset=CpuSet((2, 10)))
OWN = Pod("s-2", "u2", "ns", "chosen")


def owner(key: str, pod: Pod, cpus: str, phase: Phase = Phase.RUNNING, *, hard: bool = True) -> Container:
    placement = Placement(Pool.OWN, CpuSet.parse(cpus), Mask((0,)), hard=hard)
    return Container(key, key, pod, Request(), placement, phase, owner=f"{pod.key}/{key}")


def test_the_picture_of_a_running_node() -> None:
    there = [
        owner("a", LSR, "2,10", hard=False),
        owner("b", OWN, "4,12", hard=False),
        owner("c", OWN, "5"),
        owner("d", OWN, "6", Phase.EXITED),
    ]
    state = NodeState.of(NODE, [LSR, OWN], there)
    told = node_resource_topology(MACHINE, node_facts(state, "n1"))
    metadata = told["metadata"]
    assert isinstance(metadata, dict)
    read = {key.partition("/")[2]: json.loads(text) for key, text in metadata["annotations"].items()}
    assert (metadata["name"], told["topologyPolicies"]) == ("n1", ["RestrictedPodLevel"])
    assert json.loads(metadata["annotations"][POD_ALLOCS]) == [
        {"namespace": "ns", "name": "chosen", "uid": "u2", "cpuset": "4-5,12", "managedByKubelet": True}
    ]
    assert read["cpu-shared-pools"] == [
        {"socket": 0, "node": 0, "cpuset": "1,3,9,11"},
        {"socket": 1, "node": 1, "cpuset": "6-7,13-15"},
    ]
    assert read["be-cpu-shared-pools"][0]["cpuset"] == "1-3,9-11", "BE may borrow the CPUs of LSR"
    assert read["reservation"] == {"reservedCPUs": "0"}
    assert read["system-qos-resource"] == {"cpuset": "8", "cpusetExclusive": True}
    pools = state.pools
    assert str(pools.shared) == "1,3,6-7,9,11,13-15", "the picture says what the pools are"


def test_a_node_with_nothing_on_it() -> None:
    facts = node_facts(NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE))), "n")
    assert (facts.labels, facts.annotations, facts.pods, facts.chosen) == ({}, {}, (), ())
