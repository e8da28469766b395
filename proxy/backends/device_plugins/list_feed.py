"""The newest device list of a plug-in, handed from the thread that reads the stream to the event loop.

A list replaces all before it, so those that have not been taken when a newer one arrives are dropped: a
plug-in that sends lists without end costs no more than its newest one, every now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading


class ListFeed:
    """Holds one message. ``put`` is for the thread that reads, everything else for the loop.

    Attributes:
        received: How many messages have arrived.
        ended: Why the stream has ended; empty as long as it has not.
    """

    def __init__(self) -> None:
        self.received = 0
        self.ended = ""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._newest: bytes | None = None
        self._awake = asyncio.Event()
        self._over = asyncio.Event()

    def put(self, message: bytes) -> None:
        """Hold a message, in place of one that has not been taken."""
        self.received += 1
        with self._lock:
            waiting, self._newest = self._newest, message
        if waiting is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._awake.set)

    def end(self, words: str) -> None:
        """The stream has ended: what has not been taken is dropped."""
        self.ended = words
        self._over.set()
        self._awake.set()

    async def next(self) -> bytes | None:
        """Return the newest message, as soon as there is one; None when the stream has ended."""
        while not self.ended:
            self._awake.clear()
            with self._lock:
                message, self._newest = self._newest, None
            if message is not None:
                return message
            await self._awake.wait()
        return None

    async def rest(self, seconds: float) -> None:
        """Let messages replace each other for a while; returns early where the stream ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
