"""Listing all groups."""

from pathlib import Path

import pytest

from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.backends.cgroup.survey import survey
from proxy.demo.runc import Runc
from proxy.demo.runtime_records import Resources
from proxy.model.idset import CpuSet, Mask


@pytest.mark.parametrize("version", [1, 2])
def test_a_directory_tree(tmp_path: Path, version: int) -> None:
    groups = FakeCgroups(tmp_path / "t", CpuSet.parse("0-7"), Mask.parse("0"), version)
    Runc(groups).start("kubepods/podx/c", Resources(cpuset_cpus="2-3"), 1)
    groups.mkdir("other")
    seen = survey(groups)
    assert list(seen) == ["kubepods", "kubepods/podx", "kubepods/podx/c", "other"]
    assert seen["kubepods/podx/c"].cpus == CpuSet.parse("2-3")


def test_v1_files_as_the_kernel_lays_them(tmp_path: Path) -> None:
    """The layout of a v1 mount, read by cgroupspy, agrees with our own reader."""
    made = FakeCgroups(tmp_path / "cpuset", CpuSet.parse("0-7"), Mask.parse("0-1"), 1)
    Runc(made).start("kubepods/podx/c", Resources(cpuset_cpus="2-3,7"), 1)
    made.mkdir("empty")
    groups = KernelCgroups(tmp_path / "cpuset", 1)
    assert survey(groups) == {path: groups.read(path) for path in survey(made)}
    assert survey(groups)["kubepods/podx/c"].cpus == CpuSet.parse("2-3,7")
