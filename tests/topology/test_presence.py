"""Detection of hardware that was removed from a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.topology.reader import is_machine_unchanged, read_machine
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs
from tests.testkit.changed_copy import changed_copy

GIB = 1 << 30
NODE1 = "sys/devices/system/node/node1/meminfo"


@pytest.fixture
def known(tmp_path: Path) -> Machine:
    """A machine with two nodes of 1 GiB, written below the test's directory."""
    whole = regular_machine(2, 1, 4, 2)
    nodes = tuple(changed_copy(node, mem_bytes=GIB) for node in whole.nodes)
    write_sysfs(changed_copy(whole, nodes=nodes), tmp_path)
    machine = read_machine(tmp_path)
    assert [node.mem_bytes for node in machine.nodes] == [GIB, GIB]
    return machine


def test_an_unchanged_machine_is_the_same(known: Machine, tmp_path: Path) -> None:
    assert is_machine_unchanged(known, tmp_path)
    assert is_machine_unchanged(known, tmp_path / "sys")


def test_a_removed_cpu_is_detected(known: Machine, tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-2,4-15\n")
    assert not is_machine_unchanged(known, tmp_path)
    assert read_machine(tmp_path).online == known.online - CpuSet([3])


@pytest.mark.parametrize(
    ("size", "same"), [(0, False), (GIB - (128 << 20), False), (GIB - (1 << 20), True), (GIB + 4096, True)]
)
def test_removed_memory_is_detected(known: Machine, tmp_path: Path, size: int, same: bool) -> None:
    (tmp_path / NODE1).write_text(f"Node 1 MemTotal: {size // 1024} kB\n")
    assert is_machine_unchanged(known, tmp_path) is same


def test_a_small_node_that_lost_its_memory_is_detected(known: Machine, tmp_path: Path) -> None:
    small = changed_copy(known.nodes[1], mem_bytes=32 << 20)
    known = changed_copy(known, nodes=(known.nodes[0], small))
    (tmp_path / NODE1).write_text("Node 1 MemTotal: 0 kB\n")
    assert not is_machine_unchanged(known, tmp_path)
    (tmp_path / NODE1).unlink()
    assert not is_machine_unchanged(known, tmp_path)


def test_a_removed_node_is_detected(known: Machine, tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/node/node1").rename(tmp_path / "away")
    assert not is_machine_unchanged(known, tmp_path)


def test_a_machine_without_nodes_is_compared_by_its_cpus(tmp_path: Path) -> None:
    cpu = tmp_path / "sys/devices/system/cpu"
    (cpu / "cpu0/topology").mkdir(parents=True)
    (cpu / "online").write_text("0\n")
    machine = read_machine(tmp_path)
    assert is_machine_unchanged(machine, tmp_path)
    (cpu / "online").write_text("0-1\n")
    assert not is_machine_unchanged(machine, tmp_path)
