"""The concurrency slots of one hook: how many of its calls run, whether it is called, and its statistics.

``MOST_CALLS`` calls of a hook run at once; further calls wait for a slot, without a thread. So a slow hook
occupies at most as many threads as it has slots, and calls without this hook never wait for it. A call that
is past its deadline releases its slot but counts as *overdue* until it returns; with ``MOST_OVERDUE`` overdue
calls the hook is not called, even if its breaker permits it.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from proxy.hooks.engine.breaker import Breaker
from proxy.hooks.engine.errors import HookFailure, duration
from proxy.hooks.engine.event_loops import LoopThread
from proxy.hooks.engine.stats import HookReport, HookStats
from proxy.hooks.hook import Hook

MOST_CALLS = 8
"""Calls of one hook that run at once."""
MOST_OVERDUE = 4
"""If this many calls of one hook hang, the hook is not called any more."""
MOST_INTERRUPTED = 3
"""A pure hook that was interrupted on the loop this many times is called in threads."""
ANSWERS_UNTIL_FORGIVEN = 100
"""After this many quick answers in a row, a pure hook's interruptions do not count any more.

The limit of a call on the loop is wall-clock time. On a busy node the kernel may not run the daemon for
longer than that, so a quick hook is interrupted too.
"""
_IGNORED_BY_BREAKER = frozenset(("conflict", "hangs", "queue", "open"))


class Waiter(Protocol):
    """A sequence of hooks that may have to wait for a slot."""

    def on_queued(self) -> None:
        """Record that the sequence waits for a slot from now on."""

    def take_turn(self) -> bool:
        """Accept a free slot; False if the sequence does not wait any more."""

    def resume(self) -> None:
        """Continue with the slot."""


class OverdueCall(Protocol):
    """A thread or coroutine that has not returned after its deadline."""

    @property
    def has_returned(self) -> bool:
        """Whether it has returned."""


class HookSlots:
    """One hook and its slots; its methods may be called from any thread."""

    __slots__ = (
        "_interrupted",
        "_lock",
        "_loop_thread",
        "_overdue_calls",
        "_queue",
        "_report_problem",
        "_running_calls",
        "breaker",
        "coroutines",
        "hook",
        "stats",
    )  # fmt: skip

    def __init__(self, hook: Hook, report_problem: Callable[[str], None]) -> None:
        self.hook = hook
        self.stats = HookStats()
        self.breaker = Breaker()
        self._interrupted = 0
        self.coroutines = frozenset(name for name, handler in hook.handlers.items() if _is_async(handler))
        self._report_problem = report_problem
        self._lock = threading.Lock()
        self._running_calls = 0
        self._queue: deque[Waiter] = deque()
        self._overdue_calls: set[OverdueCall] = set()
        self._loop_thread: LoopThread | None = None

    @property
    def busy(self) -> bool:
        """Whether calls of the hook run."""
        return self._running_calls > 0

    @property
    def suits_loop(self) -> bool:
        """Whether a pure hook has been quick enough to be called on the loop."""
        if self._interrupted and self.stats.quick_in_a_row >= ANSWERS_UNTIL_FORGIVEN:
            self._interrupted = 0
        return self._interrupted < MOST_INTERRUPTED

    def count_interruption(self) -> None:
        """Count that a call took too long on the loop; it is repeated in a thread."""
        with self._lock:
            self._interrupted += 1
            self.stats.quick_in_a_row = 0

    def acquire(
        self, waiter: Waiter, now: float, ignore_breaker: bool, overloaded: bool
    ) -> int | HookFailure | None:
        """Take a slot and return whether to call the hook now, or queue the waiter for a slot.

        Returns:
            As ``permit``; the slot is taken if the result is a token. None: the waiter is queued and will be
            resumed.
        """
        with self._lock:
            if self._running_calls >= MOST_CALLS:
                waiter.on_queued()
                self._queue.append(waiter)
                return None
            if not (ignore_breaker or overloaded or self._overdue_calls) and (
                token := self.breaker.permit(now)
            ):
                self._running_calls += 1
                return token  # the usual case
            permit = self._permit(now, ignore_breaker, overloaded)
            if isinstance(permit, int):
                self._running_calls += 1
            return permit

    def permit(self, now: float, ignore_breaker: bool, overloaded: bool) -> int | HookFailure:
        """Return whether to call the hook now; if not, the caller releases its slot.

        Args:
            now: Seconds of the engine's clock.
            ignore_breaker: Call the hook even if its breaker is open.
            overloaded: Too many calls of all hooks hang.

        Returns:
            The breaker's token (0 if it is ignored), or why the hook is not called.
        """
        with self._lock:
            return self._permit(now, ignore_breaker, overloaded)

    def _permit(self, now: float, ignore_breaker: bool, overloaded: bool) -> int | HookFailure:
        if overloaded or len(self._overdue_calls) >= MOST_OVERDUE:
            which = "of all hooks" if overloaded else f"of it ({len(self._overdue_calls)})"
            return HookFailure("hangs", f"it is not called: too many calls {which} have not returned")
        if ignore_breaker:
            return 0
        if token := self.breaker.permit(now):
            return token
        left = duration(self.breaker.seconds_until_probe(now))
        return HookFailure(
            "open",
            f"it is not called after {self.breaker.failures} failures in a row; next try in {left}; "
            f"last failure: {self.stats.last_error}",
        )  # fmt: skip

    def release(
        self,
        token: int,
        took: float | None,
        failure: HookFailure | None,
        now: float,
        overdue: OverdueCall | None = None,
    ) -> None:
        """Release a slot; the next waiting call continues with it.

        Args:
            token: The return value of ``permit``; 0 if the breaker is ignored.
            took: Seconds of the call; None if the hook was not called.
            failure: Why there is no answer.
            now: Seconds of the engine's clock.
            overdue: The thread or coroutine that has not returned, if there is one.
        """
        following: Waiter | None = None
        with self._lock:
            if took is not None:
                self.stats.record_duration(took)
            if failure is not None:
                self._record_failure(failure)
            if token and took is None:
                self.breaker.unused(token)
            elif token and (failure is None or failure.kind in _IGNORED_BY_BREAKER):
                self.breaker.succeeded(token)
            elif token:
                self.breaker.failed(token, now)
            if overdue is not None and not overdue.has_returned:
                self._overdue_calls.add(overdue)
            if not self._queue:
                self._running_calls -= 1
                return
            while self._queue:
                if (candidate := self._queue.popleft()).take_turn():
                    following = candidate
                    break
            else:
                self._running_calls -= 1
        if following is not None:
            following.resume()

    def _record_failure(self, failure: HookFailure) -> None:
        if failure.kind == "open":
            self.stats.skipped += 1
        else:
            self.stats.record_failure(failure.kind, failure.text, failure.trace, time.time())

    def record_failure(self, failure: HookFailure) -> None:
        """Record a failure of a call that has no slot."""
        with self._lock:
            self._record_failure(failure)

    def count_lost(self, count: int = 1) -> None:
        """Count events that the hook does not receive."""
        with self._lock:
            self.stats.lost += count

    def count_veto(self) -> None:
        """Count a veto."""
        with self._lock:
            self.stats.vetoes += 1

    def on_returned(self, overdue: OverdueCall) -> None:
        """Record that an overdue thread or coroutine has returned."""
        with self._lock:
            self._overdue_calls.discard(overdue)

    def loop_thread(self) -> LoopThread:
        """Return the loop of the hook's coroutines; the first call creates it."""
        with self._lock:
            if self._loop_thread is None or self._loop_thread.is_abandoned or self._loop_thread.is_closing:
                self._loop_thread = LoopThread(self.hook.name, self._report_problem, self._on_loop_thread_end)
            return self._loop_thread

    def _on_loop_thread_end(self) -> None:
        with self._lock:
            self._overdue_calls = {item for item in self._overdue_calls if not item.has_returned}

    def close(self) -> None:
        """Stop the loop of the hook's coroutines."""
        with self._lock:
            loop_thread, self._loop_thread = self._loop_thread, None
        if loop_thread is not None:
            loop_thread.close()

    def report(self, now: float, waiting: int, quiet: int = 0) -> HookReport:
        """Return the statistics and the state of the hook."""
        hook = self.hook
        with self._lock:
            stats, breaker = self.stats, self.breaker
            return HookReport(
                hook.name, hook.source, tuple(sorted(hook.handlers)), str(hook.policy), hook.timeout,
                remote=hook.remote, state=self._state(), retry_in=breaker.seconds_until_probe(now),
                calls=stats.calls, failures=dict(stats.failures),
                conflicts=stats.failures.get("conflict", 0),
                vetoes=stats.vetoes, skipped=stats.skipped, lost=stats.lost, waiting=waiting,
                running=self._running_calls, hung=len(self._overdue_calls), quiet=quiet,
                in_threads=not self.suits_loop, interrupted=self._interrupted, last_error=stats.last_error,
                last_trace=stats.last_trace, last_error_at=stats.last_error_at, p50_s=stats.median(),
                max_s=stats.longest_s,
            )  # fmt: skip

    def _state(self) -> str:
        if len(self._overdue_calls) >= MOST_OVERDUE:
            return "hangs"
        if self.breaker.is_open:
            return "probing" if self.breaker.is_probing else "open"
        return "failing" if self.breaker.failures else "ok"


def _is_async(handler: Callable[..., object]) -> bool:
    call = getattr(handler, "__call__", None)  # noqa: B004 - its ``__call__`` may be a coroutine function
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)
