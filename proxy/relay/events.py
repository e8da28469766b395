"""What a session tells its owner, and the one error that it raises."""

from __future__ import annotations

from typing import Protocol

from proxy.model.errors import TopoproxyError


class RelayError(TopoproxyError):
    """A peer broke HTTP/2; this connection must end, and no other one is touched."""


class Handler(Protocol):
    """What happens on the intercepted streams of one session, told synchronously and in order.

    Every method may call ``Session.release`` and ``Session.refuse`` for any stream. What a method raises
    leaves through ``Session.from_client`` or ``Session.from_server`` and spoils the session.
    """

    def request(self, stream: int, path: str, message: bytes) -> None:
        """A complete request waits for ``release`` or ``refuse``.

        Args:
            stream: HTTP/2 stream id.
            path: ``:path`` as the client sent it.
            message: The gRPC message without its 5-byte prefix.
        """

    def response(self, stream: int, message: bytes) -> None:
        """The first message of the answer is about to reach the client (without its 5-byte prefix)."""

    def finished(self, stream: int, status: int | None) -> None:
        """The call is over; comes once for every ``request``.

        Args:
            stream: HTTP/2 stream id.
            status: grpc-status of the runtime, or None where it gave none: reset, cancelled, refused by us,
                not taken by a runtime that goes away, connection lost.
        """
