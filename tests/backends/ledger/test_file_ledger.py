"""The ledger on disk: restarts, crashes at every step, full disks, foreign files."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from proxy import atomic_write
from proxy.backends.ledger import FileLedger, file_ledger, open_ledger
from proxy.model.errors import CannotCreateError

NOON = 1_767_268_800.0  # 2026-01-01T12:00:00Z


def fresh(directory: Path, machine: str = "m1", **options: Any) -> FileLedger:
    """Open a ledger, which must report nothing."""
    ledger, notes = open_ledger(directory, machine, **options)
    assert notes == []
    return ledger


def stored(directory: Path) -> dict[str, Any]:
    ledger = fresh(directory)
    try:
        return dict(ledger.entries)
    finally:
        ledger.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.mark.parametrize("sync", [False, True])
def test_a_restart_finds_everything(home: Path, sync: bool) -> None:
    ledger = fresh(home, sync=sync)
    ledger.write({"a": {"cpus": "0-3"}, "b": {"n": 1}})
    ledger.write({"b": None, "c": {"list": [1, {"x": None}]}, "never": None})
    ledger.write({})
    expected = {"a": {"cpus": "0-3"}, "c": {"list": [1, {"x": None}]}}
    assert ledger.entries == expected
    ledger.close()
    assert stored(home) == expected


def test_only_the_owner_can_read_the_ledger(home: Path) -> None:
    fresh(home).close()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "ledger.jsonl").stat().st_mode) == 0o600
    (home / "ledger.jsonl").chmod(0o644)
    ledger, notes = open_ledger(home, "m1")
    ledger.close()
    assert "0600" in notes[0]
    assert stat.S_IMODE((home / "ledger.jsonl").stat().st_mode) == 0o600
    home.chmod(0o777)
    ledger, notes = open_ledger(home, "m1")
    ledger.close()
    assert "others may write" in notes[0]
    assert stat.S_IMODE(home.stat().st_mode) == 0o777  # the directory may belong to another program


def test_readers_keep_what_they_saw(home: Path) -> None:
    ledger = fresh(home)
    ledger.write({"a": {}})
    seen = ledger.entries
    ledger.write({"b": {}, "a": None})
    assert seen == {"a": {}}
    with pytest.raises(TypeError):
        seen["x"] = {}  # type: ignore[index]
    ledger.close()


def test_nothing_is_written_after_close(home: Path) -> None:
    ledger = fresh(home)
    ledger.close()
    ledger.close()
    with pytest.raises(CannotCreateError, match="closed"):
        ledger.write({"a": {}})
    assert stored(home) == {}


def test_an_unfinished_end_is_cut_and_writing_continues(home: Path) -> None:
    ledger = fresh(home)
    ledger.write({"a": {}})
    ledger.write({"b": {}})
    ledger.close()
    file = home / "ledger.jsonl"
    file.write_bytes(file.read_bytes()[:-3])
    ledger, notes = open_ledger(home, "m1")
    assert "repaired" in notes[0]
    assert ledger.entries == {"a": {}}
    assert file.read_bytes().endswith(b'{"a":{}}}\n')
    ledger.write({"c": {}})
    ledger.close()
    assert stored(home) == {"a": {}, "c": {}}


@pytest.mark.parametrize(
    "damage", ["middle", "machine", "format", "directory", "symlink", "dangling", "fifo", "empty"]
)
def test_what_is_not_ours_is_put_aside_and_kept(home: Path, damage: str) -> None:
    ledger = fresh(home, "m2" if damage == "machine" else "m1")
    for name in "abc":
        ledger.write({name: {}})
    ledger.close()
    file = home / "ledger.jsonl"
    data = file.read_bytes()
    if damage == "middle":
        file.write_bytes(data.replace(b'"b"', b'"B"'))
    elif damage == "format":
        file.write_bytes(b"some other program's file\n")
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage != "machine":
        file.unlink()
        {
            "directory": lambda: file.mkdir(),
            "symlink": lambda: (home / "target").write_bytes(data) and file.symlink_to(home / "target"),
            "dangling": lambda: file.symlink_to(home / "nowhere"),
            "fifo": lambda: os.mkfifo(file),
        }[damage]()
    ledger, notes = open_ledger(home, "m1", now=lambda: NOON)
    assert ledger.entries == {}
    assert len(notes) == 1
    assert "ledger.jsonl.bad-20260101T120000Z" in notes[0]
    assert os.path.lexists(home / "ledger.jsonl.bad-20260101T120000Z")
    if damage == "symlink":
        assert (home / "target").read_bytes() == data
    ledger.write({"z": {}})
    ledger.close()
    assert stored(home) == {"z": {}}
    file.write_bytes(b"again\n")
    ledger, notes = open_ledger(home, "m1", now=lambda: NOON)
    ledger.close()
    assert "bad-20260101T120000Z-2" in notes[0]


def test_a_file_of_absurd_size_is_not_read(home: Path) -> None:
    fresh(home).close()
    os.truncate(home / "ledger.jsonl", 1 << 40)
    ledger, notes = open_ledger(home, "m1", now=lambda: NOON)
    ledger.close()
    assert "bytes long" in notes[0]


@pytest.mark.parametrize("where", ["a file", "a read-only place"])
def test_an_impossible_directory_is_an_error(tmp_path: Path, where: str) -> None:
    if where == "a file":
        (tmp_path / "x").write_text("")
        bad = tmp_path / "x"
    else:
        bad = Path("/proc/topoproxy")
    with pytest.raises(CannotCreateError, match="cannot open the ledger"):
        open_ledger(bad, "m1")


def test_a_ledger_that_cannot_be_read_is_closed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(home).close()
    opened: list[int] = []
    real_open = os.open

    def open_file(*args: Any, **options: Any) -> int:
        opened.append(real_open(*args, **options))
        return opened[-1]

    def fail(*_: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(file_ledger.os, "open", open_file)
    monkeypatch.setattr(file_ledger.os, "read", fail)
    with pytest.raises(CannotCreateError, match=r"cannot open the ledger .*: Input/output error"):
        open_ledger(home, "m1")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[-1])


class Disk:
    """Makes os.write fail: after some bytes, or at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.number = errno.ENOSPC
        self._write = os.write
        monkeypatch.setattr(file_ledger.os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        if self.room is None:
            return self._write(fd, data)
        if self.room == 0:
            raise OSError(self.number, os.strerror(self.number))
        return self._write(fd, data[: self.room])


@pytest.mark.parametrize(("room", "number"), [(0, errno.ENOSPC), (0, errno.EROFS), (7, errno.ENOSPC)])
def test_a_failed_write_changes_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, room: int, number: int
) -> None:
    ledger = fresh(home)
    ledger.write({"a": {}})
    size = (home / "ledger.jsonl").stat().st_size
    disk = Disk(monkeypatch)
    disk.room, disk.number = room, number
    with pytest.raises(CannotCreateError, match=r"cannot write the ledger .*: "):
        ledger.write({"b": {}})
    assert ledger.entries == {"a": {}}
    assert (home / "ledger.jsonl").stat().st_size == size
    disk.room = None
    ledger.write({"c": {}})
    ledger.close()
    assert stored(home) == {"a": {}, "c": {}}


def test_a_torn_write_that_cannot_be_truncated_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = fresh(home)
    ledger.write({"a": {}})
    disk = Disk(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(
            file_ledger.os, "ftruncate", lambda fd, size: (_ for _ in ()).throw(OSError(errno.EIO, "io"))
        )
        disk.room = 7
        with pytest.raises(CannotCreateError):
            ledger.write({"b": {}})
        disk.room = None
        with pytest.raises(CannotCreateError):  # it would follow the torn record
            ledger.write({"c": {}})
    ledger.write({"d": {}})
    ledger.close()
    assert stored(home) == {"a": {}, "d": {}}


def test_a_file_that_another_program_removed_or_cut_is_made_again(home: Path) -> None:
    ledger = fresh(home)
    ledger.write({"a": {}})
    (home / "ledger.jsonl").unlink()
    ledger.write({"b": {}})
    os.truncate(home / "ledger.jsonl", 5)
    ledger.write({"c": {}})
    ledger.close()
    assert stored(home) == {"a": {}, "b": {}, "c": {}}


def test_a_file_that_another_program_renamed_or_replaced_is_made_again(home: Path) -> None:
    ledger = fresh(home)
    ledger.write({"a": {}})
    (home / "ledger.jsonl").rename(home / "moved")
    ledger.write({"b": {}})
    former = (home / "moved").read_bytes()
    (home / "ledger.jsonl").rename(home / "kept")
    (home / "ledger.jsonl").write_bytes(former)
    ledger.write({"c": {}})
    ledger.close()
    assert (home / "moved").read_bytes() == former, "only the file of that name is written"
    assert stored(home) == {"a": {}, "b": {}, "c": {}}


def test_the_file_stays_short(home: Path) -> None:
    ledger = fresh(home)
    largest = 0
    for number in range(2000):
        ledger.write({f"k{number % 20}": {"n": number, "text": "x" * 100}})
        largest = max(largest, (home / "ledger.jsonl").stat().st_size)
    assert largest < 66 * 1024
    assert not ledger.problem
    expected = dict(ledger.entries)
    ledger.close()
    assert len(expected) == 20
    assert stored(home) == expected
    assert os.listdir(home) == ["ledger.jsonl"]


def test_a_compaction_that_fails_loses_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = fresh(home)
    tries = []

    def fail(fd: int) -> None:
        tries.append(fd)
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(file_ledger.os, "fsync", fail)
        for number in range(1000):
            ledger.write({"k": {"n": number, "text": "x" * 200}})
    assert ledger.problem == f"{home / 'ledger.jsonl'}: no space"
    assert 1 <= len(tries) <= 3  # not with each write
    while ledger.problem:
        ledger.write({"k": {"n": 999, "text": "x" * 200}})
    ledger.close()
    assert stored(home) == {"k": {"n": 999, "text": "x" * 200}}


class Killed(BaseException):
    """Raised instead of ending the process."""


@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace", "after"])
def test_a_process_killed_during_a_compaction_loses_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    ledger = fresh(home)
    ledger.write({"a": {"n": 1}})
    ledger.write({"a": {"n": 2}, "b": {}})

    def die(*args: Any, **options: Any) -> Any:
        raise Killed

    def half(fd: int, data: bytes) -> int:
        write(fd, data[: len(data) // 2])
        raise Killed

    write = os.write
    with monkeypatch.context() as patch:
        if step == "open":
            patch.setattr(file_ledger.os, "open", die)
        elif step == "write":
            patch.setattr(file_ledger.os, "write", half)
        elif step == "fsync":
            patch.setattr(file_ledger.os, "fsync", die)
        elif step == "replace":
            patch.setattr(file_ledger.Path, "replace", die)
        else:
            patch.setattr(atomic_write, "sync_directory", die)
        with pytest.raises(Killed):
            ledger._compact()
    assert stored(home) == {"a": {"n": 2}, "b": {}}
    assert os.listdir(home) == ["ledger.jsonl"]
    os.close(ledger._fd)


def test_concurrent_writers_lose_nothing(home: Path) -> None:
    ledger = fresh(home)

    def work(name: str) -> None:
        for number in range(300):
            ledger.write({f"{name}{number % 7}": {"n": number, "pad": "x" * 60}})

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = dict(ledger.entries)
    ledger.close()
    assert len(expected) == 28
    assert stored(home) == expected


CHILD = """
import sys
from pathlib import Path
from proxy.backends.ledger import open_ledger
ledger, _ = open_ledger(Path(sys.argv[1]), "m1")
number = max([int(e["n"]) for e in ledger.entries.values()], default=0)
while True:
    number += 1
    ledger.write({f"k{number % 5}": {"n": number, "pad": "x" * 500}, "last": {"n": number}})
    print(number, flush=True)
"""


def test_acknowledged_writes_survive_a_kill(home: Path) -> None:
    """Each write that the process has acknowledged is in the file, whenever the process is killed."""
    root = Path(__file__).resolve().parents[3]
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(home)], cwd=root, stdout=subprocess.PIPE)
        assert child.stdout is not None
        for _ in range(200):
            reported = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.stdout.close()
        child.wait()
        reported = int(rest[-1]) if rest else reported
        ledger, _ = open_ledger(home, "m1")
        last = ledger.entries["last"]["n"]
        assert last in (reported, reported + 1)
        assert ledger.entries[f"k{last % 5}"]["n"] == last
        ledger.close()
