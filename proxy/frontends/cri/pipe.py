"""One end of a link: a socket that the loop watches, read and written without asyncio's transports.

asyncio's transports do the same and more, but their chain of function calls (event, transport, protocol,
transport) runs twice for every small call that is relayed. A ``Pipe`` does only what a link needs: it reads
when bytes have arrived, writes at once or as soon as there is room, stops the other end from reading while
too many bytes wait here, and closes once the pending bytes are written.

Back-pressure. Bytes that the other end has read fill this end's buffer up to ``HIGH_WATER`` plus one read.
Bytes above ``own_high_water`` are frames that the relay itself has written in answer to frames from *this*
end (refusals, resets, window), so this end is not read either until the buffer is empty enough.

Faults. The loop calls ``_readable`` and ``_writable`` again as long as the socket is ready, so an exception
that escapes from one of them would repeat for ever. So they catch all exceptions; the link is notified and
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from proxy.frontends.cri.relay_loop import RelayLoop

HIGH_WATER: Final = 512 << 10
"""When this many bytes wait to be written, nothing more is read from the other end."""
LOW_WATER: Final = 128 << 10
READ_BYTES: Final = 256 << 10
OWN_HIGH_WATER: Final = HIGH_WATER + 2 * READ_BYTES
"""When this many bytes wait to be written to a client, nothing more is read from it."""
SMALL_READ_BYTES: Final = 4096
"""The size of a read if there is no memory for more."""
LINGER_S: Final = 5.0
"""How long the socket of a peer that does not read stays open after ``close``."""
_GATHERED_BYTES: Final = 64 << 10

_OTHER_END_FULL, _THIS_END_FULL = 1, 2  # reasons to pause: the buffer of the other end, or of this end


def _nothing(*_: object) -> None:
    """Do nothing: the callback of a closed pipe."""


class PipeCallbacks(Struct, frozen=True):
    """The notifications of a pipe, except for received bytes.

    Attributes:
        failed: An unforeseen exception; must end the pipe.
        out_of_memory: Called if there is no memory for a read, before a smaller one is tried.
        over_limit: More than ``HIGH_WATER`` bytes wait to be written.
    """

    failed: Callable[[Exception], None]
    out_of_memory: Callable[[], object] = _nothing
    over_limit: Callable[[], None] = _nothing


_NO_CALLBACKS: Final = PipeCallbacks(_nothing)


class Pipe:
    """A connected socket.

    Attributes:
        other: The end that is not read while too many bytes wait at this one.
        attached: There is an open socket.
    """

    __slots__ = (
        "_closing", "_ended", "_eof", "_faults", "_loop", "_lost", "_out", "_own_high_water", "_pauses",
        "_reading", "_received", "_recv", "_send", "_socket", "_waiting", "_writing", "attached", "other",
    )  # fmt: skip

    other: Pipe

    def __init__(
        self,
        received: Callable[[bytes], None],
        ended: Callable[[], None],
        lost: Callable[[], None],
        faults: PipeCallbacks,
        *,
        own_high_water: int = OWN_HIGH_WATER,
    ) -> None:
        """Prepare; ``attach`` gives the socket.

        Args:
            received: Called with the bytes that were read.
            ended: Called when the peer sends no more; this end stays open for writing until it is closed.
            lost: Called when the socket is broken.
            faults: The other notifications.
            own_high_water: When this many bytes wait to be written, nothing more is read here.
        """
        self._received = received
        self._ended = ended
        self._lost = lost
        self._faults = faults
        self._own_high_water = own_high_water
        self._out: deque[memoryview | bytearray] = deque()
        self._waiting = self._pauses = 0
        self._closing = self._eof = self._reading = self._writing = self.attached = False

    def attach(self, end: socket.socket) -> None:
        """Start to read from a non-blocking socket, which the pipe closes in the end."""
        self._loop = asyncio.get_running_loop()
        self._socket = end
        self._recv, self._send = end.recv, end.send
        self.attached = self._reading = True
        self._watch()

    def peer_pid(self) -> int:
        """Return the process that connected, according to the kernel (SO_PEERCRED); 0 if it is unknown."""
        if not self.attached:
            return 0
        try:
            content = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return 0
        return int.from_bytes(content[:4], sys.byteorder)

    @property
    def waiting(self) -> int:
        """Bytes that wait to be written."""
        return self._waiting

    def _watch(self) -> None:
        """Register with the loop the directions that are wanted."""
        readable = self._readable if self._reading and not self._pauses else None
        writable = self._writable if self._writing else None
        watch(self._loop, self._socket, readable, writable)

    # -- reading ------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            try:
                data = self._recv(READ_BYTES)
            except MemoryError:
                self._faults.out_of_memory()
                data = self._recv(SMALL_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._lost()
            return
        except Exception as error:  # noqa: BLE001  see above: it must not leave this function
            self._faults.failed(error)
            return
        try:
            if data:
                self._received(data)
                return
            self._stop_reading()
            self._ended()
        except Exception as error:  # noqa: BLE001  the same
            self._faults.failed(error)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._watch()

    def pause(self, reason: int = _OTHER_END_FULL) -> None:
        """Stop reading until ``resume`` is called with the same reason."""
        paused, self._pauses = self._pauses, self._pauses | reason
        if not paused and self.attached and self._reading:
            self._watch()

    def resume(self, reason: int = _OTHER_END_FULL) -> None:
        """Read again, unless there is another reason not to."""
        if self._pauses & reason:
            self._pauses &= ~reason
            if not self._pauses and self.attached and self._reading:
                self._watch()

    # -- writing ------------------------------------------------------------------------------------------

    def write(self, chunks: list[bytes | memoryview]) -> None:
        """Write chunks in one piece, now or when there is room; drop them once ``end`` is done."""
        if not self.attached:
            return
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if not self._out:
            try:
                sent = self._send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                if not self._eof:  # otherwise nothing can be sent any more, but reading continues
                    self._loop.call_soon(self._lost)  # not within the caller's work
                return
            if sent == len(data):
                return
            self._out.append(memoryview(data)[sent:])
            self._waiting = len(data) - sent
            self._writing = True
            self._watch()
        else:
            self._append(data)
        if self._waiting > HIGH_WATER:
            self.other.pause()
            if self._waiting > self._own_high_water:
                self.pause(_THIS_END_FULL)
            self._faults.over_limit()

    def _append(self, data: bytes | memoryview) -> None:
        """Add to the pending bytes; small pieces share a buffer."""
        self._waiting += len(data)
        last = self._out[-1]
        if isinstance(last, bytearray) and len(last) + len(data) <= _GATHERED_BYTES:
            last += data
        elif len(data) < _GATHERED_BYTES:
            self._out.append(bytearray(data))
        else:
            self._out.append(memoryview(data))

    def _writable(self) -> None:
        try:
            self._write_out()
            if self._waiting <= LOW_WATER:
                self.other.resume()
                self.resume(_THIS_END_FULL)
            if not self._out and self.attached:
                self._writing = False
                self._watch()
                if self._closing:
                    self._finish()
                elif self._eof:
                    self._shut_down_writing()
        except OSError:
            self._lost()
            if self._closing:  # the pending bytes cannot be written any more, and epoll would report it again
                self._finish()
        except Exception as error:  # noqa: BLE001  see above: it must not leave this function
            self._faults.failed(error)

    def _write_out(self) -> None:
        out = self._out
        try:
            while out:
                first = out[0]
                if isinstance(first, bytearray):  # a view prevents the buffer from growing
                    first = out[0] = memoryview(first)
                sent = self._send(first)
                self._waiting -= sent
                if sent < len(first):
                    out[0] = first[sent:]
                else:
                    out.popleft()
        except (BlockingIOError, InterruptedError):
            pass

    # -- ends ---------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Shut the socket down for writing once the pending bytes are written; reading continues."""
        if self.attached and not self._eof:
            self._eof = True
            if not self._out:
                self._shut_down_writing()

    def _shut_down_writing(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close once the pending bytes are written; drop them if the peer does not read for a while."""
        if not self.attached or self._closing:
            return
        self._stop_reading()
        self._closing = True
        if self._out:
            self._loop.call_later(LINGER_S, self._finish)
        else:
            self._finish()

    def abort(self) -> None:
        """Close now, in whatever state the pipe is."""
        self._closing = True
        self._finish()

    def _finish(self) -> None:
        if not self.attached:
            return
        self.attached = self._reading = self._writing = False
        self._out.clear()
        self._waiting = 0
        with contextlib.suppress(Exception):
            self._watch()
        with contextlib.suppress(OSError):
            self._socket.close()
        # The link and the pipe refer to each other; without this cycle both are freed at once.
        self._received = self._ended = self._lost = _nothing
        self._faults = _NO_CALLBACKS
        del self.other


def watch(
    loop: asyncio.AbstractEventLoop,
    end: socket.socket,
    readable: Callable[[], None] | None,
    writable: Callable[[], None] | None,
) -> None:
    """Register functions that a loop calls while a socket is readable or writable; None for neither."""
    if isinstance(loop, RelayLoop):
        loop.watch(end.fileno(), readable, writable)
        return
    if readable is not None:
        loop.add_reader(end, readable)
    else:
        loop.remove_reader(end)
    if writable is not None:
        loop.add_writer(end, writable)
    else:
        loop.remove_writer(end)
