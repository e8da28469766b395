"""One thread that does the blocking work of one kind, in order.

Kernel writes of all plans go through one such thread: what is queued later is written later, and every job
reads the newest state when it runs, so the last write is always the newest truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """A named worker thread."""

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._failed = failed

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a job and wait for its result."""
        future = self._pool.submit(job, *args, **kwargs)
        return await asyncio.wrap_future(future)

    def start(self, job: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do a job some time; an exception is reported."""
        self._pool.submit(job, *args, **kwargs).add_done_callback(self._done)

    def _done(self, future: Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._failed(error)

    def close(self) -> None:
        """Let the queue run empty and end the thread."""
        self._pool.shutdown(wait=True)
