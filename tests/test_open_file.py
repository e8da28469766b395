"""Opening files without waiting for a writer, and what is refused as no file."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.open_file import open_file

pytestmark = pytest.mark.timeout(30)


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_file(tmp_path / name) as stream:
            assert os.get_blocking(stream.fileno())
            assert not os.get_inheritable(stream.fileno())
            assert stream.read() == b"text"


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (os.mkfifo, "it is not a regular file"),
        (listen, "it is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
        (os.mkdir, "Is a directory"),
        (lambda path: None, "No such file or directory"),
    ],
)
def test_another_thing_is_refused_with_its_name(
    make: Callable[[Path], None], cause: str, tmp_path: Path
) -> None:
    path = tmp_path / "thing"
    make(path)
    before = descriptors()
    with pytest.raises(OSError, match=cause) as refused:
        open_file(path)
    assert (refused.value.strerror, refused.value.filename) == (cause, str(path))
    assert descriptors() == before


def test_nothing_is_a_file_without_content(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "link"):
        with open_file(path) as stream:
            assert stream.read() == b""


def test_an_inherited_pipe_is_read_to_its_end() -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"te")
        with open_file(Path(f"/dev/fd/{read}")) as stream:
            assert stream.read(2) == b"te"
            os.write(write, b"xt")
            os.close(write)
            assert stream.read() == b"xt"
        assert os.get_blocking(read)
    finally:
        os.close(read)
