"""Serving, put together: what the daemon starts and stops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.hooks.serving.desk import Desk
from proxy.hooks.serving.server import Server
from proxy.keeper.tending import tended

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.config.schema import Config
    from proxy.hooks.serving.call import Wire
    from proxy.keeper.keeper import Keeper
    from proxy.keeper.launch import Launch
    from proxy.keeper.sync import Sync


def serving_of(
    config: Config, keeper: Keeper, sync: Sync, launch: Launch, wire: Wire | None = None
) -> Serving | None:
    """Make what serves hooks; None where the configuration names no socket for it.

    Args:
        config: What to do.
        keeper: Whose node it is.
        sync: Looks up containers that a question names and nobody knows.
        launch: Watches over starts and updates.
        wire: Who decides on the calls that pass through us, so that the same hooks are asked; somebody who
            asks none if None.
    """
    if config.hooks.serve is None:
        return None
    if wire is None:
        from proxy.cri.interceptors import Interceptors

        wire = Interceptors(keeper, sync, launch)
    return Serving(config.hooks.serve, keeper, launch, wire)


class Serving:
    """Our engine as a hook server, from ``start`` to ``stop``."""

    def __init__(self, path: Path, keeper: Keeper, launch: Launch, wire: Wire) -> None:
        """Prepare; nothing is opened before ``start``.

        Args:
            path: Where to listen.
            keeper: Whose node it is.
            launch: Who asks the runtime in the way of a call.
            wire: Who decides on calls: the interceptors of the calls that pass through us.
        """
        self._keeper = keeper
        self.desk = Desk(keeper, launch, wire)
        self._server = Server(path, keeper, self.desk)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            CannotCreateError, PermissionDeniedError: The socket cannot be had; nothing is left behind.
        """
        await asyncio.to_thread(self._server.open)
        looking = tended(self.desk.under_way.run, self._keeper.begun_anew)
        self._task = asyncio.get_running_loop().create_task(looking)

    async def stop(self) -> None:
        """Listen no more. What is under way is found again after a start, as after a crash."""
        await asyncio.to_thread(self._server.close)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
