"""Limits log lines that a client can cause: the first few of a kind, then one a minute with a count."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

PERIOD_S = 60.0
BURST = 5
"""Lines of one key that are written within a period that follows a quiet one."""
TOTAL = 200
"""Lines of all keys that are written within a period."""
KEYS = 512
"""Keys that are remembered; the one that was used least recently is forgotten first."""


@dataclass(slots=True)
class _Window:
    """A period of one key."""

    since: float
    allowed: int
    count: int = 0
    missed: int = 0

    def admits(self, now: float, burst: int, after_a_flood: int) -> bool:
        """Count a line, and report whether it is to be written; a clock that jumps begins a new period."""
        if not 0 <= now - self.since < PERIOD_S:
            self.allowed = after_a_flood if self.count > self.allowed else burst
            self.since, self.count = now, 0
        self.count += 1
        if self.count > self.allowed:
            self.missed += 1
            return False
        return True

    def take_missed(self) -> int:
        """Return how many lines were left out since the last call."""
        missed, self.missed = self.missed, 0
        return missed


class Throttle:
    """Decides which lines are written. For one thread at a time."""

    def __init__(self, clock: Callable[[], float], *, burst: int = BURST, total: int = TOTAL) -> None:
        """Begin with no line written.

        Args:
            clock: Seconds.
            burst: Lines of one key within a period.
            total: Lines of all keys within a period.
        """
        self._clock = clock
        self._burst = burst
        self._all = _Window(clock(), total)
        self._total = total
        self._windows: OrderedDict[Hashable, _Window] = OrderedDict()

    def admit(self, key: Hashable) -> tuple[int, int] | None:
        """Decide about a line.

        Returns:
            None where many of its key, or many at all, were written lately. Else how many lines were left
            out: of this key since its last one, and of all keys since the limit of all was reached.
        """
        now = self._clock()
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window(now, self._burst)
            if len(self._windows) > KEYS:
                self._windows.popitem(last=False)
        else:
            self._windows.move_to_end(key)
        if not window.admits(now, self._burst, 1):
            return None
        if not self._all.admits(now, self._total, self._total):
            window.missed += 1
            return None
        return window.take_missed(), self._all.take_missed()
