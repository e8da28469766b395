from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from proxy import atomic_write
from proxy.atomic_write import write_completely, write_file


def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the system calls, in order."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(fd: int) -> None:
        done.append("sync directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
        fsync(fd)

    def replaced(self: Path, target: Path) -> Path:
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(atomic_write.os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    return done


def test_a_file_is_synced_renamed_and_its_name_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = steps(monkeypatch)
    file = tmp_path / "file"
    file.write_text("old")
    write_file(file, b"new", mode=0o640)
    assert done == ["sync file", "rename", "sync directory"]
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_without_sync_is_only_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = steps(monkeypatch)
    write_file(tmp_path / "file", b"new", sync=False)
    assert done == ["rename"]


@pytest.mark.parametrize("step", ["write", "fsync", "fchmod"])
def test_a_failed_write_keeps_the_previous_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError(errno.EIO, "io")

    file = tmp_path / "file"
    file.write_text("old")
    monkeypatch.setattr(atomic_write.os, step, fail)
    with pytest.raises(OSError, match="io"):
        write_file(file, b"new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_draft_left_by_a_crash_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("whole")
    (tmp_path / ".file.new").symlink_to(tmp_path / "elsewhere")
    write_file(tmp_path / "file", b"new")
    assert (tmp_path / "elsewhere").read_text() == "whole"
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "file"]


def test_a_file_that_must_not_be_overwritten_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_file(file, b"first", overwrite=False)
    with pytest.raises(FileExistsError):
        write_file(file, b"second", overwrite=False)
    assert file.read_text() == "first"
    assert os.listdir(tmp_path) == ["file"]


def test_a_short_write_counts_as_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_write.os, "write", lambda fd, data: len(data) - 1)
    with (tmp_path / "file").open("wb") as opened, pytest.raises(OSError, match="space") as caught:
        write_completely(opened.fileno(), b"text")
    assert caught.value.errno == errno.ENOSPC
