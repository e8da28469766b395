"""An event loop on a simulated clock: a pause takes no time, and a busy machine does not change the result.

It suits tests whose tasks wait for nothing but each other and the clock. A loop that waits for a thread, a
process or a socket would let its timers run at once.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _ClockSelector(selectors.DefaultSelector):
    """Advances the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("no task of this loop can ever continue")
        self.now += max(0.0, timeout)
        return super().select(0)


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time advances to the next timer as soon as there is nothing else to do."""

    def __init__(self) -> None:
        self._clock = _ClockSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a simulated clock, as ``asyncio.run`` does on the real one.

    Raises:
        RuntimeError: All its tasks wait for each other.
    """
    with asyncio.Runner(loop_factory=ClockLoop) as runner:
        return runner.run(main)
