"""Detect when the kernel changes a partition, without a thread that waits.

A partition's file is polled (cgroup-v2.rst: its changes cause poll events). The event loop watches one epoll
descriptor for all files. The descriptor reports once. Reading the files (``silence``) ends the poll events,
and ``watch_again`` enables the report of the next change.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import Callable

_READ_BYTES = 4096


class PartitionWatcher:
    """Reports when one of some files has changed."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """Watch nothing yet; ``changed`` is called in the event loop."""
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._poll: select.epoll | None = None
        self._files: dict[str, int] = {}

    def add(self, key: str, file: str) -> None:
        """Watch a file from now on; one without poll events (in an ordinary directory) is skipped."""
        if key in self._files or not file:
            return
        with contextlib.suppress(OSError):
            number = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._poll = self._poll or select.epoll()
                os.pread(number, _READ_BYTES, 0)
                self._poll.register(number, select.EPOLLPRI)
            except OSError:
                os.close(number)
            else:
                self._files[key] = number

    def drop(self, key: str) -> None:
        """Stop watching a file."""
        number = self._files.pop(key, None)
        if number is not None:
            os.close(number)

    def silence(self) -> None:
        """Acknowledge all changes until now, by reading the files."""
        for number in list(self._files.values()):
            with contextlib.suppress(OSError):
                os.pread(number, _READ_BYTES, 0)

    def watch_again(self) -> None:
        """Wait for the next change again; called in the event loop."""
        if self._files and self._poll is not None:
            self._loop.add_reader(self._poll.fileno(), self._ready)

    def _ready(self) -> None:
        if self._poll is not None:
            self._loop.remove_reader(self._poll.fileno())  # until the files have been read
        self._changed()

    def close(self) -> None:
        """Stop watching everything."""
        for key in list(self._files):
            self.drop(key)
        if self._poll is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
            self._poll = None
