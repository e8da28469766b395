"""Lines of mountinfo and of /proc/PID/cgroup, as kernels and containers show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.backends.cgroup.hierarchies import (
    HierarchyMount,
    MountedPath,
    cgroup_of_process,
    controller_mounts,
    mounts_elsewhere,
    parse_mounts,
    path_below_mount,
    read_mounts,
    v1_mounts,
    v2_mounts,
    visible_root,
)

HYBRID = """\
23 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
31 23 0:28 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 master:2 - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset,clone_children
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate
"""
V2_WITH_V1_ELSEWHERE = """\
30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw
50 23 0:40 / /mnt/my\\040cpusets rw,relatime - cgroup none rw,cpuset
"""
IN_A_CONTAINER = """\
60 50 0:31 /docker/ab12 /sys/fs/cgroup/cpuset ro,nosuid master:12 - cgroup cpuset rw,cpuset
61 50 0:31 / /host/cpuset rw - cgroup cpuset rw,cpuset
"""


def test_hierarchies_are_read_by_type_and_controller() -> None:
    assert parse_mounts(HYBRID) == [
        HierarchyMount(Path("/sys/fs/cgroup/cpu,cpuacct"), 1, frozenset(("rw", "cpu", "cpuacct"))),
        HierarchyMount(Path("/sys/fs/cgroup/cpuset"), 1, frozenset(("rw", "cpuset", "clone_children"))),
        HierarchyMount(Path("/sys/fs/cgroup/systemd"), 1, frozenset(("rw", "xattr", "name=systemd"))),
        HierarchyMount(Path("/sys/fs/cgroup/unified"), 2),
    ]
    assert list(v1_mounts(parse_mounts(HYBRID), "cpu")) == [Path("/sys/fs/cgroup/cpu,cpuacct")]
    assert list(v1_mounts(parse_mounts(V2_WITH_V1_ELSEWHERE), "cpuset")) == [Path("/mnt/my cpusets")]
    assert list(v2_mounts(parse_mounts(V2_WITH_V1_ELSEWHERE))) == [Path("/sys/fs/cgroup")]


def test_the_mount_of_the_whole_hierarchy_comes_first() -> None:
    mounts = parse_mounts(IN_A_CONTAINER)
    assert list(v1_mounts(mounts, "cpuset")) == [Path("/host/cpuset"), Path("/sys/fs/cgroup/cpuset")]
    assert visible_root(mounts, Path("/sys/fs/cgroup/cpuset")) == "/docker/ab12"
    assert visible_root(mounts, Path("/absent")) == "/"


@pytest.mark.parametrize("line", ["", "nonsense", "1 2 3 - cgroup cgroup rw,cpuset", "1 2 0:1 / /x rw"])
def test_invalid_lines_yield_no_mounts(line: str) -> None:
    assert parse_mounts(line) == []


V1_LINES = "9:name=systemd:/init\n5:cpuacct,cpu:/c\n3:cpuset:/kubepods/podx/ID\n0::/unified/ID\n"


@pytest.mark.parametrize(
    ("text", "version", "path"),
    [
        (V1_LINES, 1, "/kubepods/podx/ID"),
        (V1_LINES, 2, "/unified/ID"),
        ("0::/kubepods.slice/kubepods-podx.slice/cri-containerd-ID.scope\n", 1, None),
        ("0::/../../podx/ID\n", 2, "/../../podx/ID"),
        ("3:cpuset:/a:b/ID\n", 1, "/a:b/ID"),
        ("3:cpuset:/podx/ID (deleted)\n", 1, None),
        ("3:cpusets:/x\n4:mycpuset,x:/y\n", 1, None),
        ("", 2, None),
        ("garbage\n0:\n", 2, None),
    ],
)
def test_the_line_of_the_hierarchy_in_use(text: str, version: int, path: str | None) -> None:
    assert cgroup_of_process(text, version) == path


@pytest.mark.parametrize(
    ("path", "root", "place"),
    [
        ("/kubepods/podx/ID", "/", MountedPath("kubepods/podx/ID")),
        ("/docker/ab12/kubelet/podx/ID", "/docker/ab12", MountedPath("kubelet/podx/ID")),
        ("/docker/cd34/x", "/docker/ab12", None),
        ("/docker/ab123/x", "/docker/ab12", None),
        ("/docker/ab12", "/docker/ab12", MountedPath("")),
        # The reader is in a cgroup namespace four levels deep, and the machine's root is mounted.
        ("/../../../../kubepods/podx/ID", "/../../../..", MountedPath("kubepods/podx/ID")),
        ("/../../podx/ID", "/../../../..", MountedPath("podx/ID", 2)),
        ("/below/ID", "/..", MountedPath("below/ID", 1)),
        # The visible part of the tree does not contain the process.
        ("/../other/ID", "/", None),
        ("/../a/ID", "/../b", None),
    ],
)
def test_a_path_is_made_relative_to_a_mount(path: str, root: str, place: MountedPath | None) -> None:
    assert path_below_mount(path, root) == place


def write_tree(root: Path, mountinfo: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mountinfo)
    return root / "proc"


def test_mounts_are_only_taken_if_the_root_is_the_machines_own(tmp_path: Path) -> None:
    point = tmp_path / "sys/cpuset"
    procfs = write_tree(tmp_path, f"34 31 0:31 / {point} rw - cgroup cgroup rw,cpuset\n")
    assert [m.point for m in mounts_elsewhere(tmp_path / "sys", procfs)] == [point]
    assert [m.point for m in mounts_elsewhere(point, procfs)] == [point]
    assert [m.point for m in mounts_elsewhere(Path("/sys/fs/cgroup"), procfs)] == [point]
    assert mounts_elsewhere(tmp_path / "sy", procfs) == []
    assert mounts_elsewhere(tmp_path / "other", procfs) == []
    assert read_mounts(tmp_path / "absent") == []


def test_v1_without_prefix_and_v2_without_the_controller_are_passed_over(tmp_path: Path) -> None:
    plain, good, v2, bare = (tmp_path / name for name in ("plain", "good", "v2", "bare"))
    for directory in (plain, good, v2, bare):
        directory.mkdir()
    (plain / "cpus").touch()
    (good / "cpuset.cpus").touch()
    (v2 / "cgroup.controllers").write_text("cpu cpuset memory\n")
    (bare / "cgroup.controllers").write_text("cpu\n")
    (bare / "cpu.stat").touch()
    mounts = [
        HierarchyMount(plain, 1, frozenset({"cpuset"})),
        HierarchyMount(bare, 2),
        HierarchyMount(v2, 2),
        HierarchyMount(good, 1, frozenset({"cpuset"})),
    ]
    assert list(controller_mounts(mounts, "cpuset", "cpuset.cpus")) == [(good, 1), (v2, 2)]
    assert list(controller_mounts(mounts, "cpuacct", "cpuacct.usage", always="cpu.stat")) == [(bare, 2)]
