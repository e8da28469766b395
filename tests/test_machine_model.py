"""Queries about the hardware of a machine."""

from __future__ import annotations

import pytest

from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Cpu, Machine, NumaNode
from tests.testkit.changed_copy import changed_copy


def machine() -> Machine:
    """Two packages of two cores; CPU 7 is offline, node 2 has no CPUs, node 5 no memory."""
    cpus = tuple(
        Cpu(i, core=i % 4, package=i % 4 // 2 * 2, numa=0 if i % 4 < 2 else 5, die=None if i == 4 else i % 4)
        for i in range(7)
    )
    nodes = (
        NumaNode(0, CpuSet.parse("0-1,4-5"), mem_bytes=1 << 30),
        NumaNode(2, CpuSet(), mem_bytes=None),
        NumaNode(5, CpuSet.parse("2-3,6"), mem_bytes=0),
    )
    return Machine(cpus, nodes, present=CpuSet.parse("0-7"), possible=CpuSet.parse("0-15"))


def test_groups_are_named_by_level_and_hold_online_cpus_only() -> None:
    m = machine()
    assert str(m.online) == "0-6"
    assert {name: str(cpus) for name, cpus in m.cores.items()} == {0: "0,4", 1: "1,5", 2: "2,6", 3: "3"}
    assert {name: str(cpus) for name, cpus in m.packages.items()} == {0: "0-1,4-5", 2: "2-3,6"}
    assert m.groups("numa") == {0: CpuSet.parse("0-1,4-5"), 5: CpuSet.parse("2-3,6")}
    assert m.groups("llc") == {}
    assert list(m.groups("die")) == [0, 1, 2, 3]
    assert m.groups("die")[0] == CpuSet([0]), "a CPU that is in no such group is left out"


def test_parts_are_found_by_id() -> None:
    m = machine()
    assert m.by_id[6].core == 2
    assert 7 not in m.by_id
    assert list(m.node_by_id) == [0, 2, 5]


def test_nodes_and_cpus() -> None:
    m = machine()
    assert m.memory_nodes == Mask.parse("0,2"), "only a node that reports 0 bytes has no memory"
    assert m.nodes_of(CpuSet.parse("1,6")) == Mask.parse("0,5")
    assert m.nodes_of(CpuSet()) == Mask()
    assert m.cpus_of(Mask([5])) == CpuSet.parse("2-3,6")
    assert m.cpus_of(Mask.parse("0-5")) == m.online
    assert m.cpus_of(Mask([2, 9])) == CpuSet()


@pytest.mark.parametrize(
    "other",
    [
        changed_copy(machine(), nodes=machine().nodes[:-1]),
        changed_copy(machine(), extra={"numa": {"possible": "0-7"}}),
        changed_copy(machine(), possible=CpuSet.parse("0-31")),
    ],
)
def test_the_fingerprint_distinguishes_hardware(other: Machine) -> None:
    assert machine().fingerprint == machine().fingerprint
    assert other.fingerprint != machine().fingerprint


def test_fingerprint_does_not_depend_on_what_changes_while_running() -> None:
    assert changed_copy(machine(), isolated=CpuSet([1])).fingerprint == machine().fingerprint
    offline = changed_copy(machine(), cpus=machine().cpus[:-1])
    assert offline.fingerprint == machine().fingerprint, "a CPU that is offline comes back"
    pulled = changed_copy(machine(), present=CpuSet.parse("0-2"))
    assert pulled.fingerprint == machine().fingerprint, "CPUs of a virtual machine may be taken out"
    whole = changed_copy(machine(), extra={"numa": {"possible": "0,2,5"}})
    less = changed_copy(whole, nodes=machine().nodes[:-1])
    assert less.fingerprint == whole.fingerprint == machine().fingerprint, "so may a node of memory"
