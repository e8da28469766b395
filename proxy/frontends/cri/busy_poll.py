"""Busy polling: while messages follow each other closely, look for the next one before sleeping.

A thread that sleeps in epoll_wait(2) has to be woken when its event occurs, which is much of the time that a
small call takes here (``bench/floor_figures.py``). So after a message, the event loop may poll for a short
time before it sleeps. Linux does the same for idle virtual CPUs (Documentation/virt/kvm/halt-polling.rst).

Polling must not cost CPU time for nothing. So each socket has a history of what followed its messages. It
distinguishes a client that makes one call after the other from a client that calls once per second, and from
a runtime that takes milliseconds for an answer.

* The loop begins to poll after a few short waits in a row (``SHORT_WAITS``). A wait is short if it ends
  within the time that polling may take.
* If nothing arrives while the loop polls, it sleeps, and that many short waits have to come again. So a burst
  of calls is followed by one useless poll.
* If the message arrives soon after such a poll, polling may have delayed it, because the other process needed
  the CPU. Then twice as many short waits are required each time, until a poll succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeAlias

from proxy.model.backoff import Backoff

Events: TypeAlias = list[tuple[int, int]]
"""File descriptors and their events, as ``select.epoll.poll`` returns them."""

SHORT_WAITS: Final = 3
"""How many short waits in a row are required at first."""
MOST_SHORT_WAITS: Final = 1024
"""The most that are required, after polls that delayed a message."""
_REQUIRED: Final = Backoff(SHORT_WAITS, MOST_SHORT_WAITS)


class WaitHistory:
    """The waits that followed the messages of one socket."""

    __slots__ = ("_failed_polls", "_missing")

    def __init__(self) -> None:
        """Begin without a wait."""
        self._missing = SHORT_WAITS
        self._failed_polls = 0  # since a poll succeeded; only those that a message followed soon

    def wait(
        self,
        poll: Callable[[float | None], Events],
        timeout: float | None,
        limit: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Events:
        """Wait for the events that follow a message of the socket.

        Args:
            poll: Returns events; sleeps until there are any or a number of seconds is over, None for no end.
            timeout: Seconds after which the wait ends without events; None if it does not.
            limit: Seconds that may be spent on polling.
            clock: Returns seconds.
        """
        began = clock()
        if self._missing:
            events = poll(timeout)
            self._missing = self._missing - 1 if clock() - began < limit else self._required_waits()
            return events
        spent = 0.0
        while spent < limit and (timeout is None or spent < timeout):
            if events := poll(0):
                self._failed_polls = 0
                return events
            spent = clock() - began
        events = poll(timeout if timeout is None else max(0.0, timeout - spent))
        if clock() - began < 2 * limit:
            self._failed_polls += 1
        self._missing = self._required_waits()
        return events

    def _required_waits(self) -> int:
        return int(_REQUIRED.delay(self._failed_polls + 1))
