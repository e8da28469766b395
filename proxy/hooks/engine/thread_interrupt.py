"""Interrupting slow hooks: a shorter switch interval, and an exception after the deadline.

A hook that spins in Python takes every other turn of the interpreter: a thread that wakes up waits up to the
switch interval, 5 ms. So the interval is shortened while a hook is slow. Measured on two cores, the event
loop is late by 5 ms with one such hook and 15 ms with three at the default interval; by 0.3 and 0.8 ms
with the short one.

``OverdueError`` is raised in a thread that is past its deadline, repeatedly and with growing pauses, until
the thread returns. It is raised only while the innermost frame belongs to the hook or to a library, and never
in a module that holds locks which other threads need (logging, imports, threading, asyncio, gRPC): there, an
exception between a lock's acquisition and the following ``try`` would leave the lock held for ever.

Limits. A thread in a C call (``time.sleep``, a read) gets the exception when the call returns. A thread in C
code that keeps the interpreter lock (a regular expression that backtracks without end) stops the whole daemon
until it is done; nothing in this process can prevent that. Nor can it prevent ``os._exit`` and
crashes in C code, changes to the whole interpreter (``sys.setrecursionlimit``, signals, the working
directory), or the memory that a hook allocates. Code that needs isolation from this belongs in a hook server.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import operator
import sys
import threading
from pathlib import PurePath
from types import FrameType
from typing import Protocol

_DEFAULT_INTERVAL_S = sys.getswitchinterval()
_SHORT_INTERVAL_S = 0.0001
_ENGINE_DIRECTORY = str(PurePath(__file__).parent)
_UNSAFE_TO_INTERRUPT = frozenset(
    ("asyncio", "concurrent", "grpc", "importlib", "logging", "loguru", "queue", "threading")
)
_FROZEN_IMPORTLIB = "<frozen importlib"


class OverdueError(BaseException):
    """Raised in a hook that is past its deadline; the hook must not catch it."""


class InterruptTarget(Protocol):
    """A thread in which an exception may be raised."""

    ident: int
    """Its id, from ``threading.get_ident``; 0 until it runs."""
    has_returned: bool
    """Whether the hook's function has returned."""


class SwitchInterval:
    """The interpreter's switch interval: short while a hook is slow, otherwise the default."""

    def __init__(self) -> None:
        self._slow: set[InterruptTarget] = set()
        self._lock = threading.Lock()

    def shorten(self, target: InterruptTarget) -> None:
        """Shorten the interval while the hook in this thread is slow."""
        with self._lock:
            if not self._slow:
                sys.setswitchinterval(_SHORT_INTERVAL_S)
            self._slow.add(target)

    def interrupt(self, target: InterruptTarget) -> None:
        """Raise ``OverdueError`` in an overdue thread, unless it runs code in which that could do harm."""
        if not target.has_returned:
            _raise_in_thread(target.ident)

    def restore(self, target: InterruptTarget) -> None:
        """Restore the interval once no thread is in a slow hook."""
        if target not in self._slow:
            return
        with self._lock:
            self._slow.discard(target)
            if not self._slow:
                sys.setswitchinterval(_DEFAULT_INTERVAL_S)


def _raise_in_thread(ident: int) -> None:
    frame = sys._current_frames().get(ident)
    if frame is None or not _is_safe_to_interrupt(frame):
        return
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc
    # This is one C call: no other thread runs between the second check and the exception.
    frames = map(operator.call, (sys._current_frames,))
    still = map(operator.is_, map(operator.itemgetter(ident), frames), (frame,))
    threads = itertools.compress((ctypes.c_ulong(ident),), still)
    with contextlib.suppress(KeyError):  # the thread has just ended
        collections.deque(map(throw, threads, (ctypes.py_object(OverdueError),)), 0)


def _is_safe_to_interrupt(innermost: FrameType) -> bool:
    """Return whether a thread is in code in which an exception is safe at any point."""
    if innermost.f_code.co_filename.startswith(_ENGINE_DIRECTORY):
        return False
    frame: FrameType | None = innermost
    while frame is not None and not frame.f_code.co_filename.startswith(_ENGINE_DIRECTORY):
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] in _UNSAFE_TO_INTERRUPT or frame.f_code.co_filename.startswith(
            _FROZEN_IMPORTLIB
        ):
            return False
        frame = frame.f_back
    return True
