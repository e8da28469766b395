"""The orders in which free CPUs are taken, worked out by hand."""

from __future__ import annotations

import pytest

from proxy.allocation.cpu_topology import CpuRow, CpuTopology
from proxy.allocation.koordinator.groups import CpuGroup, Groups
from proxy.model.idset import CpuSet
from proxy.model.koordinator import NumaStrategy

MOST, LEAST = NumaStrategy.MOST_ALLOCATED, NumaStrategy.LEAST_ALLOCATED


def machine(threads: int = 2, offline: tuple[int, ...] = ()) -> CpuTopology:
    """Build two sockets of two nodes of two cores; CPU ids count up by thread, core, node and socket."""
    return CpuTopology.of_rows(
        CpuRow(cpu, core, core // 4, core // 2, core // 4)
        for cpu in range(8 * threads)
        if cpu not in offline
        for core in (cpu // threads,)
    )


MACHINE = machine()  # nodes 0-3, 4-7, 8-11, 12-15; cores 0-1, 2-3, ...
USABLE = CpuSet.parse("0,2-4,8-9,12").bits  # by node 3, 1, 2, 1; by socket 4, 3


def shown(groups: list[CpuGroup]) -> dict[int, list[int]]:
    return {group.unit: list(group.cpus) for group in groups}


def ordered(groups: list[CpuGroup]) -> list[tuple[int, list[int]]]:
    return list(shown(groups).items())


def test_single_cpus_by_node() -> None:
    expected = {0: [0, 2, 3], 1: [4], 2: [8, 9], 3: [12]}
    for strategy, order in ((MOST, [3, 1, 2, 0]), (LEAST, [0, 2, 1, 3])):
        found = Groups(MACHINE, strategy).single_by_node(USABLE, one_each=False)
        assert shown(found) == expected
        assert [group.unit for group in found] == order, "of equal nodes the socket decides"
    one_each = Groups(MACHINE, MOST).single_by_node(USABLE, one_each=True)
    assert ordered(one_each) == [(3, [12]), (1, [4]), (2, [8]), (0, [0, 2])]


def test_single_cpus_by_socket() -> None:
    most, least = Groups(MACHINE, MOST), Groups(MACHINE, LEAST)
    assert ordered(most.single_by_socket(USABLE, one_each=False)) == [(1, [8, 9, 12]), (0, [0, 2, 3, 4])]
    assert ordered(least.single_by_socket(USABLE, one_each=False)) == [(0, [0, 2, 3, 4]), (1, [8, 9, 12])]
    assert ordered(most.single_by_socket(USABLE, one_each=True)) == [(1, [8, 12]), (0, [0, 2, 4])]
    assert ordered(least.single_by_socket(0b1 << 8 | 0b1, one_each=True)) == [(0, [0]), (1, [8])]


def test_whole_cores_by_node_and_by_socket() -> None:
    most, least = Groups(MACHINE, MOST), Groups(MACHINE, LEAST)
    assert ordered(most.whole_by_node(USABLE)) == [(2, [8, 9]), (0, [2, 3])], "socket 1 has fewer free"
    assert ordered(least.whole_by_node(USABLE)) == [(0, [2, 3]), (2, [8, 9])]
    assert ordered(most.whole_by_socket(USABLE)) == [(0, [2, 3]), (1, [8, 9])]
    wider = USABLE | 0b10  # CPU 1
    assert ordered(most.whole_by_socket(wider)) == [(1, [8, 9]), (0, [0, 1, 2, 3])]
    assert ordered(least.whole_by_socket(wider)) == [(0, [0, 1, 2, 3]), (1, [8, 9])]
    assert ordered(most.whole_by_node(0b101)) == []


@pytest.mark.parametrize(
    ("strategy", "chosen", "expected"),
    [
        (MOST, "", [12, 8, 9, 4, 0, 2, 3]),
        (LEAST, "", [0, 2, 3, 4, 8, 9, 12]),
        (MOST, "5", [4, 0, 2, 3, 12, 8, 9]),  # the socket of the chosen CPU comes first
        (LEAST, "10", [8, 9, 12, 0, 2, 3, 4]),
        (LEAST, "5,10-11", [8, 9, 12, 0, 2, 3, 4]),
    ],
)
def test_cpus_core_by_core(strategy: NumaStrategy, chosen: str, expected: list[int]) -> None:
    assert Groups(MACHINE, strategy).by_core(USABLE, CpuSet.parse(chosen).bits) == expected


def test_cpus_that_fewer_pods_have_come_first() -> None:
    groups = Groups(MACHINE, MOST, {0: 1, 2: 1, 3: 1})
    assert shown(groups.single_by_node(0b1111, one_each=False)) == {0: [1, 0, 2, 3]}
    assert shown(groups.single_by_node(0b1111, one_each=True)) == {0: [1, 2]}
    assert shown(groups.whole_by_node(0b1111)) == {0: [0, 1, 2, 3]}, "core 0 has one reference, core 1 two"
    assert groups.by_core(0b1111, 0) == [1, 0, 2, 3]
    other = Groups(MACHINE, MOST, {0: 2, 1: 1, 3: 1})
    assert shown(other.whole_by_node(0b1111)) == {0: [2, 3, 0, 1]}
    assert other.by_core(0b1111, 0) == [2, 3, 1, 0]
    assert other.by_core(0b1110, 0) == [1, 2, 3], "a broken core comes before the references"


def test_cores_with_more_threads_come_first() -> None:
    topo = machine(offline=(1,))
    assert shown(Groups(topo, MOST).whole_by_node(topo.nodes[0])) == {0: [2, 3, 0]}
    assert Groups(topo, MOST).by_core(topo.nodes[0], 0) == [0, 2, 3]


def test_cpus_are_spread_if_they_are_more_than_the_threads_of_a_core() -> None:
    groups = Groups(machine(threads=4), MOST)
    assert groups.spread([0, 1, 2, 4]) == [0, 1, 2, 4]
    assert groups.spread([0, 1, 2, 4, 5]) == [0, 4, 1, 5, 2]
    assert groups.spread([5, 0, 1, 2, 4]) == [5, 0, 1, 4, 2], "in each round in the given order"
    assert groups.first_of_cores([5, 0, 4, 1, 8]) == [5, 0, 8]
    assert groups.core_of[7] == 1


def test_a_node_belongs_to_the_first_socket_that_has_cpus_of_it() -> None:
    rows = [CpuRow(0, 0, 0, 0, 0), CpuRow(1, 1, 1, 1, 0), CpuRow(2, 2, 0, 1, 0), CpuRow(3, 3, 1, 2, 0)]
    topo = CpuTopology.of_rows(rows)  # node 1 has CPUs of both sockets
    assert Groups(topo, MOST).by_core(0b1110, 0b1) == [1, 2, 3]
