"""Background tasks: a permanent task that ends by a fault is restarted.

Otherwise a fault of our own would end, say, settling for good, and that might not be noticed for days. So the
fault is reported and counted, and the task is restarted after a pause, which doubles while the task goes on
failing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from proxy.model.backoff import Backoff, RetryDelays
from proxy.telemetry import metrics
from proxy.telemetry.port import Telemetry

PAUSES = Backoff(0.1, 60.0, steady=120.0)
"""Seconds before a task is restarted."""


async def tended(begin: Callable[[], Awaitable[None]], failed: Callable[[BaseException], None]) -> None:
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
        except Exception as error:  # noqa: BLE001  whatever it is, the task must go on
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
        self.spawn(tended(begin, self.restarted))

    def restarted(self, error: BaseException) -> None:
        """Report a fault of our own that has ended a task; the task is restarted."""
        self.telemetry.count(metrics.TASKS_RESTARTED)
        self.broken(error)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken(error)

    def broken(self, error: BaseException) -> None:
        """Report a fault of our own; callable from any thread."""
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
