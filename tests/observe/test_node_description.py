from __future__ import annotations

import json
from dataclasses import replace

import pytest
from msgspec import structs

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.node import Node
from proxy.engine.owners import floor_cpus
from proxy.engine.state import NodeState
from proxy.model.admission import AdmissionRules
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import NodeBindPolicy
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.mode import NodeMode
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, QosClass, Request, SetAside
from proxy.observe.json_access import as_list, as_map
from proxy.observe.koordinator import POD_ALLOCS, node_resource_topology
from proxy.observe.node_description import describe_node, node_facts
from proxy.pools.node_keys import AMPLIFICATION, NUMA_RESERVATION, RAW_ALLOCATABLE, RESERVATION
from proxy.pools.topology_keys import MANAGER_POLICY
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(2, 1, 4, 2)
NODE = Node(
    MACHINE,
    CpuTopology.of(MACHINE),
    static=True,
    policy=TopologyPolicy.RESTRICTED,
    scope=Scope.POD,
    node_reservation=CpuSet((0,)),
    system=CpuSet((8,)),
    bind=NodeBindPolicy.FULL_PCPUS_ONLY,
)
LSR = Pod("s-1", "u1", "ns", "named", qos=QosClass.LSR, cpuset=CpuSet((2, 10)))
OWN = Pod("s-2", "u2", "ns", "chosen")


def owner(key: str, pod: Pod, cpus: str, phase: Phase = Phase.RUNNING, *, hard: bool = True) -> Container:
    placement = Placement(Pool.OWN, CpuSet.parse(cpus), Mask((0,)), excludes_be=hard)
    return Container(key, key, pod, Request(), placement, phase, owner=f"{pod.key}/{key}")


def test_the_description_of_a_running_node() -> None:
    containers = [
        owner("a", LSR, "2,10", hard=False),
        owner("b", OWN, "4,12", hard=False),
        owner("c", OWN, "5"),
        owner("d", OWN, "6", Phase.EXITED),
    ]
    state = NodeState.of(NODE, [LSR, OWN], containers)
    reported = node_resource_topology(MACHINE, node_facts(state, "n1"))
    metadata = reported["metadata"]
    assert isinstance(metadata, dict)
    read = {key.partition("/")[2]: json.loads(text) for key, text in metadata["annotations"].items()}
    assert (metadata["name"], reported["topologyPolicies"]) == ("n1", ["RestrictedPodLevel"])
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
    assert str(pools.shared) == "1,3,6-7,9,11,13-15", "the description has the pools of the state"


def test_the_floor_of_the_shared_pool_is_not_free_and_schedulers_know_it_as_reserve() -> None:
    node = replace(NODE, admission=AdmissionRules(floor=0, numa_floor=2))
    state = NodeState.of(node, [LSR], [owner("a", LSR, "2,10")])
    assert str(floor_cpus(state)) == "3,7,11,15"
    page = describe_node(state, "n1")
    assert (page["freeCPUs"], page["floorCPUs"], page["withheldCPUs"]) == (
        "1,4-6,9,12-14",
        "3,7,11,15",
        "0,8",
    )
    assert (
        as_map(page["policies"]).items()
        >= {
            "cpuBindPolicy": "FullPCPUsOnly",
            "sharedFloor": "0",
            "sharedFloorPerNUMANode": "2",
        }.items()
    )
    reported = node_resource_topology(MACHINE, node_facts(state, "n1", CpuManager("static")))
    metadata = reported["metadata"]
    assert isinstance(metadata, dict)
    assert json.loads(metadata["annotations"][MANAGER_POLICY])["reservedCPUs"] == "3,7,11,15"
    observed = structs.replace(state, mode=NodeMode.OBSERVE)
    page = describe_node(observed, "n1")
    assert (page["freeCPUs"], page["floorCPUs"]) == ("1-7,9-15", "")
    assert "sharedFloor" not in as_map(page["policies"])


def test_cpus_reserved_for_a_pod_are_not_free_and_are_listed_as_its_own() -> None:
    aside = structs.replace(OWN, reserved_for_pod=SetAside(Mask((0,)), True, CpuSet((2, 3, 10))))
    exited = owner("a", aside, "2,10", Phase.EXITED)
    for containers, left in ((), "2-3,10"), ((owner("a", aside, "2,10"),), "3"), ((exited,), "2-3,10"):
        page = describe_node(NodeState.of(NODE, [aside, LSR], containers), "n1")
        assert page["freeCPUs"] == "1,4-7,9,11-15"
        pods = {as_map(pod)["name"]: as_map(pod) for pod in as_list(page["pods"])}
        assert (pods["chosen"]["setAside"], pods["chosen"]["counted"]) == (left, True)
        assert (pods["named"]["setAside"], pods["named"]["counted"]) == ("", False), (
            "nothing of it was placed"
        )
    observed = structs.replace(NodeState.of(NODE, [aside], []), mode=NodeMode.OBSERVE)
    (pod,) = as_list(describe_node(observed, "n1")["pods"])
    assert (as_map(pod)["setAside"], as_map(pod)["counted"]) == ("", False)


def test_schedulers_know_reserved_cpus_as_reserve_if_there_is_no_floor() -> None:
    state = NodeState.empty(replace(NODE, reserved=CpuSet((1, 9)), admission=AdmissionRules(floor=0)))
    texts = as_map(
        as_map(node_resource_topology(MACHINE, node_facts(state, "n1"))["metadata"])["annotations"]
    )
    assert json.loads(str(texts[MANAGER_POLICY])) == {"reservedCPUs": "1,9"}
    observed = node_facts(structs.replace(state, mode=NodeMode.OBSERVE), "n1")
    assert observed.unavailable == CpuSet()


@pytest.mark.parametrize("mode", [NodeMode.OBSERVE, NodeMode.RELEASED])
def test_a_plan_that_is_not_applied_is_not_in_the_description(mode: NodeMode) -> None:
    pinned = structs.replace(owner("e", OWN, "7"), request=Request(cpuset_cpus="7"))
    containers = [owner("a", LSR, "2,10", hard=False), owner("b", OWN, "4,12"), pinned]
    state = structs.replace(NodeState.of(NODE, [LSR, OWN], containers), mode=mode)
    reported = node_resource_topology(MACHINE, node_facts(state, "n1"))
    metadata = reported["metadata"]
    assert isinstance(metadata, dict)
    read = {key.partition("/")[2]: json.loads(text) for key, text in metadata["annotations"].items()}
    assert reported["topologyPolicies"] == ["None"]
    assert [(each["name"], each["cpuset"]) for each in read["pod-cpu-allocs"]] == [("chosen", "7")]
    assert [pool["cpuset"] for pool in read["cpu-shared-pools"]] == ["0-3,8-11", "4-6,12-15"]
    assert not read["reservation"].get("reservedCPUs")
    assert not read["system-qos-resource"]


def test_a_node_without_containers_is_described() -> None:
    facts = node_facts(NodeState.empty(Node(MACHINE, CpuTopology.of(MACHINE))), "n")
    assert (facts.labels, facts.annotations, facts.pods, facts.chosen) == ({}, {}, (), ())


def test_the_node_objects_values_pass_and_effective_ones_are_reported() -> None:
    meta = NodeMeta(
        "n1",
        "node-uid",
        {NUMA_RESERVATION: "true", "other": "x"},
        {
            RESERVATION: '{"resources":{"cpu":"1"},"applyPolicy":"ReservedCPUsOnly"}',
            AMPLIFICATION: '{"cpu": 1.5}',
            "other": "x",
        },
        {"cpu": 16_000},
        {"cpu": 14_000},
    )
    reported = node_resource_topology(MACHINE, node_facts(NodeState.empty(NODE), "n1", meta=meta))
    metadata, zones = reported["metadata"], reported["zones"]
    assert isinstance(metadata, dict)
    assert isinstance(zones, list)
    texts = metadata["annotations"]
    assert json.loads(texts[RESERVATION]) == {
        "resources": {"cpu": "1"},
        "reservedCPUs": "0",
        "applyPolicy": "ReservedCPUsOnly",
    }
    assert texts[AMPLIFICATION] == '{"cpu":1.50}'
    assert "other" not in texts
    assert metadata["labels"][NUMA_RESERVATION] == "true"
    assert metadata["ownerReferences"][0]["uid"] == "node-uid"
    cpu = zones[0]["resources"][0]
    assert (cpu["name"], cpu["capacity"], cpu["allocatable"]) == ("cpu", "8", "7"), (
        "half of kubelet's reserve"
    )
    stranger = node_resource_topology(MACHINE, node_facts(NodeState.empty(NODE), "n2", meta=meta))
    assert "ownerReferences" not in stranger["metadata"]  # type: ignore[operator]


def test_kubelets_assignments_are_reported_once() -> None:
    held = {
        "u2": {"a": CpuSet((4, 12)), "b": CpuSet((5,))},
        "u3": {"c": CpuSet((6, 7))},
        "u1": {"x": CpuSet((3,))},
    }
    containers = [owner("a", OWN, "4,12")]
    node = Node(MACHINE, CpuTopology.of(MACHINE))
    state = NodeState.of(node, [LSR, OWN], containers, held)
    manager = CpuManager(
        "static", {"full-pcpus-only": "true"}, CpuSet((0, 8)), "single-numa-node", "pod", held=held
    )
    reported = node_resource_topology(MACHINE, node_facts(state, "n", manager))
    metadata = reported["metadata"]
    assert isinstance(metadata, dict)
    read = {key.partition("/")[2]: json.loads(text) for key, text in metadata["annotations"].items()}
    assert read["pod-cpu-allocs"] == [
        {"namespace": "ns", "name": "chosen", "uid": "u2", "cpuset": "4-5,12", "managedByKubelet": True},
        {"uid": "u3", "cpuset": "6-7", "managedByKubelet": True},
    ]
    assert read["cpu-manager-policy"] == {
        "policy": "static",
        "options": {"full-pcpus-only": "true"},
        "reservedCPUs": "0,8",
    }
    assert reported["topologyPolicies"] == ["SingleNUMANodePodLevel"]
    shared = CpuSet.parse(",".join(pool["cpuset"] for pool in read["cpu-shared-pools"]))
    assert shared == state.pools.shared - CpuSet((2, 10)), "no container of that pod is here yet"


def test_the_topology_manager_of_the_daemon_is_reported_if_it_is_active() -> None:
    manager = CpuManager("none", topology_policy="best-effort", topology_scope="container")
    reported = node_resource_topology(MACHINE, node_facts(NodeState.empty(NODE), "n", manager))
    assert reported["topologyPolicies"] == ["RestrictedPodLevel"]


def test_kubelets_reserve_comes_from_raw_allocatable() -> None:
    meta = NodeMeta(
        labels={NUMA_RESERVATION: "true"},
        annotations={AMPLIFICATION: '{"cpu": 2}', RAW_ALLOCATABLE: '{"cpu": "14"}'},
        capacity={"cpu": 16_000, "memory": 1000},
        allocatable={"cpu": 28_000, "memory": 900},
    )
    facts = node_facts(NodeState.empty(NODE), "n1", meta=meta)
    assert facts.allocatable == {"cpu": 14_000, "memory": 900}
    zones = node_resource_topology(MACHINE, facts)["zones"]
    assert isinstance(zones, list)
    assert zones[1]["resources"][0]["allocatable"] == "7"
