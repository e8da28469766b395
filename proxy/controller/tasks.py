"""Tasks in the background: none of those that last ends by a fault without being begun again.

A fault of ours in one of them would otherwise end, say, settling for good, and it might not be noticed for
days. So it is reported and counted, and the task begins again after a pause, which doubles while it goes on
failing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from proxy.model.backoff import Backoff, RetryDelays
from proxy.telemetry import metrics
from proxy.telemetry.port import Telemetry

PAUSES = Backoff(0.1, 60.0, steady=120.0)
"""Seconds before a task begins again."""


async def tended(begin: Callable[[], Awaitable[None]], failed: Callable[[BaseException], None]) -> None:
    """Run something until it ends by itself.

    Args:
        begin: Begins it; called again after each fault.
        failed: Is told what it ended with.
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
            failed(error)  # something that it waited for was cancelled, not the task
        except Exception as error:  # noqa: BLE001  whatever it is, the task must go on
            failed(error)
        else:
            return
        await asyncio.sleep(pauses.next(loop.time() - began))


class BackgroundTasks:
    """Tasks that run in the background, and what went wrong.

    Attributes:
        telemetry: Where everything is logged, counted and reported.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        """Begin on the running event loop."""
        self.telemetry = telemetry
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Run a coroutine beside; what it raises is reported. Nothing is begun any more at the end."""
        if self._closing:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def tend(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Run something beside for as long as there is a controller; it begins anew after a fault."""
        self.spawn(tended(begin, self.restarted))

    def restarted(self, error: BaseException) -> None:
        """Report a fault of ours that has ended a task which begins anew."""
        self.telemetry.count(metrics.TASKS_RESTARTED)
        self.broken(error)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken(error)

    def broken(self, error: BaseException) -> None:
        """Report a fault of ours; callable from any thread."""
        self.telemetry.fault(error)

    def unreadable(self, what: str) -> None:
        """Count and report an entry of the runtime's that cannot be read; callable from any thread."""
        self.telemetry.count(metrics.RUNTIME_ENTRIES_UNREADABLE)
        self.telemetry.problem("cannot read an entry of the runtime", reason=what)

    async def end_tasks(self) -> None:
        """Cancel what runs beside, and let nothing begin any more."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
