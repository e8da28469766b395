"""Maintains the daemon's process while it runs: notifies systemd's watchdog, and keeps memory small."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy import logs, memory_trim
from proxy.telemetry.metrics import RECONCILES, RUNTIME_EVENT_STREAMS

if TYPE_CHECKING:
    from proxy.executor.context import NodeContext
    from proxy.executor.worker_health import Health
    from proxy.notify import SystemdNotifier

SETTLED_S = 0.2
"""Seconds after the first reconcile until its memory is freed."""
EARLY_CHECK_S, CHECK_S = 0.3, 1.0
"""Seconds between two checks whether memory can be returned to the kernel: at first, and later."""
EARLY_CHECKS = 6
GROWN_BYTES = 8 << 20
"""Memory is returned to the kernel if it has grown by this much since the last time."""


async def ping_watchdog(notifier: SystemdNotifier, health: Health | None, status: Callable[[], str]) -> None:
    """Send signs of life, unless workers have been stuck so long that a restart is due.

    Args:
        notifier: Reaches systemd; without a watchdog the function returns.
        health: Knows which workers are stuck; None if there are no workers.
        status: Returns the line for ``systemctl status`` while all is well.
    """
    reported: list[str] = []
    while notifier.ping_interval_s is not None:
        stuck = health.stuck() if health is not None else {}
        messages = [f"the {name} worker has been stuck for {s:.0f} s" for name, s in stuck.items()]
        if health is not None and health.may_restart():
            what = "; ".join(messages)
            logs.log.say_once(
                "watchdog",
                "error",
                "workers are stuck: the watchdog gets no ping, for a restart",
                workers=what,
            )
        else:
            notifier.ping()
        if messages or reported:
            notifier.status("; ".join(messages) or status())
        reported = messages
        await asyncio.sleep(notifier.ping_interval_s)


async def keep_memory_small(executor: NodeContext) -> None:
    """Free the memory of the start and the first reconcile; later, that of reconciles and messages."""
    await executor.reconciled.wait()
    await asyncio.sleep(SETTLED_S)
    memory_trim.collect_and_freeze()

    telemetry, seen, kept = executor.telemetry, (-1, -1), memory_trim.resident_bytes()
    early_checks_left = EARLY_CHECKS
    again = False
    while True:
        now = telemetry.value(RECONCILES), telemetry.value(RUNTIME_EVENT_STREAMS)
        grown = memory_trim.resident_bytes() > kept + GROWN_BYTES
        if now != seen or grown or again:
            await asyncio.to_thread(memory_trim.trim)
            await asyncio.to_thread(memory_trim.drop_clean_pages)
            seen, kept = now, memory_trim.resident_bytes()
        again = grown  # the message that needed the memory may not have been sent yet
        await asyncio.sleep(EARLY_CHECK_S if early_checks_left > 0 else CHECK_S)
        early_checks_left -= 1
