"""One set of cases for the simulated kernel of the executor's tests and for the real one."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from proxy.backends.cgroup.files import OsCgroupFiles
from proxy.backends.cgroup.inotify import InotifyWrites
from proxy.executor.kernel_ports import WriteEvents
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet
from tests.executor.played_writes import PlayedWrites

MOUNT = Path("/sys/fs/cgroup/cpuset")
BASE = "topoproxy-test-writes"


class Bed(Protocol):
    """Groups, and ways to write them."""

    writes: WriteEvents

    def make(self, name: str) -> str: ...

    def remove(self, path: str) -> None: ...

    def write(self, path: str) -> None:
        """Write the group's CPUs as another process."""

    def read(self, path: str) -> None: ...

    def close(self) -> None: ...


class PlayedBed:
    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.played = PlayedWrites(self.groups)
        self.writes: WriteEvents = self.played

    def make(self, name: str) -> str:
        self.groups.add(name)
        return name

    def remove(self, path: str) -> None:
        self.groups.discard(path)

    def write(self, path: str) -> None:
        self.played.write(path)

    def read(self, path: str) -> None:
        assert path in self.groups

    def close(self) -> None:
        self.writes.close()


class DirectoryBed:
    """A directory with plain files, as in the imitated tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writes: WriteEvents = InotifyWrites(root)

    def make(self, name: str) -> str:
        (self.root / name).mkdir()
        (self.root / name / "cpuset.cpus").write_text("0-1\n")
        return name

    def remove(self, path: str) -> None:
        for file in (self.root / path).iterdir():
            file.unlink()
        (self.root / path).rmdir()

    def write(self, path: str) -> None:
        subprocess.run(["sh", "-c", f"echo 0 > {self.root / path}/cpuset.cpus"], check=True)

    def read(self, path: str) -> None:
        (self.root / path / "cpuset.cpus").read_text()

    def close(self) -> None:
        self.writes.close()


class KernelBed(DirectoryBed):
    """Real groups (v1)."""

    def __init__(self) -> None:
        if os.geteuid() != 0 or not (MOUNT / "cpuset.cpus").is_file():
            pytest.skip("needs root and cgroup v1's cpuset controller")
        super().__init__(MOUNT)
        self.made: list[str] = []
        self._mkdir(BASE)

    def _mkdir(self, path: str) -> None:
        (MOUNT / path).mkdir()
        self.made.append(path)
        for file in ("cpuset.cpus", "cpuset.mems"):
            OsCgroupFiles(MOUNT).write(path, file, (MOUNT / file).read_text())

    def make(self, name: str) -> str:
        self._mkdir(f"{BASE}/{name}")
        return f"{BASE}/{name}"

    def remove(self, path: str) -> None:
        (MOUNT / path).rmdir()
        self.made.remove(path)

    def close(self) -> None:
        super().close()
        for path in reversed(self.made):
            (MOUNT / path).rmdir()


@pytest.fixture(params=["played", "directory", "cgroup v1"])
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    kind = request.param
    made: Bed = (
        PlayedBed() if kind == "played" else DirectoryBed(tmp_path) if kind == "directory" else KernelBed()
    )
    try:
        yield made
    finally:
        made.close()


def is_told(writes: WriteEvents) -> bool:
    return bool(select.select([writes], [], [], 0)[0])


def test_a_write_is_reported_once_and_a_read_is_not(bed: Bed) -> None:
    one, two = bed.make("one"), bed.make("two")
    assert bed.writes.watch(one)
    assert bed.writes.watch(two)
    bed.read(one)
    assert not is_told(bed.writes)
    assert bed.writes.read_events() == set()
    bed.write(one)
    bed.write(one)
    assert is_told(bed.writes)
    assert bed.writes.read_events() == {one}
    assert not is_told(bed.writes)
    bed.write(two)
    bed.write(one)
    assert bed.writes.read_events() == {one, two}


def test_watching_a_group_again_changes_nothing(bed: Bed) -> None:
    one = bed.make("one")
    assert bed.writes.watch(one)
    assert bed.writes.watch(one)
    assert bed.writes.watched() == {one}
    bed.write(one)
    assert bed.writes.read_events() == {one}
    bed.writes.unwatch(one)
    bed.write(one)
    assert bed.writes.read_events() == set()


def test_writes_to_an_unwatched_container_are_not_reported(bed: Bed) -> None:
    one, two = bed.make("one"), bed.make("two")
    bed.writes.watch(one)
    bed.writes.watch(two)
    bed.write(one)
    bed.writes.unwatch(one)
    bed.writes.unwatch("missing")
    assert bed.writes.read_events() == set()
    assert bed.writes.watched() == {two}


def test_a_missing_container_is_not_watched(bed: Bed) -> None:
    assert not bed.writes.watch("missing")
    assert bed.writes.watched() == set()


def test_a_group_of_the_same_name_is_another_one(bed: Bed) -> None:
    one = bed.make("one")
    bed.writes.watch(one)
    bed.remove(one)
    bed.make("one")
    assert bed.writes.watch(one)
    bed.writes.read_events()
    bed.write(one)
    assert bed.writes.read_events() == {one}
    bed.writes.unwatch(one)
    assert bed.writes.watched() == set()


def test_nothing_is_watched_after_the_close(bed: Bed) -> None:
    one = bed.make("one")
    bed.writes.watch(one)
    bed.writes.close()
    bed.writes.close()
    assert bed.writes.watched() == set()


# Rules of the real kernel only


def test_a_group_that_is_made_again_while_notifications_are_read(tmp_path: Path) -> None:
    """``watch`` runs in the kernel worker, between two steps of the loop that reads."""
    writes = InotifyWrites(tmp_path)
    file = tmp_path / "one" / "cpuset.cpus"
    file.parent.mkdir()
    file.write_text("0\n")
    assert writes.watch("one")
    file.unlink()
    file.write_text("0\n")

    class Paths(dict[int, str]):
        """Lets the worker run after the first look-up."""

        def get(self, key: int, default: Any = None) -> Any:
            found = super().get(key, default)
            writes._paths = dict(self)
            assert writes.watch("one")
            return found

    writes._paths = Paths(writes._paths)
    assert writes.read_events() == set()
    assert writes.watched() == {"one"}
    writes.close()


def test_an_overflow_is_reported(tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    writes = InotifyWrites(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpuset.cpus").write_text("0\n")
        assert writes.watch(name)
    one, two = (os.open(tmp_path / name / "cpuset.cpus", os.O_WRONLY) for name in ("one", "two"))
    for _ in range(limit // 2 + 1):  # the same event twice would be reported once
        os.pwrite(one, b"1\n", 0)
        os.pwrite(two, b"1\n", 0)
    os.close(one)
    os.close(two)
    assert writes.read_events() is None
    writes.read_events()
    writes.close()


def test_too_many_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = InotifyWrites(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one/cpuset.cpus").write_text("0\n")
    monkeypatch.setattr("ctypes.get_errno", lambda: 28)
    monkeypatch.setattr(writes, "_libc", _Refusing())
    with pytest.raises(CgroupError, match=r"cannot watch .*max_user_watches"):
        writes.watch("one")
    monkeypatch.undo()
    writes.close()


class _Refusing:
    def inotify_add_watch(self, *_: object) -> int:
        return -1


def test_a_write_by_us_and_by_another_mount_is_reported(tmp_path: Path) -> None:
    bed = KernelBed()
    try:
        one = bed.make("one")
        bed.writes.watch(one)
        OsCgroupFiles(MOUNT).write(one, "cpuset.cpus", str(CpuSet([0])))
        assert bed.writes.read_events() == {one}
        mount = f"mount -t cgroup -o cpuset cpuset {tmp_path}"
        write = f"echo 0 > {tmp_path}/{one}/cpuset.cpus"
        done = subprocess.run(["unshare", "-m", "sh", "-c", f"{mount} && {write}"], check=False)
        if done.returncode == 0:
            assert bed.writes.read_events() == {one}
    finally:
        bed.close()
