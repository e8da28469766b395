"""Log records of hooks, written to the daemon's log under the hook's name, with a rate limit.

A hook file logs with ``logging.getLogger(__name__)``. One handler takes the records of all hook files: the
names of their modules have a common prefix. The handler has no lock, so a hook that is interrupted while it
logs leaves none held.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from proxy.hooks.engine.errors import text_of
from proxy.hooks.hook import Hook
from proxy.logs import log

PREFIX = "_topoproxy_hooks"
"""The prefix of the module names of hook files."""
MOST_RECORDS = 20
"""Records of one hook in a second; further ones are only counted."""
LONGEST_RECORD = 1000
"""Characters of one record."""


class HookLogHandler(logging.Handler):
    """Takes the log records of hooks; from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._names: dict[str, str] = {}
        self._windows: dict[str, list[float]] = {}
        self._dropped: dict[str, int] = {}
        self._reported: dict[str, int] = {}

    def createLock(self) -> None:  # noqa: N802 - the name of logging
        """Set no lock: the handler needs none."""
        self.lock = None

    def add_hooks(self, hooks: Iterable[Hook]) -> None:
        """Take the log records of these hooks."""
        logger = logging.getLogger(PREFIX)
        if self not in logger.handlers:
            logger.addHandler(self)
            logger.setLevel(logging.DEBUG)
            logger.propagate = False
        self._names |= {hook.source: hook.name for hook in hooks}

    def keep_only(self, hooks: Iterable[Hook]) -> None:
        """Forget all other hooks."""
        self._names = {hook.source: hook.name for hook in hooks}
        names = set(self._names.values())
        for known in (self._windows, self._dropped, self._reported):
            for name in known.keys() - names:
                del known[name]

    def dropped(self, hook: str) -> int:
        """Return how many records of a hook were dropped."""
        return self._dropped.get(hook, 0)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless there are too many."""
        name = self._names.get(record.pathname) or record.name.removeprefix(f"{PREFIX}.")
        if not self._is_allowed(name):
            self._dropped[name] = self._dropped.get(name, 0) + 1
            return
        context: dict[str, object] = {"hook": name}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            context["error"] = f"{type(error).__name__}: {text_of(error)}"
        if left_out := self._dropped.get(name, 0) - self._reported.get(name, 0):
            context["left_out"] = left_out
            self._reported[name] = self._dropped[name]
        _write(record.levelno, _text(record), context)

    def _is_allowed(self, name: str) -> bool:
        now = self._clock()
        window = self._windows.setdefault(name, [now, 0])
        if now - window[0] >= 1.0:
            window[0], window[1] = now, 0
        window[1] += 1
        return window[1] <= MOST_RECORDS

    def close(self) -> None:
        """Remove the handler."""
        logger = logging.getLogger(PREFIX)
        logger.removeHandler(self)
        logger.propagate = not logger.handlers
        super().close()


def _text(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001 - arguments of hooks may be anything
        text = str(record.msg)
    return text[:LONGEST_RECORD]


def _write(level: int, text: str, context: dict[str, object]) -> None:
    if level >= logging.ERROR:
        log.error(text, **context)
    elif level >= logging.WARNING:
        log.warning(text, **context)
    elif level >= logging.INFO:
        log.info(text, **context)
    else:
        log.debug(text, **context)
