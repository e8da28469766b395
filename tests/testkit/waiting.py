"""Waiting until a condition holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 120.0
"""Longer than anything takes on a busy machine."""


async def until(condition: Callable[[], object], seconds: float = LIMIT_S, pause: float = 0.01) -> float:
    """Wait on the event loop until the condition holds; return the seconds that this took.

    Raises:
        TimeoutError: It does not hold after ``seconds``.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(pause)
    return loop.time() - began


def wait_until(condition: Callable[[], object], seconds: float = LIMIT_S, pause: float = 0.01) -> float:
    """Wait in this thread until the condition holds; return the seconds that this took.

    Raises:
        TimeoutError: It does not hold after ``seconds``.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"waited for {seconds:g} s")
        time.sleep(pause)
    return time.monotonic() - began


async def begin_held_create(node: Any, sandbox: str) -> asyncio.Task[Any]:
    """Begin a create of an owner at a node of the tests, and see that it is held."""
    create = asyncio.create_task(node.begin(sandbox))
    await node.until(lambda: node.executor.state.owners)
    await node.quiet()
    assert not create.done()
    return create
