"""The shutdown of the daemon's parts, in their order and in bounded time."""

from __future__ import annotations

import asyncio

from proxy import logs
from proxy.daemon_parts import DaemonParts
from proxy.executor.shutdown import CLOSE_S, ShutdownTime

STOP_S = 4.0
"""Seconds that the shutdown may take after ``drainTimeout``, whatever hangs."""
SETTLE_LIMIT_S = 3.0
"""Seconds that a stop may take to send the runtime the CPUs that BE (best effort) containers got back."""
SERVER_S, SUPPRESSION_S, HOOKS_S = 1.0, 5.2, 10.0
"""The most seconds for each server, BE suppression and hooks to stop; fewer if less time is left."""
EXECUTOR_S, WORKERS_S = 1.5, 1.2
"""The least seconds that are kept for closing the executor and the other workers."""


async def shut_down(parts: DaemonParts, seconds: float = STOP_S, *, handing_over: bool = False) -> None:
    """End all parts within this many seconds; do not wait for a part that hangs.

    Args:
        parts: The parts.
        seconds: How long the shutdown may take.
        handing_over: Whether a successor continues, so that BE pods keep their limits.
    """
    telemetry = parts.telemetry or logs.telemetry()
    ending = ShutdownTime(max(seconds, STOP_S), telemetry.warning)
    for task in parts.tasks:
        task.cancel()
    await ending.step("end tasks", asyncio.gather(*parts.tasks, return_exceptions=True))
    await _stop_servers(parts, ending)
    if parts.executor is not None and not handing_over:
        await _restore_be_pods(parts, ending)
    await _close_executor(parts, ending, handing_over=handing_over)
    if parts.state_directory is not None:
        parts.state_directory.close()
    if parts.listener is not None:
        parts.listener.close()
    if parts.predecessor is not None and not handing_over:
        parts.predecessor.close()


async def _stop_servers(parts: DaemonParts, ending: ShutdownTime) -> None:
    servers = (parts.admin, parts.pod_resources, parts.device_plugins, parts.release, parts.hooks)
    for server in servers:
        if server is not None:
            max_seconds = HOOKS_S if server is parts.hooks else SERVER_S
            await ending.step(
                "end the servers", server.stop(), min(max_seconds, ending.remaining() - EXECUTOR_S)
            )


async def _restore_be_pods(parts: DaemonParts, ending: ShutdownTime) -> None:
    """Remove the limits of BE pods, and send the runtime the CPUs that they got back."""
    if parts.suppression is None:
        return
    max_seconds = min(SUPPRESSION_S, ending.remaining() - EXECUTOR_S)
    await ending.step("restore the limits of BE pods", parts.suppression.stop(), max_seconds)
    if parts.runtime_sync is not None:
        max_seconds = min(SETTLE_LIMIT_S, ending.remaining() - EXECUTOR_S)
        await ending.step("update the runtime", parts.runtime_sync.finish(SETTLE_LIMIT_S), max_seconds)


async def _close_executor(parts: DaemonParts, ending: ShutdownTime, *, handing_over: bool) -> None:
    """Close the executor, and then all that has a worker of its own."""
    if parts.executor is None:
        return
    limit = max(EXECUTOR_S, min(CLOSE_S, ending.remaining() - WORKERS_S))
    await parts.executor.close(limit, handing_over=handing_over)
    with_workers = (
        parts.reconciler,
        parts.runtime_sync,
        parts.call_tracker,
        parts.suppression,
        parts.takeover,
        parts.release,
        parts.staging,
        parts.executor.runtime,
    )
    closing = (asyncio.to_thread(part.close) for part in with_workers if part)
    await ending.step("end the workers", asyncio.gather(*closing), WORKERS_S, min_seconds=WORKERS_S)
