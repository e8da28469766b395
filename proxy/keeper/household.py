"""What a keeper needs beside its state: tasks beside, what is counted, and faults that are told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine

from proxy.keeper.problems import Problems
from proxy.keeper.tending import tended


class Household:
    """Tasks that run beside, and what went wrong.

    Attributes:
        counters: What has happened how often.
        problems: What went wrong.
    """

    def __init__(self, wall: Callable[[], float], warn: Callable[[str], None]) -> None:
        """Begin on the running event loop.

        Args:
            wall: Seconds since the epoch.
            warn: Is told each problem once.
        """
        self.counters: Counter[str] = Counter()
        self.problems = Problems(wall, warn)
        self._loop = asyncio.get_running_loop()
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
        """Run something beside for as long as there is a keeper; it begins anew after a fault."""
        self.spawn(tended(begin, self.begun_anew))

    def begun_anew(self, error: BaseException) -> None:
        """Report a fault of ours that has ended a task which begins anew."""
        self.counters["tasks_begun_anew"] += 1
        self.broken(error)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken(error)

    def complain(self, problem: str) -> None:
        """Note a problem; callable from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.problems.note, problem)

    def broken(self, error: BaseException) -> None:
        """Report a fault of ours; callable from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note_fault, f"{type(error).__name__}: {error}")

    def unreadable(self, what: str) -> None:
        """Count and note something of the runtime's that cannot be read; callable from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note_unreadable, what)

    def _note_unreadable(self, what: str) -> None:
        self.counters["runtime_entries_unreadable"] += 1
        self.problems.note(what)

    def _note_fault(self, what: str) -> None:
        self.counters["internal_errors"] += 1
        self.problems.note(f"internal error: {what}")

    async def end_tasks(self) -> None:
        """Cancel what runs beside, and let nothing begin any more."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
