"""Event loops for hooks that are coroutine functions: one for each such hook, in its own thread.

A hook that blocks its loop blocks no other hook. A coroutine that is past its deadline is cancelled; if its
loop cannot even do that, the thread is abandoned (see ``runners``) and the next call creates a new one.
Tasks that a hook starts run on its loop until the hook is removed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from proxy.hooks import forks
from proxy.hooks.engine.thread_interrupt import OverdueError

_END_S = 1.0
"""How long tasks have to end after they are cancelled because their hook is removed."""


class LoopThread:
    """One loop in a thread."""

    __slots__ = (
        "_loop",
        "_on_exit",
        "_report_problem",
        "has_exited",
        "has_returned",
        "ident",
        "is_abandoned",
        "is_closing",
    )

    def __init__(self, name: str, report_problem: Callable[[str], None], on_exit: Callable[[], None]) -> None:
        self._report_problem = report_problem
        self._on_exit = on_exit
        self.has_returned = False
        self.has_exited = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._unhandled)
        self.ident = 0
        self.is_abandoned = False
        self.is_closing = False
        try:
            threading.Thread(target=self._run_thread, name=f"hooks-{name}"[:15], daemon=True).start()
        except BaseException:
            self._loop.close()
            raise

    def _run_thread(self) -> None:
        self.ident = threading.get_ident()
        loop = self._loop
        asyncio.set_event_loop(loop)
        while True:  # at least once, even if it begins late: a coroutine that is to be run has to be closed
            try:
                loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - a task raises SystemExit, or is overdue
                forks.exit_if_child()
                if not isinstance(error, OverdueError):
                    self._report_problem(f"a task of it has ended with {type(error).__name__}")
            if self.is_closing or self.is_abandoned:
                break
        self.has_returned = True
        try:
            self._cancel_tasks(loop)
        except BaseException:  # noqa: BLE001 - tasks may raise anything
            self.is_abandoned = True  # its tasks cannot be cleaned up
        finally:
            self.has_exited = True
            self._on_exit()

    def _cancel_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=_END_S))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def _unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        what = type(error).__name__ if error is not None else str(context.get("message"))[:100]
        self._report_problem(f"a task of it has failed: {what}")

    def start(
        self,
        make: Callable[[], Coroutine[Any, Any, None]],
        tasks: list[asyncio.Task[None]],
        on_end: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """Run a coroutine.

        Args:
            make: Creates the coroutine, on the loop.
            tasks: Its task is appended here.
            on_end: Called on the loop at its end.

        Raises:
            RuntimeError: The loop is closed.
        """

        def begin() -> None:
            task = self._loop.create_task(make())
            tasks.append(task)
            task.add_done_callback(on_end)

        self._loop.call_soon_threadsafe(begin)

    def cancel(self, tasks: list[asyncio.Task[None]], on_cancelled: Callable[[], None]) -> None:
        """Cancel a coroutine; ``on_cancelled`` is called on its loop once the task has been cancelled."""

        def end() -> None:
            for task in tasks:
                task.cancel()
            on_cancelled()

        self._post(end)

    def abandon(self) -> None:
        """Abandon a blocked loop: it ends when it is not blocked any more."""
        self.is_abandoned = True
        self._post(self._loop.stop)

    def close(self) -> None:
        """Cancel all its tasks and end."""
        self.is_closing = True
        self._post(self._loop.stop)

    def _post(self, what: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            return  # the loop has just been closed
