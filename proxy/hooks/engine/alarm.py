"""Calling a function on the event loop's own thread, and having it back in any case.

Theory. Handing a call to another thread and waiting for it costs two switches, which on a machine that idles
are most of what a hook costs. Who only computes need not pay that. But nothing of a hook may hold the loop,
so a timer of the kernel rings while such a function runs: its signal reaches the main thread wherever that
is, asleep in a system call, waiting for a lock, or in a loop of Python, and the handler raises there. The
timer rings again until the function is left. What would catch the exception is kept out of such hooks
(``files.purity``); what no signal reaches, C code that does not look for any, holds up threads just as well.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LIMIT_S: Final = 0.01
"""A function is interrupted after so long."""


class TooLongError(BaseException):
    """Raised in a function whose time is over; no ``Exception``, so that few catch it."""


class Alarm:
    """The kernel's timer for calls on the main thread. One at a time.

    Attributes:
        rang: The last call was interrupted: what came of it does not count.
    """

    def __init__(self) -> None:
        """Install the signal's handler; see ``alarm``."""
        self.rang = False
        self._inside = False
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, _signum: int, _frame: object) -> None:
        if self._inside:
            self.rang = True
            raise TooLongError

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function; gives its answer, None if it was interrupted. What it raises comes through."""
        result, self.rang, self._inside = None, False, True
        try:
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S, LIMIT_S)
            result = function(*args, **kwargs)
            self._inside = False
        except TooLongError:
            result = None
        finally:
            self._quiet()
        return None if self.rang else result

    def close(self) -> None:
        """Leave the signal to others."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _quiet(self) -> None:
        """End the timer; it may ring until that has happened."""
        quiet = False
        while not quiet:
            try:
                self._inside = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                quiet = True
            except TooLongError:
                continue


def alarm() -> Alarm | None:
    """Give an alarm, where there can be one: on the main thread, if nobody else uses the signal."""
    if threading.current_thread() is not threading.main_thread():
        return None
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL or signal.getitimer(signal.ITIMER_REAL)[0]:
        return None
    return Alarm()
