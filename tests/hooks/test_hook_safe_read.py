"""Files are read completely, and only the file that was checked."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from proxy.hooks.loader.safe_read import (
    SETTLED_S,
    SIZE_LIMIT_BYTES,
    FileBeingWrittenError,
    UntrustedError,
    read,
    read_stable,
)
from proxy.model.errors import HookError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "10-a.py"
    made.write_text("one")
    made.chmod(0o644)
    return made


def settle() -> None:
    time.sleep(SETTLED_S + 0.05)


def test_a_file_is_read_when_it_has_not_changed_for_a_moment(file: Path) -> None:
    file.write_text("two")
    with pytest.raises(FileBeingWrittenError, match="written a moment ago"):
        read(file)
    assert read_stable(file).data == b"two"
    assert read(file).data == b"two"


def test_an_old_time_does_not_make_a_fresh_file_settled(file: Path) -> None:
    settle()
    file.write_text("two")
    os.utime(file, ns=(1, 1))
    with pytest.raises(FileBeingWrittenError):
        read(file)


def test_a_file_that_another_program_has_open_for_writing_waits_for_it(file: Path) -> None:
    with file.open("a"):
        settle()
        with pytest.raises(FileBeingWrittenError, match="another process has it open for writing"):
            read(file)
        with pytest.raises(
            HookError, match=f"cannot read hook {file}: another process has it open for writing"
        ):
            read_stable(file, timeout_s=0.1)
    assert read(file).data == b"one"


def test_without_leases_the_age_of_a_file_decides(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("proxy.hooks.loader.safe_read.fcntl.fcntl", refuse)
    with file.open("a"):
        settle()
        assert read(file).data == b"one"


def test_a_file_that_changes_while_it_is_read_is_read_later(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle()
    monkeypatch.setattr("proxy.hooks.loader.safe_read.fcntl.fcntl", lambda *_: 0)
    read_all = os.read

    def write_during_read(descriptor: int, most: int) -> bytes:
        data = read_all(descriptor, most)
        with file.open("a") as stream:
            stream.write("!")
        return data

    monkeypatch.setattr("proxy.hooks.loader.safe_read.os.read", write_during_read)
    with pytest.raises(FileBeingWrittenError, match="while it was read"):
        read(file)


def test_a_file_of_a_slow_writer_is_never_read_partially(file: Path) -> None:
    whole = b"x" * 100_000
    file.write_bytes(whole)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with file.open("wb") as stream:
                for at in range(0, len(whole), 20_000):
                    stream.write(whole[at : at + 20_000])
                    stream.flush()
                    time.sleep(0.1)
            stop.wait(0.4)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        good, until = 0, time.monotonic() + 30
        while good < 3 and time.monotonic() < until:
            try:
                assert len(read(file).data) == len(whole)
                good += 1
            except FileBeingWrittenError:
                pass
            time.sleep(0.02)
    finally:
        stop.set()
        writer.join()
    assert good == 3


def test_a_writer_during_a_read_ends_no_thread(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel signals the holder of the lease; SIGIO, its first choice, ends a process."""
    settle()
    read_all = os.read
    writers: list[threading.Thread] = []

    def write_during_read(descriptor: int, most: int) -> bytes:
        if not writers:
            writers.append(threading.Thread(target=lambda: file.open("a").close()))
            writers[0].start()
            time.sleep(0.2)
        return read_all(descriptor, most)

    monkeypatch.setattr("proxy.hooks.loader.safe_read.os.read", write_during_read)
    try:
        assert read(file).data == b"one"
    finally:
        writers[0].join(30)
    assert not writers[0].is_alive()


def test_a_clock_that_was_set_back_does_not_delay_a_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = time.time() - 3600
    monkeypatch.setattr("proxy.hooks.loader.safe_read.time.time", lambda: earlier)
    assert read(file).data == b"one"


def test_the_same_content_is_the_same_version_until_it_is_written_again(file: Path) -> None:
    settle()
    first = read(file).version
    file.chmod(0o600)
    settle()
    assert read(file).version == first
    file.write_text("one")
    settle()
    assert read(file).version != first


def test_a_file_that_others_can_write_is_not_read(file: Path) -> None:
    file.chmod(0o666)
    settle()
    with pytest.raises(UntrustedError) as caught:
        read(file, "hook server")
    assert str(caught.value).startswith(
        f"cannot trust hook server {file}: {file} can be written by its group and"
    )
    assert read(file, trusted=False).data == b"one"


def test_links_are_followed_to_the_checked_file(file: Path, tmp_path: Path) -> None:
    settle()
    link = tmp_path / "20-b.py"
    link.symlink_to(file)
    assert read(link).data == b"one"
    assert read(link, trusted=False).data == b"one"


def test_what_is_swapped_for_a_link_after_the_check_is_not_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle()
    other = tmp_path / "other"
    other.write_text("evil")
    opened = os.open

    def swap(path: Path, flags: int) -> int:
        file.unlink()
        file.symlink_to(other)
        return opened(path, flags)

    monkeypatch.setattr("proxy.hooks.loader.safe_read.os.open", swap)
    with pytest.raises(FileBeingWrittenError, match="being replaced"):
        read(file)


def test_a_replacement_after_the_check_is_noticed_on_the_descriptor(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.write_text("evil")
    other.chmod(0o666)
    settle()
    opened = os.open
    monkeypatch.setattr("proxy.hooks.loader.safe_read.os.open", lambda _, flags: opened(other, flags))
    with pytest.raises(UntrustedError, match="can be written by its group and others"):
        read(file)


def test_a_missing_file_is_temporary_and_a_dangling_link_is_not(tmp_path: Path) -> None:
    with pytest.raises(FileBeingWrittenError, match="being replaced"):
        read(tmp_path / "10-a.py")
    (tmp_path / "20-b.py").symlink_to("nowhere")
    with pytest.raises(HookError, match=r"cannot read hook .*20-b.py: it is a link, and nothing is there"):
        read(tmp_path / "20-b.py")


def test_files_that_are_not_regular_or_too_large_are_refused(file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "10-pipe.py", 0o600)
    with pytest.raises(HookError, match="not a regular file"):
        read(tmp_path / "10-pipe.py")
    with pytest.raises(HookError, match="not a regular file"):
        read(tmp_path / "10-pipe.py", trusted=False)
    with file.open("w") as stream:
        stream.truncate(SIZE_LIMIT_BYTES + 1)
    settle()
    with pytest.raises(
        HookError, match=f"cannot read hook {file}: it is larger than {SIZE_LIMIT_BYTES} bytes"
    ):
        read(file)
    with file.open("w") as stream:
        stream.truncate(SIZE_LIMIT_BYTES)
    settle()
    assert len(read(file).data) == SIZE_LIMIT_BYTES
