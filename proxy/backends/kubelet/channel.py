"""Calls to a gRPC service of kubelet on a unix socket.

grpc is imported with the first call. Answers are decoded here and not by grpc, which would write what it
cannot decode to a log of its own.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from proxy.backends.kubelet.errors import KubeletError

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

LARGEST = 64 << 20
"""Bytes of an answer."""

_OPTIONS = (
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", LARGEST),
    # A kubelet that comes back is seen within a second; the default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)

Answer = TypeVar("Answer", bound="Message")


class UnixChannel:
    """A channel that is opened when it is needed; safe to use from several threads."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Store the socket; nothing is dialled before the first call.

        Args:
            path: Path of the socket, with or without ``unix://``.
            timeout_s: Deadline of each call.
        """
        self.path = path.removeprefix("unix://")
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._opened: grpc.Channel | None = None
        self._closed = False

    def call(self, what: str, method: str, request: Message, answer: type[Answer]) -> Answer:
        """Make a call.

        Args:
            what: What is asked, for messages, as ``ask for the pod``.
            method: Path of the method.
            request: What is sent.
            answer: What is expected.

        Raises:
            KubeletError: There is no answer, or it is an error; ``code`` and ``details`` say which.
        """
        import grpc
        from google.protobuf.message import DecodeError

        try:
            send: Any = self._channel().unary_unary(method)
            content: bytes = send(request.SerializeToString(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            failed: Any = error
            number, name = failed.code().value[0], failed.code().name
            details = " ".join((failed.details() or "no reason given").split())
            raise KubeletError(self._failed(what, f"{details} ({name})"), number, details) from None
        except ValueError:  # how grpc says that the channel was closed meanwhile
            raise KubeletError(self._failed(what, "the channel is closed")) from None
        try:
            return answer.FromString(content)
        except DecodeError:
            raise KubeletError(self._failed(what, "the answer cannot be decoded")) from None

    def close(self) -> None:
        """Close the channel; calls after that fail."""
        with self._lock:
            self._closed = True
            channel, self._opened = self._opened, None
        if channel is not None:
            channel.close()

    def _channel(self) -> grpc.Channel:
        import grpc

        with self._lock:
            if self._closed:
                raise ValueError
            if self._opened is None:
                # What is named after the pause between attempts is also how long one may take.
                patience = ("grpc.min_reconnect_backoff_ms", max(100, int(self._timeout_s * 1000)))
                options = (*_OPTIONS, patience)
                self._opened = grpc.insecure_channel(f"unix:{quote(self.path)}", options=options)
            return self._opened

    def _failed(self, what: str, cause: str) -> str:
        return f"cannot {what} at {self.path}: {cause}"
