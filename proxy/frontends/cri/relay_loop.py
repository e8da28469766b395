"""An event loop that handles a link's sockets as soon as the kernel reports them.

asyncio makes a handle of each event, queues it and runs it in a separate turn. A small call has two events,
and the queue with its overhead costs as much as relaying the bytes. Here, the functions of the sockets that
are given to ``RelayLoop.watch`` are called as soon as the kernel has reported the sockets. Then the loop
waits again at once, unless asyncio has something to do: a callback, a timer that is due, another file
descriptor.

Everything else is asyncio's own loop. Its selector is one file descriptor of the selector here (epoll(7)
allows that).
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Mapping
from contextvars import Context
from functools import partial
from select import EPOLLIN, EPOLLOUT, epoll
from typing import TYPE_CHECKING, Any, Final, TypeVarTuple

from proxy.frontends.cri.busy_poll import WaitHistory

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_Callback = Callable[[], None]
_Args = TypeVarTuple("_Args")
_MOST_EVENTS: Final = 64
_ReadyEvents = list[tuple[selectors.SelectorKey, int]]


class _RelaySelector(selectors.BaseSelector):
    """Calls the functions of watched sockets; returns events of other file descriptors to asyncio.

    Attributes:
        callbacks: For each watched socket the functions to call when it can be read, and when it can be
            written.
        has_work: Whether asyncio has got callbacks or timers since the wait began.
    """

    def __init__(
        self, report: Callable[[dict[str, Any]], None], busy_poll_s: float, may_poll: Callable[[], bool]
    ) -> None:
        """Watch nothing yet.

        Args:
            report: Takes the exception of a function, in asyncio's form.
            busy_poll_s: See ``RelayLoop``.
            may_poll: See ``RelayLoop``.
        """
        self._report = report
        self._busy_poll_s = busy_poll_s
        self._may_poll = may_poll
        self._asyncio_selector = selectors.EpollSelector()
        self._epoll = epoll()
        self._poll = partial(self._epoll.poll, maxevents=_MOST_EVENTS)
        self._epoll.register(self._asyncio_selector.fileno(), EPOLLIN)
        self.callbacks: dict[int, tuple[_Callback | None, _Callback | None]] = {}
        self._waits: dict[int, WaitHistory] = {}
        self.has_work = False

    def watch(self, fd: int, readable: _Callback | None, writable: _Callback | None) -> None:
        """See ``RelayLoop.watch``."""
        events = (EPOLLIN if readable is not None else 0) | (EPOLLOUT if writable is not None else 0)
        if not events:  # otherwise the kernel would still report an error or the end, repeatedly
            if self.callbacks.pop(fd, None) is not None:
                self._waits.pop(fd, None)
                self._epoll.unregister(fd)
        elif fd in self.callbacks:
            self._epoll.modify(fd, events)
            self.callbacks[fd] = readable, writable
        else:
            self._epoll.register(fd, events)
            self.callbacks[fd] = readable, writable
            if self._busy_poll_s:
                self._waits[fd] = WaitHistory()

    def select(self, timeout: float | None = None) -> _ReadyEvents:
        """Wait for events for asyncio; call the functions of watched sockets while waiting."""
        callbacks, poll, may_poll = self.callbacks, self._poll, self._may_poll
        end = None if timeout is None else time.monotonic() + timeout
        self.has_work = False
        waits: WaitHistory | None = None
        while True:
            try:
                if waits is not None and may_poll():
                    events = waits.wait(poll, timeout, self._busy_poll_s)
                else:
                    events = poll(timeout)
            except InterruptedError:
                return []
            others = False
            for fd, event in events:
                # A function may have ended the watch of a later socket.
                functions = callbacks.get(fd)
                if functions is None:
                    others |= fd == self._asyncio_selector.fileno()
                    continue
                waits = self._waits.get(fd)
                readable, writable = functions
                try:
                    if readable is not None and writable is None:
                        readable()
                    else:
                        self._call_both(fd, event)
                except Exception as error:  # noqa: BLE001  as asyncio does: the loop continues
                    self._report({"message": "a watched socket's function failed", "exception": error})
            if others:
                return self._asyncio_selector.select(0)
            if self.has_work or not events:
                return []
            if end is not None:
                timeout = end - time.monotonic()
                if timeout <= 0:
                    return []

    def _call_both(self, fd: int, event: int) -> None:
        """Call both functions of a socket; the first one may have ended its watch."""
        readable = self.callbacks[fd][0]
        if readable is not None and event & ~EPOLLOUT:
            readable()
        writable = self.callbacks.get(fd, (None, None))[1]
        if writable is not None and event & ~EPOLLIN:
            writable()

    def register(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        """Add a file descriptor of asyncio's."""
        return self._asyncio_selector.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        """Remove a file descriptor of asyncio's."""
        return self._asyncio_selector.unregister(fileobj)

    def modify(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        """Change the events of a file descriptor of asyncio's."""
        return self._asyncio_selector.modify(fileobj, events, data)

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        """Return asyncio's file descriptors."""
        return self._asyncio_selector.get_map()

    def close(self) -> None:
        """Close both selectors."""
        self.callbacks.clear()
        self._waits.clear()
        self._epoll.close()
        self._asyncio_selector.close()


class RelayLoop(asyncio.SelectorEventLoop):
    """The loop of the daemon.

    Attributes:
        busy_poll_s: Seconds that the loop may poll for the message that follows another one before it
            sleeps; 0 if it always sleeps.
        may_poll: Returns whether no other thread has work.
    """

    def __init__(self, busy_poll_s: float = 0.0, may_poll: Callable[[], bool] = lambda: True) -> None:
        """Create the loop.

        Args:
            busy_poll_s: See above.
            may_poll: See above.
        """
        self.busy_poll_s = busy_poll_s
        self.may_poll = may_poll
        self._relay_selector = _RelaySelector(self.call_exception_handler, busy_poll_s, may_poll)
        super().__init__(self._relay_selector)

    def watch(self, fd: int, readable: _Callback | None, writable: _Callback | None) -> None:
        """Register functions to call from now on, instead of the previous ones.

        Their exceptions go to the loop's exception handler; the socket is still watched.

        Args:
            fd: A socket that asyncio does not watch.
            readable: Called while the socket can be read; None for no function.
            writable: Called while the socket can be written; None for no function.
        """
        self._relay_selector.watch(fd, readable, writable)

    # Callbacks and timers from this thread; those from other threads arrive through asyncio's own pipe.

    def call_soon(
        self,
        callback: Callable[[*_Args], object],
        *args: *_Args,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Call a function in the next turn."""
        self._relay_selector.has_work = True
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Args], object],
        *args: *_Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call a function at a time."""
        self._relay_selector.has_work = True
        return super().call_at(when, callback, *args, context=context)

    def stop(self) -> None:
        """Stop after this turn."""
        self._relay_selector.has_work = True
        super().stop()
