"""The state of one intercepted stream; ``streams`` has its transitions."""

from __future__ import annotations

from typing import Final

from proxy.relay.flow import Outgoing

ARRIVING: Final = 0
WAITING: Final = 1
SENDING: Final = 2


class Stream(Outgoing):
    """An intercepted stream.

    Attributes:
        path: The method.
        phase: ARRIVING, WAITING or SENDING.
        body: What came of the body so far; small pieces are gathered in buffers.
        tail: What came behind the message while WAITING.
        size: Bytes that count against the limit of the connection.
        message: The original message while WAITING.
        asked: ``request`` was called.
        answered: The runtime began to answer.
        closing: The last header of the answer is on its way.
        tee: What came of the answer so far; None once there is nothing more to read.
    """

    __slots__ = ("answered", "asked", "body", "closing", "message", "path", "phase", "size", "tail", "tee")

    def __init__(self, stream: int, path: str, window: int) -> None:
        super().__init__(stream, window)
        self.path = path
        self.phase = ARRIVING
        self.body: list[bytes | bytearray] = []
        self.tail = b""
        self.size = 0
        self.message: bytes | None = None
        self.asked = False
        self.answered = False
        self.closing = False
        self.tee: bytearray | None = bytearray()
