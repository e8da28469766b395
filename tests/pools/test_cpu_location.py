from __future__ import annotations

from proxy.model.idset import CpuSet
from proxy.model.machine import Cpu, Machine, NumaNode
from proxy.pools.cpu_location import CpuLocation, groups_of, locations_of
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy


def test_cores_and_sockets_are_numbered_from_zero_for_any_kernel_ids() -> None:
    machine = regular_machine(2, 1, 2, 2)  # cores 0-3, siblings four apart
    assert locations_of(machine)[:3] == (
        CpuLocation(0, 0, 0, 0),
        CpuLocation(1, 1, 0, 0),
        CpuLocation(2, 2, 1, 1),
    )
    assert locations_of(machine)[4] == CpuLocation(4, 0, 0, 0)


def test_nodes_keep_their_ids_and_a_homeless_cpu_joins_its_package() -> None:
    cpus = (Cpu(0, 0, 0, numa=3), Cpu(1, 1, 0), Cpu(2, 2, 2), Cpu(3, 3, 2, numa=8))
    machine = Machine(
        cpus, (NumaNode(3, CpuSet([0])), NumaNode(8, CpuSet([3]))), CpuSet(range(4)), CpuSet(range(4))
    )
    assert locations_of(machine) == (
        CpuLocation(0, 0, 0, 3),
        CpuLocation(1, 1, 0, 3),
        CpuLocation(2, 2, 1, 8),
        CpuLocation(3, 3, 1, 8),
    )
    bare = changed_copy(machine, cpus=(Cpu(1, 1, 1),))
    assert locations_of(bare) == (CpuLocation(1, 0, 0, 3),)


def test_cpus_are_grouped_by_socket_and_node_in_order() -> None:
    locations = [CpuLocation(3, 1, 1, 4), CpuLocation(0, 0, 0, 4), CpuLocation(1, 0, 0, 4)]
    assert groups_of(locations) == {(0, 4): CpuSet([0, 1]), (1, 4): CpuSet([3])}
    assert list(groups_of(locations)) == [(0, 4), (1, 4)]
