"""Standard output and standard error that cannot be written: closed, without a reader, or on a full disk.

The exit code of a failed command is that of its error, whether or not the message could be written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

_STDERR = 2


def replace_closed_stderr() -> None:
    """Give the process a standard error that discards everything where its parent has closed it.

    Python has no ``sys.stderr`` then, so that messages would go to standard output, and the next file that is
    opened could get the descriptor.
    """
    if sys.stderr is not None:
        return
    descriptor = os.open(os.devnull, os.O_WRONLY)
    if descriptor != _STDERR:
        os.dup2(descriptor, _STDERR)
        os.close(descriptor)
    sys.stderr = os.fdopen(_STDERR, "w", errors="backslashreplace", closefd=False)


def report(message: str) -> None:
    """Write a line to standard error; it is lost where that cannot be written."""
    write_errors(lambda: print(message, file=sys.stderr, flush=True))


def write_errors(write: Callable[[], object]) -> None:
    """Call what writes to standard error; what cannot be written is lost.

    Args:
        write: Writes it.
    """
    try:
        write()
    except OSError:
        _discard(sys.stderr)


def flush_or_discard() -> None:
    """Write what is buffered, or discard it: it must not raise an error when the interpreter ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    """Send what is still buffered, and what is written later, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
