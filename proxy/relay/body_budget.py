"""The memory limit for request bodies that are held, over all connections.

Theory. Each connection has its own limit, but there may be many connections, so the sum has a limit as well.
When it is exceeded, one held request is refused. The choice of that request lets an honest client continue
while another client fills the budget:

* First choice: the body that has been arriving for the longest time, unless it is the one that has just
  grown. A client on a unix socket sends a body within milliseconds. A body that never ends is soon the oldest
  one. However fast a client begins new bodies, all of them are older than the body of an honest client.
* Otherwise: the largest body of the connection that holds the most bytes.

A body that never ends needs no timer here: the runtime has its headers, and their ``grpc-timeout`` ends the
call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from proxy.relay.streams import Stream


ALL_HELD_BYTES: Final = 256 << 20


class BodyHolder(Protocol):
    """One connection that holds bodies."""

    held: int

    def refuse_for_memory(self, stream: Stream, cause: str) -> None:
        """Refuse a held request and free its bytes."""

    def largest(self) -> Stream | None:
        """Return the stream that holds the most bytes."""


class BodyBudget:
    """The bytes of request bodies that all connections hold, and their limit.

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

    def make_room(self, newest: BodyHolder, stream: Stream) -> bool:
        """Refuse held requests until the others fit into the budget.

        Args:
            newest: The connection that has just got bytes.
            stream: The stream that they belong to.

        Returns:
            Whether that stream is still held.
        """
        cause = f"more than {self.limit >> 20} MiB wait on all connections"
        while self.total > self.limit:
            holder, victim = self._choose_victim(stream) or (newest, stream)
            holder.refuse_for_memory(victim, cause)
            if victim is stream:
                return False
        return True

    def refuse_largest(self) -> bool:
        """Refuse the request with the largest held body, to free memory; False if nothing is held."""
        heaviest = self._heaviest()
        if heaviest is None:
            return False
        holder, stream = heaviest
        holder.refuse_for_memory(stream, "out of memory")
        return True

    def _choose_victim(self, newest: Stream) -> tuple[BodyHolder, Stream] | None:
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
