"""The events that a hook receives when it is loaded and when it is removed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from proxy.hooks.events import Configure, Point, Shutdown, Synchronize
from proxy.hooks.hook import Hook
from proxy.hooks.loader.versions import Version
from proxy.model.errors import HookError
from proxy.telemetry.port import Report


class HandoverEngine(Protocol):
    """What is needed of the engine."""

    def use(self, hooks: Sequence[Hook]) -> None:
        """Ask these from now on."""

    def expect(self, hook: Hook) -> None:
        """Notify a hook of what happens from now on, although it is not in use yet."""

    def notify_one(self, hook: Hook, event: Point) -> Awaitable[object]:
        """Send an event to one hook, in use or not, within its deadline; return the error, or None."""


class Handover:
    """Sends hooks their first and last events."""

    def __init__(
        self,
        engine: HandoverEngine,
        synchronize: Callable[[], Synchronize | None],
        report_problem: Report,
    ) -> None:
        self._engine = engine
        self._synchronize = synchronize
        self._report_problem = report_problem

    async def introduce(self, new: Version) -> None:
        """Configure a hook, and send it the whole state, now or as soon as that is known.

        Raises:
            HookError: It cannot be configured.
        """
        hook = new.loaded.hook
        if Configure.NAME in hook.handlers:
            error = await self._engine.notify_one(hook, Configure(new.loaded.settings, hook.name))
            if error is not None:
                new.loaded.unload()
                raise HookError(f"cannot configure hook {hook.source}: {error}")
        if Synchronize.NAME in hook.handlers:
            event = self._everything()
            if event is None:
                self._engine.expect(hook)  # the state may come before it is in use
            elif (error := await self._engine.notify_one(hook, event)) is not None:
                self._report_problem(
                    "cannot send a hook the state of the node", hook=hook.name, path=hook.source, err=error
                )

    async def shut(self, old: Version, reason: str) -> None:
        """Notify a version of a hook that it is removed, and forget it.

        Args:
            old: It is not in use any more; calls that include it may still be running.
            reason: As ``Shutdown.reason``.
        """
        hook = old.loaded.hook
        try:
            error = await self._engine.notify_one(hook, Shutdown(reason))  # the engine forgets it, too
            if error is not None:
                self._report_problem("cannot shut down a hook", hook=hook.name, path=hook.source, err=error)
        finally:
            old.loaded.unload()

    def _everything(self) -> Synchronize | None:
        try:
            return self._synchronize()
        except Exception as error:  # noqa: BLE001 - a hook without it is better than none
            self._report_problem("cannot send hooks the state of the node", err=error)
            return None
