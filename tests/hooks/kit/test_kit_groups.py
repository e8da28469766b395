"""Removing a pod's quota and disabling load balancing, on simulated cgroup directories."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from proxy.hooks.facts import PodFacts
from proxy.hooks.kit.groups import disable_load_balancing, open_quota
from proxy.model.errors import HookError

UID = "0f9a3c52-6f0f-4c43-9d0e-3f6d5a1c7e11"
SLICE = f"kubepods-pod{UID.replace('-', '_')}.slice"
ID = "c0a1" * 16


def make(root: Path, path: str, **files: str) -> Path:
    directory = root / path
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name.replace("_", ".", 1)).write_text(f"{text}\n")
    return directory


def pod(parent: str, uid: str = UID) -> PodFacts:
    return PodFacts(uid=uid, cgroup_parent=parent)


def test_the_quota_of_a_pod_is_removed_on_cgroup_v1(tmp_path: Path) -> None:
    group = make(tmp_path, f"cpu,cpuacct/kubepods/pod{UID}", cpu_cfs_quota_us="400000")
    assert open_quota(tmp_path, pod(f"/kubepods/pod{UID}"))
    assert (group / "cpu.cfs_quota_us").read_text() == "-1\n"
    assert not open_quota(tmp_path, pod(f"/kubepods/pod{UID}")), "it has none any more"


def test_the_quota_of_a_pod_is_removed_on_cgroup_v2_under_systemd(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu cpuset")
    group = make(tmp_path, f"kubepods.slice/{SLICE}", cpu_max="400000 100000")
    assert open_quota(tmp_path, pod(SLICE))
    assert (group / "cpu.max").read_text() == "max\n"
    assert not open_quota(tmp_path, pod(SLICE))


@pytest.mark.parametrize(
    ("parent", "uid"),
    [
        ("/kubepods", UID),
        ("/kubepods", "pods"),
        ("/kubepods", ""),
        ("", UID),
        (f"/other/../kubepods/pod{UID}", UID),
        (f"/kubepods/pod{UID}x", UID),
        ("/kubepods/podgone", "gone"),
    ],
)
def test_a_cgroup_that_is_not_of_this_pod_alone_is_not_changed(tmp_path: Path, parent: str, uid: str) -> None:
    names = ("kubepods", f"kubepods/pod{UID}", f"kubepods/pod{UID}x", "other")
    files = [make(tmp_path / "cpu", name, cpu_cfs_quota_us="1") / "cpu.cfs_quota_us" for name in names]
    assert not open_quota(tmp_path, pod(parent, uid))
    assert {file.read_text() for file in files} == {"1\n"}


def test_a_quota_that_cannot_be_written_is_an_error_unless_the_pod_left(tmp_path: Path) -> None:
    make(tmp_path, f"cpu/kubepods/pod{UID}", cpu_cfs_quota_us="1")

    def fail(number: int) -> bool:
        def put(path: Path, value: str) -> None:
            raise OSError(number, "no")

        return open_quota(tmp_path, pod(f"/kubepods/pod{UID}"), put)

    assert not fail(errno.ENODEV)
    with pytest.raises(HookError, match=r"cannot take the quota off .*: no"):
        fail(errno.EROFS)
    with pytest.raises(HookError, match="cannot find the controller cpu"):
        open_quota(tmp_path / "nothing", pod(f"/kubepods/pod{UID}"))


def test_disabling_load_balancing_names_the_ancestor_that_undoes_it(tmp_path: Path) -> None:
    balance = {"cpuset_sched_load_balance": "1"}
    make(tmp_path, "cpuset", **balance)
    make(tmp_path, "cpuset/kubepods", cpuset_sched_load_balance="0")
    make(tmp_path, f"cpuset/kubepods/pod{UID}", **balance)
    group = make(tmp_path, f"cpuset/kubepods/pod{UID}/{ID}", **balance)
    above = disable_load_balancing(tmp_path, pod(f"/kubepods/pod{UID}"), ID)
    assert (group / "cpuset.sched_load_balance").read_text() == "0\n"
    assert above == (f"/kubepods/pod{UID}", "/")


def test_load_balancing_on_cgroup_v2_is_left_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset")
    with pytest.raises(HookError, match=r"apply\.partitions: isolated"):
        disable_load_balancing(tmp_path, pod("/kubepods"), ID)


@pytest.mark.parametrize("container_id", [ID, "", "..", "a/b"])
def test_a_container_without_a_cgroup_is_reported(tmp_path: Path, container_id: str) -> None:
    make(tmp_path, "cpuset/kubepods", cpuset_sched_load_balance="1")
    with pytest.raises(HookError, match="its cgroup was not found"):
        disable_load_balancing(tmp_path, pod("/kubepods"), container_id)
    assert (tmp_path / "cpuset/kubepods/cpuset.sched_load_balance").read_text() == "1\n"
