"""What the imitated tree adds to the kernel's rules, which are tested in tests/contract/test_cgroups.py."""

import threading
from pathlib import Path

import pytest

from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.demo.runc import Runc, RuncError
from proxy.demo.runtime_records import Resources
from proxy.model.idset import CpuSet, Mask


def tree(tmp_path: Path, version: int) -> FakeCgroups:
    return FakeCgroups(tmp_path / "t", CpuSet.parse("0-7"), Mask.parse("0-1"), version)


def test_a_container_starts_as_with_runc(tmp_path: Path) -> None:
    groups = tree(tmp_path, 1)
    Runc(groups).start("kubepods/podx/c1", Resources(cpuset_cpus="2-3"), 10)
    value = groups.read("kubepods/podx/c1")
    assert (value.cpus, value.mems) == (CpuSet.parse("2-3"), Mask.parse("0-1"))
    assert groups.read("kubepods/podx").cpus == CpuSet.parse("0-7")
    assert (tmp_path / "t/kubepods/podx/c1/cgroup.procs").read_text() == "10\n"
    assert (tmp_path / "t/kubepods/podx/c1/cpuset.cpus").read_text() == "2-3\n"


def test_a_container_with_impossible_cpus_does_not_start(tmp_path: Path) -> None:
    groups = tree(tmp_path, 1)
    groups.mkdir("narrow")
    groups.write("narrow", CpuSet.parse("0-1"), Mask.parse("0"))
    with pytest.raises(RuncError, match="permission denied"):
        Runc(groups).start("narrow/c", Resources(cpuset_cpus="4"), 10)


def test_without_a_cpuset_v2_inherits(tmp_path: Path) -> None:
    groups = tree(tmp_path, 2)
    Runc(groups).start("kubepods/podx/c1", Resources(), 10)
    value = groups.read("kubepods/podx/c1")
    assert (str(value.cpus), str(value.effective_cpus)) == ("", "0-7")


def test_the_group_of_an_ended_container_is_removed(tmp_path: Path) -> None:
    groups = tree(tmp_path, 1)
    Runc(groups).start("podx/c1", Resources(), 10)
    with pytest.raises(OSError, match="busy"):
        groups.rmdir("podx/c1")
    groups.detach(10)
    groups.rmdir("podx/c1")
    assert groups.find("/podx", "c1") is None
    assert not (tmp_path / "t/podx/c1").exists()
    groups.rmdir("podx")


def test_a_task_is_in_one_group(tmp_path: Path) -> None:
    groups = tree(tmp_path, 2)
    groups.mkdir("a")
    groups.mkdir("b")
    groups.attach("a", 7)
    groups.attach("b", 7)
    assert (tmp_path / "t/a/cgroup.procs").read_text() == ""
    assert (tmp_path / "t/b/cgroup.procs").read_text() == "7\n"


def test_concurrent_writers_keep_the_rules_of_v1(tmp_path: Path) -> None:
    """Threads write parents and children at the same time: the rule of v1 must hold at each read."""
    groups = tree(tmp_path, 1)
    Runc(groups).start("pod/c", Resources(), 1)
    wrong: list[str] = []

    def work(cpus: str) -> None:
        for _ in range(40):
            groups.write("pod/c", CpuSet.parse(cpus), None)

    def look() -> None:
        for _ in range(200):
            value = groups.read("pod/c")
            if not value.cpus or not value.cpus <= CpuSet.parse("0-7"):
                wrong.append(str(value))

    threads = [threading.Thread(target=look)]
    # Both write the same list, so that reading back finds what was written, in any order.
    threads += [threading.Thread(target=work, args=("0-3",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert groups.read("pod/c").cpus == CpuSet.parse("0-3")
