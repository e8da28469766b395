from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.model.idset import CpuSet
from proxy.model.machine import HugePages, Machine, NumaNode
from proxy.observe.koordinator import (
    Zone,
    equal_share,
    kubelet_reserve,
    subtract_share,
    with_reserve,
    zones_of,
)
from proxy.pools.cpu_location import locations_of
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

GIB = 1 << 30


def sparse() -> Machine:
    """Nodes 0 and 3 with CPUs, node 5 with memory alone."""
    machine = regular_machine(2, 1, 2, 2, mem_bytes_per_node=4 * GIB)
    nodes = tuple(changed_copy(node, id=3 * node.id) for node in machine.nodes)
    cpus = tuple(changed_copy(cpu, numa=3 * (cpu.numa or 0)) for cpu in machine.cpus)
    pages = {2048: HugePages(512), 65536: HugePages(1), 1048576: HugePages(0)}
    return changed_copy(machine, cpus=cpus, nodes=(*nodes, NumaNode(5, CpuSet(), 8 * GIB, pages)))


def zones() -> tuple[Zone, ...]:
    return zones_of(sparse(), locations_of(sparse()))


def test_zones_are_called_by_the_kernels_ids() -> None:
    assert [zone.data()["name"] for zone in zones()] == ["node-0", "node-3", "node-5"]
    assert [zone.capacity["cpu"] for zone in zones()] == [4000, 4000, 0]


def test_huge_pages_are_not_memory() -> None:
    memory = 8 * GIB - GIB - (64 << 20)
    assert zones()[2].data() == {
        "name": "node-5",
        "type": "Node",
        "resources": [
            {"name": name, "capacity": amount, "allocatable": amount, "available": amount}
            for name, amount in (
                ("cpu", "0"),
                ("hugepages-1Gi", "0"),
                ("hugepages-2Mi", "1Gi"),
                ("hugepages-64Mi", "64Mi"),
                ("memory", f"{memory >> 20}Mi"),
            )
        ],
    }


def test_a_node_with_unknown_memory() -> None:
    bare = Machine((), (NumaNode(0, CpuSet()),), CpuSet(), CpuSet())
    (zone,) = zones_of(bare, ())
    assert zone.capacity == {"cpu": 0, "memory": 0, "hugepages-2Mi": 0, "hugepages-1Gi": 0}


def test_what_kubelet_keeps_back() -> None:
    capacity, allocatable = {"cpu": 8000, "memory": 9, "pods": 5}, {"cpu": 7500, "memory": 9, "pods": 1}
    assert kubelet_reserve(capacity, allocatable) == {"cpu": 500}
    assert kubelet_reserve({"cpu": 8000}, {}) == {}
    assert kubelet_reserve({"cpu": 1}, {"cpu": 2}) == {}
    assert kubelet_reserve({"memory": 2}, {"memory": 1}) == {"memory": 1}


def test_shares_are_rounded_up_and_go_down_to_nothing() -> None:
    assert [equal_share(1000, 3), equal_share(1000, 2), equal_share(0, 2), equal_share(5, 0)] == [
        334,
        500,
        0,
        0,
    ]
    zone = Zone(0, {"cpu": 1000, "memory": 7}, {"cpu": 1000, "memory": 7})
    (left,) = subtract_share([zone], {"cpu": 400, "gpu": 9})
    assert (left.allocatable, left.capacity) == ({"cpu": 600, "memory": 7}, zone.capacity)
    assert subtract_share([zone], {"cpu": 1001})[0].allocatable["cpu"] == 0


def test_the_reserve_is_taken_where_the_resource_is() -> None:
    left = with_reserve(zones(), {"cpu": 1001, "memory": 3000})
    assert [zone.allocatable["cpu"] for zone in left] == [3499, 3499, 0]
    taken = [zone.capacity["memory"] - zone.allocatable["memory"] for zone in left]
    assert taken == [1000, 1000, 1000]
    cpu = left[0].data()["resources"][0]  # type: ignore[index]
    assert cpu == {"name": "cpu", "capacity": "4", "allocatable": "3499m", "available": "3499m"}


@given(st.integers(0, 20_000))
def test_zones_never_promise_what_is_kept_back(milli: int) -> None:
    left = sum(zone.allocatable["cpu"] for zone in with_reserve(zones(), {"cpu": milli}))
    assert left <= max(0, 8000 - milli)
