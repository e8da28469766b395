"""Threads that call hooks.

Theory. A runner is a thread with a lock to sleep on: waking it and waiting for it costs two switches of
threads, about twelve microseconds, where a turn of the event loop costs several times that. Runners are
made when one is needed, and end when they were idle for a while. How many run at once is bounded by who
gives them work: each hook has a few places.

A runner whose hook is past its deadline is *abandoned*: its answer will not be used, and nobody gives it
work again. What is done to have it back, and what cannot be helped, is said in ``pace``.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import Protocol

from proxy.hooks.engine.pace import OverdueError, Pace

MOST_STUCK = 64
"""Threads of all hooks that may hang before no hook is asked."""
IDLE_S = 30.0
"""A runner that has had nothing to do for so long ends."""


class Way(Enum):
    """How a job has left its runner."""

    DONE = "done"
    HANDED = "handed on"
    LOST = "abandoned"


class Job(Protocol):
    """What a runner does."""

    def run(self, runner: Runner) -> Way:
        """Do it."""

    def broke(self, error: BaseException, runner: Runner | None) -> Way:
        """Our own code has failed in ``run``, or the exception for what is overdue came late."""

    def settle(self) -> None:
        """Tell that it is done; the runner may have its next job before this ends."""

    def came_back(self, runner: Runner) -> None:
        """A runner that was abandoned with this job is back. May be said twice."""


class Runner:
    """One thread."""

    __slots__ = ("_house", "_wake", "back", "ident", "job")

    def __init__(self, house: Runners, job: Job, name: str) -> None:
        self._house = house
        self._wake = threading.Lock()
        self._wake.acquire()
        self.job: Job | None = job
        self.back = False
        self.ident = 0
        threading.Thread(target=self._live, name=name, daemon=True).start()

    def give(self, job: Job | None) -> None:
        """Give it its next job; None ends it."""
        self.job = job
        self._wake.release()

    def _live(self) -> None:
        house = self._house
        try:
            lost = self._work()
        except OverdueError:  # it was thrown at the very end of the hook, and comes only now
            lost = self.job
        if lost is None:
            house.ended()
        else:
            house.returned(self, lost)

    def _work(self) -> Job | None:
        """Do jobs; gives the one that it was abandoned with, or None when there are no more."""
        self.ident = threading.get_ident()
        house = self._house
        while (job := self.job) is not None:
            try:
                way = job.run(self)
            except BaseException as error:  # noqa: BLE001 - the thread must live, and the call go on
                way = job.broke(error, self)
            if way is Way.LOST:
                return job
            house.pace.calm(self)
            self.job = None
            house.idle.append(self)  # before it is told: who asks again at once finds this one
            if way is Way.DONE:
                job.settle()
            del job
            while not self._wake.acquire(timeout=0.0 if house.closed else IDLE_S):
                try:
                    house.idle.remove(self)
                except ValueError:
                    continue  # somebody has just taken it
                return None
        return None


class Runners:
    """All runners of an engine."""

    def __init__(self) -> None:
        self.idle: list[Runner] = []
        self.pace = Pace()
        self._lock = threading.Lock()
        self._made = 0
        self._alive = 0
        self._stuck: set[Runner] = set()
        self.closed = False

    @property
    def alive(self) -> int:
        """How many threads there are, without those that were abandoned."""
        return self._alive

    @property
    def stuck(self) -> int:
        """How many have been abandoned and have not come back."""
        return len(self._stuck)

    @property
    def crowded(self) -> bool:
        """Whether too many have not come back."""
        return len(self._stuck) >= MOST_STUCK

    def start(self, job: Job) -> None:
        """Do a job, in a thread that is idle or in a new one.

        Raises:
            RuntimeError: The system gives no more threads.
        """
        try:
            idle = self.idle.pop()
        except IndexError:
            self._add(job)
        else:
            idle.give(job)

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
        """Its job is somebody else's now."""
        self._stuck.add(runner)
        if runner.back:
            self._stuck.discard(runner)
        self.ended()

    def returned(self, runner: Runner, job: Job) -> None:
        """One that was abandoned is back, and ends."""
        for _ in range(3):
            try:
                runner.back = True
                self.pace.calm(runner)
                self._stuck.discard(runner)
                job.came_back(runner)
            except OverdueError:
                continue  # it was thrown before the runner was seen to be back
            return

    def ended(self) -> None:
        """A thread is gone."""
        with self._lock:
            self._alive -= 1

    def close(self) -> None:
        """End those that are idle; the others end when they are."""
        self.closed = True
        while self.idle:
            try:
                self.idle.pop().give(None)
            except IndexError:
                break
