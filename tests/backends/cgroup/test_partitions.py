"""Partitions on an imitated tree with the rules of Linux 6.12, and with those of 6.1."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.backends.cgroup.partitions import KernelPartitions, open_partitions
from proxy.engine.partition import PartitionState
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask

POD, ONE, TWO = "kubepods/podx", "kubepods/podx/c1", "kubepods/podx/c2"
OTHER = "kubepods/pody/c3"
OWN, REST = CpuSet.parse("4-5"), CpuSet.parse("0-3,6-7")


class Node:
    """A tree with an owner, another container in its pod, and a container in another pod."""

    def __init__(self, directory: Path, version: int = 2, *, exclusive: bool = True) -> None:
        online, nodes = CpuSet.parse("0-7"), Mask.parse("0-1")
        self.groups = FakeCgroups(directory, online, nodes, version, exclusive=exclusive)
        for path in ("kubepods", POD, ONE, TWO, "kubepods/pody", OTHER):
            self.groups.mkdir(path)
        self.groups.write(ONE, OWN, None)
        self.groups.write(TWO, REST, None)
        self.groups.write(OTHER, REST, None)
        made = open_partitions(self.groups)
        assert made is not None
        self.partitions: KernelPartitions = made

    def make(self, path: str = ONE, cpus: CpuSet = OWN, kind: str = "isolated") -> PartitionState:
        return self.partitions.make(path, cpus, kind, self.partitions.exclusive_added(path, cpus))

    def file(self, path: str, name: str) -> str:
        return self.groups.files.read(path, name).strip()

    def effective(self, path: str) -> CpuSet:
        return CpuSet.parse(self.file(path, "cpuset.cpus.effective"))

    def untouched(self) -> bool:
        """Return whether no file has a trace of a partition."""
        groups = ("kubepods", POD, ONE, "kubepods/pody")
        clean = all(not self.file(path, "cpuset.cpus.exclusive") for path in groups)
        return clean and self.file(ONE, "cpuset.cpus.partition") == "member" and len(self.effective("")) == 8


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "t")


@pytest.mark.parametrize("kind", ["root", "isolated"])
def test_other_groups_lose_the_cpus_of_a_partition(node: Node, kind: str) -> None:
    assert node.make(kind=kind) == PartitionState(kind, valid=True)
    assert node.effective(ONE) == OWN
    assert [node.effective(path) for path in ("", "kubepods", POD, TWO, OTHER)] == [REST] * 5
    assert node.file(POD, "cpuset.cpus") == ""
    assert node.partitions.isolated() == (OWN if kind == "isolated" else CpuSet())


def test_an_ended_partition_leaves_nothing(node: Node) -> None:
    exclusive_added = node.partitions.exclusive_added(ONE, OWN)
    assert exclusive_added == {"kubepods": OWN, POD: OWN}
    node.make()
    node.partitions.end(ONE, OWN, exclusive_added)
    assert node.untouched()
    node.partitions.end(ONE, OWN, exclusive_added)
    assert node.untouched()


def test_two_owners_share_the_groups_above(node: Node) -> None:
    more = CpuSet.parse("6-7")
    for path in (TWO, OTHER):
        node.groups.write(path, CpuSet.parse("0-3"), None)
    node.make()
    node.groups.write(OTHER, more, None)
    exclusive_added = node.partitions.exclusive_added(OTHER, more)
    assert node.make(OTHER, more, "root").valid
    assert node.file("kubepods", "cpuset.cpus.exclusive") == "4-7"
    node.partitions.end(OTHER, more, exclusive_added)
    assert node.partitions.read(ONE).valid
    assert node.file("kubepods", "cpuset.cpus.exclusive") == "4-5"
    assert node.file("kubepods/pody", "cpuset.cpus.exclusive") == ""


def test_exclusive_cpus_of_other_programs_stay(node: Node) -> None:
    node.groups.files.write("kubepods", "cpuset.cpus.exclusive", "3-5")
    exclusive_added = node.partitions.exclusive_added(ONE, OWN)
    assert exclusive_added == {POD: OWN}
    node.make()
    node.partitions.end(ONE, OWN, exclusive_added)
    assert node.file("kubepods", "cpuset.cpus.exclusive") == "3-5"


def test_an_overlap_is_reported_and_nothing_is_left(node: Node) -> None:
    node.groups.files.write(TWO, "cpuset.cpus", "0-4")
    made = node.make()
    assert not made.valid
    assert made.reason == "Cpu list in cpuset.cpus not exclusive"
    assert node.untouched()


def test_a_sibling_inside_the_cpus_is_reported(node: Node) -> None:
    node.groups.files.write(TWO, "cpuset.cpus", "4")
    made = node.make()
    assert not made.valid
    assert "EINVAL" in made.reason
    assert node.untouched()


def test_another_pod_inside_the_cpus_is_reported(node: Node) -> None:
    node.groups.files.write("kubepods/pody", "cpuset.cpus", "4")
    made = node.make()
    assert not made.valid
    assert "cpuset.cpus.exclusive to 4-5 in cgroup /kubepods/podx" in made.reason
    assert node.untouched()


def test_an_invalid_partition_is_detected_and_can_be_made_again(node: Node) -> None:
    exclusive_added = node.partitions.exclusive_added(ONE, OWN)
    node.make()
    node.groups.files.write(TWO, "cpuset.cpus", "0-7")
    assert node.partitions.read(ONE) == PartitionState("isolated", valid=False)
    node.groups.files.write(TWO, "cpuset.cpus", "0-3")
    node.partitions.end(ONE, OWN, exclusive_added)
    assert node.untouched()
    assert node.effective(ONE) == OWN
    assert node.make().valid


def test_a_foreign_write_does_not_change_a_partition(node: Node) -> None:
    node.make()
    node.groups.files.write(ONE, "cpuset.cpus", "0-3")
    assert node.effective(ONE) == OWN
    assert node.partitions.read(ONE).valid


def test_a_partition_ends_with_its_group(node: Node) -> None:
    exclusive_added = node.partitions.exclusive_added(ONE, OWN)
    node.make()
    node.groups.rmdir(ONE)
    assert node.effective(POD) == CpuSet.parse("0-7")
    with pytest.raises(CgroupError, match="gone"):
        node.partitions.read(ONE)
    node.partitions.end(ONE, OWN, exclusive_added)
    assert node.file("kubepods", "cpuset.cpus.exclusive") == ""


def test_an_older_kernel_reports_why_it_has_no_partitions(tmp_path: Path) -> None:
    node = Node(tmp_path / "t", exclusive=False)
    made = node.make()
    assert not made.valid
    assert made.reason.startswith("Parent is not a partition root; this kernel has no cpuset.cpus.exclusive")
    assert node.file(ONE, "cpuset.cpus.partition") == "member"
    assert node.effective(OTHER) == REST
    assert node.partitions.isolated() is None


def test_an_older_kernel_can_use_partitions_made_by_another_program(tmp_path: Path) -> None:
    node = Node(tmp_path / "t", exclusive=False)
    for path in ("kubepods", POD):
        node.groups.write(path, CpuSet.parse("1-7") if path == "kubepods" else CpuSet.parse("4-7"), None)
        node.groups.files.write(path, "cpuset.cpus.partition", "root")
    assert node.make().valid
    assert node.effective(POD) == CpuSet.parse("6-7")
    assert node.effective("") == CpuSet.parse("0")


def test_v1_has_no_partitions(tmp_path: Path) -> None:
    groups = FakeCgroups(tmp_path / "t", CpuSet.parse("0-7"), Mask.parse("0"), 1)
    made = open_partitions(groups)
    assert made is not None
    assert "v1" in made.unsupported_reason


def test_a_kernel_without_the_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "pod").mkdir()
    made = open_partitions(KernelCgroups(tmp_path, 2))
    assert made is not None
    with pytest.raises(CgroupError, match="not enabled"):
        made.read("pod")
    assert made.event_file("pod") == f"{tmp_path}/pod/cpuset.cpus.partition"


def test_a_plain_directory_has_no_partitions() -> None:
    assert open_partitions(object()) is None
