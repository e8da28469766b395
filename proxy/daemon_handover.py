"""The hand-over of the node to a successor: the process of another version that replaces this daemon.

``proxy.succession`` starts that process and speaks with it. This module decides when it takes over, and what
becomes of the calls in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.daemon_parts import DaemonParts
from proxy.daemon_shutdown import shut_down
from proxy.notify import SystemdNotifier
from proxy.succession.replacement import DaemonReplacement, wait_quiet

if TYPE_CHECKING:
    from proxy.executor.former_calls import RelayedCall
    from proxy.succession.successor import Successor

QUIET_WAIT_S, GOAWAY_S = 5.0, 1.0
"""Seconds to wait, before a successor takes over, for a moment without calls that place containers; and
seconds for clients to learn that they must connect again."""
PLACING_CALLS_S = 5.0
"""The most seconds (or ``drainTimeout``) for placing calls to end; new calls wait until then."""
RELAY_AFTER_REPLACED_S = 900.0
"""Seconds for which other calls may continue in a daemon that has been replaced."""
DRAIN_GRACE_S = 0.2
"""Seconds after ``drainTimeout`` for the last connections to be closed."""


async def hand_over(
    parts: DaemonParts,
    replacement: DaemonReplacement,
    notifier: SystemdNotifier,
    drain_timeout_s: float,
    is_stopping: Callable[[], bool],
) -> bool:
    """Hand the socket and the state of the node over to the successor.

    Calls that place containers end before the hand-over; the others continue in this daemon, which only
    relays them.

    Args:
        parts: The parts of this daemon.
        replacement: Has the process that has prepared.
        notifier: Reports to systemd which process is the daemon.
        drain_timeout_s: ``drainTimeout``.
        is_stopping: Returns whether a signal to stop this daemon has arrived.

    Returns:
        False if the successor has ended, or this daemon has to stop; it then serves as before.

    Raises:
        TopoproxyError: The successor does not serve.
    """
    successor, acceptor, listener = replacement.successor, parts.acceptor, parts.listener
    assert successor is not None
    assert acceptor is not None
    assert listener is not None
    await wait_quiet(lambda: _is_busy(parts) and not is_stopping(), QUIET_WAIT_S)
    if replacement.discard_ended() or is_stopping():
        return False
    clock = asyncio.get_running_loop().time
    began = clock()
    await acceptor.retire(GOAWAY_S)
    await wait_quiet(acceptor.is_placing, min(drain_timeout_s, PLACING_CALLS_S))
    quiet = await wait_quiet(lambda: _is_busy(parts), GOAWAY_S)
    if is_stopping():
        return False
    relayed = _stop_deciding(parts, successor)
    for task in parts.tasks:
        task.cancel()
    listener.hand_over()
    await shut_down(parts, handing_over=True)
    notifier.main_process(successor.pid)
    await asyncio.to_thread(successor.take_over, quiet=quiet, calls=relayed)
    successor.follow()
    if parts.telemetry is not None:
        parts.telemetry.event("replaced", pid=successor.pid, seconds=f"{clock() - began:.3f}")
    return True


def _stop_deciding(parts: DaemonParts, successor: Successor) -> list[RelayedCall]:
    """Stop deciding; return the calls whose ends the successor has to know."""
    if parts.call_flow is None or parts.acceptor is None or parts.call_tracker is None:
        return []
    former, acceptor = parts.call_tracker.former_calls, parts.acceptor
    former.report_ends_to(successor.over)
    relayed = parts.call_flow.hand_over(acceptor.refuse_undecided, acceptor.calls, successor.over)
    return [*relayed, *former.relayed]


def _is_busy(parts: DaemonParts) -> bool:
    """Return whether a client or the daemon itself has a placing call in flight."""
    assert parts.acceptor is not None
    return parts.acceptor.is_placing() or bool(parts.executor and parts.executor.state.inflight.calls)


async def finish_calls(parts: DaemonParts, limit_s: float) -> None:
    """Relay the calls in flight to their end, and the reports about calls of an earlier daemon."""
    if parts.acceptor is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s + DRAIN_GRACE_S):
                await parts.acceptor.drain(limit_s)
                if parts.call_tracker is not None:
                    await parts.call_tracker.former_calls.wait()
