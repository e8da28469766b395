"""Listing all groups."""

from pathlib import Path

import pytest

from proxy.backends.cgroup.cgroup_listing import PodAndContainerNames, list_cpusets
from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.demo.runc import Runc
from proxy.demo.runtime_records import Resources
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask


@pytest.mark.parametrize("version", [1, 2])
def test_a_directory_tree(tmp_path: Path, version: int) -> None:
    groups = FakeCgroups(tmp_path / "t", CpuSet.parse("0-7"), Mask.parse("0"), version)
    Runc(groups).start("kubepods/podx/c", Resources(cpuset_cpus="2-3"), 1)
    groups.mkdir("other")
    seen = list_cpusets(groups)
    assert list(seen) == ["kubepods", "kubepods/podx", "kubepods/podx/c", "other"]
    assert seen["kubepods/podx/c"].cpus == CpuSet.parse("2-3")


def test_v1_files_as_cgroupspy_reads_them(tmp_path: Path) -> None:
    """The layout of a v1 mount, read by cgroupspy, agrees with our own reader."""
    made = FakeCgroups(tmp_path / "cpuset", CpuSet.parse("0-7"), Mask.parse("0-1"), 1)
    Runc(made).start("kubepods/podx/c", Resources(cpuset_cpus="2-3,7"), 1)
    made.mkdir("empty")
    groups = KernelCgroups(tmp_path / "cpuset", 1)
    assert list_cpusets(groups) == {path: groups.read(path) for path in list_cpusets(made)}
    assert list_cpusets(groups)["kubepods/podx/c"].cpus == CpuSet.parse("2-3,7")


def test_v2_files_as_cgroupspy_reads_them(tmp_path: Path) -> None:
    """The layout of a v2 mount, read by cgroupspy, agrees with our own reader, also about inherited sets."""
    made = FakeCgroups(tmp_path / "t", CpuSet.parse("0-7"), Mask.parse("0-1"), 2)
    Runc(made).start("kubepods/podx/c", Resources(cpuset_cpus="2-3,7"), 1)
    made.mkdir("kubepods/podx/inherits")
    (tmp_path / "t" / "not a group").mkdir()
    seen = list_cpusets(KernelCgroups(tmp_path / "t", 2))
    assert seen == {path: made.read(path) for path in seen}
    assert list(seen) == ["kubepods", "kubepods/podx", "kubepods/podx/c", "kubepods/podx/inherits"]
    child = seen["kubepods/podx/inherits"]
    assert (str(child.cpus), str(child.effective_cpus)) == ("", "0-7")


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_that_cannot_be_read_is_named(tmp_path: Path, version: int) -> None:
    made = FakeCgroups(tmp_path / "t", CpuSet.parse("0-7"), Mask.parse("0"), version)
    made.mkdir("kubepods")
    (tmp_path / "t" / "kubepods" / "cpuset.cpus").write_text("0-x\n")
    with pytest.raises(CgroupError, match="cannot read the cpuset of cgroup /kubepods: invalid literal"):
        list_cpusets(KernelCgroups(tmp_path / "t", version))


def test_groups_are_named_by_the_ids_in_their_names() -> None:
    owners = PodAndContainerNames({"abc": "main", "def": "(sandbox)"}, {"1-2": "ns/web"})
    pod = "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1_2.slice"
    assert owners.of_group(f"{pod}/cri-containerd-abc.scope") == ("ns/web", "main")
    assert owners.of_group(f"{pod}/crio-def.scope") == ("ns/web", "(sandbox)")
    assert owners.of_group("kubepods/burstable/pod1-2/abc") == ("ns/web", "main")
    assert owners.of_group("kubepods/burstable/pod1-2/abc/inner") == ("ns/web", "")
    assert owners.of_group(pod) == ("ns/web", "")
    assert owners.of_group("kubepods/podgone/xyz") == ("", "")
    assert owners.of_group("system.slice:cri-containerd:abc") == ("", "main")
