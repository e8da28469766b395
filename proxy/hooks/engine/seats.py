"""A hook in its place: how many calls it works on, whether it is asked, and how it does.

A hook works on ``PLACES`` calls at once; calls beyond that wait for a place, without a thread. So a slow
hook holds as many threads as it has places, and calls that do not ask it never wait for it. A call that is
past its deadline gives its place back but stays *astray* until it comes back; with ``MOST_ASTRAY`` of them
the hook is not asked, whatever its breaker says.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from proxy.hooks.engine.breaker import Breaker
from proxy.hooks.engine.loops import Looper
from proxy.hooks.engine.standing import HookReport, Standing
from proxy.hooks.engine.traces import Fault
from proxy.hooks.engine.words import seconds
from proxy.hooks.hook import Hook

PLACES = 8
"""Calls that one hook works on at once."""
MOST_ASTRAY = 4
"""Calls of one hook that may hang before it is not asked any more."""
MOST_INTERRUPTED = 3
"""A pure hook that was interrupted on the loop so often is called in threads from then on."""
_BLAMELESS = frozenset(("conflict", "hangs", "queue", "open"))


class Waiter(Protocol):
    """A call that may have to wait for a place."""

    def waits(self) -> None:
        """It does, from now on."""

    def turn(self) -> bool:
        """It may have a place now; False if it does not wait any more."""

    def resume(self) -> None:
        """Go on, with the place."""


class Astray(Protocol):
    """What has not come back after its deadline."""

    @property
    def back(self) -> bool:
        """It has."""


class Seat:
    """One hook in its place; its methods may be called from any thread."""

    __slots__ = (
        "_astray", "_complain", "_inside", "_lock", "_looper", "_queue", "breaker", "coroutines", "hook",
        "interrupted", "standing",
    )  # fmt: skip

    def __init__(self, hook: Hook, complain: Callable[[str], None]) -> None:
        self.hook = hook
        self.standing = Standing()
        self.breaker = Breaker()
        self.interrupted = 0
        self.coroutines = frozenset(name for name, handler in hook.handlers.items() if _is_async(handler))
        self._complain = complain
        self._lock = threading.Lock()
        self._inside = 0
        self._queue: deque[Waiter] = deque()
        self._astray: set[Astray] = set()
        self._looper: Looper | None = None

    @property
    def busy(self) -> bool:
        """Whether it works on calls."""
        return self._inside > 0

    @property
    def here(self) -> bool:
        """Whether it is called on the loop itself."""
        return self.hook.pure and self.interrupted < MOST_INTERRUPTED

    def enter(self, waiter: Waiter, now: float, always: bool, crowded: bool) -> int | Fault | None:
        """Take a place and ask whether to call it now, or wait for a place.

        Returns:
            As ``permit``, and there is a place if that is a token; None: it waits, and is resumed.
        """
        with self._lock:
            if self._inside >= PLACES:
                waiter.waits()
                self._queue.append(waiter)
                return None
            permit = self._permit(now, always, crowded)
            if isinstance(permit, int):
                self._inside += 1
            return permit

    def permit(self, now: float, always: bool, crowded: bool) -> int | Fault:
        """Ask whether to call it now; whoever asks has a place, and gives it back if not.

        Args:
            now: Seconds of the engine's clock.
            always: The breaker does not count.
            crowded: Too many calls of all hooks hang.

        Returns:
            The breaker's token (0 if it does not count), or why it is not called.
        """
        with self._lock:
            return self._permit(now, always, crowded)

    def _permit(self, now: float, always: bool, crowded: bool) -> int | Fault:
        if crowded or len(self._astray) >= MOST_ASTRAY:
            whose = "of all hooks" if crowded else f"of it ({len(self._astray)})"
            return Fault("hangs", f"it is not asked: too many calls {whose} have not come back")
        if always:
            return 0
        if token := self.breaker.permit(now):
            return token
        left = seconds(self.breaker.left(now))
        return Fault(
            "open",
            f"it is not asked after {self.breaker.failures} failures in a row, but again in {left}; "
            f"the last one: {self.standing.last_error}",
        )  # fmt: skip

    def leave(
        self,
        token: int,
        took: float | None,
        fault: Fault | None,
        now: float,
        astray: Astray | None = None,
    ) -> None:
        """Give the place back; whoever waits for it goes on.

        Args:
            token: What ``permit`` has given; 0 if the breaker does not count.
            took: Seconds of the call; None if it was not made.
            fault: Why there is no answer.
            now: Seconds of the engine's clock.
            astray: What has not come back, if it has not.
        """
        following: Waiter | None = None
        with self._lock:
            if took is not None:
                self.standing.took(took)
            if fault is not None:
                self._note(fault)
            if token:
                self._judge(token, took, fault, now)
            if astray is not None and not astray.back:
                self._astray.add(astray)
            if not self._queue:
                self._inside -= 1
                return
            while self._queue:
                if (candidate := self._queue.popleft()).turn():
                    following = candidate
                    break
            else:
                self._inside -= 1
        if following is not None:
            following.resume()

    def _judge(self, token: int, took: float | None, fault: Fault | None, now: float) -> None:
        if took is None:
            self.breaker.unused(token)
        elif fault is None or fault.kind in _BLAMELESS:
            self.breaker.succeeded(token)
        else:
            self.breaker.failed(token, now)

    def _note(self, fault: Fault) -> None:
        if fault.kind == "open":
            self.standing.skipped += 1
        else:
            self.standing.failed(fault.kind, fault.text, fault.trace, time.time())

    def note(self, fault: Fault) -> None:
        """Remember a failure of somebody who has no place."""
        with self._lock:
            self._note(fault)

    def lost(self, count: int = 1) -> None:
        """It is not told so many events."""
        with self._lock:
            self.standing.lost += count

    def refused(self) -> None:
        """It has refused a call."""
        with self._lock:
            self.standing.vetoes += 1

    def came_back(self, astray: Astray) -> None:
        """What was astray is back, and says so itself."""
        with self._lock:
            self._astray.discard(astray)

    def looper(self) -> Looper:
        """Give the loop of its coroutines; the first call makes it."""
        with self._lock:
            if self._looper is None or self._looper.lost or self._looper.ended:
                self._looper = Looper(self.hook.name, self._complain, self._looper_gone)
            return self._looper

    def _looper_gone(self) -> None:
        with self._lock:
            self._astray = {item for item in self._astray if not item.back}

    def close(self) -> None:
        """End its loop."""
        with self._lock:
            looper, self._looper = self._looper, None
        if looper is not None:
            looper.close()

    def report(self, now: float, waiting: int, quiet: int = 0) -> HookReport:
        """Tell how it stands."""
        hook = self.hook
        with self._lock:
            known, breaker = self.standing, self.breaker
            return HookReport(
                hook.name, hook.source, tuple(sorted(hook.handlers)), str(hook.policy), hook.timeout,
                remote=hook.remote, state=self._state(), retry_in=breaker.left(now), calls=known.calls,
                failures=dict(known.failures), conflicts=known.failures.get("conflict", 0),
                vetoes=known.vetoes, skipped=known.skipped, lost=known.lost, waiting=waiting,
                running=self._inside, hung=len(self._astray), quiet=quiet, last_error=known.last_error,
                last_trace=known.last_trace, last_error_at=known.last_error_at, p50_s=known.middle(),
                max_s=known.longest,
            )  # fmt: skip

    def _state(self) -> str:
        if len(self._astray) >= MOST_ASTRAY:
            return "hangs"
        if self.breaker.open:
            return "probing" if self.breaker.probing else "open"
        return "failing" if self.breaker.failures else "ok"


def _is_async(handler: Callable[..., object]) -> bool:
    call = getattr(handler, "__call__", None)  # noqa: B004 - an object's own coroutine, not whether it has one
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)
