"""Calls at one hook server on a unix socket.

The channel is opened by the first call. The caller encodes and decodes messages, not grpc, which would log
messages that it cannot decode.

A call does not wait for a server to appear: a socket without a server is an error at once. A server that
returns is noticed within a second. The deadline is the hook's own; the engine waits a little longer than
that, so that the call ends first, with a reason.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import grpc

from proxy.hooks.remote.peer import Peer
from proxy.model.errors import HookError
from proxy.wire.grpc_channel import GrpcChannel, details_of

LARGEST: Final = 16 << 20
"""The largest message in bytes, the same as kubelet's; Koordinator's proxy keeps gRPC's default of 4 MiB."""
SERVICE: Final = "/runtime.v1alpha1.RuntimeHookService/"
"""Path of the methods."""

_LONGEST_WORDS = 300
_OPTIONS = (
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 500),  # also how long one attempt to connect may take
)


class Client:
    """A hook server, called from several threads; its channel is closed when the last call is done."""

    def __init__(self, path: Path, timeout: float, users: Collection[int] = ()) -> None:
        """Prepare a client; nothing is dialled before the first call.

        Args:
            path: Of the socket.
            timeout: Seconds for one answer.
            users: Users whose processes may answer there, besides root.
        """
        self.path = path
        self._peer = Peer(path, users)
        self._timeout = timeout
        self._channel = GrpcChannel(path, LARGEST, *_OPTIONS)
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
        self._calls.add(mark)  # before the look at _closed: one of the two sides sees the other
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
        """Take no more calls; those that wait are let end, and the last one closes the channel."""
        self._closed = True
        if not self._calls:
            self._channel.close()  # may be done twice

    def _check(self, method: str) -> None:
        """Refuse to ask a process that is not trusted."""
        try:
            problem = self._peer.distrust_reason(self._timeout)
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
        """Describe in one line what grpc means; its own words for a missing socket are three lines."""
        name = error.code().name
        details = details_of(error)
        if name == "UNAVAILABLE":
            return f"no process answers there ({details.rpartition(': ')[2][:_LONGEST_WORDS]})"
        if name == "DEADLINE_EXCEEDED":
            return f"no answer within {self._timeout:g} s"
        if name == "UNIMPLEMENTED":
            return "the server does not implement this hook"
        return f"{details[:_LONGEST_WORDS]} ({name})"
