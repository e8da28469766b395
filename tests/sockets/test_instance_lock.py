"""The lock belongs to one process and dies with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.model.errors import CannotCreateError, LockedError
from proxy.sockets.instance_lock import InstanceLock

HOLD = """
import sys
from pathlib import Path
from proxy.sockets.instance_lock import InstanceLock
InstanceLock.acquire(Path(sys.argv[1]), "try")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path):
    """Another process that holds the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "l")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_learns_which_one_holds_the_lock(tmp_path: Path, other: subprocess.Popen) -> None:
    before = (tmp_path / "l").read_bytes()
    with pytest.raises(
        LockedError, match=rf"^cannot listen on x: pid {other.pid} \(.*python.*\) holds the lock"
    ):
        InstanceLock.acquire(tmp_path / "l", "listen on x")
    assert (tmp_path / "l").read_bytes() == before == f"{other.pid}\n".encode()


def test_a_killed_holder_leaves_no_lock(tmp_path: Path, other: subprocess.Popen) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    lock = InstanceLock.acquire(tmp_path / "l", "try")
    assert (tmp_path / "l").read_text() == f"{os.getpid()}\n"
    lock.release()
    lock.release()
    InstanceLock.acquire(tmp_path / "l", "try").release()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("keep")
    (tmp_path / "l").symlink_to(tmp_path / "target")
    with pytest.raises(CannotCreateError, match="cannot try: the lock"):
        InstanceLock.acquire(tmp_path / "l", "try")
    assert (tmp_path / "target").read_text() == "keep"


def test_only_a_regular_file_can_be_locked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "l")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CannotCreateError, match=r"cannot try: the lock .*/l: it is not a regular file"):
        InstanceLock.acquire(tmp_path / "l", "try")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_replaced_lock_file_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is deleted between open and lock: the lock must be on the file at the path."""
    import fcntl

    real, path = fcntl.flock, tmp_path / "l"
    calls = []

    def swap(fd: int, how: int) -> None:
        if not calls:
            path.unlink()
        calls.append(fd)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", swap)
    lock = InstanceLock.acquire(path, "try")
    assert len(calls) == 2
    with pytest.raises(LockedError, match=f"pid {os.getpid()}"):
        InstanceLock.acquire(path, "try")
    lock.release()
