"""Events that hooks are told beside everything else.

Each hook has a queue of its own, first in, first out, and is told one event at a time: a slow hook is late
with its own events only. What it answers for an event is claimed against what the other hooks have answered
for the same one. A queue is bounded: what it cannot hold is lost, counted, and told of.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.hooks.answers import Update
from proxy.hooks.engine.chain import Call
from proxy.hooks.engine.claims import Claims, said_by
from proxy.hooks.engine.seats import Seat
from proxy.hooks.engine.shared import Shared
from proxy.hooks.engine.traces import Fault
from proxy.hooks.points import Point

MOST_WAITING = 1000
"""Events that wait for one hook."""
_LOOK_S, _WAIT_S = 0.02, 5.0

Updated = Callable[[Mapping[str, Update], Mapping[str, str]], None]
"""Takes runtime's container id to what is to change for it, and field to the hook that has said it."""


@dataclass(frozen=True, slots=True)
class _Item:
    event: Point
    claims: Claims
    done: asyncio.Future[str | None] | None = None
    always: float = 0.0


class Teller:
    """Tells one hook; on the loop."""

    __slots__ = ("_busy", "_lossy", "_queue", "_shared", "_updated", "seat")

    def __init__(self, shared: Shared, seat: Seat, updated: Updated) -> None:
        self._shared = shared
        self._updated = updated
        self._queue: deque[_Item] = deque()
        self._busy = False
        self._lossy = False
        self.seat = seat

    @property
    def waiting(self) -> int:
        """How many events wait."""
        return len(self._queue)

    def tell(self, event: Point, claims: Claims) -> None:
        """Tell an event when those before it have been told."""
        if len(self._queue) >= MOST_WAITING:
            self.seat.lost()
            if not self._lossy:
                self._lossy = True
                text = f"{MOST_WAITING} events wait for it: those that come now are not told"
                self._shared.note(self.seat, Fault("lost", text))
            return
        self._put(_Item(event, claims))

    def tell_one(self, event: Point, always: float) -> asyncio.Future[str | None]:
        """Tell an event that is for this hook alone, whatever its breaker says.

        Returns:
            The error in words, or None.
        """
        done = asyncio.get_running_loop().create_future()
        self._put(_Item(event, Claims(), done, always))
        return done

    def tell_last(self, event: Point, always: float) -> asyncio.Future[str | None]:
        """As ``tell_one``, when all calls that the hook works on have ended, or some seconds are over.

        What waits to be told is not told any more.
        """
        loop = asyncio.get_running_loop()
        done, until = loop.create_future(), loop.time() + min(self.seat.hook.timeout, _WAIT_S)

        def look() -> None:
            if self.seat.busy and loop.time() < until:
                loop.call_later(_LOOK_S, look)
            else:
                self._put(_Item(event, Claims(), done, always))

        self.forget()
        look()
        return done

    def forget(self) -> None:
        """Tell nothing of what waits."""
        dropped = [item for item in self._queue if item.done is None]
        kept = [item for item in self._queue if item.done is not None]
        self._queue = deque(kept)
        self.seat.lost(len(dropped))

    def _put(self, item: _Item) -> None:
        self._queue.append(item)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._queue)
        if not self._queue:
            self._lossy = False
            return
        item = self._queue.popleft()

        def then(call: Call) -> None:
            self._told(item, call)
            # Not from here: a call that ends at once would end within the one before it.
            asyncio.get_running_loop().call_soon(self._next)

        Call(self._shared, item.event, (self.seat,), then=then, always=item.always).start(inline=False)

    def _told(self, item: _Item, call: Call) -> None:
        outcome, error = call.outcome, call.error
        if outcome is not None and outcome.adjustment.updates:
            clash = item.claims.claim(self.seat.hook.name, said_by(outcome.adjustment))
            if clash:
                fault = Fault("conflict", clash)
                self.seat.note(fault)
                self._shared.note(self.seat, fault)
                error = clash
            else:
                self._updated(outcome.adjustment.updates, outcome.owners)
        if item.done is not None and not item.done.done():
            item.done.set_result(error)
