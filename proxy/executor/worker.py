"""Threads that do blocking work of one kind.

Kernel writes of all plans go through one thread, in order: what is queued later is written later, and every
job reads the newest state when it runs, so the last write always carries the newest state. The ledger has a
thread of its own, so that a cgroup file that does not answer delays no record. Where work in both threads
must happen in order, the first is awaited (``Journal.flush`` before a kernel write). Calls to the runtime
that calls of clients wait for have a few threads, so that they do not queue behind one that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from proxy.executor.threads import Threads

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_S = 1.0
"""Seconds that ``close`` waits for running jobs. A thread that is stuck longer ends with the process."""


class Worker:
    """One thread, or a few, with a name."""

    def __init__(self, name: str, failed: Callable[[BaseException], None], threads: int = 1) -> None:
        self.name = name
        self._pool = Threads(threads, name)
        self._failed = failed

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a job and wait for its result. Cancelling the wait drops a job that has not begun."""
        return await self.submit(job, *args, **kwargs)

    async def run_noted(
        self, noted: Callable[[T], object], job: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a job as ``run`` does, and pass its result to ``noted``, on the event loop.

        Where the wait is cancelled after the job has begun, ``noted`` gets the result when the job ends.
        """
        future, loop = self._pool.submit(job, *args, **kwargs), asyncio.get_running_loop()
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancelled():
                future.add_done_callback(lambda ended: self._note_late(ended, noted, loop))
            raise
        noted(result)
        return result

    def _note_late(
        self, ended: Future[T], noted: Callable[[T], object], loop: asyncio.AbstractEventLoop
    ) -> None:
        if ended.exception() is not None:
            self._done(ended)
            return
        with contextlib.suppress(RuntimeError):  # the loop has been closed: the process ends
            loop.call_soon_threadsafe(noted, ended.result())

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue a job; the caller must retrieve its result or exception."""
        return asyncio.wrap_future(self._pool.submit(job, *args, **kwargs))

    def start(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a job without waiting; an exception is reported.

        Returns:
            The job's future. Its end does not wake the event loop, unless something waits for it there.
        """
        future = self._pool.submit(job, *args, **kwargs)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._failed(error)

    def running_s(self) -> float:
        """Return how many seconds the oldest running job has been running; 0 while none runs."""
        return self._pool.running_s()

    @property
    def waiting(self) -> int:
        """How many jobs wait for a thread."""
        return self._pool.waiting

    def close(self) -> None:
        """Wait a moment for running jobs, drop waiting ones, and end the threads."""
        self._pool.shutdown(CLOSE_S)
