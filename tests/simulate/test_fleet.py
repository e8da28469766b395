"""Fleets: made and recorded ones, their runs under both schedulers, and what is counted."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from proxy.model.errors import InputError
from proxy.simulate.documents import Document, documents
from proxy.simulate.fleet.figures import FleetFigures, figures_of, svg_of
from proxy.simulate.fleet.fleet_run import FleetPodState
from proxy.simulate.fleet.fleet_simulation import (
    Arrival,
    ArrivalPattern,
    FleetSettings,
    FleetSimulation,
    fleet_of,
    simulate_fleet,
)

FLEET = """
kind: Fleet
nodes:
- {count: 12, numaNodes: 4, cpus: 32, memory: 64Gi}
pods:
- {name: small, share: 2, resources: {limits: {cpu: 3, memory: 1Gi}}}
- {name: large, share: 1, resources: {limits: {cpu: 5, memory: 1Gi}}}
- {name: web, share: 1, resources: {requests: {cpu: 500m}}}
fill: 0.95
"""


def read(text: str) -> list[Document]:
    return documents(text.encode(), "fleet.yaml")


def simulated(text: str = FLEET, settings: FleetSettings | None = None) -> FleetSimulation:
    settings = settings or FleetSettings()
    return simulate_fleet(fleet_of(read(text), (), settings), settings)


def figures(done: FleetSimulation) -> tuple[FleetFigures, FleetFigures]:
    stock, extended = (figures_of(run) for run in done.runs)
    return stock, extended


def test_the_extender_binds_no_pod_that_its_node_rejects_and_no_fewer_run() -> None:
    stock, extended = figures(simulated())
    assert sum(stock.rejected.values()) > 0
    assert set(stock.rejected) == {"TopologyAffinityError"}
    assert extended.rejected == {}
    assert extended.placed >= stock.placed
    assert extended.pods_on_one_numa_node == extended.pods_possible_on_one_numa_node
    assert stock.pods_on_one_numa_node < stock.pods_possible_on_one_numa_node


def test_a_fleet_is_filled_to_the_requested_level() -> None:
    done = simulated()
    size = done.fleet
    assert (size.nodes, size.numa_nodes, size.cpus, size.running) == (12, 48, 12 * 31, 0)
    assert size.offered_milli == 12 * 31_000
    assert 0.93 < size.requested_milli / size.offered_milli <= 0.95
    for found in figures(done):
        assert found.placed + sum(found.rejected.values()) + found.waiting == found.pods == size.pods


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    def nodes(seed: int) -> list[str]:
        return [
            record.node for run in simulated(settings=FleetSettings(seed=seed)).runs for record in run.records
        ]

    assert nodes(1) == nodes(1)
    assert nodes(1) != nodes(2)


def test_a_pod_waits_until_another_one_leaves() -> None:
    text = "kind: Fleet\nnodes: [{cpus: 8, numaNodes: 2}]\ncount: 9\n"
    text += "pods: [{resources: {limits: {cpu: 3, memory: 1Gi}}}]\n"
    stays = simulated(text)
    assert [record.outcome for record in stays.runs[1].records].count(FleetPodState.WAITING) == 7
    leaves = simulated(text, FleetSettings(ArrivalPattern(lifetime=10.0)))
    for run in leaves.runs:
        assert [record.outcome for record in run.records].count(FleetPodState.WAITING) == 0
        later = [record for record in run.records if record.bound > 0]
        assert len(later) == 7
        assert run.simulated_nodes[0].pod_count <= 2


def test_pods_of_a_stream_come_at_their_rate() -> None:
    times = list(ArrivalPattern(Arrival.POISSON, 5.0).times(2000, random.Random(1)))
    assert 350 < times[-1][0] < 450
    assert {stays for _, stays in times} == {float("inf")}
    burst = list(ArrivalPattern(lifetime=7.0).times(2000, random.Random(1)))
    assert {now for now, _ in burst} == {0.0}
    assert 6.5 < sum(stays for _, stays in burst) / 2000 < 7.5


def test_fragmentation_counts_the_cpus_that_a_size_leaves_over() -> None:
    text = "kind: Fleet\nnodes: [{cpus: 16, numaNodes: 2}]\ncount: 2\n"
    text += "pods: [{resources: {limits: {cpu: 5, memory: 1Gi}}}]\n"
    found = figures(simulated(text))[1]
    assert found.free_cpus == 15 - 10
    assert found.unusable_cpus == {5: 5}, "2 on one NUMA node and 3 on the other"


@pytest.mark.parametrize(
    ("policy", "scope", "one"),
    [("single-numa-node", "container", 1), ("best-effort", "container", 0), ("none", "container", 0)],
)
def test_the_policy_of_the_nodes_decides(policy: str, scope: str, one: int) -> None:
    text = f"""
kind: Fleet
nodes: [{{cpus: 16, numaNodes: 2, topologyManagerPolicy: {policy}, topologyManagerScope: {scope}}}]
pods: [{{resources: {{limits: {{cpu: 10, memory: 1Gi}}}}}}]
count: 1
"""
    stock, extended = figures(simulated(text))
    assert (sum(stock.rejected.values()), extended.waiting) == (one, one)
    assert (stock.placed, extended.placed) == (1 - one, 1 - one)
    assert stock.pods_possible_on_one_numa_node == extended.pods_on_one_numa_node == 0


def test_devices_are_on_the_node_of_the_cpus() -> None:
    text = """
kind: Fleet
nodes: [{count: 2, cpus: 16, numaNodes: 2, devices: {example.com/gpu: 2}}]
pods: [{resources: {limits: {cpu: 4, memory: 1Gi, example.com/gpu: 1}}}]
count: 5
"""
    stock, extended = figures(simulated(text))
    assert (extended.placed, extended.waiting, extended.rejected) == (4, 1, {})
    assert stock.placed == 4


def test_a_device_is_given_to_a_pod_without_cpus_of_its_own_once() -> None:
    text = """
kind: Fleet
nodes: [{cpus: 16, numaNodes: 2, devices: {example.com/gpu: 4}}]
pods: [{resources: {requests: {cpu: 100m}, limits: {example.com/gpu: 1}}}]
count: 5
"""
    for found in figures(simulated(text)):
        assert (found.placed, found.waiting, found.rejected) == (4, 1, {})


def test_a_pod_of_class_lse_gets_the_cpus_that_its_annotation_names() -> None:
    text = """
kind: Fleet
nodes: [{count: 2, cpus: 16, numaNodes: 2}]
pods:
- resources: {limits: {cpu: 5, memory: 1Gi}}
  labels: {koordinator.sh/qosClass: LSE}
count: 4
"""
    done = simulated(text)
    _, extended = figures(done)
    assert (extended.placed, extended.pods_on_one_numa_node, extended.rejected) == (4, 4, {})
    for simulated_node in done.runs[1].simulated_nodes:
        for container in simulated_node.state.containers.values():
            assert container.pod.cpuset == container.placement.exclusive


def test_the_picture_is_an_svg_with_both_runs() -> None:
    done = simulated()
    root = ET.fromstring(svg_of(done.runs, done.fleet.cpus))
    lines = [each for each in root.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 2 * 4
    points = [
        tuple(map(float, point.split(","))) for each in lines for point in each.attrib["points"].split()
    ]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    texts = [each.text or "" for each in root.iter() if each.tag.endswith("text")]
    assert "stock" in texts
    assert "with extender" in texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "kind: Fleet\nnodes: [{cpus: 30}]",
            "nodes[0].cpus: 30 cannot be divided by 2 NUMA nodes",
        ),
        ("kind: Fleet\nnodes: [{count: 0}]", "nodes[0].count: 0 is not a whole number from 1 to 100000"),
        ("kind: Fleet\nnodes: [{numa: 2}]", "nodes[0].numa: is not known, only name, count"),
        ("kind: Fleet\nnodes: {}", "nodes: an object is not a list"),
        (
            "kind: Fleet\nnodes: [{topologyManagerPolicy: best}]",
            "nodes[0].topologyManagerPolicy: 'best' is",
        ),
        ("kind: Fleet\nnodes: [{sockets: 3}]", "nodes[0].numaNodes: 2 cannot be divided by 3 sockets"),
        (
            "kind: Fleet\nnodes: [{reservedCPUs: 64}]",
            "nodes[0].reservedCPUs: reserves all 64 CPUs; none are left",
        ),
        ("kind: Fleet\nnodes: [{memory: lots}]", "nodes[0].memory: "),
        ("kind: Fleet\nnodes: [{devices: {gpu: 1}}]", "nodes[0].devices.gpu: is not DOMAIN/NAME"),
        ("kind: Fleet\nfleet: 1", "fleet: is not known"),
        ("kind: Fleet\npods: [{resources: {limits: {cpu: x}}}]", "pods[0]: "),
        ("kind: Fleet\npods: [{resources: {}}]", "count: is missing, and no pod requests CPUs"),
        ("kind: Fleet\npods: [{share: 0}]", "pods[0].share: 0 is not a number above 0"),
        (
            "kind: Fleet\nfill: no\npods: [{resources: {limits: {cpu: 1}}}]",
            "fill: False is not a number",
        ),
    ],
)
def test_a_wrong_fleet_is_refused_with_its_field(text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        simulated(text)
    found = str(refused.value)
    assert found.startswith(f"cannot read the fleet in fleet.yaml line 1: {message}"), found
    assert "\n" not in found


def node(name: str = "n1", **more: Any) -> dict[str, Any]:
    offers = {"cpu": "15", "memory": "64Gi", "pods": "110"}
    status = {"allocatable": offers, "capacity": {**offers, "cpu": "16"}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status, **more}


def numatopology(free: str, *held: tuple[str, str], policy: str = "single-numa-node") -> dict[str, Any]:
    detail = {str(cpu): {"numa": cpu // 8, "socket": cpu // 8, "core": cpu} for cpu in range(16)}
    pods = [
        {"uid": uid, "name": uid, "containerAllocations": [{"name": "c", "allocations": {"cpu": cpus}}]}
        for uid, cpus in held
    ]
    return {
        "apiVersion": "nodeinfo.volcano.sh/v1alpha1",
        "kind": "Numatopology",
        "metadata": {"name": "n1"},
        "spec": {
            "policies": {"CPUManagerPolicy": "static", "TopologyManagerPolicy": policy},
            "resReserved": {"cpu": "0"},
            "numares": {"cpu": {"allocatable": free, "capacity": 16}},
            "cpuDetail": detail,
            "podAllocations": pods,
        },
    }


def pod(name: str, cpu: int, where: str = "") -> dict[str, Any]:
    limits = {"cpu": cpu, "memory": "1Gi"}
    spec: dict[str, Any] = {"containers": [{"name": "c", "resources": {"limits": limits}}]}
    if where:
        spec["nodeName"] = where
    metadata = {"name": name, "uid": f"uid-{name}"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def listed(*items: dict[str, Any]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)})


def test_a_recorded_node_has_free_what_its_objects_show() -> None:
    recorded = numatopology("4-7,8-11", ("uid-a", "1-3"), ("uid-gone", "12-15"))
    done = simulated(listed(node(), recorded, pod("a", 3, "n1"), pod("b", 4), pod("c", 4), pod("d", 4)))
    assert (done.fleet.nodes, done.fleet.cpus, done.fleet.running, done.fleet.pods) == (1, 8, 1, 3)
    stock, extended = figures(done)
    assert (stock.placed, stock.rejected) == (2, {"TopologyAffinityError": 1})
    assert (extended.placed, extended.waiting) == (2, 1)
    assert done.notes == ()
    used = done.runs[0].simulated_nodes[0].offers["cpu"] - done.runs[0].simulated_nodes[0].free["cpu"]
    assert used == 11_000, "the pod that runs and the two that came"


def test_recorded_pods_come_again_to_empty_nodes_if_they_may_go_anywhere() -> None:
    recorded = numatopology("4-7,8-11", ("uid-a", "1-3"), ("uid-gone", "12-15"))
    done = simulated(listed(node(), recorded, pod("a", 3, "n1")), FleetSettings(anywhere=True))
    assert (done.fleet.cpus, done.fleet.running, done.fleet.pods) == (15, 0, 1)
    assert figures(done)[1].pods_on_one_numa_node == 1


def test_a_pod_that_runs_and_is_not_shown_takes_its_cpus() -> None:
    done = simulated(listed(node(), numatopology("1-15"), pod("a", 7, "n1"), pod("b", 8)))
    assert figures(done)[1].placed == 1
    assert done.runs[1].simulated_nodes[0].ownable.bits == 0


def test_a_pod_that_requires_a_node_is_scheduled_to_it() -> None:
    pinned = [pod("a", 4), pod("b", 4), pod("c", 4)]
    for each, node_name in zip(pinned, ("n1", "n1", "n9"), strict=True):
        each["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node_name}
    for settings in (FleetSettings(), FleetSettings(anywhere=True)):
        done = simulated(listed(node(), numatopology("1-5,8-15"), *pinned), settings)
        assert (done.fleet.running, done.fleet.pods) == (0, 3)
        stock, extended = figures(done)
        placed, waiting = (3, 0) if settings.anywhere else (2, 1)
        assert (stock.placed, extended.placed, extended.waiting) == (placed, placed, waiting)
        note = "not placed: 1 pod that can only go to a node not simulated, such as default/c (node n9)"
        assert (note in done.notes) is not settings.anywhere


def test_no_other_node_takes_a_pod_that_requires_one() -> None:
    pinned = [pod(f"p{number}", 9) for number in range(2)]
    for each in pinned:
        each["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "node1-2"}
    text = f"---\n{listed(*pinned)}\n---\nkind: Fleet\nnodes: [{{count: 3, cpus: 32, numaNodes: 2}}]"
    for settings in (FleetSettings(), FleetSettings(percentage=50, extended_percentage=50)):
        for run in simulated(text, settings).runs:
            assert [record.node for record in run.records] == ["node1-2", "node1-2"]


def test_the_pods_of_a_daemon_set_are_scheduled_to_each_node() -> None:
    template = {"spec": pod("", 1)["spec"]}
    agent = {"kind": "DaemonSet", "metadata": {"name": "a"}, "spec": {"template": template}}
    done = simulated(f"---\n{listed(agent)}\n---\nkind: Fleet\nnodes: [{{count: 3}}]")
    assert (done.fleet.running, done.fleet.pods) == (0, 3)
    for run in done.runs:
        assert [record.node for record in run.records] == ["node1-1", "node1-2", "node1-3"]


def test_a_pod_that_its_node_would_reject_is_left_out() -> None:
    done = simulated(listed(node(), numatopology("1-15"), pod("a", 9, "n1"), pod("b", 8)))
    note = "left out: 1 pod that run already, because their nodes reject them, such as default/a"
    assert note in done.notes
    assert figures(done)[1].placed == 1


def test_memory_is_of_one_numa_node_if_the_memory_manager_is_static() -> None:
    zones = [
        {
            "name": f"node-{numa}",
            "type": "Node",
            "resources": [
                {"name": name, "capacity": most, "allocatable": most, "available": free}
                for name, most, free in (("cpu", "8", "7"), ("memory", "32Gi", free_memory))
            ],
        }
        for numa, free_memory in ((0, "32Gi"), (1, "12Gi"))
    ]
    recorded = {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": "n1"},
        "attributes": [{"name": "topologyManagerPolicy", "value": "single-numa-node"}],
        "zones": zones,
    }
    coming = [pod(f"p{number}", 2) for number in range(3)]
    for each in coming:
        each["spec"]["containers"][0]["resources"]["limits"]["memory"] = "18Gi"
    stock, extended = figures(simulated(listed(node(), recorded, *coming)))
    assert (stock.placed, sum(stock.rejected.values())) == (1, 2)
    assert (extended.placed, extended.waiting, extended.rejected) == (1, 2, {})


def test_a_node_without_topology_objects_aligns_nothing() -> None:
    done = simulated(listed(node(), pod("a", 9)))
    assert any("1 node without Numatopology" in note for note in done.notes)
    stock, _ = figures(done)
    assert (stock.placed, stock.pods_on_one_numa_node) == (1, 0)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([pod("a", 1)], "cannot simulate a cluster without nodes"),
        ([node(), numatopology("1-15")], "cannot simulate a cluster without arriving pods"),
        ([node(), node(), pod("a", 1)], "cannot read the Node in fleet.yaml line 1: there is another one"),
        ([numatopology("1-15"), pod("a", 1)], "cannot use the node n1: there is no Node object"),
        ([node(), pod("a", 1, "n2"), pod("b", 1)], "cannot place the pod default/a of fleet.yaml"),
        ([{**node(), "status": {}}, pod("a", 1)], "cannot use the node n1: status.allocatable"),
        (
            [{**node(), "metadata": {}}, pod("a", 1)],
            "cannot read the Node in fleet.yaml line 1: metadata.name",
        ),
        ([node(), {**numatopology("x")}, pod("a", 1)], "cannot read the Numatopology in fleet.yaml line 1: "),
        (
            [node(), {"kind": "Service"}],
            "cannot read fleet.yaml, line 1, item 2: kind 'Service' is not supported (supported: Pod, List",
        ),
        ([node(), 7], "cannot read fleet.yaml, line 1, item 2: it is the value '7', not an object"),
    ],
)
def test_wrong_objects_are_refused(items: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError) as refused:
        simulated(listed(*items))
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
