"""Learning what hooks are to know of what was made before there were hooks, or without a call.

The runtime's lists tell it, in a worker. Where the runtime does not answer, it is asked again; until then
hooks see such pods and containers without labels and annotations, and are told of all that exists once more
after it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from proxy.controller.worker import Worker
from proxy.model.errors import RuntimeCallError, UnavailableError

if TYPE_CHECKING:
    from proxy.controller.context import NodeContext
    from proxy.frontends.hook_bridge.lifecycle_events import LifecycleEvents
    from proxy.hooks.hook import Asking

IN_CALL_S: Final = 1.0
"""The longest that a call waits for what hooks are to learn of its container or sandbox."""
PAUSES_S: Final = (1.0, 2.0, 5.0, 30.0)
"""Before the runtime is asked again; the last again and again."""


class Backfill:
    """Learns, and has hooks told."""

    def __init__(self, keeper: NodeContext, asking: Asking) -> None:
        """Ask nobody yet; who follows is set before anything is learned.

        Args:
            keeper: Whose runtime tells.
            asking: Tells hooks.
        """
        self.following: LifecycleEvents | None = None
        self._keeper = keeper
        self._asking = asking
        self._worker = Worker("hooks-learn", keeper.broken)
        self._learning = self._tell = False
        self._asked = asyncio.Lock()

    async def once(self) -> bool:
        """Learn; where the runtime does not answer, go on with that later, and tell hooks then.

        Returns:
            Whether it has answered.
        """
        if await self._learned():
            return True
        self._tell = True
        self.later()
        return False

    async def in_call(self, target: str) -> None:
        """Learn what hooks lack of the container or sandbox that a call names.

        It came without a call that was seen here, and lists have not been learned from since. Where the
        runtime does not answer soon the call goes on without.
        """
        following = self.following
        if following is None:
            return
        try:
            async with asyncio.timeout(IN_CALL_S), self._asked:
                if following.lacks(target):
                    await self._learned()
        except TimeoutError:
            pass
        except Exception as error:  # noqa: BLE001  hooks learn less, and the call is decided all the same
            self._keeper.broken(error)

    def later(self) -> None:
        """Learn in a moment, and until it works."""
        if not self._learning:
            self._learning = True
            self._keeper.spawn(self._go_on())

    def resumed(self) -> None:
        """The node is ours again: hooks have missed what happened meanwhile."""
        self._keeper.spawn(self._tell_all())

    async def when_synced(self) -> None:
        """The runtime comes late, and hooks are in use that were not told what exists."""
        await self._keeper.synced.wait()
        await self._tell_all()

    async def _learned(self) -> bool:
        try:
            pods, containers = await self._worker.run(self._keeper.runtime.raw_lists)
        except (UnavailableError, RuntimeCallError) as error:
            self._keeper.telemetry.problem(
                "cannot show hooks the labels and annotations of earlier containers", err=error
            )
            return False
        if self.following is not None:
            self.following.learn(pods, containers)
        return True

    async def _go_on(self) -> None:
        try:
            tries = 0
            while True:
                await asyncio.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
                if await self._learned():
                    break
                tries += 1
        finally:
            self._learning = False
        tell, self._tell = self._tell, False
        if tell:
            self._tell_now()

    async def _tell_all(self) -> None:
        if await self.once():
            self._tell_now()

    def _tell_now(self) -> None:
        if self.following is not None:
            self._asking.notify(self.following.everything())

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
