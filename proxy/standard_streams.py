"""Handles standard output and error that cannot be written: closed, without a reader, or on a full disk.

A failed command has the exit code of its error, whether or not the message could be written.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Callable
from typing import TextIO

_STDERR = 2
_JSON_ESCAPES = "topoproxy.json-escapes"


def prepare() -> None:
    """Prepare both streams so that writing text to them cannot fail for reasons of Python.

    Characters that the encoding of standard output lacks are written as escapes: names of files need not be
    UTF-8. The escapes are those of JSON, so that JSON stays valid.

    If the parent has closed standard error, the process gets one that discards everything. Otherwise Python
    would have no ``sys.stderr``, so messages would go to standard output, and the next file that is opened
    could get the descriptor.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        codecs.register_error(_JSON_ESCAPES, _escaped)
        sys.stdout.reconfigure(errors=_JSON_ESCAPES)
    if sys.stderr is not None:
        return
    descriptor = os.open(os.devnull, os.O_WRONLY)
    if descriptor != _STDERR:
        os.dup2(descriptor, _STDERR)
        os.close(descriptor)
    sys.stderr = os.fdopen(_STDERR, "w", errors="backslashreplace", closefd=False)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def report(message: str) -> None:
    """Write a line to standard error; it is lost if standard error cannot be written."""
    write_errors(lambda: print(message, file=sys.stderr, flush=True))


def write_errors(write: Callable[[], object]) -> None:
    """Call a function that writes to standard error; output that cannot be written is lost.

    Args:
        write: The function.
    """
    try:
        write()
    except OSError:
        _discard(sys.stderr)


def flush_or_discard() -> None:
    """Write buffered output, or discard it: it must not raise an error when the interpreter ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    """Discard the buffered output and all later output of a stream."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
