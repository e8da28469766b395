"""The end of the daemon, step by step, within a bounded time: one step that hangs does not hold up the next.

The steps share one deadline. Each has a bound of its own too, so that one that hangs leaves time to others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from proxy.telemetry.port import Report

CLOSE_S = 4.0
"""Seconds that the end of a controller may take."""


class Ending:
    """The time that is left for an end."""

    def __init__(self, limit: float, report: Report) -> None:
        """Begin to count.

        Args:
            limit: Seconds for all steps together.
            report: Called with what did not end in time.
        """
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + limit
        self._report = report

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self._until - self._loop.time())

    async def step(self, what: str, work: Awaitable[object], most: float = 1.0, least: float = 0.1) -> None:
        """Do a step; what it raises is reported, and so is that it does not end in time.

        Args:
            what: What it does, for people ("write the ledger").
            work: The step.
            most: Seconds that it may take at most.
            least: Seconds that it may take also where none are left.
        """
        try:
            async with asyncio.timeout(max(least, min(most, self.left()))):
                await work
        except TimeoutError:
            self._report("cannot finish a step of the shutdown in time: it is left behind", step=what)
        except Exception as error:  # noqa: BLE001  whatever it is, the next step must come
            self._report("cannot finish a step of the shutdown", step=what, err=error)
