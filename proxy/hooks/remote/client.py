"""Calls at one hook server on a unix socket.

The first call opens the channel. The caller encodes and decodes the messages, because grpc would log messages
that it cannot decode.

A call does not wait for a server to appear: a socket without a server is an error at once. A server that is
back is detected within a second. The deadline is the hook's own. The engine waits a little longer than that,
so that the call ends first, with a reason.

A hook server sees every pod, and its answers change containers, so only a server of a trusted user is called.
Two facts identify the process that answers: the permissions of the directories on the path of the socket,
which decide which users can put a socket there, and the credentials that the kernel recorded when the process
began to listen (SO_PEERCRED, unix(7)). gRPC connects and reconnects by itself, and does not expose
credentials. So the socket is checked before each call, and if it is not the same socket as before, we first
make a connection of our own. Between that connection and gRPC's only a trusted user could replace the socket,
because no other user can write to its directories.

The check of a known socket costs one stat.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc

from proxy.model.errors import HookError
from proxy.permissions import TrustCheck
from proxy.wire.grpc_channel import GrpcChannel, details_of

LARGEST_MESSAGE_BYTES: Final = 16 << 20
"""The largest message in bytes, the same as kubelet's; Koordinator's proxy keeps gRPC's default of 4 MiB."""
SERVICE: Final = "/runtime.v1alpha1.RuntimeHookService/"
"""Path of the methods."""

_LONGEST_DETAILS = 300
_OPTIONS = (
    ("grpc.max_send_message_length", LARGEST_MESSAGE_BYTES),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 500),  # also how long one attempt to connect may take
)

_CREDENTIALS: Final = struct.Struct("=iII")
"""struct ucred: process, user, group."""
_TIME: Final = struct.Struct("@ll")
"""struct timeval: seconds, microseconds."""
_NOT_LISTED: Final = "which hooks.serverUsers does not name"

_Fingerprint: TypeAlias = tuple[int, int, int]


class HookServerSocket:
    """The socket of a hook server, as it was when it last passed the check; for use by several threads."""

    def __init__(self, path: Path, users: Collection[int] = ()) -> None:
        """Store the socket; ``distrust_reason`` checks it.

        Args:
            path: The path of the socket.
            users: Users that are trusted in addition to root and the user of this process.
        """
        self._path = path
        self._users = frozenset(users)
        self._trusted_fingerprint: _Fingerprint | None = None

    def distrust_reason(self, timeout: float) -> str:
        """Return why the process that answers there is not trusted; empty if it is.

        Args:
            timeout: Seconds to wait for a place in the queue of a busy server.

        Raises:
            OSError: No process answers, or the socket cannot be examined.
        """
        found = self._path.stat()
        fingerprint = _fingerprint(found)
        if fingerprint == self._trusted_fingerprint:
            return ""
        trust = TrustCheck(self._users)
        if not stat.S_ISSOCK(found.st_mode):
            return "it is not a socket"
        if problem := trust.path_problem(self._path):
            return problem
        trusted = {0, os.geteuid(), *self._users}
        if found.st_uid not in trusted:
            return f"the socket is owned by user {found.st_uid}, {_NOT_LISTED}"
        process, user = _listener(self._path, timeout)
        if user not in trusted:
            return f"process {process} of user {user} answers there, {_NOT_LISTED}"
        if _fingerprint(self._path.stat()) != fingerprint:
            return "the socket is being replaced"
        self._trusted_fingerprint = fingerprint
        return ""


def _fingerprint(found: os.stat_result) -> _Fingerprint:
    return found.st_dev, found.st_ino, found.st_ctime_ns  # the file system may use an inode number again


def _listener(path: Path, timeout: float) -> tuple[int, int]:
    """Connect, and return the ids of the process and the user that listen there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        # Python's own timeout does not wait for a place in a full queue (EAGAIN of connect(2)). This does.
        whole = int(max(timeout, 0.001) * 1e6)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(*divmod(whole, 1_000_000)))
        begun = time.monotonic()
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            waited = time.monotonic() - begun
            raise TimeoutError(0, f"its queue has been full for {waited:.1f} s") from None
        content = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(content)
    return process, user


class HookServerClient:
    """A hook server, called from several threads; its channel is closed when the last call is done."""

    def __init__(self, path: Path, timeout: float, users: Collection[int] = ()) -> None:
        """Prepare a client; the first call connects.

        Args:
            path: The path of the socket.
            timeout: Seconds for one answer.
            users: Users whose processes may answer there, in addition to root and the user of this process.
        """
        self.path = path
        self._server_socket = HookServerSocket(path, users)
        self._timeout = timeout
        self._channel = GrpcChannel(path, LARGEST_MESSAGE_BYTES, *_OPTIONS)
        self._calls: set[object] = set()
        self._closed = False

    def call(self, method: str, request: bytes) -> bytes:
        """Make a call and wait for the answer.

        Args:
            method: Name of the method.
            request: The encoded request.

        Raises:
            HookError: There is no answer, or it is an error.
        """
        mark = object()
        self._calls.add(mark)  # before _closed is read, so that one of the two sides sees the other
        until = time.monotonic() + self._timeout
        try:
            send: Any = self._open().unary_unary(SERVICE + method)
            self._check(method)
            answer: bytes = send(request, timeout=max(until - time.monotonic(), 0.001))
        except grpc.RpcError as error:
            raise HookError(f"cannot call {method} at {self.path}: {self._cause(error)}") from None
        except ValueError:
            raise HookError(f"cannot call {method} at {self.path}: the hook has been shut down") from None
        finally:
            self._calls.discard(mark)
            if self._closed:
                self.close()
        return answer

    def close(self) -> None:
        """Accept no more calls; running calls may end, and the last of them closes the channel."""
        self._closed = True
        if not self._calls:
            self._channel.close()  # may be called twice

    def _check(self, method: str) -> None:
        """Refuse to call a process that is not trusted."""
        try:
            problem = self._server_socket.distrust_reason(self._timeout)
        except OSError as error:
            cause = f"no process answers there ({error.strerror or error})"
            raise HookError(f"cannot call {method} at {self.path}: {cause}") from None
        if problem:
            raise HookError(f"cannot call {method} at {self.path}: {problem}")

    def _open(self) -> grpc.Channel:
        if self._closed:
            raise ValueError
        return self._channel.open()

    def _cause(self, error: Any) -> str:
        """Describe grpc's error in one line; its own text for a missing socket has three lines."""
        name = error.code().name
        details = details_of(error)
        if name == "UNAVAILABLE":
            return f"no process answers there ({details.rpartition(': ')[2][:_LONGEST_DETAILS]})"
        if name == "DEADLINE_EXCEEDED":
            return f"no answer within {self._timeout:g} s"
        if name == "UNIMPLEMENTED":
            return "the server does not implement this hook"
        return f"{details[:_LONGEST_DETAILS]} ({name})"
