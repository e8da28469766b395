"""Threads that do the blocking work of one kind.

Kernel writes of all plans go through one thread, in order: what is queued later is written later, and every
job reads the newest state when it runs, so the last write is always the newest truth. Calls at the runtime
that calls of clients wait for have a few threads, so that they do not queue behind one that hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """One thread, or a few, with a name."""

    def __init__(self, name: str, failed: Callable[[BaseException], None], threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        self._failed = failed

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do a job and wait for its result."""
        return await asyncio.wrap_future(self._pool.submit(job, *args, **kwargs))

    def start(self, job: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do a job some time; an exception is reported."""
        self._pool.submit(job, *args, **kwargs).add_done_callback(self._done)

    def _done(self, future: Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._failed(error)

    def close(self) -> None:
        """Let what runs end, forget what waits, and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
