"""Reading nodes from their objects; malformed objects are refused with a reason."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable

import pytest

from proxy.agent.objects.node_page import KoordinatorPart, read_node_page
from proxy.agent.objects.node_resource_topology import koordinator_topology, nfd_topology
from proxy.agent.objects.numatopology import numatopology as published_numatopology
from proxy.model.koordinator import NodeBindPolicy
from proxy.model.kubelet import NodeMeta
from proxy.model.options import Scope, TopologyPolicy
from proxy.pools import topology_keys
from proxy.scheduler.node_facts import SchedulableNode, UnknownNodeError, join_facts
from proxy.scheduler.numatopology import read_numatopology
from proxy.scheduler.resource_topology import read_resource_topology
from tests.scheduler.objects import Json, cpus, numatopology, resource_topology

PAGE = read_node_page(
    {
        "name": "n1",
        "mode": "enforce",
        "published": True,
        "applied": True,
        "policies": {
            "cpuManagerPolicy": "static",
            "topologyManagerPolicy": "restricted",
            "topologyManagerScope": "pod",
        },
        "reservedCPUs": "0",
        "freeCPUs": "1,4-7",
        "cpus": [[cpu, cpu // 2, cpu // 4, cpu // 4] for cpu in range(8)],
        "numaNodes": [
            {"id": numa, "memory": 1 << 30, "distances": {"0": 10 + 11 * numa, "1": 21 - 11 * numa}}
            for numa in (0, 1)
        ],
        "pods": [
            {
                "namespace": "default",
                "name": "a",
                "uid": "u-a",
                "containers": [{"name": "main", "cpus": "2-3"}],
            }
        ],
    }
)
KOORDINATOR = {
    "node.koordinator.sh/cpu-topology": json.dumps(
        {"detail": [{"id": c, "core": c // 2, "socket": c // 4, "node": c // 4} for c in range(8)]}
    ),
    "node.koordinator.sh/pod-cpu-allocs": json.dumps([{"uid": "u-a", "cpuset": "2-3"}]),
    "kubelet.koordinator.sh/cpu-manager-policy": json.dumps(
        {"policy": "static", "options": {"full-pcpus-only": "true"}, "reservedCPUs": "0"}
    ),
}


def test_facts_published_by_the_agent_are_read_back() -> None:
    numa = read_numatopology(published_numatopology(PAGE))
    zones = read_resource_topology(nfd_topology(PAGE))
    found = join_facts("n1", None, numa, zones)
    assert (found.reserved, found.free) == (cpus("0"), cpus("1,4-7"))
    assert (found.rules.policy, found.rules.scope) == (TopologyPolicy.RESTRICTED, Scope.POD)
    assert found.shown == {"u-a": cpus("2-3")}
    assert [node.distance for node in found.rules.machine.nodes] == [(10, 21), (21, 10)]


def test_an_object_of_nfd_alone_gives_amounts() -> None:
    found = join_facts("n1", None, None, read_resource_topology(nfd_topology(PAGE)))
    assert [len(found.free & node.cpus) for node in found.rules.machine.nodes] == [1, 4]
    assert found.rules.static


def test_an_object_of_koordinator_names_cpus() -> None:
    page = read_node_page(
        {
            "name": "n1",
            "mode": "enforce",
            "published": True,
            "applied": True,
            "policies": {},
            "reservedCPUs": "",
            "freeCPUs": "",
            "cpus": [],
            "numaNodes": [],
        }
    )
    part = KoordinatorPart(annotations=KOORDINATOR, topology_policies=("SingleNUMANodePodLevel",))
    raw = {**koordinator_topology(page), "topologyPolicies": list(part.topology_policies)}
    raw["metadata"]["annotations"] = KOORDINATOR
    found = join_facts("n1", None, None, read_resource_topology(raw))
    assert found.free == cpus("1,4-7")
    assert (found.rules.policy, found.rules.scope) == (TopologyPolicy.SINGLE_NUMA_NODE, Scope.POD)
    assert found.rules.options.full_pcpus_only
    assert not found.counts_named


def test_labels_of_the_node_object_come_first() -> None:
    labels = {
        "node.koordinator.sh/cpu-bind-policy": "SpreadByPCPUs",
        "node.koordinator.sh/numa-topology-policy": "Restricted",
    }
    found = join_facts("n1", NodeMeta("n1", labels=labels), read_numatopology(numatopology("n1")), None)
    assert found.rules.bind is NodeBindPolicy.SPREAD_BY_PCPUS
    assert found.rules.policy is TopologyPolicy.RESTRICTED


def test_identical_nodes_share_their_rules() -> None:
    one, two = (
        join_facts(name, None, read_numatopology(numatopology(name, free=free)), None)
        for name, free in (("n1", "1-3"), ("n2", "8-11"))
    )
    assert one.rules is two.rules


def test_rules_are_kept_for_as_long_as_a_node_has_them_however_many_there_are() -> None:
    numa = read_numatopology(numatopology("n", numa_nodes=1, cores=1))
    attribute = {"name": topology_keys.MEMORY_MANAGER, "value": topology_keys.STATIC_MEMORY}

    def with_memory(amount: int) -> SchedulableNode:
        raw = resource_topology("n", {0: {"memory": (amount, amount)}})
        raw["attributes"].append(attribute)
        return join_facts("n", None, numa, read_resource_topology(raw))

    amounts = range(1 << 30, (1 << 30) + 2500)
    nodes = [with_memory(amount) for amount in amounts]
    assert len({id(node.rules) for node in nodes}) == len(nodes)
    assert all(with_memory(amount).rules is node.rules for amount, node in zip(amounts, nodes, strict=True))
    rules = weakref.ref(nodes.pop().rules)
    gc.collect()
    assert rules() is None, "no node has them any more"


def _without_cpus(spec: Json) -> None:
    spec["cpuDetail"] = {}


def _foreign_id(spec: Json) -> None:
    spec["cpuDetail"]["x"] = {}


def _bad_list(spec: Json) -> None:
    spec["numares"]["cpu"]["allocatable"] = "3-1"


def _bad_amount(spec: Json) -> None:
    spec["resReserved"]["cpu"] = "many"


def _negative(spec: Json) -> None:
    spec["cpuDetail"]["0"] = {"numa": -1}


def _no_object(spec: Json) -> None:
    spec["numares"] = []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_cpus, "cpuDetail names no CPU"),
        (_foreign_id, "'x' is not the id of a CPU"),
        (_bad_list, "runs backwards"),
        (_bad_amount, "is not an amount"),
        (_negative, "a number is negative"),
        (_no_object, "numares is not a JSON object"),
    ],
)
def test_a_malformed_numatopology_is_refused_with_the_cause(
    spoil: Callable[[Json], None], message: str
) -> None:
    raw = numatopology("n1")
    spoil(raw["spec"])
    with pytest.raises(ValueError, match=message):
        read_numatopology(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zones": {}}, "zones"),
        (
            {"zones": [{"name": "node-0", "type": "Node", "resources": [{"name": "cpu", "capacity": "x"}]}]},
            "x",
        ),
        ({"metadata": {"annotations": {"node.koordinator.sh/cpu-topology": "{}"}}}, "detail is not a list"),
        ({"metadata": {"annotations": {"node.koordinator.sh/pod-cpu-allocs": "["}}}, "not JSON"),
    ],
)
def test_malformed_resource_topologies(change: Json, message: str) -> None:
    raw = {**resource_topology("n1", {0: {"cpu": (4, 4)}}), **change}
    with pytest.raises(ValueError, match=message):
        read_resource_topology(raw)


def test_too_little_is_known() -> None:
    with pytest.raises(UnknownNodeError, match="neither a Numatopology nor"):
        join_facts("n1", NodeMeta("n1"), None, None)
    with pytest.raises(UnknownNodeError, match="name no CPU"):
        join_facts("n1", None, None, read_resource_topology(resource_topology("n1", {0: {}})))
    with pytest.raises(UnknownNodeError, match="policy 'odd'"):
        join_facts("n1", None, read_numatopology(numatopology("n1", policy="odd")), None)
    with pytest.raises(UnknownNodeError, match="reserved CPUs cannot be chosen"):
        join_facts("n1", None, read_numatopology(numatopology("n1", reserved=99)), None)


@pytest.mark.parametrize(
    ("resource", "amount", "problem"),
    [
        ("cpu", "9k", "capacity of 'cpu' is more than 8192 on one NUMA node"),
        ("cpu", "-1", "capacity of 'cpu' is negative"),
        ("vendor.com/gpu", "8Gi", "capacity of 'vendor.com/gpu' is more than 65536 on one NUMA node"),
        ("vendor.com/gpu", "-1", "capacity of 'vendor.com/gpu' is negative"),
    ],
)
def test_amounts_that_no_machine_has_are_refused(resource: str, amount: str, problem: str) -> None:
    entry = {"name": resource, "capacity": amount, "allocatable": "1", "available": "1"}
    raw = resource_topology("n1", {0: {}})
    raw["zones"][0]["resources"] = [entry]
    with pytest.raises(ValueError, match=f"^{problem}$"):
        read_resource_topology(raw)


@pytest.mark.parametrize("cpu", [-1, 65536, (1 << 31) - 1])
def test_ids_that_no_cpu_has_are_refused_when_they_are_read(cpu: int) -> None:
    """A set with such an id would have 256 MiB, and be made in seconds, in which nothing else is answered."""
    raw = resource_topology("n1", {0: {}})
    detail = [{"id": number, "core": 0, "socket": 0, "node": 0} for number in (0, cpu, 1)]
    raw["metadata"]["annotations"] = {"node.koordinator.sh/cpu-topology": json.dumps({"detail": detail})}
    with pytest.raises(ValueError, match=f"cpu-topology: {cpu} is not the id of a CPU$"):
        read_resource_topology(raw)


def test_bytes_of_koordinators_batch_resources_are_no_devices() -> None:
    """Each device is a value of its own: bytes that counted as devices would exhaust the memory."""
    raw = resource_topology(
        "n1", {0: {"cpu": (4, 4), "kubernetes.io/batch-memory": (8 << 30, 8 << 30), "vendor.com/gpu": (2, 1)}}
    )
    assert read_resource_topology(raw).devices == {"vendor.com/gpu": {0: (2, 1)}}


def test_a_negative_reserve_is_refused() -> None:
    raw = numatopology("n1")
    raw["spec"]["resReserved"] = {"cpu": "-1"}
    with pytest.raises(ValueError, match=r"^resReserved\.cpu is negative$"):
        read_numatopology(raw)
