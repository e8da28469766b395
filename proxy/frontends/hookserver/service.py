"""The hook server as the daemon starts and stops it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from proxy.executor.tasks import run_with_restarts
from proxy.frontends.hookserver.server import Server
from proxy.frontends.hookserver.servicer import Servicer
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import TopoproxyError

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.calls.call_flow import CallFlow
    from proxy.executor.node_executor import NodeExecutor
    from proxy.executor.start_update import StartUpdate

RETRY: Final = Backoff(1.0, 15.0)
"""Seconds before the socket is tried again: its current user may be stopping."""


class HookServerRunner:
    """Our engine as a hook server: ``run``, or ``start``, and then ``stop``."""

    def __init__(self, path: Path, executor: NodeExecutor, start_update: StartUpdate, flow: CallFlow) -> None:
        """Prepare; nothing is opened yet.

        Args:
            path: Where to listen.
            executor: The node.
            start_update: Makes calls to the runtime on behalf of a call.
            flow: Decides calls: the same as for calls that pass through us, so that the same hooks are
                called.
        """
        self.path = path
        self.listening = False
        self.servicer = Servicer(executor, start_update, flow)
        self._executor = executor
        self._server = Server(path, executor, self.servicer)
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Start as soon as the socket can be bound; returns when it is bound."""
        pauses = RetryDelays(RETRY)
        while True:
            try:
                return await self.start()
            except TopoproxyError as error:
                self._executor.telemetry.problem("cannot listen as a hook server", path=self.path, err=error)
            await asyncio.sleep(pauses.next())

    async def start(self) -> None:
        """Listen.

        Raises:
            CannotCreateError, PermissionDeniedError: The socket cannot be bound; nothing remains open.
        """
        self._server.socket.wanted = True
        await asyncio.to_thread(self._server.socket.open)
        self.listening = True
        looking = run_with_restarts(self.servicer.pending.run, self._executor.restarted)
        self._task = asyncio.get_running_loop().create_task(looking)
        self._executor.telemetry.event("listening as a hook server", path=self.path)

    async def stop(self) -> None:
        """Listen no more. What is under way is found again after a start, as after a crash."""
        self._server.socket.wanted = False  # also for an opening that is under way in its thread
        await asyncio.to_thread(self._server.socket.close)
        self.listening = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
