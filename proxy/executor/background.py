"""What runs in parallel with calls: worker threads that may block, and background tasks of the event loop.

Kernel writes of all plans go through one thread, in order: what is queued later is written later, and every
job reads the newest state when it runs, so the last write always carries the newest state. The ledger has a
thread of its own, so that a cgroup file that does not answer delays no record. If work in both threads must
happen in order, the first part is awaited (``LedgerWriter.flush`` before a kernel write). If a client's call
waits for a call to the runtime, that call runs in one of a few threads, so that it does not queue behind a
call that hangs.

The threads of ``concurrent.futures.ThreadPoolExecutor`` are joined when the interpreter exits. A thread
stuck in a system call on a file system would keep the whole process from exiting. So these threads are
daemon threads, and ``shutdown`` waits for a bounded time only. The futures are those of
``concurrent.futures``. A stuck thread is never replaced. Its write may still happen later, and could undo a
write of its replacement: the older value would be the last one. The queue continues when the call returns.

A permanent task that ends with an internal error is restarted. Otherwise a task such as ``RuntimeSync`` would
not start again, and nothing might detect that for days. So the fault is reported and counted, and the task is
restarted after a pause, which doubles while the task continues failing. Long work gives other tasks a turn
(``TimeSlices``).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Final, ParamSpec, TypeVar

from proxy.model.backoff import Backoff, RetryDelays
from proxy.telemetry import metrics
from proxy.telemetry.port import Telemetry

P = ParamSpec("P")
T = TypeVar("T")

Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class JobCounter:
    """Counts the jobs of all threads of the process that have not ended; usable from any thread."""

    __slots__ = ("_lock", "_unfinished")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unfinished = 0

    def add(self, jobs: int) -> None:
        """Count jobs that begin to wait, or discount jobs that have ended."""
        with self._lock:
            self._unfinished += jobs

    def none_unfinished(self) -> bool:
        """Return whether no job waits or runs."""
        return not self._unfinished


JOBS: Final = JobCounter()
"""The jobs of all ``Threads``:
while there are any, the event loop does not poll (``frontends/cri/relay_loop``)."""


class Threads:
    """A few threads with one queue. Threads are started when there is work."""

    def __init__(
        self,
        count: int,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        unfinished: JobCounter = JOBS,
    ) -> None:
        """Start nothing yet.

        Args:
            count: How many threads there may be.
            name: The name of the threads.
            clock: A monotonic clock, in seconds.
            unfinished: Counts the jobs that have not ended.
        """
        self._count = count
        self._name = name
        self._clock = clock
        self._unfinished = unfinished
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._began: dict[int, float] = {}
        self._closed = False

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a job; if no thread can be started for it, it fails, and the next job tries to start one.

        Raises:
            RuntimeError: The threads have been shut down.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"cannot begin a job of {self._name}: its threads have been shut down")
            if self._idle:
                self._idle -= 1
            elif len(self._threads) < self._count:
                try:
                    self._start_one()
                except RuntimeError as error:
                    if not self._threads:  # otherwise, one of them runs it later
                        future.set_exception(error)
                        return future
            self._unfinished.add(1)
            self._jobs.put((future, job, args, kwargs))
        return future

    def _start_one(self) -> None:
        number = len(self._threads)
        name = self._name if self._count == 1 else f"{self._name}_{number}"
        thread = threading.Thread(target=self._run, args=(number,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

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
        self._unfinished.add(-len(waiting))
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
                self._unfinished.add(-1)
                del self._began[number], job

    def _next(self) -> Job | None:
        """Wait for a job; None if there will be no more."""
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


CLOSE_S = 1.0
"""Seconds that ``close`` waits for running jobs. A thread that is stuck longer ends with the process."""


class Worker:
    """A named queue of jobs with one thread, or a few."""

    def __init__(self, name: str, failed: Callable[[BaseException], None], threads: int = 1) -> None:
        self.name = name
        self._pool = Threads(threads, name)
        self._failed = failed

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a job and wait for its result. Cancelling the wait drops a job that has not begun."""
        return await self.submit(job, *args, **kwargs)

    async def run_with_callback(
        self, on_result: Callable[[T], object], job: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a job as ``run`` does, and pass its result to ``on_result``, on the event loop.

        If the wait is cancelled after the job has begun, ``on_result`` gets the result when the job ends.
        """
        future, loop = self._pool.submit(job, *args, **kwargs), asyncio.get_running_loop()
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancelled():
                future.add_done_callback(lambda ended: self._note_late(ended, on_result, loop))
            raise
        on_result(result)
        return result

    def _note_late(
        self, ended: Future[T], on_result: Callable[[T], object], loop: asyncio.AbstractEventLoop
    ) -> None:
        if ended.exception() is not None:
            self._done(ended)
            return
        with contextlib.suppress(RuntimeError):  # the loop has been closed: the process ends
            loop.call_soon_threadsafe(on_result, ended.result())

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
        """Run a coroutine in the background and report what it raises; after ``end_tasks``, start nothing."""
        if self._closing:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def run_always(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Run a task in the background as long as the executor lives; it is restarted after a fault."""
        self.spawn(run_with_restarts(begin, self.restarted))

    def restarted(self, error: BaseException) -> None:
        """Report an internal error that has ended a task; the task is restarted."""
        self.telemetry.count(metrics.TASKS_RESTARTED)
        self.report_internal_error(error)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report_internal_error(error)

    def report_internal_error(self, error: BaseException) -> None:
        """Report an internal error; callable from any thread."""
        self.telemetry.fault(error)

    def report_unreadable(self, message: str) -> None:
        """Count and report an entry in the runtime's lists that cannot be read; callable from any thread."""
        self.telemetry.count(metrics.RUNTIME_ENTRIES_UNREADABLE)
        self.telemetry.problem("cannot read an entry of the runtime", reason=message)

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

    Work on all containers of a node (adopting them after a start, reconciling them with the runtime's list)
    is done in slices, between which calls of clients continue. So the state may change during each ``turn``.
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
        """Run a generator to its end, and give other tasks turns in between."""
        for _ in steps:
            await self.turn()
