"""Threads that call hooks.

Theory. A runner is a thread with a lock to sleep on: waking it and waiting for it costs two switches of
threads, about twelve microseconds; a turn of the event loop costs several times as much. Runners are created
on demand, and end after they were idle for a while. The number of slots of each hook (``slots``) limits how
many run at once.

A runner whose hook is past its deadline is *abandoned*: its answer is discarded, and it gets no further
jobs. ``thread_interrupt`` describes how it is interrupted, and when that is impossible.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import Protocol

from proxy.hooks.engine.thread_interrupt import OverdueError, SwitchInterval

MOST_STUCK = 64
"""If this many threads hang, counted over all hooks, no hook is called any more."""
IDLE_S = 30.0
"""A runner that was idle for this long ends."""


class JobResult(Enum):
    """How a job has ended in its runner."""

    DONE = "done"
    HANDED_ON = "handed on"
    ABANDONED = "abandoned"


class Job(Protocol):
    """A job of a runner."""

    def run(self, runner: Runner) -> JobResult:
        """Run the job in a runner."""

    def on_internal_error(self, error: BaseException, runner: Runner | None) -> JobResult:
        """``run`` failed with an internal error, or the exception for an overdue hook arrived late."""

    def notify_outcome(self) -> None:
        """Notify that the job is done; the runner may have its next job before this returns."""

    def on_returned(self, runner: Runner) -> None:
        """Handle that a runner that was abandoned with this job has returned. May be called twice."""


class Runner:
    """One thread."""

    __slots__ = ("_pool", "_wake", "has_returned", "ident", "job")

    def __init__(self, pool: Runners, job: Job, name: str) -> None:
        self._pool = pool
        self._wake = threading.Lock()
        self._wake.acquire()
        self.job: Job | None = job
        self.has_returned = False
        self.ident = 0
        threading.Thread(target=self._run_thread, name=name, daemon=True).start()

    def assign(self, job: Job | None) -> None:
        """Hand the runner its next job; None ends it."""
        self.job = job
        self._wake.release()

    def _run_thread(self) -> None:
        pool = self._pool
        try:
            lost = self._work()
        except OverdueError:  # it was raised at the very end of the hook, and arrives only now
            lost = self.job
        if lost is None:
            pool.ended()
        else:
            pool.returned(self, lost)

    def _work(self) -> Job | None:
        """Run jobs; return the job that the runner was abandoned with, or None when there are no more."""
        self.ident = threading.get_ident()
        pool = self._pool
        while (job := self.job) is not None:
            try:
                result = job.run(self)
            except BaseException as error:  # noqa: BLE001 - the thread must live, and the call continue
                result = job.on_internal_error(error, self)
            if result is JobResult.ABANDONED:
                return job
            pool.switch_interval.restore(self)
            self.job = None
            pool.idle.append(self)  # before ``notify_outcome``: a call made at once finds this runner
            if result is JobResult.DONE:
                job.notify_outcome()
            del job
            while not self._wake.acquire(timeout=0.0 if pool.closed else IDLE_S):
                try:
                    pool.idle.remove(self)
                except ValueError:
                    continue  # another thread has just taken it
                return None
        return None


class Runners:
    """All runners of an engine."""

    def __init__(self) -> None:
        self.idle: list[Runner] = []
        self.switch_interval = SwitchInterval()
        self._lock = threading.Lock()
        self._made = 0
        self._alive = 0
        self._stuck: set[Runner] = set()
        self.closed = False

    @property
    def alive(self) -> int:
        """The number of threads, not counting abandoned ones."""
        return self._alive

    @property
    def stuck(self) -> int:
        """The number of abandoned threads that have not returned."""
        return len(self._stuck)

    @property
    def is_overloaded(self) -> bool:
        """Whether too many abandoned runners have not returned."""
        return len(self._stuck) >= MOST_STUCK

    def start(self, job: Job) -> None:
        """Run a job, in an idle thread or in a new one.

        Raises:
            RuntimeError: The system cannot start another thread.
        """
        try:
            idle = self.idle.pop()
        except IndexError:
            self._add(job)
        else:
            idle.assign(job)

    def _add(self, job: Job) -> None:
        with self._lock:
            self._made += 1
            self._alive += 1
        try:
            Runner(self, job, f"hooks-{self._made}")
        except BaseException:
            self.ended()
            raise

    def abandon(self, runner: Runner) -> None:
        """Abandon a runner: another thread has taken its job."""
        self._stuck.add(runner)
        if runner.has_returned:
            self._stuck.discard(runner)
        self.ended()

    def returned(self, runner: Runner, job: Job) -> None:
        """An abandoned runner has returned, and ends."""
        for _ in range(3):
            try:
                runner.has_returned = True
                self.switch_interval.restore(runner)
                self._stuck.discard(runner)
                job.on_returned(runner)
            except OverdueError:
                continue  # it was raised before we saw that the runner had returned
            return

    def ended(self) -> None:
        """A thread has ended."""
        with self._lock:
            self._alive -= 1

    def close(self) -> None:
        """End the idle runners; the others end when they become idle."""
        self.closed = True
        while self.idle:
            try:
                self.idle.pop().assign(None)
            except IndexError:
                break
