"""Threads that call hooks, and what becomes of those that do not come back.

Theory. A runner is a thread with a lock to sleep on: waking it and waiting for it costs two switches of
threads, about ten microseconds, where a turn of the event loop costs several times that. Runners are made
when one is needed, and end when they were idle for a while. How many run at once is bounded by who gives
them work: each hook has a few places.

A runner whose hook is past its deadline is *abandoned*: its answer will not be used, and nobody gives it
work again. An exception is thrown into it, again and again with longer pauses, until it comes back. It is
thrown only while the innermost frame is the hook's own or one of a library, and never in one that holds
locks which others need (logging, imports, threads, asyncio, gRPC): there an exception between a lock's
acquisition and the ``try`` after it would leave the lock held for ever.

What remains. A thread that sits in a call of C (``time.sleep``, a read) gets the exception when that
returns. One in C code that keeps the interpreter's lock (a regular expression that backtracks without end)
stops the whole daemon until it is done: nothing in this process can do anything about it. Neither can a
hook's ``os._exit`` or a crash in C be helped. Who must be safe from that is a remote hook.

A hook that spins in Python takes every other turn of the interpreter: whoever wakes waits up to the switch
interval, 5 ms. So the interval is made short while a hook takes long.
"""

from __future__ import annotations

import sys
import threading
from enum import Enum
from pathlib import PurePath
from typing import Protocol

IDLE_S = 30.0
"""A runner that has had nothing to do for so long ends."""
_HURRIED_S = 0.0005
_STILL_S = 1.0
_OURS = str(PurePath(__file__).parent)
_DELICATE = frozenset(
    ("asyncio", "concurrent", "grpc", "importlib", "logging", "loguru", "queue", "threading")
)
_FROZEN = "<frozen importlib"


class OverdueError(BaseException):
    """Thrown into a hook that is past its deadline; it must let it pass."""


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


class Target(Protocol):
    """A thread that an exception may be thrown into."""

    ident: int
    """Its id, as ``threading.get_ident`` gives it; 0 until it runs."""
    back: bool
    """It is out of the hook."""


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
        self.ident = threading.get_ident()
        house = self._house
        while (job := self.job) is not None:
            try:
                way = job.run(self)
            except BaseException as error:  # noqa: BLE001 - the thread must live, and the call go on
                way = job.broke(error, self)
            house.pace.calm(self)
            if way is Way.LOST:
                house.returned(self, job)
                return
            self.job = None
            house.idle.append(self)  # before it is told: who asks again at once finds this one
            if way is Way.DONE:
                job.settle()
            del job
            while not self._wake.acquire(timeout=IDLE_S):
                try:
                    house.idle.remove(self)
                except ValueError:
                    continue  # somebody has just taken it
                house.ended()
                return
        house.ended()


class Runners:
    """All runners of an engine."""

    def __init__(self) -> None:
        self.idle: list[Runner] = []
        self.pace = Pace()
        self._lock = threading.Lock()
        self._made = 0
        self._alive = 0
        self._stuck: set[Runner] = set()
        self._closed = False

    @property
    def alive(self) -> int:
        """How many threads there are, without those that were abandoned."""
        return self._alive

    @property
    def stuck(self) -> int:
        """How many have been abandoned and have not come back."""
        return len(self._stuck)

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
        while self.idle:
            try:
                self.idle.pop().give(None)
            except IndexError:
                break


class Pace:
    """The interpreter's switch interval: short while a hook takes long, else as it was."""

    def __init__(self) -> None:
        self._usual = sys.getswitchinterval()
        self._slow: set[Target] = set()
        self._lock = threading.Lock()

    def hurry(self, target: Target) -> None:
        """A thread's hook takes long."""
        with self._lock:
            if not self._slow:
                sys.setswitchinterval(_HURRIED_S)
            self._slow.add(target)

    def throw(self, target: Target) -> None:
        """Throw ``OverdueError`` into a thread that is out of time, if it is where that does no harm."""
        with self._lock:
            sys.setswitchinterval(_STILL_S)  # nobody else runs between the look and the throw
            try:
                if not target.back:
                    _throw(target.ident)
            finally:
                sys.setswitchinterval(_HURRIED_S if self._slow else self._usual)

    def calm(self, target: Target) -> None:
        """A thread is out of its hook."""
        if target not in self._slow:
            return
        with self._lock:
            self._slow.discard(target)
            if not self._slow:
                sys.setswitchinterval(self._usual)


def _throw(ident: int) -> None:
    """Throw ``OverdueError`` into a thread if it is where that does no harm."""
    import ctypes

    if _may(ident):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(OverdueError))


def _may(ident: int) -> bool:
    """Tell whether a thread is in code that an exception may hit anywhere."""
    frame = sys._current_frames().get(ident)
    if frame is None or frame.f_code.co_filename.startswith(_OURS):
        return False
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] in _DELICATE or frame.f_code.co_filename.startswith(_FROZEN):
            return False
        frame = frame.f_back
    return True
