from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.backends.kubelet import node_file
from proxy.backends.kubelet.node_file import TRIES, NodeFile

if TYPE_CHECKING:
    import pytest

GOOD = '{"metadata": {"name": "n1", "labels": {"a": "1"}}}'
LATER = '{"metadata": {"name": "n1", "labels": {"a": "2"}}}'


def quick(path: Path) -> NodeFile:
    return NodeFile(path, lambda seconds: None)


def labels(file: NodeFile) -> dict[str, str] | None:
    found = file.read()
    return None if found is None else dict(found.labels)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    file = quick(path)
    assert file.read() is None
    assert file.problem == f"cannot read the Node object in {path}: there is no such file"
    path.write_text(GOOD)
    assert labels(file) == {"a": "1"}
    assert file.problem == ""
    assert file.read() is file.read(), "an unchanged file is not read again"
    path.write_text(LATER)
    assert labels(file) == {"a": "2"}, "of the same length, written in the same moment"


def test_the_reader_waits_for_the_end_of_a_torn_write(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text(LATER[:20])
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        path.write_text(LATER)

    file = NodeFile(path, pause)
    assert labels(file) == {"a": "2"}
    assert len(pauses) == 1
    assert file.problem == ""


def test_the_last_valid_file_stays_in_effect(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text(GOOD)
    file = quick(path)
    file.read()
    for broken in ("", LATER[:20], '{"kind": "Pod", "metadata": {"name": "p"}}'):
        path.write_text(broken)
        assert labels(file) == {"a": "1"}
        assert file.problem.endswith("(its last content stays in effect)")
    path.unlink()
    assert labels(file) == {"a": "1"}
    assert "there is no such file" in file.problem
    path.write_text(GOOD)
    assert labels(file) == {"a": "1"}
    assert file.problem == ""


def test_a_file_that_is_no_text_of_moderate_size_is_refused(tmp_path: Path) -> None:
    fifo, directory, binary, huge = (tmp_path / name for name in ("fifo", "directory", "binary", "huge"))
    os.mkfifo(fifo)
    directory.mkdir()
    binary.write_bytes(b'{"a": "\xff"}')
    with huge.open("wb") as file:
        file.truncate(node_file.FILE_LIMIT_BYTES + 1)
    for path, message in (
        (fifo, "not a regular file"),
        (directory, "not a regular file"),
        (binary, "not UTF-8"),
        (huge, "larger than 4 MiB"),
    ):
        reading = quick(path)
        assert reading.read() is None
        assert message in reading.problem.lower() or message in reading.problem


def test_the_number_of_attempts_is_limited(tmp_path: Path) -> None:
    pauses: list[float] = []
    NodeFile(tmp_path / "none", pauses.append).read()
    assert len(pauses) == TRIES - 1
    assert sum(pauses) < 1


def test_a_read_that_would_block_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some files of /proc and /sys are regular ones, and answer as an empty pipe does."""
    path = tmp_path / "node.json"
    path.write_text(GOOD)
    file = quick(path)
    file.read()

    def waits(*_: object) -> bytes:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    path.write_text(LATER)
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", waits)
        assert labels(file) == {"a": "1"}
    assert file.problem.endswith("temporarily unavailable (its last content stays in effect)")
    assert labels(file) == {"a": "2"}
