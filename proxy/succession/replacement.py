"""The replacement of this daemon: started over the admin socket, carried out at a moment without calls.

``successor`` is imported with this module, at the daemon's start: when a successor is requested, a package
has already replaced the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy import logs
from proxy.model.errors import UnavailableError
from proxy.succession.messages import FAILED
from proxy.succession.successor import Successor

if TYPE_CHECKING:
    from proxy.sockets.unix_socket import Listener

POLL_S = 0.002
"""Seconds between two checks for such a moment."""


class DaemonReplacement:
    """Starts the process that will replace this one.

    Attributes:
        successor: The process, when it has prepared.
        prepared: Set when the process has prepared.
    """

    def __init__(self) -> None:
        """Prepare; no process is started yet."""
        self.successor: Successor | None = None
        self.prepared = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure = ""

    def start(self, listener: Listener) -> str:
        """Start the process, unless a start is under way; return the page.

        Args:
            listener: The socket that the process gets.
        """
        if self._task is None or self._failure:
            self._failure = ""
            self._task = asyncio.get_running_loop().create_task(self._start(listener))
        return self.page()

    def discard_ended(self) -> bool:
        """Discard the process if it ended before it could take over, so that another one may be started.

        Returns:
            Whether the process has ended.
        """
        if self.successor is None or self.successor.is_alive():
            return False
        self._failed(f"process {self.successor.pid} ended before it took over, this daemon continues")
        self.successor.close()
        self.successor = None
        self.prepared.clear()
        return True

    def stop_successor(self) -> None:
        """Forward a signal to stop that arrived while the process took over."""
        assert self.successor is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.successor.pid, signal.SIGTERM)

    def page(self) -> str:
        """Return the progress of the replacement of this process: a page of the admin socket."""
        if self._failure:
            return f"{FAILED}{self._failure}\n"
        return "preparing\n" if self._task is not None else "none\n"

    async def _start(self, listener: Listener) -> None:
        try:
            self.successor = await asyncio.to_thread(Successor.started, listener)
        except UnavailableError as error:
            self._failed(str(error))
        except Exception as error:  # noqa: BLE001  the command waits for a page that says so
            cause = f"internal error: {type(error).__name__}: {error}"
            self._failed(f"cannot start the successor, this daemon continues: {cause}")
        else:
            self.prepared.set()

    def _failed(self, why: str) -> None:
        self._failure = why
        logs.log.error("not replaced", err=why)


async def wait_quiet(is_busy: Callable[[], bool], limit_s: float) -> bool:
    """Wait up to this many seconds for a moment in which nothing is busy; return whether there was one."""
    clock = asyncio.get_running_loop().time
    end = clock() + limit_s
    while is_busy():
        if clock() >= end:
            return False
        await asyncio.sleep(POLL_S)
    return True
