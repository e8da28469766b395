from __future__ import annotations

import pytest

from proxy.allocation.cpu_policy import pick_unpoliced
from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.packed import NotEnoughCpus
from proxy.engine.placement import memory_nodes_for
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Cpu, Machine, NumaNode
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(2, 1, 4, 2)  # node 0: 0-3,8-11; node 1: 4-7,12-15; siblings n and n+8


@pytest.mark.parametrize(
    ("available", "count", "cpus"),
    [
        ("0-15", 2, "0,8"),
        ("0-15", 1, "0"),
        ("1-15", 2, "1,9"),
        ("3-15", 4, "4-5,12-13"),  # node 0 has five CPUs left but one whole core: node 1
        ("2-15", 4, "2-3,10-11"),  # node 0 has two whole cores left: best fit
        ("0-7", 2, "0-1"),  # no whole core anywhere: the lower node
        ("8-15", 3, "8-10"),
        ("0-15", 10, "0-4,8-12"),
        ("2-7,10-15", 4, "2-3,10-11"),  # node 0 has just as many
        ("3-7,11-15", 2, "3,11"),  # node 0 has one core left, which is enough
        ("0-1,4-8,12-15", 3, "0-1,8"),  # the odd CPU needs no whole core: best fit
    ],
)
def test_whole_cores_of_the_best_fitting_node_are_picked_first(available: str, count: int, cpus: str) -> None:
    result = pick_unpoliced(MACHINE, CpuTopology.of(MACHINE), CpuSet.parse(available), count)
    assert str(result) == cpus


@pytest.mark.parametrize(
    ("available", "count", "cpus"),
    [
        ("0-2,4-7", 3, "0-2"),  # a whole core and one of two threads: best fit
        ("0-3,4,6", 2, "0-1"),  # a half core and a small one are no two CPUs in whole cores
    ],
)
def test_pick_among_cores_of_two_kinds(available: str, count: int, cpus: str) -> None:
    core = (0, 0, 2, 2, 4, 4, 6, 7)  # node 0 has two cores of two threads, node 1 has one and two single ones
    rows = tuple(Cpu(i, core=c, package=i // 4, numa=i // 4) for i, c in enumerate(core))
    nodes = NumaNode(0, CpuSet.parse("0-3")), NumaNode(1, CpuSet.parse("4-7"))
    machine = Machine(rows, nodes, CpuSet.parse("0-7"), CpuSet.parse("0-7"))
    assert str(pick_unpoliced(machine, CpuTopology.of(machine), CpuSet.parse(available), count)) == cpus


def test_pick_from_too_few() -> None:
    with pytest.raises(NotEnoughCpus):
        pick_unpoliced(MACHINE, CpuTopology.of(MACHINE), CpuSet.parse("0-2"), 4)


def without_memory(machine: Machine, *ids: int) -> Machine:
    nodes = [changed_copy(n, mem_bytes=0) if n.id in ids else n for n in machine.nodes]
    return changed_copy(machine, nodes=tuple(nodes))


def test_memory_is_that_of_the_cpus_nodes_or_the_nearest() -> None:
    machine = regular_machine(2, 2, 2, 1)  # nodes 0 and 1 in one socket, 2 and 3 in the other
    cpus = machine.nodes[1].cpus
    assert memory_nodes_for(machine, cpus) == Mask((1,))
    assert memory_nodes_for(machine, machine.nodes[2].cpus | cpus) == Mask((1, 2))
    assert memory_nodes_for(without_memory(machine, 1), cpus) == Mask((0,))
    assert memory_nodes_for(without_memory(machine, 0, 1), cpus) == Mask((2, 3))
    lost = without_memory(machine, 1)
    untold = changed_copy(lost, nodes=tuple(changed_copy(n, distance=()) for n in lost.nodes))
    assert memory_nodes_for(untold, cpus) == Mask((0, 2, 3))


def test_memory_beyond_the_nodes_comes_from_the_nearest_other_nodes() -> None:
    gib = 1 << 30
    machine = regular_machine(2, 2, 2, 1, mem_bytes_per_node=10 * gib)
    cpus = machine.nodes[1].cpus
    assert memory_nodes_for(machine, cpus, 10 * gib) == Mask((1,))
    assert memory_nodes_for(machine, cpus, 11 * gib) == Mask((0, 1))
    assert memory_nodes_for(machine, cpus, 21 * gib) == Mask((0, 1, 2))
    assert memory_nodes_for(machine, cpus, 99 * gib) == Mask((0, 1, 2, 3))
    assert memory_nodes_for(machine, cpus, 5 * gib, [(Mask((1,)), 5 * gib)]) == Mask((1,))
    assert memory_nodes_for(machine, cpus, 6 * gib, [(Mask((1,)), 5 * gib)]) == Mask((0, 1))
    assert memory_nodes_for(
        machine, cpus, 6 * gib, [(Mask((0, 1)), 10 * gib), (Mask((0,)), 99 * gib)]
    ) == Mask((0, 1, 2))


def test_a_node_with_memory_is_better_than_one_without() -> None:
    machine = without_memory(regular_machine(2, 1, 4, 2), 0)
    result = pick_unpoliced(machine, CpuTopology.of(machine), machine.online, 2)
    assert result <= machine.nodes[1].cpus
