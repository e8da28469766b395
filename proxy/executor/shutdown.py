"""The shutdown of the daemon, step by step, in bounded time: a step that hangs does not hold up the next.

The steps share one deadline. Each also has its own limit, so that a step that hangs leaves time for others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from proxy.telemetry.port import Report

CLOSE_S = 4.0
"""Seconds that closing an executor may take."""


class ShutdownTime:
    """The remaining time of a shutdown."""

    def __init__(self, limit: float, report: Report) -> None:
        """Start counting.

        Args:
            limit: Seconds for all steps together.
            report: Called with each step that failed or did not end in time.
        """
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + limit
        self._report = report

    def remaining(self) -> float:
        """Return the remaining seconds."""
        return max(0.0, self._until - self._loop.time())

    async def step(
        self, what: str, work: Awaitable[object], max_seconds: float = 1.0, min_seconds: float = 0.1
    ) -> None:
        """Perform a step; report what it raises, or that it did not end in time.

        Args:
            what: What the step does, for the report ("write the ledger").
            work: The step.
            max_seconds: Seconds that it may take at most.
            min_seconds: Seconds that it may take even if none are left.
        """
        try:
            async with asyncio.timeout(max(min_seconds, min(max_seconds, self.remaining()))):
                await work
        except TimeoutError:
            self._report("cannot finish a step of the shutdown in time: it is abandoned", step=what)
        except Exception as error:  # noqa: BLE001  no fault may prevent the next step
            self._report("cannot finish a step of the shutdown", step=what, err=error)
