from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.kubelet.checkpoints import read_cpu_checkpoint
from proxy.model.idset import CpuSet
from proxy.model.workload import QosClass
from proxy.observe.koordinator import (
    BASIC_INFO,
    CPU_TOPOLOGY,
    POD_ALLOCS,
    NodeFacts,
    node_resource_topology,
    node_zones,
    topology_annotations,
)
from proxy.observe.koordinator_kubelet import Alloc, KubeletFacts, PodRow
from proxy.pools.annotations import ResourceStatus
from proxy.pools.cpu_location import locations_of
from proxy.pools.node_keys import BIND_POLICY, NUMA_RESERVATION, RESERVATION, SYSTEM_QOS
from proxy.pools.topology_keys import BE_POOLS, MANAGER_POLICY, SHARED_POOLS
from proxy.topology.regular_machine import regular_machine
from tests.oracles.koordinator_pools import union
from tests.oracles.koordinator_rule import NodeRule, parse_rule
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 2, 2)  # node 0: 0-1,4-5; node 1: 2-3,6-7
LOCATIONS = locations_of(MACHINE)
STATE = read_cpu_checkpoint('{"policyName":"static","entries":{"k":{"c":"7"}},"checksum":1}')


def owner(uid: str, qos: QosClass, cpus: str) -> PodRow:
    return PodRow("n", uid, uid, qos, ResourceStatus(cpus, CpuSet.parse(cpus)))


def read(drawn: dict[str, str]) -> NodeRule:
    """Read the annotations as Koordinator's hook server does."""
    rule, problem = parse_rule(drawn)
    assert rule is not None, problem
    return rule


def test_an_empty_node() -> None:
    reported = {key: json.loads(text) for key, text in topology_annotations(LOCATIONS, NodeFacts()).items()}
    pools = [{"socket": 0, "node": 0, "cpuset": "0-1,4-5"}, {"socket": 1, "node": 1, "cpuset": "2-3,6-7"}]
    assert reported[SHARED_POOLS] == reported[BE_POOLS] == pools
    assert reported[CPU_TOPOLOGY]["detail"][6] == {"id": 6, "core": 2, "socket": 1, "node": 1}
    assert reported[BASIC_INFO] == {"hyperThreadEnabled": True}
    assert (reported[POD_ALLOCS], reported[MANAGER_POLICY], reported[RESERVATION], reported[SYSTEM_QOS]) == (
        None,
        {},
        {},
        {},
    )
    assert len(reported) == 8


def test_all_containers_with_cpus() -> None:
    facts = NodeFacts(
        annotations={RESERVATION: '{"reservedCPUs": "4"}', SYSTEM_QOS: '{"cpuset": "5"}'},
        kubelet=KubeletFacts("static", reserved_cpus=CpuSet([4]), checkpoint=STATE),
        pods=(owner("a", QosClass.LSE, "0"), owner("b", QosClass.LSR, "1")),
        chosen=(Alloc("c", CpuSet([2]), "n", "c"), Alloc("d", CpuSet([3]), excludes_be=False)),
        basic={"vendorID": "GenuineIntel"},
    )
    drawn = topology_annotations(LOCATIONS, facts)
    rule = read(drawn)
    assert (union(rule.shared), union(rule.be)) == (CpuSet([6]), CpuSet([1, 3, 6]))
    assert [alloc["uid"] for alloc in json.loads(drawn[POD_ALLOCS])] == ["c", "d", "k"]
    assert json.loads(drawn[MANAGER_POLICY]) == {"policy": "static", "reservedCPUs": "4"}
    assert json.loads(drawn[BASIC_INFO])["vendorID"] == "GenuineIntel"


def test_an_old_file_of_kubelet_holds_nothing() -> None:
    drawn = topology_annotations(LOCATIONS, NodeFacts(kubelet=KubeletFacts("none", checkpoint=STATE)))
    assert json.loads(drawn[POD_ALLOCS]) is None
    assert 7 in union(read(drawn).shared)


def test_what_is_wrong_with_the_node_object_has_no_effect() -> None:
    facts = NodeFacts(
        labels={BIND_POLICY[0]: "x"},
        annotations={RESERVATION: "x", SYSTEM_QOS: '{"cpuset": "x"}'},
        kubelet=KubeletFacts("static"),
    )
    drawn = topology_annotations(LOCATIONS, facts)
    assert json.loads(drawn[SHARED_POOLS])[1]["cpuset"] == "2-3,6-7", "a list that is none has no effect"


@given(
    st.lists(st.tuples(st.sampled_from(QosClass), st.integers(0, 255)), max_size=4),
    st.integers(0, 255),
    st.booleans(),
)
def test_what_a_reader_makes_of_the_annotations(
    pods: list[tuple[QosClass, int]], system: int, exclusive: bool
) -> None:
    cpus = str(CpuSet.from_bits(system))
    facts = NodeFacts(
        annotations={SYSTEM_QOS: json.dumps({"cpuset": cpus, "cpusetExclusive": exclusive})},
        kubelet=KubeletFacts("static", reserved_cpus=CpuSet([0]), checkpoint=STATE),
        pods=tuple(owner(str(i), qos, str(CpuSet.from_bits(bits))) for i, (qos, bits) in enumerate(pods)),
    )
    rule = read(topology_annotations(LOCATIONS, facts))
    owned = {
        hard: set().union(*(CpuSet.from_bits(bits) for qos, bits in pods if not hard or qos is QosClass.LSE))
        for hard in (False, True)
    }
    kept = {7, *(CpuSet.from_bits(system) if exclusive else ())}
    assert set(union(rule.shared)) == set(range(8)) - kept - owned[False]
    assert set(union(rule.be)) == set(range(8)) - kept - owned[True]
    assert (rule.kubelet_policy, rule.system) == ("static", cpus)


def test_the_object_has_policies_labels_owner_and_zones() -> None:
    facts = NodeFacts(
        "node-a",
        "u-1",
        labels={NUMA_RESERVATION: "true", "other": "x"},
        capacity={"cpu": 8000},
        allocatable={"cpu": 7000},
        kubelet=KubeletFacts("none", topology_policy="restricted", topology_scope="pod"),
    )
    drawn = node_resource_topology(MACHINE, facts)
    assert json.loads(json.dumps(drawn)) == drawn, "ready for JSON"
    assert (drawn["apiVersion"], drawn["kind"]) == ("topology.node.k8s.io/v1alpha1", "NodeResourceTopology")
    assert drawn["topologyPolicies"] == ["RestrictedPodLevel"]
    metadata = drawn["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["labels"] == {"app.kubernetes.io/managed-by": "Koordinator", NUMA_RESERVATION: "true"}
    assert metadata["name"] == metadata["ownerReferences"][0]["name"] == "node-a"
    assert [zone.allocatable["cpu"] for zone in node_zones(MACHINE, facts)] == [3500, 3500]
    plain = changed_copy(facts, uid="", labels={})
    assert "ownerReferences" not in str(node_resource_topology(MACHINE, plain))
    assert [zone.allocatable["cpu"] for zone in node_zones(MACHINE, plain)] == [4000, 4000]
