"""Daemon threads that take jobs from a queue, in order, and report how long they have been at one.

The threads of ``concurrent.futures.ThreadPoolExecutor`` are joined when the interpreter exits. A thread stuck
in a system call on a file system would keep the whole process from exiting. So these threads are daemon
threads, and ``shutdown`` waits for a bounded time only. The futures are the same.

A stuck thread is never replaced. Its write may still happen later, and could undo what a second thread has
written meanwhile: the older value would be the last one. The queue continues when the call returns.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Threads:
    """A few threads with one queue. Threads are started when there is work."""

    def __init__(self, count: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Start nothing yet.

        Args:
            count: How many threads there may be.
            name: The name of the threads.
            clock: A monotonic clock, in seconds.
        """
        self._count = count
        self._name = name
        self._clock = clock
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._began: dict[int, float] = {}
        self._closed = False

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a job.

        Raises:
            RuntimeError: The threads have been shut down.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"cannot begin a job of {self._name}: its threads have been shut down")
            self._jobs.put((future, job, args, kwargs))
            if self._idle:
                self._idle -= 1
            elif len(self._threads) < self._count:
                self._start_one()
        return future

    def _start_one(self) -> None:
        number = len(self._threads)
        name = self._name if self._count == 1 else f"{self._name}_{number}"
        thread = threading.Thread(target=self._run, args=(number,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def running_s(self) -> float:
        """Return how many seconds the oldest running job has been running; 0 while none runs."""
        began = list(self._began.values())
        return max(0.0, self._clock() - min(began)) if began else 0.0

    @property
    def waiting(self) -> int:
        """How many jobs wait for a thread."""
        return self._jobs.qsize()

    def shutdown(self, limit: float) -> bool:
        """Accept no more jobs, cancel waiting ones, and wait at most ``limit`` seconds for running ones.

        Returns:
            Whether all threads have ended. A thread that has not ended is not waited for.
        """
        waiting: list[Job] = []
        with self._lock, contextlib.suppress(queue.Empty):
            self._closed = True
            while True:
                job = self._jobs.get_nowait()
                waiting += [job] if job is not None else []
        for future, *_ in waiting:
            future.cancel()
            future.set_running_or_notify_cancel()
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + limit
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- the threads --------------------------------------------------------------------------------------

    def _run(self, number: int) -> None:
        while (job := self._next()) is not None:
            self._began[number] = self._clock()
            try:
                _do(*job)
            finally:
                del self._began[number], job

    def _next(self) -> Job | None:
        """Wait for a job; None where there will be no more."""
        with self._lock:
            try:
                return self._jobs.get_nowait()
            except queue.Empty:
                self._idle += 1
        return self._jobs.get()


def _do(future: Future[Any], job: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a job unless its requester has gone away, and keep its result."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
        future.set_exception(error)
    else:
        future.set_result(result)
