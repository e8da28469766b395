"""The source of each value of the policy, and where the problem of a value that cannot be read is kept."""

from __future__ import annotations

import pytest

from proxy.engine.node_policy import NodePolicy, PolicyValue, read_node_policy
from proxy.model.idset import CpuSet
from proxy.model.koordinator import NodeBindPolicy, NumaStrategy
from proxy.model.kubelet import CpuManager, NodeMeta
from proxy.model.options import Scope, TopologyPolicy
from proxy.pools import node_keys
from tests.engine.test_node_policy import MACHINE, NODE
from tests.testkit.changed_copy import changed_copy

CONFIGURED: dict[str, object] = {
    "bind": NodeBindPolicy.SPREAD_BY_PCPUS,
    "strategy": NumaStrategy.LEAST_ALLOCATED,
    "policy": TopologyPolicy.RESTRICTED,
    "scope": Scope.POD,
    "reserved": CpuSet((3,)),
    "node_reservation": CpuSet((1,)),
    "system": CpuSet((2,)),
    "system_cpus_exclusive": False,
}
KUBELET = CpuManager(
    "static",
    {"full-pcpus-only": "true", "distribute-cpus-across-numa": "true"},
    CpuSet((0,)),
    "best-effort",
    "pod",
)
LABELS = {
    node_keys.BIND_POLICY[0]: "cpuBindPolicy",
    node_keys.BIND_POLICY[1]: "cpuBindPolicy",
    node_keys.NUMA_STRATEGY[0]: "numaAllocateStrategy",
    node_keys.NUMA_POLICY[0]: "topologyManagerPolicy",
    node_keys.NUMA_POLICY[1]: "topologyManagerPolicy",
    node_keys.NUMA_RESERVATION: "numaReservation",
}
ANNOTATIONS = {
    node_keys.RESERVATION: "reservedCPUs",
    node_keys.SYSTEM_QOS: "systemCPUs",
    node_keys.AMPLIFICATION: "amplification",
}


def read(meta: NodeMeta | None, kubelet: CpuManager | None, rules: dict[str, object]) -> NodePolicy:
    return read_node_policy(changed_copy(NODE, **rules), MACHINE, meta, kubelet)


def without_problem(value: PolicyValue[object]) -> PolicyValue[object]:
    return changed_copy(value, problem="")


@pytest.mark.parametrize("kubelet", [None, KUBELET], ids=["no-kubelet", "kubelet"])
@pytest.mark.parametrize("rules", [{}, CONFIGURED], ids=["no-configuration", "configuration"])
@pytest.mark.parametrize(("key", "name"), [*LABELS.items(), *ANNOTATIONS.items()])
def test_a_value_that_cannot_be_read_counts_as_absent_and_its_problem_is_kept(
    key: str, name: str, rules: dict[str, object], kubelet: CpuManager | None
) -> None:
    written = {key: "nonsense"}
    meta = NodeMeta(labels=written) if key in LABELS else NodeMeta(annotations=written)
    found, absent = read(meta, kubelet, rules).named(), read(None, kubelet, rules).named()
    assert f"{key}: " in found[name].problem
    assert without_problem(found.pop(name)) == absent.pop(name)
    assert found == absent


@pytest.mark.parametrize(
    ("kubelet", "rules", "sources"),
    [
        (None, {}, {}),
        (
            KUBELET,
            {},
            {
                "cpuBindPolicy": "kubelet's full-pcpus-only",
                "numaAllocateStrategy": "kubelet's distribute-cpus-across-numa",
                "topologyManagerPolicy": "kubelet's topologyManagerPolicy",
                "topologyManagerScope": "kubelet's topologyManagerScope",
                "reservedSystemCPUs": "kubelet's reserve",
            },
        ),
        (
            KUBELET,
            CONFIGURED,
            {
                "cpuBindPolicy": "koordinator.cpuBindPolicy of the configuration",
                "numaAllocateStrategy": "koordinator.numaAllocateStrategy of the configuration",
                "topologyManagerPolicy": "topologyManagerPolicy of the configuration",
                "topologyManagerScope": "topologyManagerScope of the configuration",
                "reservedSystemCPUs": "reservedSystemCPUs, or the amounts, of the configuration",
                "reservedCPUs": "koordinator.reservedCPUs of the configuration",
                "systemCPUs": "koordinator.systemCPUs of the configuration",
                "systemCPUsExclusive": "koordinator.systemCPUsExclusive of the configuration",
            },
        ),
    ],
)
def test_each_value_names_its_source(
    kubelet: CpuManager | None, rules: dict[str, object], sources: dict[str, str]
) -> None:
    """Without a Node object, the configuration wins over kubelet, and kubelet over the default."""
    found = read(None, kubelet, rules).named()
    assert {name: value.source for name, value in found.items()} == dict.fromkeys(found, "default") | sources
    assert not any(value.problem for value in found.values())


@pytest.mark.parametrize("kubelet", [None, KUBELET], ids=["no-kubelet", "kubelet"])
@pytest.mark.parametrize("rules", [{}, CONFIGURED], ids=["no-configuration", "configuration"])
def test_the_node_object_wins_over_all_others(rules: dict[str, object], kubelet: CpuManager | None) -> None:
    labels = {
        node_keys.BIND_POLICY[1]: "FullPCPUsOnly",
        node_keys.NUMA_STRATEGY[0]: "MostAllocated",
        node_keys.NUMA_POLICY[1]: "SingleNUMANode",
        node_keys.NUMA_RESERVATION: "true",
    }
    annotations = {
        node_keys.RESERVATION: '{"reservedCPUs": "4", "applyPolicy": "ReservedCPUsOnly"}',
        node_keys.SYSTEM_QOS: '{"cpuset": "5"}',
        node_keys.AMPLIFICATION: '{"cpu": 1.5}',
    }
    found = read(NodeMeta(labels=labels, annotations=annotations), kubelet, rules).named()
    values = {
        "cpuBindPolicy": NodeBindPolicy.FULL_PCPUS_ONLY,
        "numaAllocateStrategy": NumaStrategy.MOST_ALLOCATED,
        "topologyManagerPolicy": TopologyPolicy.SINGLE_NUMA_NODE,
        "numaReservation": True,
        "reservedCPUs": CpuSet((4,)),
        "applyPolicy": "ReservedCPUsOnly",
        "systemCPUs": CpuSet((5,)),
        "systemCPUsExclusive": True,
        "amplification": {"cpu": 1.5},
    }
    assert {name: found[name].value for name in values} == values
    assert not any(value.problem for value in found.values())
    sources = {f"label {key} of the Node object" for key in labels}
    sources |= {f"annotation {key} of the Node object" for key in annotations}
    assert {found[name].source for name in values} == sources
    assert found["topologyManagerScope"].source == (
        "topologyManagerScope of the configuration" if rules else "default"
    )


def test_a_label_can_disable_the_reserve_of_numa_nodes() -> None:
    key = node_keys.NUMA_RESERVATION
    found = read(NodeMeta(labels={key: "false"}), None, {}).numa_reservation
    assert found == PolicyValue(value=False, source=f"label {key} of the Node object")


@pytest.mark.parametrize("scope", ["", "node"])
def test_kubelets_policy_without_a_known_scope_keeps_the_configured_scope(scope: str) -> None:
    kubelet = changed_copy(KUBELET, topology_scope=scope)
    found = read(None, kubelet, {"scope": Scope.POD})
    assert found.policy.value is TopologyPolicy.BEST_EFFORT
    assert (found.scope.value, found.scope.source) == (
        Scope.POD,
        "topologyManagerScope of the configuration",
    )


@pytest.mark.parametrize("policy", ["none", ""])
def test_options_and_reserve_of_a_cpu_manager_that_is_off_are_ignored(policy: str) -> None:
    found = read(None, changed_copy(KUBELET, policy=policy), {})
    assert (found.bind.value, found.strategy.value) == (NodeBindPolicy.NONE, NumaStrategy.NONE)
    assert (found.reserved.value, found.reserved.source) == (CpuSet(), "default")


@pytest.mark.parametrize("where", [node_keys.RESERVATION, node_keys.SYSTEM_QOS])
def test_only_named_cpus_that_the_machine_has_count(where: str) -> None:
    """A syntax error of the list is reported rather than CPUs that the machine does not have."""
    member = "reservedCPUs" if where == node_keys.RESERVATION else "cpuset"
    name = ANNOTATIONS[where]
    found = read(NodeMeta(annotations={where: f'{{"{member}": "14-17"}}'}), None, {}).named()[name]
    assert found.value == CpuSet((14, 15))
    assert found.problem == f"annotation {where}: there are no CPUs 16-17 here (CPUs: 0-15)"
    found = read(NodeMeta(annotations={where: f'{{"{member}": "14-"}}'}), None, {}).named()[name]
    assert (found.value, found.source) == (CpuSet(), "default")
    assert found.problem.startswith(f"annotation {where}: ")
    assert " here (CPUs" not in found.problem


@pytest.mark.parametrize("text", ["1", "t", "T", "true", "TRUE", "True"])
def test_options_of_kubelet_are_parsed_as_kubelet_parses_them(text: str) -> None:
    options = {"full-pcpus-only": text, "distribute-cpus-across-numa": text}
    found = read(None, changed_copy(KUBELET, options=options), {})
    assert found.bind.value is NodeBindPolicy.FULL_PCPUS_ONLY
    assert found.strategy.value is NumaStrategy.DISTRIBUTE_EVENLY
    options = {"full-pcpus-only": text * 2, "distribute-cpus-across-numa": ""}
    found = read(None, changed_copy(KUBELET, options=options), {})
    assert (found.bind.value, found.strategy.value) == (NodeBindPolicy.NONE, NumaStrategy.NONE)
