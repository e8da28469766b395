"""Calling a pure hook on the event loop's own thread, with a time limit.

Theory. Handing a call to another thread and waiting for it costs two switches, which on an idle machine are
most of the cost of a hook. A hook that only computes can avoid that. But no hook may block the loop, so an
interval timer (``setitimer(2)``) runs during the call. SIGALRM reaches the main thread whether it sleeps in a
system call, waits for a lock, or is in a Python loop, and the handler raises there. The timer fires again
until the function has ended. Code that would catch the exception is refused in such hooks (``contract``).
C code that does not check for signals cannot be interrupted; in a thread it would block others just as well.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

CALL_LIMIT_S: Final = 0.01
"""A function is interrupted after this time."""


class TooLongError(BaseException):
    """Raised in an overdue function; not an ``Exception``, so that few handlers catch it."""


class Alarm:
    """The interval timer for calls on the main thread, one at a time.

    Attributes:
        interrupted: The last call was interrupted: its result is discarded.
    """

    def __init__(self) -> None:
        """Install the signal's handler; see ``make_alarm``."""
        self.interrupted = False
        self._is_calling = False
        signal.signal(signal.SIGALRM, self._on_alarm)

    def _on_alarm(self, _signum: int, _frame: object) -> None:
        if self._is_calling:
            self.interrupted = True
            raise TooLongError

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function; return its result, or None if it was interrupted. Its exceptions pass through."""
        result, self.interrupted, self._is_calling = None, False, True
        try:
            signal.setitimer(signal.ITIMER_REAL, CALL_LIMIT_S, CALL_LIMIT_S)
            result = function(*args, **kwargs)
            self._is_calling = False  # from here on the handler does not raise
            signal.setitimer(signal.ITIMER_REAL, 0)
        except TooLongError:
            self._stop_timer()
            result = None
        except BaseException:
            self._stop_timer()
            raise
        return None if self.interrupted else result

    def close(self) -> None:
        """Restore the default handler of the signal."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _stop_timer(self) -> None:
        """Stop the timer; it may still fire until the system call has returned."""
        stopped = False
        while not stopped:
            try:
                self._is_calling = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                stopped = True
            except TooLongError:
                continue


def make_alarm() -> Alarm | None:
    """Return an alarm; None outside the main thread, or if other code uses the signal."""
    if threading.current_thread() is not threading.main_thread():
        return None
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL or signal.getitimer(signal.ITIMER_REAL)[0]:
        return None
    return Alarm()
