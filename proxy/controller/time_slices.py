"""Turns of the event loop during work that takes long.

What is done for every container of a node at once (taking them in after a start, comparing them with the
runtime's list) is done in slices, and calls of clients go on between these. So after each ``turn`` the node's
state may be another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

SLICE_S = 0.005
"""How long work goes on before others get a turn."""


class TimeSlices:
    """Gives others a turn as soon as a slice of time is used up."""

    def __init__(self, slice_s: float = SLICE_S, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin a slice.

        Args:
            slice_s: Its length in seconds.
            clock: Seconds that never jump.
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
        """Do all steps of a generator, with turns in between."""
        for _ in steps:
            await self.turn()
