"""Memory of NUMA nodes, if an object reports that the memory manager is static."""

from __future__ import annotations

import pytest

from proxy.agent.objects.node_page import NodePage, read_node_page
from proxy.agent.objects.node_resource_topology import nfd_topology
from proxy.agent.objects.numatopology import numatopology
from proxy.model.idset import Mask
from proxy.pools.topology_keys import FIGURES, MEMORY_MANAGER
from proxy.scheduler.decision import evaluate, expected_node
from proxy.scheduler.node_facts import SchedulableNode, UnknownNodeError, join_facts
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.numatopology import read_numatopology
from proxy.scheduler.pod_demand import PodDemand, read_demand
from proxy.scheduler.resource_topology import read_resource_topology
from tests.scheduler.objects import Json, node, pod, resource_topology

GI = 1 << 30
PAGE: Json = {
    "name": "n1",
    "mode": "enforce",
    "published": True,
    "applied": True,
    "policies": {
        "cpuManagerPolicy": "static",
        "topologyManagerPolicy": "single-numa-node",
        "topologyManagerScope": "container",
        "memoryManagerPolicy": "Static",
        "cpuManagerPolicyOptions": "full-pcpus-only=true",
    },
    "reservedCPUs": "0",
    "freeCPUs": "1-15",
    "cpus": [[cpu, cpu // 2, cpu // 8, cpu // 8] for cpu in range(16)],
    "numaNodes": [{"id": numa, "memory": 32 * GI, "hugepages": {"hugepages-1Gi": 8 * GI}} for numa in (0, 1)],
    "memory": {
        "0": {
            "memory": {"allocatable": 31 * GI, "free": 10 * GI},
            "hugepages-1Gi": {"allocatable": 8 * GI, "free": 8 * GI},
        },
        "1": {
            "memory": {"allocatable": 32 * GI, "free": 20 * GI},
            "hugepages-1Gi": {"allocatable": 8 * GI, "free": 2 * GI},
        },
    },
}


def page(**policies: str) -> NodePage:
    """Return the daemon's description of the node."""
    found = {**PAGE, "policies": {**PAGE["policies"], **policies}}
    if found["policies"]["memoryManagerPolicy"] != "Static":
        found["memory"] = {}
    return read_node_page(found)


def published(**policies: str) -> SchedulableNode:
    """Return the node as the objects of the agent describe it."""
    numa = read_numatopology(numatopology(page(**policies)))
    return join_facts("n1", None, numa, read_resource_topology(nfd_topology(page(**policies))))


def found(raw: Json) -> SchedulableNode:
    return join_facts("n1", None, None, read_resource_topology(raw))


def pod_requesting(memory: str, cpu: object = 2, name: str = "p", **more: str) -> PodDemand:
    raw = pod(name, cpu)
    amounts = {"cpu": str(cpu), "memory": memory, **more}
    raw["spec"]["containers"][0]["resources"] = {"requests": amounts, "limits": amounts}
    return read_demand(raw)


@pytest.mark.parametrize(("policy", "fits"), [("none", True), ("best-effort", True), ("restricted", False)])
def test_a_numa_node_without_cpus_has_its_memory(policy: str, fits: bool) -> None:
    """The memory of a CXL expander is on such a node: CPUs of nodes 0 and 1 use the memory of node 2."""
    total = 64 * GI
    zones = {0: {"cpu": (8, 8), "memory": (total, total)}, 1: {"cpu": (8, 8), "memory": (total, total)}}
    raw = resource_topology("n1", {**zones, 2: {"memory": (4 * total, 4 * total)}}, policy, "container")
    for numa, zone in enumerate(raw["zones"]):
        zone["costs"] = [
            {"name": f"node-{other}", "value": 10 if other == numa else 20 + other} for other in range(3)
        ]
    cxl = node("n1", raw)
    assert [numa.distance for numa in cxl.rules.machine.nodes] == [(10, 21, 22), (20, 10, 22), (20, 21, 10)]
    assert evaluate(pod_requesting("200Gi"), expected_node(cxl)).fits is fits


@pytest.mark.parametrize(
    ("memory", "pages", "nodes"),
    [
        ("5Gi", "1Gi", [0]),
        ("15Gi", "1Gi", [1]),
        ("5Gi", "4Gi", [0]),
        ("15Gi", "4Gi", []),
        ("25Gi", "1Gi", []),
    ],
)
def test_memory_and_huge_pages_are_of_the_numa_node_of_the_cpus(
    memory: str, pages: str, nodes: list[int]
) -> None:
    verdict = evaluate(pod_requesting(memory, **{"hugepages-1Gi": pages}), expected_node(published()))
    assert verdict.fits is bool(nodes)
    assert verdict.numa_nodes == Mask(nodes)


def test_a_node_without_a_static_memory_manager_refuses_nothing_for_memory() -> None:
    facts = published(memoryManagerPolicy="None")
    assert facts.memory == ()
    assert evaluate(pod_requesting("60Gi"), expected_node(facts)).fits


@pytest.mark.parametrize("resource", ["hugepages-1", "hugepages-0", "hugepages-512m"])
def test_a_size_of_huge_pages_below_a_kibibyte_makes_the_node_unknown(resource: str) -> None:
    raw = resource_topology("n1", {0: {"cpu": (8, 8), "memory": (32 * GI, 4 * GI), resource: (1, 1)}})
    with pytest.raises(UnknownNodeError, match=resource):
        found(raw)


def test_the_agents_facts_about_the_cpu_manager_are_read_back() -> None:
    assert published().rules.options.full_pcpus_only
    assert evaluate(pod_requesting("1Gi", 3), expected_node(published())).reason == "SMTAlignmentError"
    assert evaluate(pod_requesting("1Gi", 3), expected_node(published(cpuManagerPolicyOptions=""))).fits
    assert not published(cpuManagerPolicy="none").rules.static


def test_who_writes_memory_only_if_the_memory_manager_is_static() -> None:
    by_nfd = resource_topology("n1", {numa: {"cpu": (8, 8), "memory": (32 * GI, 4 * GI)} for numa in (0, 1)})
    assert not evaluate(pod_requesting("5Gi"), expected_node(found(by_nfd))).fits
    earlier_agent = {**by_nfd, "metadata": {"name": "n1", "annotations": {FIGURES: "mode=enforce"}}}
    assert evaluate(pod_requesting("5Gi"), expected_node(found(earlier_agent))).fits
    reported = {**by_nfd, "attributes": [*by_nfd["attributes"], {"name": MEMORY_MANAGER, "value": "None"}]}
    assert evaluate(pod_requesting("5Gi"), expected_node(found(reported))).fits


@pytest.mark.parametrize(("memory", "fits"), [("3Gi", True), ("5Gi", False), ("40Gi", False)])
def test_restricted_counts_how_many_numa_nodes_would_do_when_they_are_empty(memory: str, fits: bool) -> None:
    """As in kubelet: 5Gi fit one NUMA node of 32Gi, and two half-full ones are not preferred."""
    raw = resource_topology(
        "n1",
        {numa: {"cpu": (8, 8), "memory": (32 * GI, 4 * GI)} for numa in (0, 1)},
        "restricted",
        "container",
    )
    assert evaluate(pod_requesting(memory), expected_node(found(raw))).fits is fits


def test_memory_that_is_promised_is_not_promised_again() -> None:
    """A Guaranteed pod without exclusive CPUs holds memory of a NUMA node too."""
    table = NodeTable()
    table.put(published(), 0.0)
    shared = pod_requesting("12Gi", "500m", "a")
    assert not shared.holds_resources
    assert table.place("n1", pod_requesting("20Gi", name="b")).fits
    table.assume("n1", shared, 0.0)
    assert [each.pod for each in table.pending("n1")] == ["a"]
    assert not table.place("n1", pod_requesting("20Gi", name="b")).fits
    assert table.place("n1", pod_requesting("5Gi", name="b")).fits
    without = NodeTable()
    without.put(node("n1", free="1-15"), 0.0)
    without.assume("n1", shared, 0.0)
    assert not without.pending("n1")
