"""Which process gets the listening socket, and what happens to an existing file at its path."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.model.errors import CannotCreateError, ConfigError, LockedError, PermissionDeniedError
from proxy.sockets.unix_socket import bind_at, copy_owner_and_mode, open_listener, parse_endpoint

SERVE = """
import sys
from pathlib import Path
from proxy.sockets.unix_socket import open_listener
listener = open_listener(Path(sys.argv[1]), Path(sys.argv[2]))
print("adopted" if listener.adopted else "bound", listener.path, flush=True)
for word in sys.stdin:
    if word == "answer\\n":
        listener.socket.setblocking(True)
        client, _ = listener.socket.accept()
        client.sendall(b"hello")
        client.close()
    elif word == "close\\n":
        listener.close()
        break
"""


class Server:
    """A process that holds a listener."""

    def __init__(self, path: Path, runtime: Path, **more: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(path), str(runtime)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **more,
        )
        self.reported = self.process.stdout.readline().strip()

    def say(self, word: str) -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def end(self, how: int = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def leave(self) -> None:
        self.process.communicate("close\n", timeout=60)


@pytest.fixture
def at(tmp_path: Path) -> Path:
    return tmp_path / "cri.sock"


@pytest.fixture
def runtime(tmp_path: Path):
    """The runtime's own socket, with an owner and a mode of its own."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "runtime.sock"))
        listening.listen()
        (tmp_path / "runtime.sock").chmod(0o660)
        yield tmp_path / "runtime.sock"


def connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(60)
    try:
        client.connect(str(path))
    except OSError:
        client.close()
        raise
    return client


def connect_once_listening(path: Path, seconds: float = 30) -> socket.socket:
    """Connect to a server that starts: its file is there from bind(2), connections from listen(2) on."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def snapshot(directory: Path) -> dict[str, tuple[int, int, int]]:
    found = {p.name: p.lstat() for p in directory.iterdir()}
    return {name: (s.st_ino, s.st_mode, s.st_mtime_ns) for name, s in found.items()}


def test_the_listener_has_a_lock_file_and_removes_only_its_own_files(at: Path, runtime: Path) -> None:
    with open_listener(at, runtime) as listener:
        assert (listener.path, listener.adopted, listener.socket.getblocking()) == (at, False, False)
        connect(at).close()
        assert sorted(p.name for p in at.parent.iterdir()) == ["cri.sock", "cri.sock.lock", "runtime.sock"]
    assert not at.exists()
    assert runtime.exists()


def test_a_second_process_is_refused_and_changes_nothing(at: Path, runtime: Path) -> None:
    server = Server(at, runtime)
    before = snapshot(at.parent)
    with pytest.raises(LockedError, match=f"cannot listen on {at}: pid {server.process.pid} "):
        open_listener(at, runtime)
    assert snapshot(at.parent) == before
    with connect(at) as client:
        server.say("answer")
        assert client.recv(10) == b"hello"
    server.leave()
    assert not at.exists()


def test_a_killed_proxy_leaves_a_socket_that_is_replaced(at: Path, runtime: Path) -> None:
    Server(at, runtime).end(signal.SIGKILL)
    assert at.is_socket()
    with pytest.raises(ConnectionRefusedError):
        connect(at)
    with open_listener(at, runtime):
        connect(at).close()


def test_a_half_made_socket_of_a_killed_proxy_is_replaced(at: Path, runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{at}.new")
    with open_listener(at, runtime):
        assert not Path(f"{at}.new").exists()


def test_an_active_socket_is_kept(at: Path, runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(at))
        living.listen()
        before = at.lstat()
        with pytest.raises(CannotCreateError, match=f"cannot listen on {at}: another process answers there"):
            open_listener(at, runtime)
        assert at.lstat() == before
        living.accept()[0].close()
        connect(at).close()


def test_an_active_socket_with_a_full_queue_is_kept(at: Path, runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as waiting:
        living.bind(str(at))
        living.listen(0)
        waiting.connect(str(at))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("proxy.sockets.unix_socket.PROBE_S", 0.05)
            with pytest.raises(CannotCreateError, match="may be in use"):
                open_listener(at, runtime)
        assert at.is_socket()


def test_a_datagram_socket_is_kept(at: Path, runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(at))
        with pytest.raises(CannotCreateError, match="may be in use"):
            open_listener(at, runtime)
        assert at.is_socket()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.write_text("keep"), "a file is there and does not belong to topoproxy"),
        (lambda p: p.mkdir(), "a directory is there and does not belong to topoproxy"),
        (lambda p: p.symlink_to("elsewhere"), "a symbolic link is there and does not belong to topoproxy"),
    ],
)
def test_a_file_that_is_not_a_socket_is_kept(at: Path, runtime: Path, make, message: str) -> None:
    make(at)
    before = at.lstat()
    with pytest.raises(CannotCreateError, match=message):
        open_listener(at, runtime)
    after = at.lstat()  # not its access time: to read a link changes it
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (
        before.st_ino,
        before.st_mode,
        before.st_mtime_ns,
    )


def test_a_refused_start_releases_the_lock(at: Path, runtime: Path) -> None:
    at.write_text("")
    with pytest.raises(CannotCreateError):
        open_listener(at, runtime)
    at.unlink()
    open_listener(at, runtime).close()


def test_close_keeps_a_socket_of_another_program_in_our_place(at: Path, runtime: Path) -> None:
    listener = open_listener(at, runtime)
    at.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(at))
        listener.close()
        assert at.is_socket()


def test_the_lock_can_outlive_the_socket(at: Path, runtime: Path) -> None:
    listener = open_listener(at, runtime)
    listener.close(keep_lock=True)
    assert not at.exists()
    with pytest.raises(LockedError):
        open_listener(at, runtime)
    listener.release_lock()
    open_listener(at, runtime).close()


def test_the_runtimes_own_socket_is_refused(at: Path, runtime: Path) -> None:
    for path in (runtime, runtime.parent / ".." / runtime.parent.name / runtime.name):
        with pytest.raises(ConfigError, match="the runtime's own socket"):
            open_listener(path, runtime)
    at.symlink_to(runtime)
    with pytest.raises(ConfigError, match="the runtime's own socket"):
        open_listener(at, runtime)
    assert not Path(f"{runtime}.lock").exists()


def test_a_missing_directory_is_not_made(tmp_path: Path, runtime: Path) -> None:
    with pytest.raises(CannotCreateError, match=r".*/no does not exist \(only /run/topoproxy is created"):
        open_listener(tmp_path / "no" / "s", runtime)
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotCreateError, match="file is not a directory"):
        open_listener(tmp_path / "file" / "s", runtime)
    assert not (tmp_path / "no").exists()


def test_the_default_directory_is_made(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.sockets.unix_socket.DEFAULT_DIRECTORY", tmp_path / "topoproxy")
    with open_listener(tmp_path / "topoproxy" / "s", runtime):
        assert stat.S_IMODE((tmp_path / "topoproxy").stat().st_mode) == 0o711


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_owner_group_and_mode_are_the_runtimes(at: Path, runtime: Path) -> None:
    os.chown(runtime, 1234, 2345)
    runtime.chmod(0o606)
    with open_listener(at, runtime):
        found = at.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 2345, 0o606)
        os.chown(runtime, 1, 2)
        runtime.chmod(0o600)
        assert copy_owner_and_mode(at, runtime)
        found = at.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1, 2, 0o600)


@pytest.mark.parametrize("replace", [Path.write_text, Path.symlink_to])
def test_a_file_in_place_of_the_socket_keeps_its_mode(
    at: Path, runtime: Path, replace: Callable[[Path, str], object]
) -> None:
    runtime.chmod(0o606)
    other = at.parent / "other"
    other.touch(0o640)
    with open_listener(at, runtime):
        at.unlink()
        replace(at, os.fspath(other))
        before = at.stat().st_mode
        assert not copy_owner_and_mode(at, runtime)
        assert (at.stat().st_mode, stat.S_IMODE(other.stat().st_mode)) == (before, 0o640)


def test_without_a_runtime_the_socket_is_for_the_owner_and_group(at: Path) -> None:
    umask = os.umask(0o077)
    try:
        with open_listener(at, at.parent / "absent"):
            assert stat.S_IMODE(at.stat().st_mode) == 0o660
            assert not copy_owner_and_mode(at, at.parent / "absent")
            (at.parent / "plain").write_text("")
            assert not copy_owner_and_mode(at, at.parent / "plain")
    finally:
        os.umask(umask)


def test_without_permission_to_chown_no_other_group_may_connect(
    at: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    with open_listener(at, runtime):
        real = runtime.stat()
        monkeypatch.setattr(os, "chown", refuse)
        copy_owner_and_mode(at, runtime)
        assert stat.S_IMODE(at.stat().st_mode) == 0o660  # the same owner: no chown is needed
        other = os.stat_result((*real[:4], real.st_uid + 1, real.st_gid + 1, *real[6:]))
        plain = Path.stat
        monkeypatch.setattr(Path, "stat", lambda p, **k: other if p == runtime else plain(p, **k))
        copy_owner_and_mode(at, runtime)
        assert stat.S_IMODE(at.lstat().st_mode) == 0o600


def test_the_longest_path_works_and_one_more_byte_does_not(tmp_path: Path) -> None:
    room = 107 - len(os.fsencode(tmp_path)) - 1
    path = tmp_path / ("s" * room)
    with bind_at(path, 0o600):
        connect(path).close()
    with pytest.raises(ConfigError, match="the path is 108 bytes long, a unix socket's at most 107"):
        parse_endpoint(f"unix://{path}s")


def test_a_directory_without_permission_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionDeniedError, match=r"cannot listen on .*: Permission denied"):
        bind_at(tmp_path / "s", 0o600)
    assert list(tmp_path.iterdir()) == []


# Socket activation: a process gets the socket as file descriptor 3, as systemd hands it over.


def activated(
    listening: list[socket.socket], argument: Path, runtime: Path, names: str = "cri", pid: str = ""
) -> Server:
    """Start a server that gets the sockets as file descriptors 3 and up."""
    place = "; ".join(f"os.dup2({s.fileno()}, {100 + i})" for i, s in enumerate(listening))
    move = "; ".join(f"os.dup2({100 + i}, {3 + i})" for i in range(len(listening)))
    start = f"import os, sys; {place}; {move}; pid = {pid!r} or str(os.getpid())"
    start += f"; os.environ.update(LISTEN_PID=pid, LISTEN_FDS='{len(listening)}', LISTEN_FDNAMES={names!r})"
    start += f"; os.execv(sys.executable, [sys.executable, '-c', {SERVE!r}, *sys.argv[1:]])"
    server = Server.__new__(Server)
    server.process = subprocess.Popen(
        [sys.executable, "-c", start, str(argument), str(runtime)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[s.fileno() for s in listening],
    )
    server.reported = server.process.stdout.readline().strip()
    return server


@pytest.fixture
def passed_sockets(at: Path):
    """Return the sockets that systemd has opened for this process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(at))
        listening.listen(16)
        yield listening


def test_a_restart_keeps_an_adopted_socket_and_its_queue(
    passed_sockets: socket.socket, at: Path, runtime: Path, tmp_path: Path
) -> None:
    inode = at.stat().st_ino
    first = activated([passed_sockets], tmp_path / "configured.sock", runtime)
    assert first.reported == f"adopted {at}"
    assert not (tmp_path / "configured.sock").exists()
    first.leave()
    assert at.stat().st_ino == inode
    with connect(at) as client:  # Nothing runs now: the connection waits in the queue.
        second = activated([passed_sockets], at, runtime)
        second.say("answer")
        assert client.recv(10) == b"hello"
        second.leave()


def test_two_cannot_adopt_the_same_socket(passed_sockets: socket.socket, at: Path, runtime: Path) -> None:
    first = activated([passed_sockets], at, runtime)
    second = activated([passed_sockets], at, runtime)
    assert second.reported == ""
    assert f"pid {first.process.pid}" in second.process.communicate(timeout=60)[1]
    first.leave()


def test_the_socket_named_cri_is_taken(
    passed_sockets: socket.socket, at: Path, runtime: Path, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "other.sock"))
        other.listen()
        server = activated([other, passed_sockets], at, runtime, names="other:cri")
        assert server.reported == f"adopted {at}"
        server.leave()
        server = activated([other, passed_sockets], at, runtime, names="one:two")
        assert "of 2 handed over, 0 are named cri" in server.process.communicate(timeout=60)[1]


def test_variables_meant_for_another_process_are_ignored(
    passed_sockets: socket.socket, tmp_path: Path, runtime: Path
) -> None:
    server = activated([passed_sockets], tmp_path / "own.sock", runtime, pid="1")
    assert server.reported == f"bound {tmp_path / 'own.sock'}"
    server.leave()


@pytest.mark.parametrize("kind", ["not listening", "internet", "no path", "path gone"])
def test_an_unusable_socket_is_not_adopted(kind: str, tmp_path: Path, runtime: Path) -> None:
    family = socket.AF_INET if kind == "internet" else socket.AF_UNIX
    with socket.socket(family, socket.SOCK_STREAM) as wrong:
        if kind == "internet":
            wrong.bind(("127.0.0.1", 0))
        elif kind != "no path":
            wrong.bind(str(tmp_path / "wrong.sock"))
        else:
            wrong.bind(f"\0topoproxy-test-{os.getpid()}")
        if kind != "not listening":
            wrong.listen()
        if kind == "path gone":
            (tmp_path / "wrong.sock").unlink()
        reported = activated([wrong], tmp_path / "s", runtime).process.communicate(timeout=60)[1]
    assert "CannotCreateError: cannot adopt " in reported
    assert {"not listening": "not a listening", "internet": "not a listening"}.get(kind, "path") in reported


@pytest.mark.skipif(
    shutil.which("systemd-socket-activate") is None, reason="systemd-socket-activate is not installed"
)
def test_systemds_own_tool_hands_the_socket_over(at: Path, runtime: Path) -> None:
    command = [
        "systemd-socket-activate",
        "-l",
        str(at),
        "--fdname=cri",
        "-E",
        f"PYTHONPATH={os.pathsep.join(sys.path)}",
    ]
    command += [sys.executable, "-c", SERVE, "/nowhere/cri.sock", str(runtime)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        with connect_once_listening(at) as client:
            assert process.stdout.readline() == f"adopted {at}\n"
            process.stdin.write("answer\n")
            process.stdin.flush()
            assert client.recv(10) == b"hello"
        process.communicate("close\n", timeout=60)
    assert at.is_socket()
