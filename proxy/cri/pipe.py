"""One end of a link: a socket that the loop watches, read and written without anything between.

asyncio's transports do the same and more, and the calls between (event, transport, protocol, transport) are
paid twice by every small call that passes. This is the part of them that a link needs: read when there is
something, write at once or as soon as there is room, tell the other end to stop reading while too much waits
here, close behind what is pending.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

HIGH_WATER: Final = 512 << 10
"""When so many bytes wait to be written, nothing more is read from the other end."""
LOW_WATER: Final = 128 << 10
READ_BYTES: Final = 256 << 10
LINGER_S: Final = 5.0
"""How long a peer that does not read may keep its socket open behind the end."""


def _nothing(*_: object) -> None:
    """What a closed pipe tells."""


class Pipe:
    """A connected socket.

    Attributes:
        other: The end that is slowed down when this one cannot be written.
        attached: The socket is there and open.
    """

    __slots__ = (
        "_closing", "_ended", "_eof", "_got", "_loop", "_lost", "_out", "_reading", "_recv", "_send",
        "_socket", "_waiting", "attached", "other",
    )  # fmt: skip

    other: Pipe

    def __init__(
        self, got: Callable[[bytes], None], ended: Callable[[], None], lost: Callable[[], None]
    ) -> None:
        """Prepare; ``attach`` gives the socket.

        Args:
            got: Takes what was read.
            ended: The peer sends no more; this end stays open for writing until it is closed.
            lost: The socket is broken.
        """
        self._got = got
        self._ended = ended
        self._lost = lost
        self._out: deque[memoryview] = deque()
        self._waiting = 0
        self._closing = self._eof = self._reading = self.attached = False

    def attach(self, end: socket.socket) -> None:
        """Begin to read from a non-blocking socket, which is ours from now on."""
        self._loop = asyncio.get_running_loop()
        self._socket = end
        self._recv, self._send = end.recv, end.send
        self.attached = self._reading = True
        self._loop.add_reader(end, self._readable)

    @property
    def waiting(self) -> int:
        """Bytes that wait for room."""
        return self._waiting

    def _readable(self) -> None:
        try:
            data = self._recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._lost()
            return
        if data:
            self._got(data)
            return
        self.pause()
        self._reading = False
        self._ended()

    def pause(self) -> None:
        """Read nothing for now."""
        if self.attached and self._reading:
            self._loop.remove_reader(self._socket)

    def resume(self) -> None:
        """Read again."""
        if self.attached and self._reading:
            self._loop.add_reader(self._socket, self._readable)

    def write(self, chunks: list[bytes]) -> None:
        """Send in one piece, now or when there is room."""
        if not self.attached:
            return
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if not self._out:
            try:
                sent = self._send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self._loop.call_soon(self._lost)  # not in the middle of whatever is being done
                return
            if sent == len(data):
                return
            self._out.append(memoryview(data)[sent:])
            self._waiting = len(data) - sent
            self._loop.add_writer(self._socket, self._writable)
        else:
            self._out.append(memoryview(data))
            self._waiting += len(data)
        if self._waiting > HIGH_WATER:
            self.other.pause()

    def _writable(self) -> None:
        try:
            while self._out:
                sent = self._send(self._out[0])
                self._waiting -= sent
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                else:
                    self._out.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._lost()
            return
        if self._waiting <= LOW_WATER:
            self.other.resume()
        if not self._out and self.attached:
            self._loop.remove_writer(self._socket)
            if self._closing:
                self._finish()
            elif self._eof:
                self._shut()

    def end(self) -> None:
        """Send no more behind what is pending; reading goes on."""
        if self.attached and not self._eof:
            self._eof = True
            if not self._out:
                self._shut()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close behind what is pending, or without it if the peer does not read for a while."""
        if not self.attached or self._closing:
            return
        self.pause()
        self._reading, self._closing = False, True
        if self._out:
            self._loop.call_later(LINGER_S, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        if self.attached:
            self.attached = False
            self._out.clear()
            self._waiting = 0
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            # What refers to a link refers to this: without the knot it goes now, not at some collection.
            self._got, self._ended, self._lost = _nothing, _nothing, _nothing
            del self.other
