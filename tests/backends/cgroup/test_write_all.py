"""Bulk writes of many groups, and which groups are left to the careful single writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.cgroup.files import QUICK_WRITE_LIMIT_BYTES, OsCgroupFiles
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet

NAMES = ("a", "b", "c")
ALL, FEW = CpuSet.parse("0-3"), CpuSet.parse("0-2")


def write_tree(root: Path, version: int = 1, effective: str = "") -> KernelCgroups:
    for name in NAMES:
        (root / name).mkdir()
        put(root, name, "0-3\n")
        if version == 2:
            (root / name / "cpuset.cpus.effective").write_text(effective)
    return KernelCgroups(root, version)


def put(root: Path, name: str, text: str) -> None:
    (root / name / "cpuset.cpus").write_text(text)


def seen(root: Path, name: str) -> str:
    return (root / name / "cpuset.cpus").read_text()


def counted(monkeypatch: pytest.MonkeyPatch, call: str) -> list[int]:
    """Count the calls of a function of ``os``."""
    real: Callable[..., object] = getattr(os, call)
    calls: list[int] = []

    def counting(fd: int, *args: object) -> object:
        calls.append(fd)
        return real(fd, *args)

    monkeypatch.setattr(os, call, counting)
    return calls


def test_a_group_that_has_the_set_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = write_tree(tmp_path)
    put(tmp_path, "b", "0-2\n")
    writes = counted(monkeypatch, "pwrite")
    assert groups.write_all(NAMES, FEW) == [True, False, True]
    assert [seen(tmp_path, name) for name in NAMES] == ["0-2\n"] * 3
    assert len(writes) == 2
    assert groups.write_all(NAMES, FEW) == [False] * 3
    assert len(writes) == 2


def test_a_known_set_is_read_only_after_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = write_tree(tmp_path)
    reads = counted(monkeypatch, "pread")
    assert groups.write_all(NAMES, FEW, ALL) == [True] * 3
    assert len(reads) == 3
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: len(data))
    assert groups.write_all(NAMES, ALL, FEW) == [None] * 3, "it was written, and does not hold"


def test_missing_or_busy_groups_block_no_other(tmp_path: Path) -> None:
    groups = write_tree(tmp_path)
    long = ",".join(str(cpu) for cpu in range(0, 400, 2)) + "\n"
    assert len(long) > QUICK_WRITE_LIMIT_BYTES
    put(tmp_path, "b", long)
    assert groups.write_all(("gone", *NAMES, ""), FEW) == [None] * 5, "the root is not written"
    assert groups.write_all(("gone", *NAMES), FEW) == [None, True, None, True]
    assert seen(tmp_path, "b") == long
    assert groups.write_all(NAMES, CpuSet.parse(long.strip())) == [None] * 3
    assert groups.write_all(NAMES, CpuSet()) == [None] * 3
    assert seen(tmp_path, "a") == "0-2\n"


def test_a_bulk_write_stops_on_request(tmp_path: Path) -> None:
    groups = write_tree(tmp_path)
    answers = iter((True, False, True))
    assert groups.write_all(NAMES, FEW, None, lambda: next(answers)) == [True, None, None]
    assert [seen(tmp_path, name) for name in NAMES] == ["0-2\n", "0-3\n", "0-3\n"]


@pytest.mark.parametrize("known", [FEW, None])
def test_child_groups_follow_a_group_that_has_grown(tmp_path: Path, known: CpuSet | None) -> None:
    groups = write_tree(tmp_path)
    for name, text in (
        ("a", "0-2\n"),
        ("a/all", "0-2\n"),
        ("a/few", "1\n"),
        ("b", "0-2\n"),
        ("b/all", "0-2"),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        put(tmp_path, name, text)
    assert groups.write_all(("a", "b"), ALL, known) == [True] * 2
    assert [seen(tmp_path, name).strip() for name in ("a/all", "a/few", "b/all")] == ["0-3", "1", "0-3"]
    assert groups.write_all(("a", "b"), FEW, ALL) == [True] * 2
    assert seen(tmp_path, "a/all").strip() == "0-3", "the kernel refuses a set that they do not fit into"


def test_on_v2_nothing_is_written_below_a_group_that_cannot_be_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a list that has no CPU of the pod, a container has all CPUs of the pod: others may own some."""
    for name, text in (
        ("pod", "0-3\n"),
        ("pod/a", "1\n"),
        ("pod/b", "1\n"),
        ("other", "0-3\n"),
        ("other/c", "5\n"),
    ):
        (tmp_path / name).mkdir()
        put(tmp_path, name, text)
    for name, text in (("pod", "0-3\n"), ("other", "0-5\n"), ("other/c", "5\n")):
        (tmp_path / name / "cpuset.cpus.effective").write_text(text)
    write = OsCgroupFiles.write

    def refuse(files: OsCgroupFiles, path: str, name: str, text: str) -> None:
        if path == "pod":
            raise OSError(errno.EBUSY, "")
        write(files, path, name, text)

    monkeypatch.setattr(OsCgroupFiles, "write", refuse)
    groups = KernelCgroups(tmp_path, 2)
    assert groups.write_all(("pod/a", "other/c", "pod/b"), CpuSet.parse("5")) == [None, False, None]
    assert [seen(tmp_path, name) for name in ("pod/a", "pod/b")] == ["1\n", "1\n"]
    with pytest.raises(CgroupError, match="EBUSY"):
        groups.write("pod/a", CpuSet.parse("5"), None)
    assert seen(tmp_path, "pod/a") == "1\n", "a single write does the same"


def test_on_v2_the_effective_list_counts(tmp_path: Path) -> None:
    groups = write_tree(tmp_path, 2, "0-2\n")
    (tmp_path / "b" / "cpuset.cpus.effective").write_text("0-3\n")
    assert groups.write_all(NAMES, FEW) == [True, None, True]
    assert groups.write_all(NAMES, FEW) == [False, None, False]
