"""Opens the listening socket, and decides whether this process may take its path.

Rules, in the order in which they are applied:

1. One proxy per socket: a lock file next to it is held as long as the process lives.
2. The file at the path decides. If there is none, or a socket that refuses connections (its owner is dead),
   the path can be taken. A socket that answers, or any other file, is left alone.
3. The new socket is bound under another name, gets owner and mode, listens, and is then renamed to its path.
   So no client ever finds a socket that refuses connections or has the wrong mode.
4. A daemon that is replaced (``proxy.succession``) hands over its socket and its lock, which stay.
5. A socket that systemd hands over (sd_listen_fds(3)) is used as it is, and stays open when we end:
   connections that arrive while no proxy runs wait in its queue.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from proxy.config.endpoint import PATH_LIMIT, parse_endpoint
from proxy.model.errnos import DENIED
from proxy.model.errors import CannotCreateError, ConfigError, PermissionDeniedError
from proxy.sockets.instance_lock import InstanceLock

__all__ = [
    "DEFAULT_DIRECTORY",
    "Listener",
    "bind_at",
    "copy_owner_and_mode",
    "open_listener",
    "parse_endpoint",
    "require_no_live_socket",
]

DEFAULT_DIRECTORY = Path("/run/topoproxy")
BACKLOG = 4096
PROBE_S = 2.0

FIRST_LISTEN_FD = 3
LISTEN_FD_NAME = "cri"


def systemd_socket(environ: MutableMapping[str, str]) -> socket.socket | None:
    """Return the socket that systemd hands over, if it does.

    The socket named ``cri`` is taken; if only one is handed over, its name does not matter.

    Args:
        environ: The environment with the LISTEN_ variables; they are removed, so that children do not see
            them.

    Raises:
        CannotCreateError: The handed over descriptors are not one listening unix stream socket.
    """
    count_text, pid = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_PID", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count_text.isdigit() or not 0 < int(count_text) < 1024:
        return None
    fds = range(FIRST_LISTEN_FD, FIRST_LISTEN_FD + int(count_text))
    candidates = [fd for fd, name in zip(fds, names, strict=False) if name == LISTEN_FD_NAME]
    chosen = candidates or [fd for fd in fds if len(fds) == 1]
    if len(chosen) != 1:
        raise CannotCreateError(
            f"cannot adopt systemd's sockets: of {len(fds)} handed over, {len(chosen)} are named"
            f" {LISTEN_FD_NAME} (FileDescriptorName={LISTEN_FD_NAME} in the socket unit names one)"
        )
    for fd in fds:
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)
    try:
        adopted = socket.socket(fileno=chosen[0])
    except OSError as error:
        raise CannotCreateError(f"cannot adopt file descriptor {chosen[0]}: {error.strerror}") from error
    listening = adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if adopted.family != socket.AF_UNIX or adopted.type != socket.SOCK_STREAM or not listening:
        cause = "it is not a listening unix stream socket (ListenStream=/path in the socket unit)"
        adopted.detach()
        raise CannotCreateError(f"cannot adopt file descriptor {chosen[0]}: {cause}")
    adopted.setblocking(False)
    return adopted


def path_of_socket(adopted: socket.socket) -> Path:
    """Find the path where clients of an adopted socket connect.

    Raises:
        CannotCreateError: It has no path, or the path is gone.
    """
    name = adopted.getsockname()
    if not isinstance(name, str) or not name.startswith("/"):
        raise CannotCreateError("cannot adopt systemd's socket: it has no path in the file system")
    path = Path(name)
    try:
        is_socket = stat.S_ISSOCK(path.stat(follow_symlinks=False).st_mode)
    except OSError:
        is_socket = False
    if not is_socket:
        cause = "its path is gone, so no client can connect (restart the socket unit)"
        raise CannotCreateError(f"cannot adopt systemd's socket {path}: {cause}")
    return path


@dataclass(slots=True)
class Listener:
    """A listening unix socket.

    Attributes:
        socket: Non-blocking and listening. With asyncio use ``loop.create_server(sock=...)``:
            ``create_unix_server`` of Python 3.13 and later removes the path at the end.
        path: Where clients connect.
        adopted: systemd opened it and keeps it.
    """

    socket: socket.socket
    path: Path
    adopted: bool
    _identity: tuple[int, int, int] | None = None
    _lock: InstanceLock | None = None

    def close(self, keep_lock: bool = False) -> None:
        """Stop listening and remove the path if it is still ours; an adopted socket stays.

        Args:
            keep_lock: Hold the lock until ``release_lock``, while calls in flight are finished.
        """
        if self._identity is not None and _identify(self.path) == self._identity:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._identity = None
        self.socket.close()
        if not keep_lock:
            self.release_lock()

    @classmethod
    def from_descriptors(
        cls, path: Path, adopted: bool, identity: Sequence[int] | None, listening: int, lock: int
    ) -> Self:
        """Take the socket of another daemon, and its lock, as open file descriptors.

        Args:
            path: As for the class.
            adopted: As for the class.
            identity: The ``identity`` of the other daemon's listener.
            listening: The socket.
            lock: The locked file.
        """
        held = InstanceLock.from_descriptor(path.with_name(path.name + ".lock"), lock)
        os.set_inheritable(listening, False)
        end = socket.socket(fileno=listening)
        end.setblocking(False)
        known = None if identity is None else (identity[0], identity[1], identity[2])
        return cls(end, path, adopted, known, held)

    @property
    def identity(self) -> tuple[int, int, int] | None:
        """Distinguishes our socket from another one at its path; None for a socket that systemd keeps."""
        return self._identity

    def descriptors(self) -> tuple[int, int]:
        """Return the file descriptors of socket and lock."""
        assert self._lock is not None
        return self.socket.fileno(), self._lock.fileno()

    def record_holder(self) -> None:
        """Record this process as the holder of the lock, after the previous daemon has ended."""
        assert self._lock is not None
        self._lock.record_holder()

    def hand_over(self) -> None:
        """Close our descriptors; socket, path and lock stay with the daemon that has received them."""
        self._identity = None
        self.close()

    @property
    def is_in_place(self) -> bool:
        """Whether clients can still find the socket."""
        return self._identity is None or _identify(self.path) == self._identity

    def release_lock(self) -> None:
        """Let another proxy take the socket."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_listener(
    path: Path,
    runtime_path: Path,
    environ: MutableMapping[str, str] = os.environ,
) -> Listener:
    """Open the socket that kubelet connects to, or adopt the one that systemd hands over.

    Args:
        path: Where to listen; an adopted socket's own path counts instead.
        runtime_path: The runtime's socket, whose owner and mode are taken over. It may be missing.
        environ: The environment with systemd's LISTEN_ variables; they are removed, so that children do not
            see them.

    Raises:
        LockedError: Another proxy has the socket.
        CannotCreateError: A process answers there, something else exists there, or the path cannot be used.
        PermissionDeniedError: The process may not write there.
        ConfigError: The path is the runtime's own socket.
    """
    with contextlib.ExitStack() as undo:
        adopted = systemd_socket(environ)
        if adopted is not None:
            undo.callback(adopted.close)
            path = path_of_socket(adopted)
        _refuse_runtime_socket(path, runtime_path)
        if adopted is None:
            _require_directory(path)
        lock = InstanceLock.acquire(path.with_name(path.name + ".lock"), f"listen on {path}")
        undo.callback(lock.release)
        if adopted is not None:
            listener = Listener(adopted, path, adopted=True, _lock=lock)
        else:
            listening = bind_at(path, 0o660, like=runtime_path)
            listener = Listener(listening, path, adopted=False, _identity=_identify(path), _lock=lock)
        undo.pop_all()
    return listener


def bind_at(path: Path, mode: int, like: Path | None = None) -> socket.socket:
    """Bind and listen at a path, in place of a dead socket that may exist there.

    Args:
        path: Where to listen.
        mode: Permission bits.
        like: A socket whose owner, group and permission bits are taken instead, if it exists.

    Returns:
        The socket, non-blocking and listening.

    Raises:
        CannotCreateError: A process answers at the path, or something else exists there.
        PermissionDeniedError: The process may not write there.
    """
    require_no_live_socket(path)
    beside = _temporary_path(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        require_no_live_socket(beside)
        beside.unlink(missing_ok=True)
        os.fchmod(listening.fileno(), 0o600)  # Linux gives the file the mode that the socket has at bind.
        listening.bind(os.fspath(beside))
        if like is None or not copy_owner_and_mode(beside, like):
            beside.chmod(mode)
        listening.listen(BACKLOG)
        beside.rename(path)
    except OSError as error:
        listening.close()
        with contextlib.suppress(OSError):
            beside.unlink()
        kind = PermissionDeniedError if error.errno in (errno.EROFS, *DENIED) else CannotCreateError
        raise kind(f"cannot listen on {path}: {error.strerror or error}") from error
    except BaseException:
        listening.close()
        raise
    return listening


def copy_owner_and_mode(path: Path, runtime_path: Path) -> bool:
    """Copy owner, group and permissions from the runtime's socket, so that the same clients connect.

    If the process may not change the file's owner, the group's bits are left out: they would let in another
    group.

    Returns:
        True if our socket has the right owner and mode; False if either path is absent or no socket, and
        nothing was changed.

    Raises:
        OSError: Our own socket cannot be changed.
    """
    try:
        want = runtime_path.stat()
        have = path.stat(follow_symlinks=False)
    except OSError:
        return False
    if not (stat.S_ISSOCK(want.st_mode) and stat.S_ISSOCK(have.st_mode)):
        return False
    mode = stat.S_IMODE(want.st_mode) & 0o777
    if (have.st_uid, have.st_gid) != (want.st_uid, want.st_gid):
        try:
            os.chown(path, want.st_uid, want.st_gid, follow_symlinks=False)
        except PermissionError:
            mode = mode & 0o707 | 0o600
    if stat.S_IMODE(have.st_mode) != mode:
        path.chmod(mode)
    return True


def _refuse_runtime_socket(path: Path, runtime_path: Path) -> None:
    same = os.path.realpath(path) == os.path.realpath(runtime_path)
    with contextlib.suppress(OSError):
        same = same or path.samefile(runtime_path)
    if same:
        raise ConfigError(
            f"cannot listen on {path}: it is the runtime's own socket, and the relay would call itself"
        )


def _require_directory(path: Path) -> None:
    directory = path.parent
    try:
        if directory == DEFAULT_DIRECTORY:
            directory.mkdir(mode=0o711, exist_ok=True)
        if stat.S_ISDIR(directory.stat().st_mode):
            return
        cause = f"{directory} is not a directory"
    except FileNotFoundError:
        cause = f"{directory} does not exist (only {DEFAULT_DIRECTORY} is created when it is missing)"
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot listen on {path}: {directory}: {error.strerror}") from error
    except OSError as error:
        cause = f"{directory}: {error.strerror}"
    raise CannotCreateError(f"cannot listen on {path}: {cause}")


def require_no_live_socket(path: Path) -> None:
    """Raise unless nothing exists at the path, or a socket whose owner is dead.

    Raises:
        CannotCreateError: A process answers, or something other than a socket exists there.
    """
    try:
        mode = path.stat(follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise CannotCreateError(f"cannot listen on {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "a directory" if stat.S_ISDIR(mode) else "a file"
        raise CannotCreateError(
            f"cannot listen on {path}: {what} is there and does not belong to topoproxy; it was left alone"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            # A full queue, another socket type, no permission: a process may listen there, so the path is not
            # ours.
            cause = f"a socket exists there that may be in use ({error.strerror or error})"
            raise CannotCreateError(f"cannot listen on {path}: {cause}; it was left alone") from error
    raise CannotCreateError(
        f"cannot listen on {path}: another process answers there already; it was left alone"
    )


def is_in_use(path: Path) -> bool:
    """Return whether a process may listen on a socket, or something else exists at the path."""
    try:
        require_no_live_socket(path)
    except CannotCreateError:
        return True
    return False


def _temporary_path(path: Path) -> Path:
    """Return the name under which the socket is created; never longer than a unix socket's path can be."""
    plain = path.with_name(path.name + ".new")
    if len(os.fsencode(plain)) <= PATH_LIMIT:
        return plain
    return path.with_name(path.name[:-1] + ("~" if path.name[-1] != "~" else "-"))


def _identify(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns  # The file system may use an inode number again.
