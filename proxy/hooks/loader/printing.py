"""Keeps the output of hook files out of the output of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STDOUT, STDERR = 1, 2


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error, including that of programs that hooks start."""
    own, kept = sys.stdout, os.dup(STDOUT)
    own.flush()
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123  a stream
        try:
            sys.stdout = sys.stderr or nowhere  # without standard error, descriptor 2 may be any file
            os.dup2(STDERR if sys.stderr else nowhere.fileno(), STDOUT)
            yield
        finally:
            try:
                own.flush()  # what a hook wrote past sys.stdout
            finally:
                os.dup2(kept, STDOUT)
                os.close(kept)
                sys.stdout = own
