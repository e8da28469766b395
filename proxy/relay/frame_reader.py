"""Cutting one direction of a connection into frames, without copying what only passes.

Theory of operation. ``feed`` takes bytes as they were read and appends what must leave to ``out``. It looks
at the 9 leading bytes of each frame and decides:

* DATA that only passes is counted (``passes``) and skipped, even where only its beginning has arrived;
* every other frame is waited for until it is complete and given to a method of the subclass, which says
  whether it stays (``KEEP``), is taken out (``CUT``), or stays behind what we had to write first (``LAST``).

A stretch of kept frames leaves as one piece, and a read in which everything was kept leaves as the same bytes
object.

Frames of our own (``inject``) may only stand between two frames, and never between HEADERS and their
CONTINUATION. So they wait in ``_deferred`` until the sender has begun with its SETTINGS, while a frame is
being handled, while passing DATA is incomplete, and while a header block is open; the order on the wire is
then the order of events.

Memory: an incomplete frame is at most as long as the receiver allows (SETTINGS_MAX_FRAME_SIZE), a header
block at most ``LARGEST_BLOCK``; anything above raises RelayError, before it is decoded. Both are gathered in
one buffer each, so that pieces of a few bytes cost a few bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from proxy.relay import frames
from proxy.relay.events import ENHANCE_YOUR_CALM, RelayError
from proxy.relay.frames import CONTINUATION, DATA, END_HEADERS, HEADERS, PUSH_PROMISE, STREAM_ID

KEEP: Final = 0
CUT: Final = 1
LAST: Final = 2
LARGEST_BLOCK: Final = 256 << 10
"""Bytes of a header block, HEADERS and CONTINUATION together; kubelet sends a few hundred."""
_HEAD: Final = 9
_SHAPE: Final = frames.END_HEADERS | frames.PADDED | frames.PRIORITY
_WITH_BLOCK: Final = (HEADERS, CONTINUATION, PUSH_PROMISE)


def block_too_long() -> RelayError:
    """Return the error for a header block above ``LARGEST_BLOCK``."""
    return RelayError(f"cannot read a header: it is longer than {LARGEST_BLOCK} bytes", ENHANCE_YOUR_CALM)


class FrameReader(ABC):
    """One direction; subclasses say what the frames mean.

    Attributes:
        out: What must leave, in order.
        handlers: What to do with a complete frame, by type; other types pass. Called with flags, stream,
            data, and where the payload begins and ends; returns KEEP, CUT or LAST.
        begun: The sender's SETTINGS have passed, which must be the first frame of a direction.
        largest: The longest frame that the receiver allows.
    """

    __slots__ = (
        "_block", "_block_flags", "_block_stream", "_busy", "_deferred", "_empties", "_greeting", "_need",
        "_passing", "_rest", "begun", "handlers", "largest", "out",
    )  # fmt: skip

    def __init__(self, greeting: bytes = b"") -> None:
        """Begin.

        Args:
            greeting: What must come before the first frame.
        """
        self.out: list[bytes | memoryview] = []
        self.handlers: dict[int, Callable[[int, int, bytes, int, int], int]] = {}
        self._greeting = greeting
        self.begun = False
        self.largest = frames.DEFAULT_FRAME
        self._busy = False
        self._deferred: list[bytes | memoryview] = []
        self._passing = 0  # bytes of a passing DATA frame that are still to come
        self._rest: bytes | bytearray = b""  # an incomplete frame
        self._need = 0
        self._block: bytearray | None = None  # an open header block
        self._block_stream = self._block_flags = 0
        self._empties = 0

    def drain(self) -> list[bytes | memoryview]:
        """Take what must leave."""
        out = self.out
        if out:
            self.out = []
        return out

    def send_last(self, frame: bytes) -> None:
        """Send a last frame of our own if a frame may begin here; the reader may have failed inside one."""
        if self.begun and not self._passing and self._block is None:
            self.out.append(frame)

    def inject(self, *own: bytes | memoryview) -> None:
        """Send frames of our own at the next place where they may stand."""
        if self._busy or self._passing or self._block is not None or not self.begun:
            self._deferred.extend(own)
        else:
            self.out.extend(own)

    def feed(self, data: bytes) -> None:
        """Take bytes of any length.

        Raises:
            RelayError: The peer broke the protocol; the reader cannot be used after this.
        """
        mark = pos = 0
        self._busy = True
        if self._greeting:
            pos = self._greet(data)
        elif self._passing:
            pos = self._pass_on(data)
        elif self._rest:
            if len(self._rest) + len(data) < self._need:
                self._gather_rest(data)
                self._busy = False
                return
            if self._need > _HEAD:
                mark = pos = self._end_rest(data)
            else:
                data = b"".join((self._rest, data))
                self._rest = b""
        mark, pos = self._walk(data, mark, pos)
        self._busy = False
        size = len(data)
        if mark == 0 and pos == size:
            if size:
                self.out.append(data)
        else:
            if pos > mark:
                self.out.append(data[mark:pos])
            if pos < size:
                self._keep_rest(data, pos, size)
        if self._deferred and self.begun and not self._passing and self._block is None:
            self._pour()

    def _end_rest(self, data: bytes) -> int:
        """Handle the incomplete frame with what completes it; returns where the next one begins."""
        missing = self._need - len(self._rest)
        frame = b"".join((self._rest, data[:missing]))
        self._rest = b""
        mark, pos = self._walk(frame, 0, 0)
        if pos > mark:
            self.out.append(frame[mark:pos])
        return missing

    def _walk(self, data: bytes, mark: int, pos: int) -> tuple[int, int]:
        """Handle all complete frames; returns where the unsent stretch begins and where it ends.

        What is between ``mark`` and ``pos`` passes.
        """
        head, passes, handlers = frames.HEAD.unpack_from, self.passes, self.handlers
        size = len(data)
        if pos > mark and self._deferred and not self._passing:
            mark = self._flush(data, mark, pos)
        while pos + _HEAD <= size:
            word, flags, stream = head(data, pos)
            stream &= STREAM_ID
            end = pos + _HEAD + (word >> 8)
            kind = word & 0xFF
            if word >> 8 > self.largest or (self._block is not None and kind != CONTINUATION):
                raise RelayError(
                    f"cannot read a frame: type {kind} with {word >> 8} bytes may not stand here "
                    f"(at most {self.largest} bytes, and an open header goes first)"
                )
            if kind == DATA and passes(flags, stream, word >> 8):
                if end > size:
                    self._passing = end - size
                    return mark, size
                pos = end
                continue
            if end > size:
                break
            verdict = KEEP
            if kind == HEADERS and flags & _SHAPE == END_HEADERS and stream:
                if word >> 8 > LARGEST_BLOCK:
                    raise block_too_long()
                verdict = self.on_headers(flags, stream)
                self.on_block(flags, stream, data[pos + _HEAD : end])
            elif kind in handlers:
                verdict = handlers[kind](flags, stream, data, pos + _HEAD, end)
            if verdict != KEEP:
                mark = self._part(verdict, data, mark, pos, end)
            pos = end
            if self._deferred and self.begun and self._block is None:
                mark = self._flush(data, mark, pos)
        return mark, pos

    def _part(self, verdict: int, data: bytes, mark: int, pos: int, end: int) -> int:
        """Send what is before a frame that does not stay; returns where the next stretch begins."""
        if pos > mark:
            self.out.append(data[mark:pos])
        if verdict == CUT:
            return end
        self._pour()
        return pos

    def _flush(self, data: bytes, mark: int, pos: int) -> int:
        """Send the stretch from ``mark`` to ``pos`` and then our own frames."""
        if pos > mark:
            self.out.append(data[mark:pos])
        self._pour()
        return pos

    def _greet(self, data: bytes) -> int:
        """Let the greeting pass; returns where what has come of it ends."""
        count = min(len(self._greeting), len(data))
        if data[:count] != self._greeting[:count]:
            raise RelayError("cannot serve the client: it does not speak HTTP/2")
        self._greeting = self._greeting[count:]
        return count

    def _pass_on(self, data: bytes) -> int:
        """Let the rest of a DATA frame pass; returns where it ends."""
        rest = min(self._passing, len(data))
        self._passing -= rest
        return rest

    def _pour(self) -> None:
        self.out += self._deferred
        self._deferred.clear()

    def _keep_rest(self, data: bytes, pos: int, size: int) -> None:
        self._rest = data[pos:]
        self._need = _HEAD
        if size - pos >= _HEAD:
            word = frames.HEAD.unpack_from(data, pos)[0]
            self._need += word >> 8
            if word >> 8 > LARGEST_BLOCK and word & 0xFF in _WITH_BLOCK:
                raise block_too_long()

    def _gather_rest(self, data: bytes) -> None:
        rest = self._rest
        if not isinstance(rest, bytearray):
            rest = self._rest = bytearray(rest)
        rest += data

    # Subclasses define the meaning of the frames of their direction.

    @abstractmethod
    def passes(self, flags: int, stream: int, length: int) -> bool:
        """Count a DATA frame that only passes, or say that ``on_data`` must see it."""

    @abstractmethod
    def on_headers(self, flags: int, stream: int) -> int:
        """Record that a header begins."""

    @abstractmethod
    def on_block(self, flags: int, stream: int, block: bytes) -> None:
        """Handle a complete header block; ``flags`` are those of its first frame."""
