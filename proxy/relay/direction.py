"""The frames of one direction, validated as far as their meaning is needed here.

A frame that is wrong in itself (size, stream, an increment of 0, a header in the wrong place) ends the
connection with RelayError. An open header block is gathered until it is complete; its size is checked before
anything in it is decoded.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from proxy.relay import frames
from proxy.relay.events import ENHANCE_YOUR_CALM, RelayError
from proxy.relay.frame_reader import KEEP, LARGEST_BLOCK, FrameReader, block_too_long
from proxy.relay.frames import STREAM_ID

MOST_EMPTY: Final = 1000
"""Limit of consecutive frames without content, of which one would do."""


class Direction(FrameReader):
    """A reader that knows the frame types; subclasses say what the frames mean."""

    __slots__ = ()

    def __init__(self, greeting: bytes = b"") -> None:
        super().__init__(greeting)
        self.handlers = {
            frames.DATA: self.on_data,
            frames.HEADERS: self._headers,
            frames.RST_STREAM: self._rst_stream,
            frames.SETTINGS: self._settings,
            frames.PUSH_PROMISE: self._push_promise,
            frames.GOAWAY: self._goaway,
            frames.WINDOW_UPDATE: self._window_update,
            frames.CONTINUATION: self._continuation,
        }

    # Complete frames that do not simply pass; ``start`` and ``end`` limit the payload.

    def _window_update(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        if end - start != 4:
            raise RelayError(f"cannot read WINDOW_UPDATE: its size is {end - start}")
        increment = frames.WORD.unpack_from(data, start)[0] & STREAM_ID
        if not increment:
            raise RelayError("cannot widen a window: the increment is 0")
        return self.on_window(stream, increment)

    def _rst_stream(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        if end - start != 4 or not stream:
            raise RelayError("cannot read RST_STREAM: wrong stream or size")
        return self.on_reset(stream)

    def _settings(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        pairs = frames.settings(flags, stream, data, start, end)
        self.begun = True
        self.on_settings(acknowledged=bool(flags & frames.ACK), pairs=pairs)
        return KEEP

    def _goaway(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        if stream or end - start < 8:
            raise RelayError("cannot read GOAWAY: wrong stream or size")
        self.on_goaway(frames.WORD.unpack_from(data, start)[0] & STREAM_ID)
        return KEEP

    def _push_promise(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        self.on_promise()
        start, end = frames.unpad(flags, data, start, end)
        return self._begin(flags & ~frames.END_STREAM, stream, data, start + 4, end)

    def _headers(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        start, end = frames.unpad(flags, data, start, end)
        verdict = self.on_headers(flags, stream) if stream else KEEP
        self._begin(flags, stream, data, start + 5 if flags & frames.PRIORITY else start, end)
        return verdict

    def _begin(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        """Begin a header block; it is handled when it is complete."""
        if not stream or start > end:
            raise RelayError("cannot read a header: wrong stream or size")
        self._block_stream, self._block_flags = stream, flags
        self._block, self._empties = bytearray(), 0
        self._gather(flags, data[start:end])
        return KEEP

    def _continuation(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        if self._block is None or stream != self._block_stream:
            raise RelayError("cannot read CONTINUATION: no header is open on its stream")
        self._gather(flags, data[start:end])
        return KEEP

    def _gather(self, flags: int, piece: bytes) -> None:
        block = self._block
        assert block is not None
        if len(block) + len(piece) > LARGEST_BLOCK:
            raise block_too_long()
        if not piece:
            self.empty()
        block += piece
        if flags & frames.END_HEADERS:
            self._block = None
            self._empties = 0
            self.on_block(self._block_flags, self._block_stream, bytes(block))

    def empty(self) -> None:
        """Count a frame without content.

        Raises:
            RelayError: There were too many in a row.
        """
        self._empties += 1
        if self._empties > MOST_EMPTY:
            raise RelayError(
                f"cannot continue to read: more than {MOST_EMPTY} empty frames in a row", ENHANCE_YOUR_CALM
            )

    # What the frames of this direction mean. Each returns KEEP, CUT or LAST where it returns something.

    @abstractmethod
    def on_data(self, flags: int, stream: int, data: bytes, start: int, end: int) -> int:
        """Handle a complete DATA frame for which ``passes`` has returned False."""

    @abstractmethod
    def on_promise(self) -> None:
        """Record a PUSH_PROMISE; its block follows with END_STREAM cleared."""

    @abstractmethod
    def on_window(self, stream: int, increment: int) -> int:
        """Handle a WINDOW_UPDATE."""

    @abstractmethod
    def on_reset(self, stream: int) -> int:
        """Handle a RST_STREAM."""

    @abstractmethod
    def on_settings(self, *, acknowledged: bool, pairs: list[tuple[int, int]]) -> None:
        """Handle a SETTINGS frame, which always passes."""

    @abstractmethod
    def on_goaway(self, last: int) -> None:
        """Handle a GOAWAY, which always passes."""
