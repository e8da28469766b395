"""Hearing at once that a container has ended, where the runtime tells (CRI container events).

A container may exit without any StopContainer passing. The comparison with the runtime finds out in the end;
an event makes it happen now. A runtime that has no events (containerd before 1.7) is asked no more until it
has been away, for it may come back as a newer one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from proxy.keeper.keeper import Keeper
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.workload import Phase

RETRY_S = 1.0
UNSUPPORTED_RETRY_S = 60.0


class Event(Protocol):
    """What we read of an event."""

    @property
    def container_id(self) -> str:
        """Whom it is about."""

    @property
    def kind(self) -> str:
        """``created``, ``started``, ``stopped`` or ``deleted``."""


class Watcher:
    """A thread that listens."""

    def __init__(
        self, keeper: Keeper, watch: Callable[[Callable[[Event], None], threading.Event], bool]
    ) -> None:
        """Prepare; ``start`` begins.

        Args:
            keeper: Whom to tell.
            watch: Blocks and reports events until told to stop; False where there are none to be had.
        """
        self._keeper = keeper
        self._watch = watch
        self._stop = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            wait = RETRY_S
            try:
                if not self._watch(self._heard, self._stop):
                    wait = UNSUPPORTED_RETRY_S
            except (UnavailableError, RuntimeCallError):
                pass  # The comparison says so already.
            except Exception as error:  # noqa: BLE001  a thread that ends in silence helps nobody
                self._keeper.broken(error)
            self._stop.wait(wait)

    def _heard(self, event: Event) -> None:
        if event.kind in ("stopped", "deleted") and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended, event.container_id)

    def _ended(self, container_id: str) -> None:
        container = self._keeper.state.containers.get(container_id)
        if container is not None and container.phase in (Phase.RUNNING, Phase.STARTING):
            self._keeper.attention.set()

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        self._thread.join(timeout=2)
