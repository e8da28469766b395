from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.defects import DefectKind
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, ExclusivePolicy, NumaExclusive, NumaPolicy
from proxy.model.options import TopologyPolicy
from proxy.pools.annotations import (
    BATCH_CPU,
    NUMA_TOPOLOGY_SPEC,
    RESOURCE_SPEC,
    RESOURCE_STATUS,
    VOLCANO_DECISION,
    VOLCANO_POLICY,
    NodeShare,
    NumaSpec,
    ResourceSpec,
    ResourceStatus,
    VolcanoPreferences,
    numa_topology_spec,
    resource_spec,
    resource_status,
    volcano_preferences,
)

KEYS = (RESOURCE_SPEC, RESOURCE_STATUS, NUMA_TOPOLOGY_SPEC, VOLCANO_DECISION, VOLCANO_POLICY)


def status(**fields: object) -> ResourceStatus:
    found, problem = resource_status({RESOURCE_STATUS: json.dumps(fields)})
    assert not problem
    return found


def test_a_pod_without_annotations_has_no_resource_status() -> None:
    assert resource_spec({}) == (ResourceSpec(), "")
    assert resource_status({}) == (ResourceStatus(), "")
    assert numa_topology_spec({}) == (NumaSpec(), "")
    assert volcano_preferences({}) == (VolcanoPreferences(), ())


def test_the_requested_cpu_bind_policy_is_read() -> None:
    text = json.dumps(
        {
            "requiredCPUBindPolicy": "FullPCPUs",
            "preferredCPUBindPolicy": "ConstrainedBurst",
            "preferredCPUExclusivePolicy": "NUMANodeLevel",
        }
    )
    full, burst = BindPolicy.FULL_PCPUS, BindPolicy.CONSTRAINED_BURST
    assert resource_spec({RESOURCE_SPEC: text}) == (
        ResourceSpec(full, burst, ExclusivePolicy.NUMA_NODE_LEVEL),
        "",
    )
    assert resource_spec({RESOURCE_SPEC: '{"preferredCPUExclusivePolicy": "None"}'})[0] == ResourceSpec()


def test_the_assigned_cpus_are_read() -> None:
    share = {"node": 3, "resources": {"cpu": "1500m", BATCH_CPU: "2k", "memory": "8Gi"}}
    found = status(cpuset="2,0-1", numaNodeResources=[share], more=1)
    assert (found.text, found.cpus) == ("2,0-1", CpuSet.parse("0-2"))
    assert found.shares == (NodeShare(3, 1500, 2000, {"memory": "8Gi"}),)
    assert found.nodes == (3,)


def test_cpus_chosen_by_this_node_are_not_read_as_a_claim() -> None:
    assert status(cpuset="0-3", chosenBy="topoproxy") == ResourceStatus()
    assert status(cpuset="0-3", chosenBy="koord-scheduler").cpus == CpuSet.parse("0-3")


def test_numa_nodes_count_if_one_of_them_grants_cpu() -> None:
    memory, cpu = {"node": 0, "resources": {"memory": "1Gi"}}, {"node": 3, "resources": {"cpu": 1}}
    assert status(numaNodeResources=[memory]).nodes == ()
    assert status(numaNodeResources=[{"node": 1}]).shares == (NodeShare(1),)
    assert NodeShare(1) == NodeShare(1, 0, 0, {})
    assert status(numaNodeResources=[memory, cpu]).nodes == (0, 3)
    assert status(numaNodeResources=[{"node": 1, "resources": {BATCH_CPU: "-1"}}]).nodes == ()
    for resource, least in ((BATCH_CPU, "1"), ("cpu", "1m")):
        assert status(numaNodeResources=[{"node": 1, "resources": {resource: least}}]).nodes == (1,)


def test_documented_pools_count_if_numa_nodes_are_absent() -> None:
    pools = [{"socket": 1, "node": 2}, {"socket": 0, "node": 0}, {"socket": 1, "node": 2, "cpuset": "9"}]
    assert status(cpuSharedPools=pools).nodes == (2, 0)
    cpu = {"node": 3, "resources": {"cpu": 1}}
    assert status(cpuSharedPools=pools, numaNodeResources=[cpu]).nodes == (3,)


def test_the_numa_topology_spec_is_read() -> None:
    def spec(**fields: str) -> NumaSpec:
        return numa_topology_spec({NUMA_TOPOLOGY_SPEC: json.dumps(fields)})[0]

    single = NumaPolicy.SINGLE_NUMA_NODE
    assert spec(numaTopologyPolicy="SingleNUMANode") == NumaSpec(single, NumaExclusive.REQUIRED)
    preferred = spec(numaTopologyPolicy="SingleNUMANode", singleNUMANodeExclusive="Preferred")
    assert preferred == NumaSpec(single, NumaExclusive.PREFERRED)
    assert spec() == NumaSpec()


def test_preferences_of_volcano_are_read() -> None:
    decision = json.dumps({"numa": {"2": {"cpu": "4"}, "0": {"cpu": "500m"}}})
    preferences, faults = volcano_preferences({VOLCANO_POLICY: "restricted", VOLCANO_DECISION: decision})
    assert not faults
    assert preferences == VolcanoPreferences(TopologyPolicy.RESTRICTED, Mask([0, 2]), {2: 4000, 0: 500})


def test_a_fault_in_one_annotation_of_volcano_keeps_the_other() -> None:
    preferences, (fault,) = volcano_preferences(
        {VOLCANO_POLICY: "strict", VOLCANO_DECISION: '{"numa": {"1": {}}}'}
    )
    assert preferences == VolcanoPreferences(None, Mask([1]), {1: 0})
    assert fault.startswith(f"annotation {VOLCANO_POLICY}: 'strict' is not one of none, ")
    assert fault.kind is DefectKind.POLICY
    preferences, (fault,) = volcano_preferences(
        {VOLCANO_POLICY: "none", VOLCANO_DECISION: '{"numa": {"-1": {}}}'}
    )
    assert preferences == VolcanoPreferences(TopologyPolicy.NONE)
    assert fault == f"annotation {VOLCANO_DECISION}: numa: '-1' is not a NUMA node"
    assert fault.kind is DefectKind.ANNOTATION


@pytest.mark.parametrize("name", ["\u0661", "\u00b2", "100000", "", "1 "])
def test_a_numa_node_of_volcano_is_named_by_decimal_digits(name: str) -> None:
    preferences, (fault,) = volcano_preferences({VOLCANO_DECISION: json.dumps({"numa": {name: {}}})})
    assert preferences == VolcanoPreferences()
    assert fault.endswith("is not a NUMA node")


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        (RESOURCE_STATUS, "[]", "it is not a JSON object"),
        (RESOURCE_STATUS, '{"cpuset": "0-"}', "cpuset: '0-' is not a list"),
        (RESOURCE_STATUS, '{"numaNodeResources": [{"node": -1}]}', "node -1 is not a NUMA node"),
        (
            RESOURCE_STATUS,
            '{"cpuSharedPools": [{"node": 65536}]}',
            "NUMA node 65536 is not on this machine (0-1023)",
        ),
        (RESOURCE_STATUS, '{"numaNodeResources": [{"resources": {"cpu": "1q"}}]}', "resources: cpu: '1q'"),
        (RESOURCE_SPEC, '{"preferredCPUBindPolicy": "Full"}', "'Full' is not one of Default, FullPCPUs"),
        (NUMA_TOPOLOGY_SPEC, '{"numaTopologyPolicy": "all"}', "'all' is not one of BestEffort, "),
    ],
)
def test_faults_of_annotations_are_reported(key: str, text: str, message: str) -> None:
    readers = {
        RESOURCE_STATUS: resource_status,
        RESOURCE_SPEC: resource_spec,
        NUMA_TOPOLOGY_SPEC: numa_topology_spec,
    }
    value, problem = readers[key]({key: text})
    assert value == type(value)(), "as without the annotation"
    assert problem.startswith(f"annotation {key}: ")
    assert message in problem


@given(st.sampled_from(KEYS), st.text() | st.recursive(st.integers(), st.lists).map(json.dumps))
def test_no_text_raises(key: str, text: str) -> None:
    readers = (resource_spec, resource_status, numa_topology_spec)
    for value, problem in (*(reader({key: text}) for reader in readers), volcano_preferences({key: text})):
        assert len("".join(problem)) < 1000
        assert not problem or value == type(value)()
