"""Tasks that last as long as the daemon: none of them ends by a fault without being begun again.

A fault of ours in one of them would otherwise end, say, settling for good, and nobody would notice for days.
So it is told and counted, and the task begins anew after a pause, which doubles while it goes on failing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

SHORTEST_S, LONGEST_S = 0.1, 60.0
STEADY_S = 120.0
"""Who ran so long before it failed begins anew after the shortest pause."""


async def tended(begin: Callable[[], Awaitable[None]], failed: Callable[[BaseException], None]) -> None:
    """Run something until it ends by itself.

    Args:
        begin: Begins it; called again after each fault.
        failed: Is told what it ended with.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    pause = SHORTEST_S
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
        if loop.time() - began > STEADY_S:
            pause = SHORTEST_S
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_S)
