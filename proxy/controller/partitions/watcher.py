"""Being told when the kernel changes a partition, without a thread that waits.

A partition's file is polled (cgroup-v2.rst: its changes cause poll events); an epoll of all of them is one
descriptor that the event loop watches. It rings once; whoever answers reads the files, which silences it,
and winds it up again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import Callable

_READ_BYTES = 4096


class Bell:
    """Rings when one of some files has changed."""

    def __init__(self, ring: Callable[[], None]) -> None:
        """Watch nothing yet; ``ring`` is called in the event loop."""
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._poll: select.epoll | None = None
        self._files: dict[str, int] = {}

    def add(self, key: str, file: str) -> None:
        """Watch a file from now on; one that tells nothing (in an ordinary folder) is left."""
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
        """Watch a file no longer."""
        number = self._files.pop(key, None)
        if number is not None:
            os.close(number)

    def silence(self) -> None:
        """Take note of what has changed until now."""
        for number in list(self._files.values()):
            with contextlib.suppress(OSError):
                os.pread(number, _READ_BYTES, 0)

    def wind(self) -> None:
        """Ring at the next change; in the event loop."""
        if self._files and self._poll is not None:
            self._loop.add_reader(self._poll.fileno(), self._rung)

    def _rung(self) -> None:
        if self._poll is not None:
            self._loop.remove_reader(self._poll.fileno())  # until somebody has looked
        self._ring()

    def close(self) -> None:
        """Watch nothing any more."""
        for key in list(self._files):
            self.drop(key)
        if self._poll is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
            self._poll = None
