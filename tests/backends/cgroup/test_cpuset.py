"""Which hierarchy is used, and error messages; the write rules are tested in contract/test_cgroups.py."""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.cgroup.cpuset import KernelCgroups, open_cgroups
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "version", "mount"),
    [
        ({"cpuset/cpuset.cpus": "0-3\n", "memory/tasks": ""}, 1, "cpuset"),
        ({"cpuset.cpus": "0-3\n", "cpuset.mems": "0\n"}, 1, ""),
        ({"cgroup.controllers": "cpuset cpu memory\n"}, 2, ""),
        ({"cpuset/cpuset.cpus": "0-3\n", "unified/cgroup.controllers": "hugetlb\n"}, 1, "cpuset"),
        ({"memory/tasks": "", "unified/cgroup.controllers": "cpuset memory\n"}, 2, "unified"),
        # A v2 hierarchy with a group called "cpuset", and a v2 group as the root.
        (
            {"cgroup.controllers": "cpuset\n", "cpuset/cpuset.cpus": "", "cpuset/cgroup.controllers": ""},
            2,
            "",
        ),
        ({"cgroup.controllers": "cpuset\n", "cpuset.cpus": "0\n"}, 2, ""),
    ],
)
def test_the_hierarchy_is_recognised(tmp_path: Path, files: dict[str, str], version: int, mount: str) -> None:
    groups = open_cgroups(write_tree(tmp_path, files))
    assert (groups.version, groups.root) == (version, tmp_path / mount)
    assert type(groups) is KernelCgroups


@pytest.mark.parametrize("files", [{}, {"cgroup.controllers": "cpu memory\n"}, {"memory/tasks": ""}])
def test_no_cpuset_controller(tmp_path: Path, files: dict[str, str]) -> None:
    with pytest.raises(CgroupError, match=r"cannot find the cpuset controller .*--cgroup-root"):
        open_cgroups(write_tree(tmp_path, files))


def test_a_directory_tree_opens_with_its_version(tmp_path: Path) -> None:
    made = FakeCgroups(tmp_path / "t", CpuSet.parse("0-3"), Mask.parse("0"), 2)
    made.mkdir("a")
    again = open_cgroups(tmp_path / "t")
    assert isinstance(again, FakeCgroups)
    assert again.version == 2
    assert again.read("a").effective_cpus == CpuSet.parse("0-3")
    (tmp_path / "t" / "folder-tree.json").write_text("{}")
    with pytest.raises(CgroupError, match="damaged"):
        open_cgroups(tmp_path / "t")


def test_v1_without_effective_files(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a/cpuset.cpus": "0-1\n", "a/cpuset.mems": "0\n"})
    value = KernelCgroups(tmp_path, 1).read("a")
    assert (value.effective_cpus, value.effective_mems) == (CpuSet.parse("0-1"), Mask.parse("0"))


def test_v2_group_without_the_controller(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    groups = KernelCgroups(tmp_path, 2)
    for call in (lambda: groups.read("a"), lambda: groups.write("a", CpuSet([0]), None)):
        with pytest.raises(CgroupError, match="subtree_control") as caught:
            call()
        assert caught.value.errno == errno.EOPNOTSUPP


def test_v2_root_has_no_configured_list(tmp_path: Path) -> None:
    write_tree(tmp_path, {"cpuset.cpus.effective": "0-7\n", "cpuset.mems.effective": "0\n"})
    value = KernelCgroups(tmp_path, 2).read("")
    assert not value.cpus
    assert value.effective_cpus == CpuSet.parse("0-7")


def test_an_invalid_list_in_a_file_is_reported(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a/cpuset.cpus": "pear\n", "a/cpuset.mems": "0\n"})
    with pytest.raises(CgroupError, match="cannot read CPUs of cgroup /a: 'pear"):
        KernelCgroups(tmp_path, 1).read("a")


class RefusingFiles:
    """Files that refuse or ignore writes."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.values = {"cpuset.cpus": "0\n", "cpuset.mems": "0\n"}
        self.writes: list[tuple[str, str, str]] = []

    def read(self, path: str, name: str) -> str:
        return self.values[name] if path != "pod" else "0-9\n"

    def write(self, path: str, name: str, text: str) -> None:
        self.writes.append((path, name, text))
        if self.number:
            raise OSError(self.number, "")

    def is_group(self, path: str) -> bool:
        return True

    def children(self, path: str) -> Sequence[str]:
        return []


@pytest.mark.parametrize(
    ("number", "message", "seen"),
    [
        (errno.EBUSY, "below still holds", errno.EBUSY),
        (errno.ENOSPC, "without any CPU", errno.ENOSPC),
        (errno.EROFS, "read-only", errno.EROFS),
        (errno.ENODEV, "gone", errno.ENOENT),
        (errno.EPERM, "run as root", errno.EPERM),
        (errno.EIO, "EIO", errno.EIO),
    ],
)
def test_refused_writes_are_explained(number: int, message: str, seen: int) -> None:
    with pytest.raises(CgroupError, match=message) as caught:
        KernelCgroups(Path("/none"), 1, RefusingFiles(number)).write("pod/c", CpuSet([1]), None)
    assert caught.value.errno == seen
    assert "cannot set CPUs to 1 in cgroup /pod/c" in str(caught.value)


def test_refused_permission_is_not_repeated_for_ever() -> None:
    files = RefusingFiles(errno.EACCES)
    with pytest.raises(CgroupError, match="EACCES"):
        KernelCgroups(Path("/none"), 1, files).write("pod/c", CpuSet([1]), None)
    assert files.writes == [("pod/c", "cpuset.cpus", "1")]


def test_parents_are_widened_for_no_other_error() -> None:
    files = RefusingFiles(errno.EBUSY)
    with pytest.raises(CgroupError, match="EBUSY"):
        KernelCgroups(Path("/none"), 1, files).write("pod/c", CpuSet([12]), None)
    assert files.writes == [("pod/c", "cpuset.cpus", "12")]


def test_a_value_that_does_not_stick_is_an_error() -> None:
    with pytest.raises(CgroupError, match="reads 0 afterwards"):
        KernelCgroups(Path("/none"), 1, RefusingFiles()).write("pod/c", CpuSet([1]), None)


def test_only_what_differs_is_written() -> None:
    files = RefusingFiles()
    assert KernelCgroups(Path("/none"), 1, files).write("pod/c", CpuSet([0]), Mask([0])) is False
    assert files.writes == []


@pytest.mark.parametrize(("cpus", "above"), [("5", "0-3,5"), ("3,5", "0-3")])
@pytest.mark.parametrize("many", [False, True])
def test_v2_parents_are_widened_before_a_list_outside_their_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: str, above: str, *, many: bool
) -> None:
    """Otherwise the container would temporarily have all CPUs of its pod, those of other containers too."""
    (tmp_path / "pod/c").mkdir(parents=True)
    pod = tmp_path / "pod/cpuset.cpus"
    for path, text in (("pod", "0-3"), ("pod/c", "1")):
        (tmp_path / path / "cpuset.cpus").write_text(f"{text}\n")
    (tmp_path / "pod/cpuset.cpus.effective").write_text("0-3\n")
    (tmp_path / "pod/c/cpuset.cpus.effective").write_text(f"{cpus}\n")
    groups, seen = KernelCgroups(tmp_path, 2), list[str]()
    write_all = groups._write_all_if_different

    def record_and_write(*args: Any) -> Any:
        seen.append(pod.read_text().strip())
        return write_all(*args)

    monkeypatch.setattr(groups, "_write_all_if_different", record_and_write)
    wanted = CpuSet.parse(cpus)
    assert groups.write_all(["pod/c"], wanted) == [True] if many else groups.write("pod/c", wanted, None)
    assert seen == [above]
