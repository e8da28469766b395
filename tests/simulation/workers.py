"""The daemon's threads in the simulation: jobs are entries of the schedule, in the order of their worker.

A job runs at one moment, but other things may happen in the middle of it: whatever it calls may take time
(``SimulatedNode.elapse``), and meanwhile the event loop and other workers continue.

``SteppedThread`` stands for the one thread that the daemon starts itself, the reader of the runtime's events:
it runs in a real thread, but only while the simulation waits for it, so that its steps come in a fixed order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.daemon import SimulatedDaemon


class SimulatedThreads:
    """Stands for ``proxy.executor.background.Threads``."""

    daemon: SimulatedDaemon
    """The process that makes threads now."""

    def __init__(self, count: int, name: str) -> None:
        self.name = name
        self._daemon = SimulatedThreads.daemon
        self._free = count
        self._jobs: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = deque()
        self._began: dict[int, float] = {}
        self._closed = False
        self._daemon.thread_pools.append(self)

    def submit(self, job: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError(f"cannot begin a job of {self.name}: its threads have been shut down")
        future: Future[Any] = Future()
        if not self._daemon.alive:  # what is left of a dead process is collected some time, and does nothing
            return future
        self._jobs.append((future, job, args, kwargs))
        self._begin()
        return future

    def _begin(self) -> None:
        if self._free and self._jobs:
            self._free -= 1
            node = self._daemon.node
            node.schedule.after(node.delays.job(self.name), self._run)

    def _run(self) -> None:
        daemon = self._daemon
        if not daemon.alive:
            return
        if not self._jobs:
            self._free += 1
            return
        future, job, args, kwargs = self._jobs.popleft()
        if future.set_running_or_notify_cancel():
            name = getattr(job, "__qualname__", None) or type(job).__name__
            schedule = daemon.node.schedule
            schedule.trace(f"job {self.name} {name}")
            self._began[id(future)] = schedule.now
            try:
                result = job(*args, **kwargs)
            except Exception as error:
                schedule.count_event("result", f"{self.name} {name} {type(error).__name__}")
                future.set_exception(error)
            else:
                schedule.count_event("result", f"{self.name} {name}")
                future.set_result(result)
            del self._began[id(future)]
        self._free += 1
        self._begin()

    def running_s(self) -> float:
        return max((self._daemon.node.schedule.now - began for began in self._began.values()), default=0.0)

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._began)

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def shutdown(self, limit: float) -> bool:
        self._closed = True
        jobs, self._jobs = self._jobs, deque()
        for future, *_ in jobs:
            future.cancel()
            future.set_running_or_notify_cancel()
        return not self._began


class ThreadEndError(BaseException):
    """The process of a thread has ended."""


class SteppedThread(threading.Thread):
    """A real thread that runs only between ``resume`` and its next ``pause``."""

    def __init__(self, target: Callable[..., object], args: tuple[Any, ...], name: str, daemon: bool) -> None:
        super().__init__(target=self._steps, name=f"simulated {name}", daemon=daemon)
        self._work = target, args
        self._process = SimulatedThreads.daemon
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = False
        self._process.listeners.append(self)

    def start(self) -> None:
        super().start()
        self._process.node.schedule.after(0.001, self.resume)

    def _steps(self) -> None:
        self._go.acquire()
        try:
            target, args = self._work
            if self._process.alive:
                target(*args)
        except ThreadEndError:
            pass
        finally:
            self._ended = True
            self._paused.release()

    def resume(self) -> None:
        """Let the thread continue until it waits again. Called by the simulation."""
        if not self._ended:
            self._go.release()
            self._paused.acquire()

    def pause(self) -> None:
        """Wait for ``resume``. Called in the thread.

        Raises:
            ThreadEndError: The process has ended meanwhile.
        """
        self._paused.release()
        self._go.acquire()
        if not self._process.alive:
            raise ThreadEndError

    def join(self, timeout: float | None = None) -> None:
        if not self._process.alive:
            super().join(timeout)


class SteppedThreadEvent:
    """Stands for ``threading.Event`` in the module that starts the listener."""

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def wait(self, timeout: float) -> bool:
        thread = threading.current_thread()
        assert isinstance(thread, SteppedThread)
        if not self._set:
            thread._process.node.schedule.after(timeout, thread.resume)
            thread.pause()
        return self._set


class Threading:
    """Stands for the module ``threading`` in the code of the daemon that starts a thread itself."""

    Thread = SteppedThread
    Event = SteppedThreadEvent
    Lock = staticmethod(threading.Lock)
