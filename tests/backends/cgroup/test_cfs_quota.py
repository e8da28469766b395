"""Finding the cpu controller; its quotas are tested in tests/contract/test_cpu_quota.py."""

import errno
import os
from pathlib import Path

import pytest

from proxy.backends.cgroup.cfs_quota import KernelCpuGroups, open_cpu_groups
from proxy.model.errors import CgroupError


def v1(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cpu.cfs_quota_us").write_text("-1\n")
    return directory


def v2(directory: Path, controllers: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cgroup.controllers").write_text(controllers)
    return directory


@pytest.mark.parametrize("name", ["cpu", "cpu,cpuacct", "cpuacct,cpu", ""])
def test_the_v1_mount_is_found_under_each_of_its_names(tmp_path: Path, name: str) -> None:
    mount = v1(tmp_path / name)
    found = open_cpu_groups(tmp_path)
    assert (found.root, found.version) == (mount, 1)


def test_a_named_cpuset_mount_leads_to_the_cpu_mount(tmp_path: Path) -> None:
    (tmp_path / "cpuset").mkdir()
    (tmp_path / "cpuset/cpuset.cpus").write_text("0-3\n")
    mount = v1(tmp_path / "cpu,cpuacct")
    assert open_cpu_groups(tmp_path / "cpuset").root == mount


@pytest.mark.parametrize("name", ["", "unified"])
def test_the_v2_mount_is_found_alone_and_under_unified(tmp_path: Path, name: str) -> None:
    mount = v2(tmp_path / name, "cpuset cpu io memory")
    found = open_cpu_groups(tmp_path)
    assert (found.root, found.version) == (mount, 2)


def test_v1_goes_before_a_v2_side_without_the_controller(tmp_path: Path) -> None:
    v2(tmp_path / "unified", "")
    mount = v1(tmp_path / "cpu")
    assert (open_cpu_groups(tmp_path).root, open_cpu_groups(tmp_path).version) == (mount, 1)


@pytest.mark.parametrize("controllers", [None, "cpuset io", "cpuacct"])
def test_a_machine_without_the_controller_is_reported(tmp_path: Path, controllers: str | None) -> None:
    if controllers is not None:
        v2(tmp_path, controllers)
    (tmp_path / "cpu").mkdir()
    with pytest.raises(CgroupError, match="cannot find the cpu controller"):
        open_cpu_groups(tmp_path)


def test_a_file_that_is_not_writable_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v1(tmp_path / "cpu")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CgroupError, match=r"cannot write to .*/cpu: it is mounted read-only"):
        open_cpu_groups(tmp_path)


def test_a_group_without_the_controller(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(CgroupError, match="not enabled") as caught:
        KernelCpuGroups(tmp_path, 2).quota("a")
    assert caught.value.errno == errno.EOPNOTSUPP


@pytest.mark.parametrize("text", ["", "many\n"])
def test_an_unreadable_quota_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu.cfs_quota_us").write_text(text)
    (tmp_path / "cpu.max").write_text(text)
    for version in (1, 2):
        with pytest.raises(CgroupError, match="cannot read"):
            KernelCpuGroups(tmp_path, version).quota("")


def test_another_writer_is_noticed(tmp_path: Path) -> None:
    class IgnoredWrites:
        def read(self, path: str, name: str) -> str:
            return "20000\n"

        def write(self, path: str, name: str, text: str) -> None:
            pass

        def is_group(self, path: str) -> bool:
            return True

        def children(self, path: str) -> list[str]:
            return []

    with pytest.raises(CgroupError, match="reads 20000 afterwards"):
        KernelCpuGroups(tmp_path, 1, IgnoredWrites()).set_quota("a", -1)
