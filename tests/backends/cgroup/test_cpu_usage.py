"""Counters of CPU time, from files as the kernel writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.backends.cgroup import cpu_usage as module
from proxy.backends.cgroup.cpu_usage import V1_FILE, V2_FILE, CgroupUsage, open_usage
from proxy.engine.be_usage import UsageGroup, UsageReading
from proxy.model.errors import CgroupError

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
STAT = "cpu  100 20 30 4000 500 6 7 80 9 10\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
POD = "/kubepods/besteffort/podb"


class Tree:
    """Counters in a directory."""

    def __init__(self, directory: Path, file: str) -> None:
        self.root, self.proc, self.file = directory / "cg", directory / "proc", file
        self.root.mkdir()
        self.proc.mkdir()
        (self.proc / "stat").write_text(STAT)
        self.usage = CgroupUsage(self.root, file, self.proc)

    def put(self, path: str, nanoseconds: int) -> None:
        directory = self.root / path
        directory.mkdir(parents=True, exist_ok=True)
        v2 = f"usage_usec {nanoseconds // 1000}\nuser_usec 1\nsystem_usec 1\n"
        (directory / self.file).write_text(f"{nanoseconds}\n" if self.file == V1_FILE else v2)

    def read(self, **groups: UsageGroup) -> UsageReading:
        return self.usage.read(groups)


@pytest.fixture(params=[V1_FILE, V2_FILE])
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tree]:
    tree = Tree(tmp_path, request.param)
    yield tree
    tree.usage.close()


def test_pods_and_the_node_are_counted(tree: Tree) -> None:
    tree.put("kubepods/besteffort/podb", 7_000_000)
    tree.put("kubepods.slice/kubepods-podg.slice", 9_000_000)
    reported = tree.read(
        b=UsageGroup(POD), g=UsageGroup("kubepods-podg.slice"), gone=UsageGroup("/kubepods/podx")
    )
    assert reported.groups == {
        "b": {"kubepods/besteffort/podb": 7_000_000},
        "g": {"kubepods.slice/kubepods-podg.slice": 9_000_000},
    }
    assert reported.node == (100 + 20 + 30 + 6 + 7) * TICK_NS


def test_a_pod_without_a_group_is_the_sum_of_its_containers(tree: Tree) -> None:
    tree.put("k8s.io/c1", 1000)
    tree.put("system.slice/cri-containerd-c2.scope", 2000)
    reported = tree.read(p=UsageGroup("", ("c1", "c2", "c3")))
    assert reported.groups == {"p": {"k8s.io/c1": 1000, "system.slice/cri-containerd-c2.scope": 2000}}


def test_files_stay_open_and_are_read_again(tree: Tree) -> None:
    tree.put("kubepods/poda", 1000)
    first = tree.read(a=UsageGroup("/kubepods/poda"))
    count = len(os.listdir("/proc/self/fd"))
    tree.put("kubepods/poda", 5000)
    again = tree.read(a=UsageGroup("/kubepods/poda"))
    assert (first.groups["a"], again.groups["a"]) == ({"kubepods/poda": 1000}, {"kubepods/poda": 5000})
    assert len(os.listdir("/proc/self/fd")) == count
    assert again.at > first.at
    tree.read()  # nothing reads this group any more
    assert len(os.listdir("/proc/self/fd")) == count - 1


def test_more_groups_than_open_files_are_read(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OPEN_FILES_LIMIT", 2)
    requested = {f"p{i}": UsageGroup(f"/kubepods/podp{i}") for i in range(5)}
    for i in range(5):
        tree.put(f"kubepods/podp{i}", 1000 * i)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        reported = tree.usage.read(requested).groups
        assert [reported[f"p{i}"][f"kubepods/podp{i}"] for i in range(5)] == [0, 1000, 2000, 3000, 4000]
    assert len(os.listdir("/proc/self/fd")) == before + 2


def test_without_proc_the_root_group_is_read(tree: Tree) -> None:
    (tree.proc / "stat").unlink()
    with pytest.raises(CgroupError, match="cannot read the node's CPU time"):
        tree.read()
    tree.put(".", 123_000)
    assert tree.read().node == 123_000


def test_an_invalid_counter_is_reported(tree: Tree) -> None:
    tree.put("kubepods/poda", 0)
    (tree.root / "kubepods/poda" / tree.file).write_text("much\n")
    with pytest.raises(CgroupError, match=r"^cannot read "):
        tree.read(a=UsageGroup("/kubepods/poda"))


def test_the_group_above_best_effort_pods(tree: Tree) -> None:
    find = tree.usage.best_effort_group
    assert find(["/x/kubepods/besteffort/poda", "/x/kubepods/besteffort/podb"]) == "x/kubepods/besteffort"
    slices = "kubepods.slice/kubepods-besteffort.slice"
    assert find(["kubepods-besteffort-poda.slice", "/odd/place/poda"]) == slices
    assert find(["/kubepods/poda", "", "/poda", "kubepods-burstable-podb.slice"]) == ""


@pytest.mark.parametrize(
    ("files", "where", "file"),
    [
        (["cpuacct/cpuacct.usage"], "cpuacct", V1_FILE),
        (["cpu,cpuacct/cpuacct.usage"], "cpu,cpuacct", V1_FILE),
        (["cgroup.controllers", "cpu.stat"], "", V2_FILE),
        (["unified/cgroup.controllers", "unified/cpu.stat"], "unified", V2_FILE),
        (["cpuacct/cpuacct.usage", "unified/cgroup.controllers", "unified/cpu.stat"], "cpuacct", V1_FILE),
    ],
)
def test_the_mount_with_the_counters_is_found(
    tmp_path: Path, files: list[str], where: str, file: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("0\n")
    found = open_usage(tmp_path)
    assert (found.root, found._file) == (tmp_path / where, file)


def test_a_named_cpuset_mount_leads_to_the_counters(tmp_path: Path) -> None:
    for name in ("cpuset/cpuset.cpus", "cpuacct/cpuacct.usage"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("0\n")
    assert open_usage(tmp_path / "cpuset").root.resolve() == tmp_path / "cpuacct"


def test_a_machine_without_counters_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CgroupError, match="cannot find the kernel's CPU times"):
        open_usage(tmp_path)
