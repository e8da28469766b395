"""The notifications of a session to its handler, and the one error that it raises."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol

from proxy.model.errors import TopoproxyError

PROTOCOL_ERROR: Final = 1
ENHANCE_YOUR_CALM: Final = 11
"""HTTP/2 error codes (RFC 9113, 7)."""


class RelayError(TopoproxyError):
    """A peer broke HTTP/2; this connection must end, and no other one is touched.

    Attributes:
        code: The HTTP/2 error code that the peer is sent.
    """

    def __init__(self, message: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.code = code


class RequestAnomaly(StrEnum):
    """How the request of an intercepted method differs from one plain message that ends its stream."""

    EMPTY = "carries no message"
    CUT = "carries an incomplete message"
    COMPRESSED = "carries a compressed message"
    MORE = "carries more than one message"
    TRAILERS = "ends with trailers"
    UNENDED = "never ended"


class Handler(Protocol):
    """Receives what happens on the intercepted streams of one session, synchronously and in order.

    Every method may call ``Session.release`` and ``Session.refuse`` for any stream. An exception of a method
    propagates through ``Session.from_client`` or ``Session.from_server``; the session cannot be used any more
    then.
    """

    def request(self, stream: int, path: str, message: bytes) -> None:
        """A complete request waits for ``release`` or ``refuse``.

        Args:
            stream: HTTP/2 stream id.
            path: ``:path`` as the client sent it.
            message: The gRPC message without its 5-byte prefix.
        """

    def anomaly(self, path: str, kind: RequestAnomaly) -> tuple[int, str] | None:
        """The request of an intercepted method is not one plain message.

        With ``MORE``, ``request`` follows for the first message. With ``UNENDED`` the call is over, and the
        runtime has seen nothing of its body. In all other cases the body passes unchanged, unless a refusal
        is returned.

        Returns:
            The gRPC status and message of a refusal, or None.
        """

    def refused_for_memory(self, path: str, message: str) -> None:
        """A held request was refused because too many bytes are held; frames wait in ``to_client``.

        The bytes that exceeded the limit may have come on another connection.
        """

    def response(self, stream: int, message: bytes) -> None:
        """The first message of the answer is about to reach the client (without its 5-byte prefix)."""

    def finished(self, stream: int, status: int | None) -> None:
        """The call is over; comes once for every ``request``.

        Args:
            stream: HTTP/2 stream id.
            status: grpc-status of the runtime, or None if it gave none: reset, cancelled, refused by us,
                not taken by a runtime that goes away, connection lost.
        """
