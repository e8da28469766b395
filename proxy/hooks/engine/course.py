"""The course of one call through its hooks.

Theory. A call is at one hook at a time, and is moved on by whoever has its *ticket*: a list with one item,
and whoever pops the item has it. The thread that calls a hook pops it when the hook has answered and the
answer is checked; the event loop pops it when the hook's time is over. One of the two gets it, the other
finds that it is gone and uses nothing of what it has. So the call needs no lock, and an answer that comes
late cannot be used.

It moves on wherever it is: hooks that are plain functions are called one after the other in one runner,
coroutines on their own loops. When all hooks have answered, those that validate see what came together. The
last thing is the outcome, set once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial

from proxy.hooks.answers import Veto
from proxy.hooks.engine import calling
from proxy.hooks.engine.claims import Said
from proxy.hooks.engine.runners import Runner, Way
from proxy.hooks.engine.seats import Seat
from proxy.hooks.engine.shared import Errand, Followed, Held, Shared
from proxy.hooks.engine.tally import Tally
from proxy.hooks.engine.traces import Fault
from proxy.hooks.engine.words import seconds
from proxy.hooks.hook import LONGEST_S, Outcome
from proxy.hooks.points import POINTS, VALIDATES, Point

SPARE_S = 0.1
"""A server's own deadline is the same as ours, and its error says more: it is waited for a little."""


class Step(Enum):
    """Where a call is between two hooks."""

    READY = "a hook is to be called"
    WAITS = "for a place"
    DONE = "all have been asked"


class Course(Followed):
    """One event, its hooks, and what has come of them so far; from any thread."""

    __slots__ = (
        "_always", "_at", "_end", "_lost", "_open", "_queued", "_seat", "_seats", "_shared", "_tally",
        "_token", "_validators", "due", "event", "held", "outcome",
    )  # fmt: skip

    def __init__(
        self,
        shared: Shared,
        event: Point,
        seats: Sequence[Seat],
        validators: Sequence[Seat] | None,
        always: float,
    ) -> None:
        self._shared = shared
        self.event = event
        self.outcome: Outcome | None = None
        self._seats = seats
        self._validators = validators or None
        self._always = always
        self._tally = Tally()
        self._at = 0
        self._seat: Seat
        self._token = 0
        self._queued = False
        self._end = shared.clock() + LONGEST_S
        self.held = Held([], None, None, self._end)
        self.due = 0.0
        self._open = [True]
        self._lost: dict[Runner, Seat] = {}

    # Moving on.

    def go_on(self) -> None:
        """Find the next hook and have it called elsewhere; not from a runner."""
        while True:
            step = self._advance()
            if step is Step.DONE:
                self._conclude()
                self.settle()
            elif step is Step.READY and not self._send():
                continue
            return

    def _send(self) -> bool:
        if self.event.NAME in self._seat.coroutines:
            return self._begin(self._seat)
        try:
            self._shared.runners.start(self)
        except RuntimeError as error:
            self._ended(self._seat, None, Fault("error", f"it cannot be called: {error}"), None)
            return False
        return True

    def run(self, runner: Runner) -> Way:
        """Call hooks in a runner, as long as they are plain functions."""
        ready = self._permitted(self._seat) if self._queued else True
        while True:
            if ready:
                if self.event.NAME in self._seat.coroutines:
                    if self._begin(self._seat):
                        return Way.HANDED
                elif not self._call(self._seat, runner):
                    return Way.LOST
            step = self._advance()
            if step is Step.DONE:
                self._conclude()
                return Way.DONE
            if step is Step.WAITS:
                return Way.HANDED
            ready = True

    def _advance(self) -> Step:
        while not self._tally.refusal:
            if self._at == len(self._seats) and not self._to_validation():
                break
            seat = self._seats[self._at]
            if seat.hook.skip is not None and calling.skips(seat.hook, self.event):
                self._at += 1
                continue
            now = self._shared.clock()
            if now >= self._end:
                self._left_out(seat, Fault("queue", "no time was left for it: the hooks before it took all"))
                continue
            self._seat = seat
            permit = seat.enter(self, now, self._always > 0, self._shared.runners.crowded)
            if permit is None:
                return Step.WAITS
            if isinstance(permit, int):
                self._token = permit
                return Step.READY
            self._left_out(seat, permit)
        return Step.DONE

    def waits(self) -> None:
        """It has no place yet."""
        self._queued = True
        self.held = Held([True], None, None, self._end)

    def _permitted(self, seat: Seat) -> bool:
        """Ask whether the hook may be called now that there is a place."""
        self._queued = False
        now = self._shared.clock()
        permit = seat.permit(now, self._always > 0, self._shared.runners.crowded)
        if isinstance(permit, int):
            self._token = permit
            return True
        seat.leave(0, None, None, now)
        self._left_out(seat, permit)
        return False

    def _to_validation(self) -> bool:
        if self._validators is None:
            return False
        point = POINTS[VALIDATES[self.event.NAME]]
        self.event = point(self.event, self._tally.shown(), self._tally.owners)  # type: ignore[call-arg]
        self._seats, self._validators, self._at = self._validators, None, 0
        return True

    # Calling.

    def _deadline(self, seat: Seat, now: float) -> float:
        hook = seat.hook
        return min(now + max(hook.timeout, self._always) + (SPARE_S if hook.remote else 0.0), self._end)

    def _call(self, seat: Seat, runner: Runner) -> bool:
        """Call a function and take its answer; False: it took too long, and the call is somebody else's."""
        clock = self._shared.clock
        start = clock()
        ticket = [True]
        held = Held(ticket, seat, runner, self._deadline(seat, start))
        self._hold(held)
        said, fault = calling.function(seat.hook, self.event, self._tally)
        try:
            ticket.pop()
        except IndexError:
            return False
        self._came(held, seat, said, fault, start)
        return True

    def _came(
        self, held: Held, seat: Seat, said: Said | Veto | None, fault: Fault | None, start: float
    ) -> None:
        """An answer is there, and the call is ours; that it is late may not have been seen."""
        now = self._shared.clock()
        if now > held.deadline:
            said, fault = None, self._overtime(seat)
        self._ended(seat, said, fault, now - start)

    def _overtime(self, seat: Seat) -> Fault:
        given = max(seat.hook.timeout, self._always)
        return Fault("timeout", f"no answer within {seconds(given)} at {self.event.NAME}")

    def _begin(self, seat: Seat) -> bool:
        """Have a coroutine run on the hook's loop; False: there is none, and the call is still ours."""
        try:
            errand = Errand(seat.looper())
            now = self._shared.clock()
            held = Held([True], seat, errand, self._deadline(seat, now))
            self._hold(held)
            errand.start(partial(self._await, seat, held, now), seat.came_back)
        except (RuntimeError, OSError) as error:
            self.held = Held([], None, None, self._end)
            self._ended(seat, None, Fault("error", f"it cannot be called: {error}"), None)
            return False
        return True

    async def _await(self, seat: Seat, held: Held, start: float) -> None:
        said, fault = await calling.coroutine(seat.hook, self.event, self._tally)
        try:
            held.ticket.pop()
        except IndexError:
            return
        try:
            self._came(held, seat, said, fault, start)
            self.go_on()
        except Exception as error:  # noqa: BLE001 - a fault of ours must not leave the call hanging
            self.broke(error, None)
            self.settle()

    def _hold(self, held: Held) -> None:
        """A hook has the call; who follows the call with a timer is told if that is too late for this one."""
        self.held = held
        if held.deadline < self.due:
            self._shared.post(self.look)

    # What has come of it.

    def _ended(self, seat: Seat, said: Said | Veto | None, fault: Fault | None, took: float | None) -> None:
        """A hook has answered, or failed; whoever says so has the call."""
        if said is not None:
            fault = self._tally.said(seat, said, self.event)
        seat.leave(self._token, took, fault, self._shared.clock())
        self._at += 1
        if fault is not None:
            self._tally.failed(seat, fault, self.event)

    def _left_out(self, seat: Seat, fault: Fault) -> None:
        """A hook is not called."""
        seat.note(fault)
        self._at += 1
        self._tally.failed(seat, fault, self.event)

    def _conclude(self) -> None:
        outcome = self._tally.outcome()  # first: where it fails, somebody else must be able to conclude
        try:
            self._open.pop()
        except IndexError:
            return
        self.outcome = outcome
