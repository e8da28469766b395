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
        body: The part of the body that has arrived; small pieces are gathered in buffers.
        tail: What came behind the message while WAITING.
        size: Bytes that count against the limit of the connection.
        needs: Bytes of the first message with its prefix; 0 while that is not known.
        ahead: Window that the client was granted beyond the runtime's, for the rest of the message.
        spent: Window that the client has spent on the body and was not granted back.
        message: The original message while WAITING.
        asked: ``request`` was called.
        answered: The runtime began to answer.
        closing: The last header of the answer is on its way.
        tee: The part of the answer that has arrived; None once nothing more is read.
    """

    __slots__ = (
        "ahead", "answered", "body", "closing", "message", "needs", "path", "phase", "reported", "size",
        "spent", "tail", "tee",
    )  # fmt: skip

    def __init__(self, stream: int, path: str, window: int) -> None:
        super().__init__(stream, window)
        self.path = path
        self.phase = ARRIVING
        self.body: list[bytes | bytearray] = []
        self.tail = b""
        self.size = self.needs = self.ahead = self.spent = 0
        self.message: bytes | None = None
        self.reported = False
        self.answered = False
        self.closing = False
        self.tee: bytearray | None = bytearray()
