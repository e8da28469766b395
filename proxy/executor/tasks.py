"""Background tasks: a permanent task that ends by a fault is restarted, and long work gives others a turn.

Otherwise an internal error would end a task such as settling, and the task would not start again, and that
might not be noticed for days. So the fault is reported and counted, and the task is restarted after a pause,
which doubles while the task continues failing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable

from proxy.model.backoff import Backoff, RetryDelays
from proxy.telemetry import metrics
from proxy.telemetry.port import Telemetry

PAUSES = Backoff(0.1, 60.0, steady=120.0)
"""Seconds before a task is restarted."""


async def run_with_restarts(
    begin: Callable[[], Awaitable[None]], failed: Callable[[BaseException], None]
) -> None:
    """Run a coroutine until it ends by itself; restart it after each fault.

    Args:
        begin: Makes the coroutine; called again after each fault.
        failed: Called with the fault.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    pauses = RetryDelays(PAUSES)
    while True:
        began = loop.time()
        try:
            await begin()
        except asyncio.CancelledError as error:
            if task is None or task.cancelling():
                raise
            failed(error)  # what the task waited for was cancelled, not the task itself
        except Exception as error:  # noqa: BLE001  whatever it is, the task must continue
            failed(error)
        else:
            return
        await asyncio.sleep(pauses.next(loop.time() - began))


class BackgroundTasks:
    """Tasks that run in the background, and reports of their faults.

    Attributes:
        telemetry: Where everything is logged, counted and reported.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        """Start without tasks, on the running event loop."""
        self.telemetry = telemetry
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Run a coroutine in the background and report what it raises; once closing, start nothing."""
        if self._closing:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def tend(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Run a task in the background as long as the executor lives; it is restarted after a fault."""
        self.spawn(run_with_restarts(begin, self.restarted))

    def restarted(self, error: BaseException) -> None:
        """Report an internal error that has ended a task; the task is restarted."""
        self.telemetry.count(metrics.TASKS_RESTARTED)
        self.broken(error)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken(error)

    def broken(self, error: BaseException) -> None:
        """Report an internal error; callable from any thread."""
        self.telemetry.fault(error)

    def unreadable(self, what: str) -> None:
        """Count and report an entry in the runtime's lists that cannot be read; callable from any thread."""
        self.telemetry.count(metrics.RUNTIME_ENTRIES_UNREADABLE)
        self.telemetry.problem("cannot read an entry of the runtime", reason=what)

    async def end_tasks(self) -> None:
        """Cancel all background tasks, and start no more."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


SLICE_S = 0.005
"""Seconds that work continues before other tasks get a turn."""


class TimeSlices:
    """Gives other tasks a turn as soon as a slice of time is used up.

    Work on all containers of a node (adopting them after a start, comparing them with the runtime's list) is
    done in slices, between which calls of clients continue. So the state may change during each ``turn``.
    """

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
        """Yield to the event loop if the slice is used up."""
        if self._clock() >= self._until:
            await self.now()

    async def now(self) -> None:
        """Yield to the event loop, and begin a slice."""
        await asyncio.sleep(0)
        self._until = self._clock() + self._slice_s

    async def through(self, steps: Iterable[object]) -> None:
        """Run a generator to its end, with turns in between."""
        for _ in steps:
            await self.turn()
