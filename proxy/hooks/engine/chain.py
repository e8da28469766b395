"""A call as the event loop sees it: waited for a moment, followed with a timer, and told when it is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from proxy.hooks.engine import calling
from proxy.hooks.engine.alarm import Alarm
from proxy.hooks.engine.course import Course, Step
from proxy.hooks.engine.overdue import abandon
from proxy.hooks.engine.runners import Runner, Way
from proxy.hooks.engine.seats import Seat
from proxy.hooks.engine.shared import Held, Shared
from proxy.hooks.engine.traces import Fault
from proxy.hooks.engine.words import task
from proxy.hooks.hook import Outcome, Policy
from proxy.hooks.points import Point

INLINE_S = 0.0003
"""The loop waits so long for hooks that have been quick lately."""
SLOW_S = 0.005
"""A hook that takes longer is given shorter turns of the interpreter."""
_LAST_S = 2.0
_LEAST_S = 0.001


class Call(Course):
    """One call; all methods but those of a job are the loop's."""

    __slots__ = ("_done", "_late", "_then", "_timer", "_told", "_waiters")

    def __init__(
        self,
        shared: Shared,
        event: Point,
        seats: Sequence[Seat],
        validators: Sequence[Seat] | None = None,
        then: Callable[[Call], None] | None = None,
        always: float = 0.0,
    ) -> None:
        """Make a call.

        Args:
            shared: What all calls share.
            event: What hooks are told.
            seats: Who is asked, in order.
            validators: Who is asked then.
            then: Called on the loop when there is an outcome.
            always: Not 0: ask whatever the breaker says, and give at least so many seconds.
        """
        super().__init__(shared, event, seats, validators, always)
        self._then = then
        self._done: Any = None
        self._late = False
        self._told = False
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def _start_here(self, alarm: Alarm) -> None:
        """Ask hooks that only compute, on the loop itself; one that takes too long goes to a thread."""
        step = self._advance()
        while step is Step.READY:
            seat, begun = self._seat, self._shared.clock()
            answered = alarm.call(calling.function, seat.hook, self.event, self._tally)
            if answered is None:
                seat.interrupted += 1
                self._late = True
                if not self._send():
                    self.go_on()
                break
            self._ended(seat, *answered, self._shared.clock() - begun)
            step = self._advance()
        else:
            if step is Step.DONE:
                self._conclude()
            self._late = self.outcome is None
        self._arrived() if self.outcome is not None else self._arm(SLOW_S)

    def start(self, inline: bool, alarm: Alarm | None = None) -> None:
        """Ask the hooks.

        Args:
            inline: Wait for the outcome for a moment.
            alarm: Call them on the loop itself, under this alarm; None: in threads.
        """
        try:
            if alarm is not None:
                self._start_here(alarm)
            else:
                self._start(inline)
        except Exception as error:  # noqa: BLE001 - as in ``look``
            self.broke(error, None)
            self._arrived()

    def _start(self, inline: bool) -> None:
        done: threading.Lock | None = None
        if inline:
            self._done = done = threading.Lock()
            done.acquire()
        self.go_on()
        if done is not None and self.outcome is None:
            done.acquire(timeout=INLINE_S)
        if self.outcome is None:
            self._late = True
        if self.outcome is not None:
            self._arrived()
        else:
            self._arm(SLOW_S)

    async def wait(self) -> Outcome:
        """Wait for the outcome."""
        while self.outcome is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self.outcome

    def settle(self) -> None:
        """Tell the loop that there is an outcome, if it does not look for it; from any thread."""
        done, self._done = self._done, None
        if done is not None:
            done.release()
        if self._late:
            self._shared.post(self._arrived)

    def _arrived(self) -> None:
        if self._told:
            return
        self._told = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for seat, fault in self._tally.notes:
            self._shared.note(seat, fault)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self._then is not None:
            self._then(self)

    @property
    def error(self) -> str | None:
        """What went wrong last, in words."""
        return self._tally.notes[-1][1].text if self._tally.notes else None

    # Deadlines.

    def look(self) -> None:
        """See who has the call, and whether for too long; come again when that may be."""
        try:
            if self._watch():
                return
        except Exception as error:  # noqa: BLE001 - a fault of ours must not leave the call hanging
            self.broke(error, None)
        self._arrived()

    def _watch(self) -> bool:
        """Do what is due; False: there is an outcome."""
        while self.outcome is None:
            held, now = self.held, self._shared.clock()
            if held.deadline <= now:
                if self._taken(held):
                    self._overdue(held, now)
                    continue
                if now > self._end + _LAST_S:
                    self.broke(TimeoutError(), None)
                    continue
            elif isinstance(held.where, Runner):
                self._hurry(held, held.where)
            self._arm(held.deadline - now)
            if self.held is held:
                return True
        return False

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = max(seconds, _LEAST_S)
        self.due = self._shared.clock() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self.look)

    def _taken(self, held: Held) -> bool:
        """Take the call from who has it; False: it has just been moved on."""
        if isinstance(held.where, Runner) and held.seat is not None:
            self._lost[held.where] = held.seat  # said first: it may find at once that it is lost
            if not _won(held):
                del self._lost[held.where]
                return False
            return True
        return _won(held)

    def _hurry(self, held: Held, runner: Runner) -> None:
        """Make turns of the interpreter short while a function of a hook takes long."""
        if held.seat is None or held.seat.hook.remote:
            return
        pace = self._shared.runners.pace
        pace.hurry(runner)
        if not held.ticket:
            pace.calm(runner)  # it has just ended

    def _overdue(self, held: Held, now: float) -> None:
        """The hook that has the call is out of time; the call is ours now."""
        seat, where = held.seat, held.where
        if seat is None or where is None:
            self._left_out(self._seat, Fault("queue", "its turn did not come: it is busy with other calls"))
        else:
            given = max(seat.hook.timeout, self._always)
            fault = self._overtime(seat)
            seat.leave(self._token, given, fault, now, astray=where)
            self._at += 1
            self._tally.failed(seat, fault, self.event)
            abandon(self._shared, seat, where)
        self.go_on()

    # What a runner asks.

    def broke(self, error: BaseException, runner: Runner | None) -> Way:
        """Our own code has failed: the call goes on as it came, unless a hook of it is not to be missed."""
        if runner in self._lost:
            return Way.LOST
        try:
            self._open.pop()
        except IndexError:
            return Way.HANDED
        seats = (*self._seats, *(self._validators or ()))
        words = f"calls cannot be taken through the hooks: {type(error).__name__}: {error}"
        self._tally.notes.append((seats[0], Fault("error", words)))
        firm = self._tally.firm or any(seat.hook.policy is Policy.FAIL for seat in seats)
        if firm and self.event.VETO:
            why = f"cannot {task(self.event)}: its hooks cannot be asked: {type(error).__name__}"
            self.outcome = Outcome(refusal=why)
        else:
            self.outcome = Outcome()
        return Way.DONE

    def came_back(self, runner: Runner) -> None:
        """A runner that was abandoned with this call is back."""
        if (seat := self._lost.get(runner)) is not None:
            seat.came_back(runner)

    # What a seat asks.

    def turn(self) -> bool:
        """There is a place; False if it is not waited for any more."""
        return _won(self.held)

    def resume(self) -> None:
        """Go on with a place."""
        try:
            self._shared.runners.start(self)
        except RuntimeError as error:
            self._shared.post(self._not_started, Fault("error", f"it cannot be called: {error}"))

    def _not_started(self, fault: Fault) -> None:
        self._queued, self._token = False, 0
        self._ended(self._seat, None, fault, None)
        self.go_on()


def _won(held: Held) -> bool:
    try:
        held.ticket.pop()
    except IndexError:
        return False
    return True
