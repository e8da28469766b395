"""Finding a container's group by the path and the first process that the runtime reports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.backends.cgroup.cfs_quota import KernelCpuGroups, open_cpu_groups
from proxy.backends.cgroup.cpu_usage import V1_FILE, V2_FILE, open_usage
from proxy.backends.cgroup.cpuset import KernelCgroups, open_cgroups
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.backends.cgroup.hierarchies import cgroup_of_process, path_below_mount, read_mounts, visible_root
from proxy.backends.cgroup.locator import KernelGroupLocator
from proxy.backends.cgroup.memory import KernelMemory, open_memory
from proxy.executor.runtime_ports import RuntimeDetail
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask

ID = "4f1c9d"


class MachineTree:
    """A cgroup tree in a directory, and a /proc next to it."""

    def __init__(self, directory: Path, version: int = 1) -> None:
        self.directory = directory
        self.tree = FakeCgroups(directory / "tree", CpuSet.parse("0-3"), Mask.parse("0"), version)
        self.locator = KernelGroupLocator(self.tree, (), directory / "proc", directory / "mounts")

    def make(self, path: str) -> str:
        parts = path.split("/")
        for i in range(1, len(parts) + 1):
            if not self.tree.is_group("/".join(parts[:i])):
                self.tree.mkdir("/".join(parts[:i]))
        return path

    def process(self, pid: int, lines: str) -> None:
        (self.directory / f"proc/{pid}").mkdir(parents=True)
        (self.directory / f"proc/{pid}/cgroup").write_text(lines)

    def mounted_at(self, root: str) -> None:
        (self.directory / "mounts/self").mkdir(parents=True)
        line = f"34 31 0:31 {root} {self.directory / 'tree'} rw - cgroup cgroup rw,cpuset\n"
        (self.directory / "mounts/self/mountinfo").write_text(line)


def test_the_path_of_the_spec_is_checked_first(tmp_path: Path) -> None:
    place = MachineTree(tmp_path)
    path = place.make(f"odd/{ID}")
    assert place.locator.locate(ID, RuntimeDetail(f"/odd/{ID}", pid=7)).path == path
    assert place.tree.find("/kubepods/podx", ID) == path, "and remembered"


@pytest.mark.parametrize(
    ("reported", "group"),
    [
        (f"/node/kubelet/podx/{ID}", f"node/kubelet/podx/{ID}"),
        (f"/a.slice/crio-{ID}.scope/container", f"a.slice/crio-{ID}.scope"),
        (f"/kubepods/podx/{ID}/init.scope", f"kubepods/podx/{ID}"),
        (f"/x/a.slice:cri-containerd:{ID}", f"x/a.slice:cri-containerd:{ID}"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_the_first_process_names_the_group(tmp_path: Path, reported: str, group: str, version: int) -> None:
    place = MachineTree(tmp_path, version)
    place.make(reported.strip("/"))
    lines = (
        f"3:cpuset:{reported}\n0::/elsewhere\n" if version == 1 else f"3:cpuset:/elsewhere\n0::{reported}\n"
    )
    place.process(7, lines)
    assert place.locator.locate(ID, RuntimeDetail(pid=7)).path == group


def test_a_group_that_is_not_the_containers_own_is_none(tmp_path: Path) -> None:
    place = MachineTree(tmp_path)
    place.make("kubepods/podx/kata_abcd")
    place.process(7, "3:cpuset:/kubepods/podx/kata_abcd\n")
    found = place.locator.locate(ID, RuntimeDetail(f"/kubepods/podx/{ID}", pid=7))
    assert found.path == ""
    assert "virtual machine" in found.obstacle
    assert place.tree.find("/kubepods/podx", ID) is None


@pytest.mark.parametrize(
    ("lines", "pid", "why"),
    [
        ("", 0, "does not report"),
        (f"3:cpuset:/gone/{ID}\n", 7, "not seen below"),
        (f"3:cpuset:/../{ID}\n", 7, "not seen below"),
        (f"3:cpuset:/a/{ID} (deleted)\n", 7, "in no group"),
        (f"3:cpuset:/x/../{ID}\n", 7, "not seen below"),
        ("3:cpuset:/\n", 9, "cannot be read"),
    ],
)
def test_the_reason_is_reported_if_no_group_is_found(tmp_path: Path, lines: str, pid: int, why: str) -> None:
    place = MachineTree(tmp_path)
    place.process(7, lines)
    found = place.locator.locate(ID, RuntimeDetail(pid=pid))
    assert found.path == ""
    assert why in found.obstacle


def test_a_mount_of_a_part_of_the_tree(tmp_path: Path) -> None:
    place = MachineTree(tmp_path)
    place.mounted_at("/docker/ab12")
    path = place.make(f"kubelet/podx/{ID}")
    place.process(7, f"3:cpuset:/docker/ab12/kubelet/podx/{ID}\n")
    assert place.locator.locate(ID, RuntimeDetail(pid=7)).path == path


def test_unknown_levels_are_searched(tmp_path: Path) -> None:
    """The daemon is in a container, two levels below the mounted group; the group is three levels away."""
    place = MachineTree(tmp_path)
    place.mounted_at("/../../..")
    place.make("kubepods/burstable/podus/we")
    path = place.make(f"kubepods/burstable/podx/{ID}")
    place.process(7, f"3:cpuset:/../podx/{ID}\n")
    assert place.locator.locate(ID, RuntimeDetail(pid=7)).path == path
    place.make(f"kubepods/other/podx/{ID}")
    place.process(8, f"3:cpuset:/../podx/{ID}\n")
    fresh = KernelGroupLocator(place.tree, (), place.directory / "proc", place.directory / "mounts")
    assert fresh.locate(ID, RuntimeDetail(pid=8)).path == "", "two such groups: no guess"


def test_other_trees_are_reported(tmp_path: Path) -> None:
    place = MachineTree(tmp_path)
    path = place.make(f"odd/place/{ID}")
    cpu = KernelCpuGroups(place.tree.root, 1, place.tree.files)
    found = KernelGroupLocator(place.tree, (cpu,)).locate(ID, RuntimeDetail(f"/odd/place/{ID}"))
    assert found.path == cpu.find("/kubepods/podx", ID) == path
    again = KernelCpuGroups(place.tree.root, 1, place.tree.files)
    memory = KernelMemory(place.tree.root, place.tree.version)
    (place.tree.root / path / "memory.numa_stat").write_text("total=0 N0=0\nfile=0 N0=0\n")
    assert memory.memory_use("/kubepods/podx", "another") is None
    KernelGroupLocator(place.tree, (again, memory)).remember(ID, path)
    assert again.find("/kubepods/podx", ID) == path
    place.make("kubepods/podx")  # at the path that follows from its name, so that no search is needed
    assert memory.memory_use("/kubepods/podx", ID) is not None


def test_the_group_of_this_process_is_found() -> None:
    """On this machine, whatever hierarchy it has: the group that is found holds this process."""
    try:
        groups = open_cgroups(Path("/sys/fs/cgroup"))
    except CgroupError:
        pytest.skip("no cpuset controller here")
    reported = cgroup_of_process(Path("/proc/self/cgroup").read_text(), groups.version)
    place = path_below_mount(reported or "/", visible_root(read_mounts(Path("/proc")), groups.root))
    if reported is None or place is None or place.hidden_levels:
        pytest.skip("this process is outside of what is mounted")
    procs = (groups.root / place.path / "cgroup.procs").read_text().split()
    assert str(os.getpid()) in procs or "0" in procs


# Hierarchies at unusual places.


def write_tree(root: Path, lines: list[str], **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("".join(f"{line}\n" for line in lines))
    return root


def test_v1_is_found_by_its_mount_if_v2_has_the_usual_place(tmp_path: Path) -> None:
    sys, mnt = tmp_path / "sys", tmp_path / "mnt/sets"
    write_tree(
        tmp_path,
        [f"1 0 0:1 / {sys} rw - cgroup2 cgroup2 rw", f"2 0 0:2 / {mnt} rw - cgroup none rw,cpuset,cpu"],
        sys__cgroup_dot_controllers="memory\n",
        mnt__sets__cpuset_dot_cpus="0-3\n",
        mnt__sets__cpu_dot_cfs_quota_us="-1\n",
        mnt__sets__g__cpuset_dot_memory_migrate="0\n",
    )
    found = open_cgroups(sys, tmp_path / "proc")
    assert (type(found), found.root, found.version) == (KernelCgroups, mnt, 1)
    cpu = open_cpu_groups(sys, tmp_path / "proc")
    assert (cpu.root, cpu.version) == (mnt, 1)
    memory = open_memory(sys, tmp_path / "proc")
    assert memory is not None
    assert (memory.root, memory.version, memory.v1_cpuset_root) == (sys, 2, mnt)
    assert not memory.migrates_pages("g"), "it is the cpuset controller's side that moves pages, or does not"
    with pytest.raises(CgroupError, match="cannot find the kernel's CPU times"):
        open_usage(sys, tmp_path / "proc", tmp_path / "proc")


def test_v2_is_found_by_its_mount(tmp_path: Path) -> None:
    other = tmp_path / "sys/second"
    write_tree(
        tmp_path,
        [f"1 0 0:1 / {other} rw - cgroup2 cgroup2 rw"],
        sys__second__cgroup_dot_controllers="cpuset cpu memory\n",
        sys__second__cpu_dot_stat="usage_usec 1\n",
    )
    for found in (
        open_cgroups(tmp_path / "sys", tmp_path / "proc"),
        open_cpu_groups(tmp_path / "sys", tmp_path / "proc"),
        open_memory(tmp_path / "sys", tmp_path / "proc"),
    ):
        assert found is not None
        assert (found.root, found.version) == (other, 2)
    assert open_usage(tmp_path / "sys", tmp_path / "proc", tmp_path / "proc")._file == V2_FILE


def test_v1_memory_is_found_by_its_mounts(tmp_path: Path) -> None:
    points = {name: tmp_path / "sys" / name for name in ("ram", "big", "sets")}
    write_tree(
        tmp_path,
        [
            f"1 0 0:1 / {points[name]} rw - cgroup cgroup rw,{controller}"
            for name, controller in (("ram", "memory"), ("big", "hugetlb"), ("sets", "cpuset"))
        ],
        sys__ram__memory_dot_numa_stat="total=0 N0=0\nfile=0 N0=0\n",
    )
    memory = open_memory(tmp_path / "sys", tmp_path / "proc")
    assert memory is not None
    found = (memory.root, memory.version, memory.hugetlb_root, memory.v1_cpuset_root)
    assert found == (points["ram"], 1, points["big"], points["sets"])


def test_joined_accounting_is_found_by_its_mount(tmp_path: Path) -> None:
    point = tmp_path / "sys/both"
    write_tree(
        tmp_path,
        [f"1 0 0:1 / {point} rw - cgroup cgroup rw,cpuacct,cpu"],
        sys__both__cpuacct_dot_usage="1\n",
    )
    usage = open_usage(tmp_path / "sys", tmp_path / "proc", tmp_path / "proc")
    assert (usage.root, usage._file) == (point, V1_FILE)
