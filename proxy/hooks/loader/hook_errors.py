"""Messages for exceptions that a hook raises, and raising one in its threads."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType

_LONGEST = 300


def describe(error: BaseException, path: str) -> str:
    """Say an exception in one line: its type, its words, and the last line of a file that it came through."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    line = _line(error.__traceback__, path)
    return _words(error) + (f" (line {line})" if line else "")


def _words(error: BaseException) -> str:
    name = type(error).__name__
    try:
        words = str(error).strip()
    except BaseException:  # noqa: BLE001 - its own words are the hook's code, too
        return f"{name}, whose message cannot be read"
    first = words.splitlines()[0][:_LONGEST].rstrip() if words else ""
    return f"{name}: {first}" if first else name


def _line(traceback: TracebackType | None, path: str) -> int:
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == path:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def inject(thread: threading.Thread, error: type[BaseException]) -> None:
    """Have an exception raised in a thread, as soon as it runs Python; one that has ended stays so."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))
