"""Threads that do the blocking work of one kind.

Kernel writes of all plans go through one thread, in order: what is queued later is written later, and every
job reads the newest state when it runs, so the last write is always the newest truth. The ledger has a thread
of its own: a cgroup file that does not answer holds up no record. What must come one after the other across
both is awaited (``Journal.flush`` before a kernel write). Calls at the runtime that calls of clients wait for
have a few threads, so that they do not queue behind one that hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from proxy.controller.threads import Threads

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_S = 1.0
"""How long the end waits for jobs that run. A thread that is stuck longer ends with the process."""


class Worker:
    """One thread, or a few, with a name."""

    def __init__(self, name: str, failed: Callable[[BaseException], None], threads: int = 1) -> None:
        self.name = name
        self._pool = Threads(threads, name)
        self._failed = failed

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a job and wait for its result. One that has not begun is dropped where the wait is cancelled."""
        return await self.submit(job, *args, **kwargs)

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue a job; its result, or its exception, must be looked at."""
        return asyncio.wrap_future(self._pool.submit(job, *args, **kwargs))

    def start(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do a job some time; an exception is reported.

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
        """Return how long the oldest job that runs has been running; 0 while none does."""
        return self._pool.running_s()

    @property
    def waiting(self) -> int:
        """How many jobs wait for a thread."""
        return self._pool.waiting

    def close(self) -> None:
        """Let what runs end for a moment, forget what waits, and end the threads."""
        self._pool.shutdown(CLOSE_S)
