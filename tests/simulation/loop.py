"""An asyncio event loop on a simulated clock: it runs when the simulation lets it, and never waits.

Only what the daemon uses is there. Ready callbacks run in their order, all of them, each time the loop runs:
that is one *turn* of the daemon. Timers are entries of the schedule.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import events as asyncio_events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from tests.simulation.clock import Schedule, ScheduledCallback

LATENESS_S = 2e-5
"""A timer fires later than it is due: the clock then shows that its time has passed."""
TURNS = 100_000
"""More callbacks in one turn mean that they call each other without end."""


class ReadyCallback:
    """A callback that is ready to run."""

    __slots__ = ("args", "callback", "context")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None


class SimulatedTimer(ReadyCallback):
    """A callback that is ready at a time."""

    __slots__ = ("_when", "entry")

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        super().__init__(callback, args, context)
        self._when = when
        self.entry: ScheduledCallback | None = None

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        super().cancel()
        if self.entry is not None:
            self.entry.cancel()


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The event loop of one life of the daemon.

    Attributes:
        alive: Whether the daemon's process lives; a dead loop runs nothing.
        broken: What callbacks raised, and what asyncio reported.
    """

    def __init__(self, schedule: Schedule, lag: Callable[[], float], readable: Callable[[int], None]) -> None:
        """Begin a loop.

        Args:
            schedule: The clock.
            lag: Gives seconds until the loop turns after a thread woke it up.
            readable: Called with a descriptor that is watched from now on.
        """
        self.schedule = schedule
        self.alive = True
        self.broken: list[str] = []
        self.readers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self._lag = lag
        self._readable = readable
        self._ready: deque[ReadyCallback] = deque()
        self._wakes = False
        self._runs = False

    # -- running ------------------------------------------------------------------------------------------

    def run_ready(self) -> None:
        """Run everything that is ready, and what becomes ready by that."""
        if self._runs or not self.alive:
            return
        self._runs = True
        asyncio_events._set_running_loop(self)
        ready, count = self._ready, 0
        try:
            while ready:
                one = ready.popleft()
                callback = one.callback
                if callback is None:
                    continue
                count += 1
                if count > TURNS:
                    raise AssertionError("a turn of the event loop does not end")
                try:
                    if one.context is None:
                        callback(*one.args)
                    else:
                        one.context.run(callback, *one.args)
                except Exception as error:
                    self.broken.append(f"a callback raised {error!r}")
        finally:
            asyncio_events._set_running_loop(None)
            self._runs = False

    def enter(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call something inside of the loop, and let everything that it makes ready happen."""
        found: list[Any] = []
        self._ready.append(ReadyCallback(lambda: found.append(work(*args)), (), None))
        self.run_ready()
        return found[0] if found else None

    def _fire(self, timer: SimulatedTimer) -> None:
        if self.alive and timer.callback is not None:
            name = getattr(timer.callback, "__qualname__", type(timer.callback).__name__)
            self.schedule.count_event("timer", name)
            self._ready.append(timer)
            self.run_ready()

    def kill(self) -> None:
        """End the process that the loop is in: nothing runs any more."""
        self.alive = False
        self._ready.clear()
        self.readers.clear()
        tasks, self.tasks = list(self.tasks), {}
        asyncio_events._set_running_loop(self)  # what their ends begin is of this process, and never runs
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(Exception):
                task.get_coro().close()  # type: ignore[union-attr]
        asyncio_events._set_running_loop(None)

    # -- what asyncio and the daemon call -----------------------------------------------------------------

    def time(self) -> float:
        return self.schedule.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> ReadyCallback:
        handle = ReadyCallback(callback, args, context)
        if self.alive:
            self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> ReadyCallback:
        handle = ReadyCallback(callback, args, context)
        if self.alive:
            self._ready.append(handle)
            if not self._wakes and not self._runs:
                self._wakes = True
                self.schedule.after(self._lag(), self._wake)
        return handle

    def _wake(self) -> None:
        self._wakes = False
        self.run_ready()

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimulatedTimer:
        timer = SimulatedTimer(self.schedule.now + delay, callback, args, context)
        if self.alive:
            timer.entry = self.schedule.after(max(0.0, delay) + LATENESS_S, self._fire, timer)
        return timer

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimulatedTimer:
        return self.call_later(when - self.schedule.now, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        if not self.alive:  # objects of a dead process are collected at some time, and have no effect
            coro.close()
            return self.create_future()  # type: ignore[return-value]
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name or "task", context=context)
        self.tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        self.readers[number] = (callback, args)
        self._readable(number)

    def remove_reader(self, fd: Any) -> bool:
        number = fd if isinstance(fd, int) else fd.fileno()
        return self.readers.pop(number, None) is not None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.alive:
            error = context.get("exception")
            self.broken.append(f"{context.get('message')}: {error!r}")

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Do what a thread of its own would do, a moment later."""
        future = self.create_future()

        def work() -> None:
            if self.alive:
                result = func(*args)
                self.call_soon_threadsafe(lambda: None if future.done() else future.set_result(result))

        if self.alive:
            self.schedule.after(self._lag(), work)
        return future

    def is_running(self) -> bool:
        return self._runs

    def is_closed(self) -> bool:
        return not self.alive

    def get_debug(self) -> bool:
        return False
