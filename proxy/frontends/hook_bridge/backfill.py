"""Look up facts for hooks about pods and containers that are older than the hooks or came without a call.

A worker reads the facts from the runtime's lists. If the runtime does not answer, it is queried again. Until
it answers, hooks see such pods and containers without labels and annotations; afterwards they are notified of
the whole state once more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from proxy.executor.background import Worker
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import RuntimeCallError, UnavailableError

if TYPE_CHECKING:
    from proxy.executor.context import NodeContext
    from proxy.frontends.hook_bridge.lifecycle_events import LifecycleEvents
    from proxy.hooks.hook import HookCaller

IN_CALL_S: Final = 1.0
"""The longest time that a call waits for facts for hooks about its container or sandbox."""
RETRY: Final = Backoff(1.0, 30.0)
"""Seconds before the runtime is queried again."""


class Backfill:
    """Looks up missing facts, and notifies hooks."""

    def __init__(self, executor: NodeContext, hooks: HookCaller) -> None:
        """Prepare; ``lifecycle_events`` is set before anything is looked up.

        Args:
            executor: The node.
            hooks: Notifies hooks.
        """
        self.lifecycle_events: LifecycleEvents | None = None
        self._executor = executor
        self._hooks = hooks
        self._worker = Worker("hooks-learn", executor.report_internal_error)
        self._is_retrying = self._must_notify = False
        self._look_up_lock = asyncio.Lock()

    async def look_up(self) -> bool:
        """Look up the facts; if the runtime does not answer, try again later, and notify hooks then.

        Returns:
            Whether the runtime has answered.
        """
        if await self._read_lists():
            return True
        self._must_notify = True
        self.look_up_later()
        return False

    async def look_up_in_call(self, target: str) -> None:
        """Look up the missing facts of the container or sandbox that a call names.

        It was created without a call that passed here, and no list has been read since. If the runtime does
        not answer soon, the call continues without the facts.
        """
        lifecycle_events = self.lifecycle_events
        if lifecycle_events is None:
            return
        try:
            async with asyncio.timeout(IN_CALL_S), self._look_up_lock:
                if lifecycle_events.lacks_facts(target):
                    await self._read_lists()
        except TimeoutError:
            pass
        except Exception as error:  # noqa: BLE001  hooks get fewer facts, and the call is decided anyway
            self._executor.report_internal_error(error)

    def look_up_later(self) -> None:
        """Look up the facts soon, and repeat until that succeeds."""
        if not self._is_retrying:
            self._is_retrying = True
            self._executor.spawn(self._retry())

    def resumed(self) -> None:
        """Handle the end of a release: hooks have missed the events during it."""
        self._executor.spawn(self._notify_of_all())

    async def when_reconciled(self) -> None:
        """Handle a late first reconcile: hooks in use have not been notified of existing containers."""
        await self._executor.reconciled.wait()
        await self._notify_of_all()

    async def _read_lists(self) -> bool:
        since = self._executor.state.runtime.changes.number
        try:
            pods, containers = await self._worker.run(self._executor.runtime.raw_lists)
        except (UnavailableError, RuntimeCallError) as error:
            self._executor.telemetry.problem(
                "cannot show hooks the labels and annotations of earlier containers", err=error
            )
            return False
        if self.lifecycle_events is not None:
            self.lifecycle_events.read_lists(pods, containers, since)
        return True

    async def _retry(self) -> None:
        try:
            pauses, known = RetryDelays(RETRY), False
            while not known:
                await asyncio.sleep(pauses.next())
                known = await self._read_lists()
        finally:
            self._is_retrying = False
        must_notify, self._must_notify = self._must_notify, False
        if must_notify:
            self._notify_now()

    async def _notify_of_all(self) -> None:
        if await self.look_up():
            self._notify_now()

    def _notify_now(self) -> None:
        if self.lifecycle_events is not None:
            self._hooks.notify(self.lifecycle_events.synchronize_event())

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
