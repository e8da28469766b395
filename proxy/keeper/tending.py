"""Tasks that last as long as the daemon: none of them ends by a fault without being begun again.

A fault of ours in one of them would otherwise end, say, settling for good, and nobody would notice for days.
So it is told and counted, and the task begins anew after a pause, which doubles while it goes on failing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from proxy.model.backoff import Backoff, RetryDelays

PAUSES = Backoff(0.1, 60.0, steady=120.0)
"""Seconds before a task begins again."""


async def tended(begin: Callable[[], Awaitable[None]], failed: Callable[[BaseException], None]) -> None:
    """Run something until it ends by itself.

    Args:
        begin: Begins it; called again after each fault.
        failed: Is told what it ended with.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    pauses = RetryDelays(PAUSES)
    while True:
        began = loop.time()
        try:
            await begin()
        except asyncio.CancelledError as error:
            if task is None or task.cancelling():
                raise
            failed(error)  # something that it waited for was cancelled, not the task
        except Exception as error:  # noqa: BLE001  whatever it is, the task must go on
            failed(error)
        else:
            return
        await asyncio.sleep(pauses.next(loop.time() - began))
