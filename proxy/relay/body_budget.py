"""The memory limit for request bodies that are held, over all connections.

Theory. Each connection has a limit of its own, but connections are many. Beyond the sum one held request is
refused. Which one decides whether an honest client continues while another one fills the room:

* first the body that has been arriving for the longest time, if it is not the one that has just grown. A
  client on a unix socket sends a body within milliseconds; a body that never ends is the oldest soon, and
  however fast new bodies are begun, all older ones go before the honest one that began a moment ago;
* else the largest of the connection that holds most.

A body without end needs no timer of ours: its headers are at the runtime, whose ``grpc-timeout`` ends it.
"""

from __future__ import annotations

from typing import Final, Protocol

from proxy.relay.stream import Stream

ALL_HELD_BYTES: Final = 256 << 20


class BodyHolder(Protocol):
    """One connection that holds bodies."""

    held: int

    def crowd_out(self, stream: Stream, cause: str) -> None:
        """Refuse a held request, and let go of its bytes."""

    def largest(self) -> Stream | None:
        """Return the stream that holds most."""


class BodyBudget:
    """What all connections hold.

    Attributes:
        limit: Bytes that may be held.
        total: Bytes that are held.
        arriving: Streams whose body has begun and not ended, the oldest first, and their connections.
        holders: The connections.
    """

    __slots__ = ("arriving", "holders", "limit", "total")

    def __init__(self, limit: int = ALL_HELD_BYTES) -> None:
        self.limit = limit
        self.total = 0
        self.arriving: dict[Stream, BodyHolder] = {}
        self.holders: set[BodyHolder] = set()

    def make(self, newest: BodyHolder, stream: Stream) -> bool:
        """Refuse requests until the rest has room.

        Args:
            newest: The connection that has just got bytes.
            stream: The stream that they belong to.

        Returns:
            Whether that stream is still held.
        """
        cause = f"more than {self.limit >> 20} MiB wait on all connections"
        while self.total > self.limit:
            holder, victim = self._victim(stream) or (newest, stream)
            holder.crowd_out(victim, cause)
            if victim is stream:
                return False
        return True

    def shed(self) -> bool:
        """Let go of the largest body that is held, for want of memory; False where nothing is held."""
        heaviest = self._heaviest()
        if heaviest is None:
            return False
        holder, stream = heaviest
        holder.crowd_out(stream, "out of memory")
        return True

    def _victim(self, newest: Stream) -> tuple[BodyHolder, Stream] | None:
        oldest = next(iter(self.arriving.items()), None)
        if oldest is not None and oldest[0] is not newest:
            return oldest[1], oldest[0]
        return self._heaviest()

    def _heaviest(self) -> tuple[BodyHolder, Stream] | None:
        holder = max(self.holders, key=_held, default=None)
        stream = holder.largest() if holder is not None else None
        return (holder, stream) if holder is not None and stream is not None else None


def _held(holder: BodyHolder) -> int:
    return holder.held
