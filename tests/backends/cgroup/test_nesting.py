"""Writes to parents and children that fail; those that succeed are tested in contract/test_cgroups.py."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from proxy.backends.cgroup.nesting import NestedLists, widen_below, write_narrowing_below
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, IdSet

ALL, FEW = CpuSet.parse("0-3"), CpuSet.parse("0")
BUSY = CgroupError("cannot set: a group below still holds it", errno.EBUSY)


class Groups:
    """Groups by path with their sets; some refuse every write."""

    def __init__(self, *paths: str, refuse: dict[str, int] | None = None) -> None:
        self.sets: dict[str, IdSet] = dict.fromkeys(paths, ALL)
        self.refuse = refuse or {}
        self.writes: list[str] = []

    def held(self, path: str) -> IdSet:
        return self.sets[path]

    def put(self, path: str, value: IdSet) -> None:
        self.writes.append(path)
        if number := self.refuse.get(path):
            raise CgroupError(f"cannot set {path}", number)
        if any(not self.sets[child] <= value for child in self.children(path)):
            raise CgroupError(f"cannot set {path}", errno.EBUSY)
        self.sets[path] = value

    def children(self, path: str) -> Sequence[str]:
        return [p for p in self.sets if p.rpartition("/")[0] == path]

    @property
    def lists(self) -> NestedLists:
        return NestedLists(self.held, self.put, self.children, 1)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EPERM, errno.ENOSPC])
def test_a_refused_write_below_is_the_error_of_the_group(number: int) -> None:
    groups = Groups("c", "c/a", "c/b", refuse={"c/b": number})
    with pytest.raises(CgroupError, match="cannot set c/b") as caught:
        write_narrowing_below(groups.lists, "c", FEW, BUSY)
    assert caught.value.errno == number
    assert "c" not in groups.writes
    assert groups.writes.count("c/b") == 1, "it is not tried again"


def test_a_group_that_no_longer_exists_is_skipped() -> None:
    groups = Groups("c", "c/a", "c/b", refuse={"c/a": errno.ENOENT})
    groups.sets["c/a"] = FEW

    def held(path: str) -> IdSet:
        if path == "c/a":
            raise CgroupError("cannot read: gone", errno.ENOENT)
        return groups.held(path)

    write_narrowing_below(NestedLists(held, groups.put, groups.children, 1), "c", FEW, BUSY)
    assert groups.sets["c"] == groups.sets["c/b"] == FEW


def test_a_group_that_stays_busy_ends_with_the_error() -> None:
    groups = Groups("c", "c/a", refuse={"c": errno.EBUSY})
    with pytest.raises(CgroupError, match="cannot set c") as caught:
        write_narrowing_below(groups.lists, "c", FEW, BUSY)
    assert caught.value.errno == errno.EBUSY
    assert groups.writes.count("c") == 3


def test_nothing_below_needs_no_write() -> None:
    groups = Groups("c")
    with pytest.raises(CgroupError) as caught:
        write_narrowing_below(groups.lists, "c", FEW, BUSY)
    assert caught.value is BUSY
    assert groups.writes == []


def test_groups_that_cannot_follow_are_skipped() -> None:
    groups = Groups("c", "c/a", "c/b", "c/b/d", refuse={"c/a": errno.EACCES})
    more = CpuSet.parse("0-7")
    groups.sets["c"] = more
    widen_below(groups.lists, "c", ALL, more)
    assert {p: str(s) for p, s in groups.sets.items()} == {
        "c": "0-7",
        "c/a": "0-3",
        "c/b": "0-7",
        "c/b/d": "0-7",
    }


@pytest.mark.parametrize("refuses", ["c", "c/b", "c/b/d"])
@pytest.mark.parametrize("value", ["0", "0,7"])
def test_a_group_that_cannot_be_narrowed_completely_is_restored(refuses: str, value: str) -> None:
    """The first child is narrowed; then the second one, its child, or the group itself refuses."""
    groups = Groups("c", "c/a", "c/a/e", "c/b", "c/b/d")
    groups.sets["c/a"] = groups.sets["c/a/e"] = CpuSet.parse("0-1")
    before = dict(groups.sets)
    want = CpuSet.parse(value)

    def put(path: str, new: IdSet) -> None:
        if path == refuses and not before[path] <= new:
            raise CgroupError(f"cannot set {path}", errno.EPERM)
        groups.put(path, new)

    with pytest.raises(CgroupError, match=f"cannot set {refuses}$"):
        write_narrowing_below(NestedLists(groups.held, put, groups.children, 1), "c", want, BUSY)
    assert "c/a" in groups.writes
    assert groups.sets == before


def test_a_foreign_write_in_between_is_kept() -> None:
    groups = Groups("c", "c/a", "c/b", refuse={"c/b": errno.EPERM})

    def put(path: str, new: IdSet) -> None:
        if path == "c/b":
            groups.sets["c/a"] = CpuSet.parse("0,2")
        groups.put(path, new)

    with pytest.raises(CgroupError):
        write_narrowing_below(NestedLists(groups.held, put, groups.children, 1), "c", FEW, BUSY)
    assert str(groups.sets["c/a"]) == "0,2"
