"""The log: one line for each record on standard error, in one of three forms.

``text`` is for people: a line starts with the time as RFC 3339 has it, with
milliseconds and the offset from UTC. ``klog`` and ``json`` are what Kubernetes'
own daemons write. Under systemd each line starts with its priority
(sd-daemon(3)), and text carries no time, because the journal has both.

Messages are constant texts. Varying facts go into keywords; they are quoted, and never used as a format.
Values of local variables are never printed, because they may hold the environment of a container. Texts in a
line may come from the author of a pod, so no line is longer than ``LINE_BYTES``. The exception is the stack
trace of a fault in a JSON line, which has its own limit.

loguru is imported when the first record is written: the import takes 50 ms, and should delay neither the
listening socket nor a command that logs nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO

from proxy.model.quoting import MESSAGE
from proxy.model.quoting import message as fit
from proxy.telemetry.text import escaped, pairs, quoted

if TYPE_CHECKING:
    import loguru

    from proxy.telemetry.port import Telemetry

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
REPEAT_INTERVAL_S = 60.0
REPEATED_KEYS_LIMIT = 1024
LINE_BYTES = MESSAGE
"""The most bytes of a line."""
LONGEST_TRACE = 16_000
"""The most characters of a stack trace."""
PART_LENGTH = 400
"""Characters that are written at once: at most 4096 bytes in any encoding, even if escaped."""
_RESERVED_BYTES = 200
"""Bytes of a JSON line that are kept for the values that come last."""
_PRIORITY = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}

Render = Callable[["loguru.Record"], list[str]]
"""A function that returns the lines of a record."""


@dataclass(slots=True)
class _Repeat:
    """When a repeated message was last written, and how often it was left out since then."""

    since: float
    count: int = 0


class Log:
    """Writes records; all packages share the instance ``log``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._threshold = LEVELS["info"]
        self._form = "text"
        self._stream: TextIO | None = None
        self._logger: loguru.Logger | None = None
        self._clock = clock
        self._lost = 0
        self._is_cut = False
        self._repeats: OrderedDict[object, _Repeat] = OrderedDict()

    def setup(self, level: str = "info", fmt: str = "text", stream: TextIO | None = None) -> None:
        """Choose the level and the form of the log, and forward the standard library's records to it.

        Args:
            level: debug, info, warning or error.
            fmt: text, klog or json.
            stream: The stream to write to; standard error if None.
        """
        import logging

        self._form = fmt
        self._stream = stream
        self._threshold = LEVELS[level]
        self._logger = None
        root = logging.getLogger()
        root.handlers[:] = [_forwarder(self._loguru_logger)]
        root.setLevel(max(LEVELS[level], logging.WARNING))

    def change(self, level: str, fmt: str) -> None:
        """Change the level and the form of further records; see ``setup``."""
        import logging

        self._form, self._threshold = fmt, LEVELS[level]
        logging.getLogger().setLevel(max(LEVELS[level], logging.WARNING))

    def _loguru_logger(self) -> loguru.Logger:
        """Return loguru's logger, configured; the first call imports it."""
        if self._logger is not None:
            return self._logger
        from loguru import logger

        target = self._stream if self._stream is not None else sys.stderr
        journal = _is_journal(target)
        renders = {"text": _text(not journal), "klog": _klog, "json": _json}

        def sink(message: loguru.Message) -> None:
            if not _has_room(target):
                self._lost += 1  # the reader has stopped: the node must not stop with it
                return
            record = message.record
            mark = f"<{_PRIORITY.get(record['level'].name, 6)}>" if journal else ""
            if self._lost:
                record["extra"]["lost"], self._lost = self._lost, 0
            lines = renders[self._form](record)  # Each line of a traceback is an entry of the journal.
            text = "".join(f"{mark}{line}\n" for line in lines)
            self._is_cut = not _write_without_waiting(target, f"\n{text}" if self._is_cut else text)
            self._lost += self._is_cut

        logger.remove()
        # Level 0: our own level, which may change, has already filtered the records.
        logger.add(sink, level=0, format="{message}", diagnose=False, backtrace=False, catch=True)
        self._logger = logger
        return logger

    def enabled(self, level: str) -> bool:
        """Return whether records of the level are written; if not, their values need not be computed."""
        return LEVELS[level] >= self._threshold

    def debug(self, message: str, **context: object) -> None:
        """Write a record that is useful only to developers."""
        self._write("debug", message, context)

    def info(self, message: str, **context: object) -> None:
        """Write an event: one line for each decision."""
        self._write("info", message, context)

    def warning(self, message: str, **context: object) -> None:
        """Write a record that an operator should examine at some time."""
        self._write("warning", message, context)

    def error(self, message: str, **context: object) -> None:
        """Write a record that an operator should examine now; ``err=`` takes the cause."""
        self._write("error", message, context)

    def exception(self, message: str, **context: object) -> None:
        """Write an internal error with the traceback of the exception being handled, without any values."""
        self._write("error", message, context, trace=True)

    def say_once(self, key: object, level: str, message: str, **context: object) -> None:
        """Write a record at most once a minute for each key; the next one says how many were left out.

        Args:
            key: A hashable value; records with equal keys count as the same.
            level: As in ``setup``.
            message: The message.
            context: The varying facts.
        """
        now = self._clock()
        known = self._repeats.get(key)
        if known is not None and now - known.since < REPEAT_INTERVAL_S:
            known.count += 1
            return
        if known is not None and known.count:
            context["repeated"] = known.count
        self._repeats[key] = _Repeat(now)
        self._repeats.move_to_end(key)
        if len(self._repeats) > REPEATED_KEYS_LIMIT:
            self._repeats.popitem(last=False)
        self._write(level, message, context)

    def write(self, level: str, message: str, keys: Mapping[str, object], above: int) -> None:
        """Write a record for a caller further up; see ``proxy.telemetry.port.Sink``."""
        if self.enabled(level):
            self._loguru_logger().opt(depth=1 + above).bind(**keys).log(level.upper(), message)

    def _write(self, level: str, message: str, context: dict[str, object], trace: bool = False) -> None:
        if LEVELS[level] < self._threshold:
            return
        # No arguments are passed, so loguru does not treat the message as a format.
        self._loguru_logger().opt(depth=2, exception=trace).bind(**context).log(level.upper(), message)


log = Log()
"""The log of this process."""

setup = log.setup


def telemetry() -> Telemetry:
    """Return new telemetry that writes to the log of this process."""
    from proxy.telemetry.port import Telemetry

    return Telemetry(log, time.monotonic, time.time)


def with_own_descriptor(stream: TextIO) -> TextIO:
    """Return a stream to the same file with a descriptor of its own.

    If a hook closes standard error, a log to standard error stays open, and is not written into the next
    socket that gets the same descriptor number.
    """
    try:
        descriptor = fcntl.fcntl(stream.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    except (OSError, ValueError, AttributeError):
        return stream
    return os.fdopen(descriptor, "w", encoding=stream.encoding, errors="backslashreplace", closefd=False)


def _has_room(stream: TextIO) -> bool:
    """Return whether a line can be written without waiting (a full pipe, a journal that has stopped)."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return True


def _write_without_waiting(stream: TextIO, text: str) -> bool:
    """Write a record, or its beginning if the reader takes no more; return whether all was written.

    A pipe with room takes at least ``PIPE_BUF`` bytes at once (pipe(7)); a longer write could wait.
    """
    for start in range(0, len(text), PART_LENGTH):
        if start and not _has_room(stream):
            return False
        stream.write(text[start : start + PART_LENGTH])
        stream.flush()
    return True


def _is_journal(stream: TextIO) -> bool:
    """Return whether the stream is the one that systemd connected to the journal (systemd.exec(5))."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


def _forwarder(logger: Callable[[], loguru.Logger]) -> Any:
    """Make the handler that forwards records of asyncio, grpc and others to this log."""
    import logging

    class Forwarder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            level = record.levelname if record.levelname in _PRIORITY else record.levelno
            logger().opt(exception=record.exc_info).bind(logger=record.name).log(level, record.getMessage())

    return Forwarder()


def _text(with_time: bool) -> Render:
    def render(record: loguru.Record) -> list[str]:
        start = f"{record['time'].isoformat(timespec='milliseconds')} " if with_time else ""
        level = f"{record['level'].name:<7} " if with_time or record["level"].no >= 30 else ""
        head = f"{start}{level}{escaped(record['message'])}{pairs(record['extra'])}"
        return [fit(line) for line in (head, *_trace(record))]

    return render


def _klog(record: loguru.Record) -> list[str]:
    name = record["level"].name
    head = f"{name[0] if name != 'DEBUG' else 'I'}{record['time']:%m%d %H:%M:%S.%f} {record['process'].id:>7}"
    head = f"{head} {_caller(record)}] {quoted(record['message'])}{pairs(record['extra'], bare=False)}"
    return [fit(line) for line in (head, *_trace(record))]


def _json(record: loguru.Record) -> list[str]:
    level = record["level"].no
    entry: dict[str, object] = {
        "ts": record["time"].timestamp(),
        "caller": _caller(record),
        "msg": record["message"],
    }
    if level < 30:
        entry["v"] = 4 if level < 20 else 0
    entry |= {key: value for key, value in record["extra"].items() if key not in entry}
    if level >= 30:
        entry["severity"] = record["level"].name.lower()
    if record["exception"] is not None:
        entry.setdefault("err", f"{record['exception'].value!r}")
    entry = _fitted(entry)
    if record["exception"] is not None:
        entry["stacktrace"] = "\n".join(_trace(record))
    return [json.dumps(entry, default=str)]


def _fitted(entry: dict[str, object]) -> dict[str, object]:
    """Cut the values of a JSON object, the later ones first, until its line is short enough."""
    if len(json.dumps(entry, default=str)) <= LINE_BYTES:
        return entry
    fitted: dict[str, object] = {}
    room = LINE_BYTES
    for key, value in entry.items():
        size = len(json.dumps({key: value}, default=str))
        if size > room - _RESERVED_BYTES:
            # A character takes up to six bytes in JSON, or twelve if it is beyond the first 65,536.
            value = str(value)[: max(0, room - _RESERVED_BYTES - len(key)) // 12] + "..."
            size = len(json.dumps({key: value}))
        if size > room:
            break
        fitted[key] = value
        room -= size
    return fitted


def _caller(record: loguru.Record) -> str:
    return f"{PurePath(record['file'].path).name}:{record['line']}"


def _trace(record: loguru.Record) -> list[str]:
    """Return the lines of the exception's stack trace; if it is too long, its beginning and its end."""
    caught = record["exception"]
    if caught is None or caught.value is None:
        return []
    text = "".join(traceback.format_exception(caught.value)).rstrip()
    if len(text) > LONGEST_TRACE:
        text = f"{text[: LONGEST_TRACE // 2]}\n...\n{text[-LONGEST_TRACE // 2 :]}"
    return text.split("\n")
