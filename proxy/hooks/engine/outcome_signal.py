"""Notifies the event loop that a sequence of hooks has its outcome, wherever the last hook ran.

Theory. At first the loop itself checks for the outcome: it may block briefly for it (``expect_soon``,
``wait_briefly``), which costs less than a turn of the loop. After that the outcome has to be posted to the
loop. The loop first calls ``post_from_now`` and then looks for an outcome; a thread first sets the outcome
and then calls ``notify``. So whichever comes second notices the other, and no outcome is lost. It may be
noticed twice, so delivering it a second time must have no effect.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from proxy.hooks.engine.invoke import EngineContext


class OutcomeSignal:
    """The way in which the outcome of one sequence reaches the loop, and the tasks that wait for it."""

    __slots__ = ("_context", "_lock", "_must_post", "_waiters")

    def __init__(self, context: EngineContext) -> None:
        """Make a signal; ``context`` posts to the loop."""
        self._context = context
        self._lock: threading.Lock | None = None
        self._must_post = False
        self._waiters: list[asyncio.Future[None]] = []

    # On the event loop.

    def expect_soon(self) -> None:
        """Prepare for ``wait_briefly``, before the first hook is called."""
        self._lock = lock = threading.Lock()
        lock.acquire()

    def wait_briefly(self, seconds: float) -> None:
        """Block the loop until there is an outcome, for a short time at most."""
        lock = self._lock
        if lock is not None:
            lock.acquire(timeout=seconds)

    def post_from_now(self) -> None:
        """Have the outcome posted to the loop; then the caller checks whether there is one already."""
        self._must_post = True

    async def wait(self) -> None:
        """Wait until the outcome is delivered."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def wake(self) -> None:
        """Wake the tasks that wait."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # From any thread.

    def notify(self, deliver: Callable[[], None]) -> None:
        """Notify the loop that there is an outcome, unless the loop is going to check for one.

        Args:
            deliver: Delivers the outcome; called on the loop. It is not an attribute, because a sequence and
                its signal would then refer to each other, and live until Python's garbage collection.
        """
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
        if self._must_post:
            self._context.post(deliver)
