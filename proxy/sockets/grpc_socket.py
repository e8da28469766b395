"""A gRPC server on a unix socket. Threads open and close it: importing gRPC and stopping it take time.

At no time can another user open the path of a server. The gRPC library binds a path by itself, with the mode
that the process's umask gives, and replaces any file there. So it binds in a directory that only this process
can access, and the socket is moved to its path after it got its mode. The path is checked first, as for the
socket for kubelet: a dead socket is replaced, any other file is left alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import quote

from proxy.config.endpoint import PATH_LIMIT
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import CannotCreateError, PermissionDeniedError, TopoproxyError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.quoting import message
from proxy.sockets.unix_socket import require_no_live_socket

if TYPE_CHECKING:
    import grpc

SOCKET_MODE = 0o600
OPEN_RETRY: Final = Backoff(1.0, 15.0)
"""Seconds before the opening of a socket is retried: its current user may be stopping."""


class SocketPath:
    """One path of a socket: bound and removed."""

    def __init__(self, path: Path, purpose: str, *, needs_create_event: bool = False) -> None:
        """Prepare; nothing is bound yet.

        Args:
            path: Where to listen.
            purpose: The purpose of the socket, for messages: ``serve hooks``.
            needs_create_event: Whether the path must appear as a new file (IN_CREATE of inotify(7)), as when
                a server binds it, and not as a file that is moved there. A dead socket is removed first.
        """
        self._path = path
        self._needs_create_event = needs_create_event
        self._error_prefix = f"cannot {purpose} on {path}"
        self._identity: tuple[int, int] | None = None

    def bind(self, listen: Callable[[str], int]) -> None:
        """Bind a socket, and move it to the path.

        Args:
            listen: Binds and listens at the given path; returns 0 if that failed.

        Raises:
            CannotCreateError: A process answers there, another kind of file exists there, or it cannot be
                bound.
            PermissionDeniedError: The process may not write there.
        """
        path = self._path
        require_no_live_socket(path)
        try:
            with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as directory:  # mode 0700
                beside = Path(directory, "s")
                if len(os.fsencode(beside)) > PATH_LIMIT:
                    raise CannotCreateError(f"{self._error_prefix}: the name of its directory is too long")
                self._listen(listen, beside)
                beside.chmod(SOCKET_MODE)
                status = beside.stat()
                self._move(beside)
        except PermissionError as error:
            raise PermissionDeniedError(f"{self._error_prefix}: {error.strerror}") from error
        except OSError as error:
            raise CannotCreateError(f"{self._error_prefix}: {error.strerror}") from error
        self._identity = status.st_dev, status.st_ino

    def _move(self, beside: Path) -> None:
        if self._needs_create_event:
            self._path.unlink(missing_ok=True)
            self._path.hardlink_to(beside)
        else:
            beside.rename(self._path)

    def _listen(self, listen: Callable[[str], int], beside: Path) -> None:
        cause = ""
        try:
            if listen(str(beside)):
                return
        except RuntimeError as error:  # the library's error if it cannot bind
            cause = f": {error}"
        raise CannotCreateError(f"{self._error_prefix}: it cannot be bound{cause}")

    def unbind(self) -> None:
        """Remove the path, if it is still ours."""
        with contextlib.suppress(OSError):
            status = self._path.stat(follow_symlinks=False)
            if (status.st_dev, status.st_ino) == self._identity:
                self._path.unlink()
        self._identity = None


class GrpcSocket:
    """Serves one gRPC service on a path.

    Attributes:
        may_open: Whether ``open`` may open the socket; if not, it does nothing.
    """

    def __init__(
        self,
        path: Path,
        purpose: str,
        service: str,
        handlers: Callable[[], Mapping[str, grpc.RpcMethodHandler[Any, Any]]],
        *,
        threads: int,
        max_requests: int,
        options: Sequence[tuple[str, int]] = (),
        grace_s: float,
        close_timeout_s: float,
        needs_create_event: bool = False,
    ) -> None:
        """Prepare; nothing is opened before ``open``.

        Args:
            path: Where to listen.
            purpose: The purpose of the socket, for messages: ``serve hooks``.
            service: The name of the service, with its package.
            handlers: Returns the methods by name; called when it is opened.
            threads: Requests that are answered at a time.
            max_requests: Requests that may be answered or wait at a time; others are refused.
            options: Options of the gRPC server.
            grace_s: Seconds in which requests may end after ``close``.
            close_timeout_s: Seconds that ``close`` waits for the server to end.
            needs_create_event: Whether the socket must appear as a new file (``SocketPath``).
        """
        self._socket_path = SocketPath(path, purpose, needs_create_event=needs_create_event)
        self._service, self._handlers, self._options = service, handlers, options
        self._threads, self._max_requests = threads, max_requests
        self._grace_s, self._close_timeout_s = grace_s, close_timeout_s
        self._server: grpc.Server | None = None
        self._lock = threading.Lock()
        self.may_open = True

    def open(self) -> None:
        """Listen; runs in a thread.

        Raises:
            CannotCreateError, PermissionDeniedError: The socket cannot be created.
        """
        with self._lock:
            if self.may_open and self._server is None:
                self._server = self._opened()

    def close(self) -> None:
        """Remove the socket, let running requests end for a moment, and close; runs in a thread."""
        with self._lock:
            self._socket_path.unbind()
            server, self._server = self._server, None
        if server is not None:
            server.stop(self._grace_s).wait(self._close_timeout_s)

    def _opened(self) -> grpc.Server:
        import grpc

        pool = concurrent.futures.ThreadPoolExecutor(self._threads, thread_name_prefix=self._service)
        server = grpc.server(pool, options=self._options, maximum_concurrent_rpcs=self._max_requests)
        handlers = dict(self._handlers())
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self._service, handlers),))
        try:
            self._socket_path.bind(lambda path: server.add_insecure_port(f"unix:{quote(path)}"))
            server.start()
        except BaseException:
            server.stop(None)
            self._socket_path.unbind()
            raise
        return server


def refuse_call(context: grpc.ServicerContext, code: int, text: str) -> NoReturn:
    """Answer a call with a status."""
    import grpc

    codes = {status.value[0]: status for status in grpc.StatusCode}
    context.abort(codes.get(code, codes[GrpcStatus.UNKNOWN]), message(text))


async def open_with_retries(
    open_socket: Callable[[], Awaitable[None]], report: Callable[[TopoproxyError], None]
) -> None:
    """Open a socket, and retry until that succeeds.

    Args:
        open_socket: Opens it.
        report: Called with the reason of each failure.
    """
    pauses = RetryDelays(OPEN_RETRY)
    while True:
        try:
            return await open_socket()
        except TopoproxyError as error:
            report(error)
        await asyncio.sleep(pauses.next())


def cancel_with_call(context: grpc.ServicerContext, job: concurrent.futures.Future[Any]) -> None:
    """Cancel a job when its call ends (the client may disconnect), or now if the call has ended already."""

    def cancel() -> None:
        job.cancel()

    if not context.add_callback(cancel):
        job.cancel()
