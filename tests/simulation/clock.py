"""The clock of a simulated node, and everything that will happen on it, in order of time."""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

TRACE_KEPT = 20_000
"""Lines of the trace that a report of a violation shows at most."""


class ScheduledCallback:
    """Something that will happen. ``cancel`` makes it nothing."""

    __slots__ = ("args", "callback", "when")

    def __init__(self, when: float, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.when = when
        self.callback: Callable[..., object] | None = callback
        self.args = args

    def cancel(self) -> None:
        self.callback, self.args = None, ()


class Schedule:
    """What will happen, by time; entries of one moment happen in the order in which they were made.

    Attributes:
        now: Seconds; moves only from one entry to the next.
        events: How many events were delivered to the daemon; see ``__main__``.
        by_kind: The same by kind.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.events = 0
        self.by_kind: dict[str, int] = {}
        self.recent: deque[str] = deque(maxlen=TRACE_KEPT)
        self._heap: list[tuple[float, int, ScheduledCallback]] = []
        self._made = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def after(self, seconds: float, callback: Callable[..., object], *args: Any) -> ScheduledCallback:
        """Schedule something after this number of seconds."""
        entry = ScheduledCallback(self.now + seconds, callback, args)
        self._made += 1
        heapq.heappush(self._heap, (entry.when, self._made, entry))
        return entry

    def next_at(self) -> float | None:
        """Return the time of the next entry; None if there is none."""
        heap = self._heap
        while heap and heap[0][2].callback is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def step(self) -> None:
        """Let the next entry happen."""
        when, _, entry = heapq.heappop(self._heap)
        self.now = max(self.now, when)
        callback, args = entry.callback, entry.args
        entry.callback = None
        if callback is not None:
            callback(*args)

    # -- the trace ----------------------------------------------------------------------------------------

    def trace(self, line: str) -> None:
        """Add a line to the trace."""
        line = f"{self.now:.6f} {line}"
        self._hash.update(line.encode())
        self.recent.append(line)

    def count_event(self, kind: str, detail: str = "") -> None:
        """Count an event that is delivered to the daemon."""
        self.events += 1
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        self.trace(f"{kind} {detail}")

    @property
    def trace_hash(self) -> str:
        """The hash of the whole trace."""
        return self._hash.hexdigest()
