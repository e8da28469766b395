"""A runtime's container events, handed to every open GetContainerEvents stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from proxy.api.cri import api_pb2 as pb

if TYPE_CHECKING:
    import grpc


class EventHub:
    """Fans events out to the streams that are open at the time; nothing is kept for later ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: list[queue.SimpleQueue[pb.ContainerEventResponse | None]] = []

    def emit(self, event: pb.ContainerEventResponse) -> None:
        """Hand an event to all open streams."""
        with self._lock:
            for one in self._queues:
                one.put(event)

    def stream(
        self, _: pb.GetEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ContainerEventResponse]:
        """Answer GetContainerEvents until the client leaves or the server ends."""
        mine: queue.SimpleQueue[pb.ContainerEventResponse | None] = queue.SimpleQueue()
        with self._lock:
            self._queues.append(mine)
        try:
            # A call that ended before the callback could be set gets no event to wake it.
            if context.add_callback(lambda: mine.put(None)):
                while (event := mine.get()) is not None:
                    yield event
        finally:
            with self._lock:
                self._queues.remove(mine)
