from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.node import Node
from proxy.engine.node_policy import NodePolicy, read_node_policy
from proxy.model.idset import CpuSet
from proxy.model.koordinator import NodeBindPolicy, NumaStrategy
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.options import Scope, TopologyPolicy
from proxy.pools import node_keys
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15; cores 0,8 1,9 ...
NODE = Node(MACHINE, CpuTopology.of(MACHINE), static=True)
FULL, SPREAD = NodeBindPolicy.FULL_PCPUS_ONLY, NodeBindPolicy.SPREAD_BY_PCPUS
NOTHING = NodeBindPolicy.NONE
CONFIGZ = dict.fromkeys(("options", "topology_policy", "topology_scope"), "configz")
BIND, SHORT_BIND = node_keys.BIND_POLICY
POLICY, DOCUMENTS_POLICY = node_keys.NUMA_POLICY


def labels(**more: str) -> NodeMeta:
    return NodeMeta(labels={key.replace("_", "-"): text for key, text in more.items()})


def policy_of(meta: NodeMeta | None = None, kubelet: CpuManager | None = None, **rules: object) -> NodePolicy:
    node = changed_copy(NODE, **rules)  # type: ignore[arg-type]
    return read_node_policy(node, node.machine, meta, kubelet)


def static(**options: str) -> CpuManager:
    named = {name.replace("_", "-"): text for name, text in options.items()}
    return CpuManager("static", named, sources=CONFIGZ)


def test_no_source_sets_a_value() -> None:
    found = policy_of()
    assert {value.source for value in found.named().values()} == {"default"}
    assert not any(value.problem for value in found.named().values())
    assert found.on(NODE) == NODE


def test_values_of_the_configuration_without_other_sources() -> None:
    found = policy_of(
        bind=SPREAD,
        strategy=NumaStrategy.LEAST_ALLOCATED,
        policy=TopologyPolicy.RESTRICTED,
        scope=Scope.POD,
        node_reservation=CpuSet((0,)),
        system=CpuSet((1,)),
        system_cpus_exclusive=False,
    )
    assert {name: value.source for name, value in found.named().items() if value.source != "default"} == {
        "cpuBindPolicy": "koordinator.cpuBindPolicy of the configuration",
        "numaAllocateStrategy": "koordinator.numaAllocateStrategy of the configuration",
        "topologyManagerPolicy": "topologyManagerPolicy of the configuration",
        "topologyManagerScope": "topologyManagerScope of the configuration",
        "reservedCPUs": "koordinator.reservedCPUs of the configuration",
        "systemCPUs": "koordinator.systemCPUs of the configuration",
        "systemCPUsExclusive": "koordinator.systemCPUsExclusive of the configuration",
    }
    node = found.on(NODE)
    assert (node.bind, node.policy, node.scope, node.system_cpus_exclusive) == (
        SPREAD,
        TopologyPolicy.RESTRICTED,
        Scope.POD,
        False,
    )


@pytest.mark.parametrize(
    ("reported", "kubelet", "configured", "value", "source"),
    [
        ({BIND: "SpreadByPCPUs"}, static(full_pcpus_only="true"), FULL, SPREAD, f"label {BIND}"),
        ({BIND: "None"}, static(full_pcpus_only="true"), FULL, NOTHING, f"label {BIND}"),
        ({SHORT_BIND: "FullPCPUsOnly"}, None, SPREAD, FULL, f"label {SHORT_BIND}"),
        ({BIND: "FullPCPUsOnly", SHORT_BIND: "SpreadByPCPUs"}, None, SPREAD, FULL, f"label {BIND}"),
        ({BIND: ""}, static(full_pcpus_only="true"), NOTHING, FULL, "kubelet's full-pcpus-only (configz)"),
        ({}, static(full_pcpus_only="1"), NOTHING, FULL, "kubelet's full-pcpus-only (configz)"),
        ({}, static(full_pcpus_only="1"), SPREAD, SPREAD, "koordinator.cpuBindPolicy of the config"),
        ({}, static(full_pcpus_only="false"), NOTHING, NOTHING, "default"),
        ({}, CpuManager("none", {"full-pcpus-only": "true"}), NOTHING, NOTHING, "default"),
        ({BIND: "Full"}, static(full_pcpus_only="true"), NOTHING, FULL, "kubelet's full-pcpus-only"),
        ({BIND: "Full"}, None, NOTHING, NOTHING, "default"),
    ],
)
def test_the_bind_policy_comes_from_the_label_the_config_or_kubelet(
    reported: dict[str, str],
    kubelet: CpuManager | None,
    configured: NodeBindPolicy,
    value: NodeBindPolicy,
    source: str,
) -> None:
    found = policy_of(NodeMeta(labels=reported), kubelet, bind=configured).bind
    assert found.value is value
    assert found.source.startswith(source)
    if reported.get(BIND) == "Full":
        assert found.problem == f"label {BIND}: 'Full' is not one of FullPCPUsOnly, SpreadByPCPUs"
    else:
        assert found.problem == ""


def test_the_numa_strategy_comes_from_the_label_the_config_or_kubelet() -> None:
    key = node_keys.NUMA_STRATEGY[0]
    evenly = static(distribute_cpus_across_numa="true")
    configured = NumaStrategy.MOST_ALLOCATED
    found = policy_of(NodeMeta(labels={key: "LeastAllocated"}), evenly, strategy=configured).strategy
    assert (found.value, found.source) == (NumaStrategy.LEAST_ALLOCATED, f"label {key} of the Node object")
    assert policy_of(None, evenly, strategy=configured).strategy.value is configured
    found = policy_of(None, evenly).strategy
    assert found.value is NumaStrategy.DISTRIBUTE_EVENLY
    assert found.source == "kubelet's distribute-cpus-across-numa (configz)"
    found = policy_of(NodeMeta(labels={key: "Most"}), None, strategy=configured).strategy
    assert found.value is configured
    assert "is not one of MostAllocated" in found.problem


def test_topology_policy_and_its_scope() -> None:
    kubelet = CpuManager(topology_policy="restricted", topology_scope="pod", sources=CONFIGZ)
    found = policy_of(NodeMeta(labels={DOCUMENTS_POLICY: "SingleNUMANode"}), kubelet)
    assert (found.policy.value, found.scope.value) == (TopologyPolicy.SINGLE_NUMA_NODE, Scope.CONTAINER)
    assert found.policy.source == f"label {DOCUMENTS_POLICY} of the Node object"
    found = policy_of(NodeMeta(labels={POLICY: "BestEffort"}), kubelet, scope=Scope.POD)
    assert (found.policy.value, found.scope.value) == (TopologyPolicy.BEST_EFFORT, Scope.POD), (
        "the configured scope is kept"
    )
    found = policy_of(None, kubelet, policy=TopologyPolicy.BEST_EFFORT)
    assert (found.policy.value, found.scope.value) == (TopologyPolicy.BEST_EFFORT, Scope.CONTAINER), (
        "the configuration takes precedence"
    )
    found = policy_of(None, kubelet)
    assert (found.policy.value, found.scope.value) == (TopologyPolicy.RESTRICTED, Scope.POD)
    assert found.policy.source == "kubelet's topologyManagerPolicy (configz)"
    for nothing in ("none", "", "strict"):
        silent = CpuManager(topology_policy=nothing, topology_scope="pod")
        found = policy_of(None, silent, policy=TopologyPolicy.BEST_EFFORT)
        assert (found.policy.value, found.scope.value) == (TopologyPolicy.BEST_EFFORT, Scope.CONTAINER)
    found = policy_of(NodeMeta(labels={POLICY: "None"}), kubelet, policy=TopologyPolicy.BEST_EFFORT)
    assert found.policy.value is TopologyPolicy.NONE


def test_cpus_reserved_by_kubelet_have_no_owner() -> None:
    kubelet = CpuManager("static", reserved=CpuSet((0, 1, 900)), sources={"reserved": "configz"})
    found = policy_of(None, kubelet)
    assert (found.reserved.value, found.reserved.source) == (CpuSet((0, 1)), "kubelet's reserve (configz)")
    assert found.on(NODE).cpu.reserved == CpuSet((0, 1))
    ours = policy_of(None, kubelet, reserved=CpuSet((2,))).reserved
    assert (ours.value, ours.source) == (
        CpuSet((2,)),
        "reservedSystemCPUs, or the amounts, of the configuration",
    )
    assert policy_of(None, CpuManager("none", reserved=CpuSet((0,)))).reserved.value == CpuSet()


def annotated(key: str, value: object) -> NodeMeta:
    return NodeMeta(annotations={key: value if isinstance(value, str) else json.dumps(value)})


@pytest.mark.parametrize(
    ("value", "cpus", "source", "problem"),
    [
        ({"reservedCPUs": "2-3"}, "2-3", "annotation", ""),
        ({"reservedCPUs": "2-3", "resources": {"cpu": "6"}}, "2-3", "annotation", ""),
        ({"resources": {"cpu": "1100m"}}, "0,8", "annotation", ""),
        ({}, "1", "koordinator.reservedCPUs", ""),
        ({"reservedCPUs": "15-16"}, "15", "annotation", "there is no CPU 16 here"),
        ({"reservedCPUs": "99"}, "1", "koordinator.reservedCPUs", "there is no CPU 99 here"),
        ({"reservedCPUs": "x"}, "1", "koordinator.reservedCPUs", "not"),
        ({"resources": {"cpu": "99"}}, "1", "koordinator.reservedCPUs", "cannot choose CPUs"),
        ('{"reservedCPUs": ', "1", "koordinator.reservedCPUs", "not JSON"),
    ],
)
def test_a_valid_annotation_replaces_the_config(value: object, cpus: str, source: str, problem: str) -> None:
    found = policy_of(annotated(node_keys.RESERVATION, value), node_reservation=CpuSet((1,))).reservation
    assert str(found.value) == cpus
    assert found.source.startswith(source)
    assert problem in found.problem
    assert bool(problem) == bool(found.problem)


def test_a_reservation_by_number_stays_when_cpus_go_offline() -> None:
    meta = annotated(node_keys.RESERVATION, {"resources": {"cpu": "2"}})
    less = changed_copy(MACHINE, cpus=tuple(c for c in MACHINE.cpus if c.id not in (0, 8)))
    assert str(read_node_policy(NODE, less, meta, None).reservation.value) == "0,8"


def test_an_unknown_apply_policy_is_reported_and_default_is_used() -> None:
    found = policy_of(
        annotated(node_keys.RESERVATION, {"reservedCPUs": "1", "applyPolicy": "ReservedCPUsOnly"})
    )
    assert found.apply_policy.value == "ReservedCPUsOnly"
    found = policy_of(annotated(node_keys.RESERVATION, {"reservedCPUs": "1", "applyPolicy": "Default"}))
    assert found.apply_policy.source == f"annotation {node_keys.RESERVATION} of the Node object"
    found = policy_of(annotated(node_keys.RESERVATION, {"reservedCPUs": "1", "applyPolicy": "Never"}))
    assert found.apply_policy.value == "Default"
    assert found.apply_policy.problem.endswith("'Never' is not one of Default, ReservedCPUsOnly")
    assert str(found.reservation.value) == "1"


def test_cpus_of_class_system() -> None:
    found = policy_of(annotated(node_keys.SYSTEM_QOS, {"cpuset": "4-5", "cpusetExclusive": False}))
    assert (str(found.system.value), found.system_cpus_exclusive.value) == ("4-5", False)
    found = policy_of(annotated(node_keys.SYSTEM_QOS, {"cpuset": "4-5"}), system_cpus_exclusive=False)
    assert found.system_cpus_exclusive.value is True, "exclusive unless the annotation disables it"
    found = policy_of(
        annotated(node_keys.SYSTEM_QOS, {"cpuset": "40"}), system=CpuSet((2,)), system_cpus_exclusive=False
    )
    assert (str(found.system.value), found.system_cpus_exclusive.value) == ("2", False)
    assert "there is no CPU 40" in found.system.problem


def test_amplification_and_numa_reservation() -> None:
    found = policy_of(annotated(node_keys.AMPLIFICATION, {"cpu": 1.5}))
    assert found.amplification.value == {"cpu": 1.5}
    assert policy_of(annotated(node_keys.AMPLIFICATION, "{")).amplification.problem
    key = node_keys.NUMA_RESERVATION
    assert policy_of(NodeMeta(labels={key: "true"})).numa_reservation.value is True
    wrong = policy_of(NodeMeta(labels={key: "yes"})).numa_reservation
    assert (wrong.value, wrong.source) == (False, "default")
    assert "'yes' is neither true nor false" in wrong.problem


def test_arm_cannot_spread() -> None:
    meta = NodeMeta(labels={BIND: "SpreadByPCPUs"})
    arm = changed_copy(MACHINE, extra={"arch": "aarch64"})
    assert "aarch64" in policy_of(meta, machine=arm).bind.problem
    assert policy_of(NodeMeta(labels={BIND: "FullPCPUsOnly"}), machine=arm).bind.problem == ""
    single = regular_machine(1, 1, 4, 1)
    alone = changed_copy(single, extra={"arch": "aarch64"})
    assert policy_of(meta, machine=alone, topology=CpuTopology.of(alone)).bind.problem == ""


KEYS = st.sampled_from(
    [
        *node_keys.BIND_POLICY,
        *node_keys.NUMA_STRATEGY,
        *node_keys.NUMA_POLICY,
        node_keys.NUMA_RESERVATION,
        node_keys.RESERVATION,
        node_keys.SYSTEM_QOS,
        node_keys.AMPLIFICATION,
    ]
)
PIECES = st.sampled_from(
    ["0-3", "true", "99", "-1", "1e999", "FullPCPUsOnly", "cpu", "1-", "3-1", "65536", ""]
)
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | PIECES,
    lambda inner: (
        st.dictionaries(
            st.sampled_from(["cpuset", "reservedCPUs", "resources", "cpu", "cpusetExclusive", "applyPolicy"]),
            inner,
            max_size=3,
        )
        | st.lists(inner, max_size=2)
    ),
    max_leaves=6,
).map(json.dumps)
TEXTS = st.text(max_size=30) | PIECES | JSONS


@given(st.dictionaries(KEYS, TEXTS), st.dictionaries(KEYS, TEXTS), st.text(max_size=12), st.text(max_size=8))
def test_invalid_annotations_yield_a_working_node(
    garbage: dict[str, str], more: dict[str, str], policy: str, scope: str
) -> None:
    kubelet = CpuManager(policy, {"full-pcpus-only": scope}, topology_policy=policy, topology_scope=scope)
    found = policy_of(NodeMeta(labels=garbage, annotations=more), kubelet)
    node = found.on(NODE)
    assert node.node_reservation <= MACHINE.present
    assert node.system <= MACHINE.present
    assert node.shareable
    assert all(len(value.problem) < 500 for value in found.named().values())
