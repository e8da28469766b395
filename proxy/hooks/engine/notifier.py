"""Notifications: events that hooks receive in the background, without delaying a call.

Each hook has its own FIFO queue and receives one event at a time: a slow hook delays only its own events.
Its answer to an event is checked for conflicts with the answers of the other hooks to the same event. A queue
is bounded: events beyond the bound are dropped, counted and reported.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.hooks.answers import Update
from proxy.hooks.engine.claims import FieldClaims, fields_set_by
from proxy.hooks.engine.errors import HookFailure
from proxy.hooks.engine.invoke import EngineContext
from proxy.hooks.engine.sequence import HookSequence
from proxy.hooks.engine.slots import HookSlots
from proxy.hooks.events import Point

MOST_WAITING = 1000
"""Events that may wait for one hook."""
_POLL_S, _WAIT_S = 0.02, 5.0

ApplyUpdates = Callable[[Mapping[str, Update], Mapping[str, str]], None]
"""Takes the updates by runtime's container id, and field to the hook that set it."""


@dataclass(frozen=True, slots=True)
class _QueuedEvent:
    event: Point
    claims: FieldClaims
    done: asyncio.Future[str | None] | None = None
    forced_timeout_s: float = 0.0


class HookNotifier:
    """Sends events to one hook; all methods are called on the loop."""

    __slots__ = ("_apply_updates", "_busy", "_context", "_is_dropping", "_queue", "slots")

    def __init__(self, context: EngineContext, slots: HookSlots, apply_updates: ApplyUpdates) -> None:
        self._context = context
        self._apply_updates = apply_updates
        self._queue: deque[_QueuedEvent] = deque()
        self._busy = False
        self._is_dropping = False
        self.slots = slots

    @property
    def waiting(self) -> int:
        """How many events wait."""
        return len(self._queue)

    def notify(self, event: Point, claims: FieldClaims) -> None:
        """Send an event after those that already wait."""
        if len(self._queue) >= MOST_WAITING:
            self.slots.count_lost()
            if not self._is_dropping:
                self._is_dropping = True
                text = f"{MOST_WAITING} events wait for it: further events are dropped"
                self._context.report_failure(self.slots.hook, HookFailure("lost", text))
            return
        self._enqueue(_QueuedEvent(event, claims))

    def notify_one(self, event: Point, forced_timeout_s: float) -> asyncio.Future[str | None]:
        """Send an event to this hook only, even if its breaker is open.

        Returns:
            The error's text, or None.
        """
        done = asyncio.get_running_loop().create_future()
        self._enqueue(_QueuedEvent(event, FieldClaims(), done, forced_timeout_s))
        return done

    def notify_last(self, event: Point, forced_timeout_s: float) -> asyncio.Future[str | None]:
        """As ``notify_one``, but after all running calls of the hook have ended, or a few seconds.

        Events that still wait are dropped.
        """
        loop = asyncio.get_running_loop()
        done, until = loop.create_future(), loop.time() + min(self.slots.hook.timeout, _WAIT_S)

        def send_when_idle() -> None:
            if self.slots.busy and loop.time() < until:
                loop.call_later(_POLL_S, send_when_idle)
            else:
                self._enqueue(_QueuedEvent(event, FieldClaims(), done, forced_timeout_s))

        self.drop_waiting()
        send_when_idle()
        return done

    def drop_waiting(self) -> None:
        """Drop the events that wait."""
        dropped = [item for item in self._queue if item.done is None]
        kept = [item for item in self._queue if item.done is not None]
        self._queue = deque(kept)
        self.slots.count_lost(len(dropped))

    def _enqueue(self, item: _QueuedEvent) -> None:
        self._queue.append(item)
        if not self._busy:
            self._send_next()

    def _send_next(self) -> None:
        self._busy = bool(self._queue)
        if not self._queue:
            self._is_dropping = False
            return
        item = self._queue.popleft()

        def on_outcome(call: HookSequence) -> None:
            self._answered(item, call)
            # Not called directly: calls that end at once would nest.
            asyncio.get_running_loop().call_soon(self._send_next)

        HookSequence(
            self._context,
            item.event,
            (self.slots,),
            on_outcome=on_outcome,
            forced_timeout_s=item.forced_timeout_s,
        ).start(inline=False)

    def _answered(self, item: _QueuedEvent, call: HookSequence) -> None:
        outcome, error = call.outcome, call.error
        if outcome is not None and outcome.adjustment.updates:
            clash = item.claims.claim(self.slots.hook.name, fields_set_by(outcome.adjustment))
            if clash:
                failure = HookFailure("conflict", clash)
                self.slots.record_failure(failure)
                self._context.report_failure(self.slots.hook, failure)
                error = clash
            else:
                self._apply_updates(outcome.adjustment.updates, outcome.owners)
        if item.done is not None and not item.done.done():
            item.done.set_result(error)
