"""Turns of the event loop during long work.

Work for all containers of a node at once (adopting them after a start, comparing them with the runtime's
list) is done in slices, and calls of clients go on in between. So the node's state may have changed after
each ``turn``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

SLICE_S = 0.005
"""Seconds that work goes on before other tasks get a turn."""


class TimeSlices:
    """Gives other tasks a turn as soon as a slice of time is used up."""

    def __init__(self, slice_s: float = SLICE_S, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin a slice.

        Args:
            slice_s: Its length in seconds.
            clock: A monotonic clock, in seconds.
        """
        self._slice_s = slice_s
        self._clock = clock
        self._until = clock() + slice_s

    async def turn(self) -> None:
        """Let the loop turn if the slice is used up."""
        if self._clock() >= self._until:
            await self.now()

    async def now(self) -> None:
        """Let the loop turn, and begin a slice."""
        await asyncio.sleep(0)
        self._until = self._clock() + self._slice_s

    async def through(self, steps: Iterable[object]) -> None:
        """Run a generator to its end, with turns in between."""
        for _ in steps:
            await self.turn()
