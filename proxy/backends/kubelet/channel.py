"""Calls to a gRPC service of kubelet on a unix socket.

grpc is imported with the first call. Answers are decoded here and not by grpc, which would write messages
that it cannot decode to its own log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from proxy.backends.kubelet.settings import KubeletError
from proxy.wire.grpc_channel import GrpcChannel, details_of

if TYPE_CHECKING:
    from google.protobuf.message import Message

ANSWER_LIMIT_BYTES = 64 << 20
"""The most bytes of an answer."""

Answer = TypeVar("Answer", bound="Message")


class UnixChannel:
    """A channel that is opened when it is needed; safe to use from several threads."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Store the path of the socket; nothing is dialled before the first call.

        Args:
            path: Path of the socket, with or without ``unix://``.
            timeout_s: Deadline of each call.
        """
        self.path = path.removeprefix("unix://")
        self._timeout_s = timeout_s
        self._channel = GrpcChannel(self.path, ANSWER_LIMIT_BYTES)

    def call(self, action: str, method: str, request: Message, answer: type[Answer]) -> Answer:
        """Make a call.

        Args:
            action: The text after "cannot" in messages, such as ``query kubelet for a pod``.
            method: Path of the method.
            request: The request.
            answer: The type of the answer.

        Raises:
            KubeletError: There is no answer, or it is an error; ``code`` and ``details`` describe it.
        """
        import grpc
        from google.protobuf.message import DecodeError

        try:
            send: Any = self._channel.open(self._timeout_s).unary_unary(method)
            content: bytes = send(request.SerializeToString(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            failed: Any = error
            number, name = failed.code().value[0], failed.code().name
            details = details_of(failed)
            raise KubeletError(self._failed(action, f"{details} ({name})"), number, details) from None
        except ValueError:  # grpc's error for a channel that was closed during the call
            raise KubeletError(self._failed(action, "the channel is closed")) from None
        try:
            return answer.FromString(content)
        except DecodeError:
            raise KubeletError(self._failed(action, "the answer cannot be decoded")) from None

    def close(self) -> None:
        """Close the channel; calls after that fail."""
        self._channel.close()

    def _failed(self, action: str, cause: str) -> str:
        return f"cannot {action} at {self.path}: {cause}"
