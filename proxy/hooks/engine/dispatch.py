"""One event on its way through its hooks.

Theory. A call is at one hook at a time. The thread that holds its *ticket* moves it on: the ticket is a list
with one item, and the thread that pops the item has won. The thread that calls a hook pops it when the hook
has answered and the answer is checked; the event loop pops it when the hook's deadline has passed. One of
the two gets the item; the other finds the list empty and discards what it has. So the call needs no lock,
and a late answer cannot be used.

A call moves on wherever it is: hooks that are plain functions are called one after the other in one runner,
coroutines on their own loops. When all hooks have answered, the validating hooks receive the merged answers.
The outcome is set last, and once.

The event loop waits briefly for hooks that were quick lately, then watches the call with a timer, and learns
of the outcome through ``settle``. Each section below says which thread runs it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from proxy.hooks.answers import Veto
from proxy.hooks.engine import invoke
from proxy.hooks.engine.claims import AnswerFields
from proxy.hooks.engine.errors import HookFailure, duration, task
from proxy.hooks.engine.invoke import DispatchContext, HookTask, MergedAnswers, cancel
from proxy.hooks.engine.loop_interrupt import Alarm
from proxy.hooks.engine.runners import JobResult, Runner
from proxy.hooks.engine.slots import HookSlots
from proxy.hooks.events import POINTS, VALIDATES, Point
from proxy.hooks.hook import LONGEST_S, HookFailurePolicy, Outcome

INLINE_S = 0.0003
"""How long the loop blocks for hooks that have been quick lately."""
SLOW_S = 0.005
"""From then on the interpreter's switch interval is shortened while a hook still runs."""
SPARE_S = 0.1
"""A server's own deadline equals ours and its error says more, so the call waits this much longer for it."""
_LAST_S = 2.0
_LEAST_S = 0.001


class DispatchStep(Enum):
    """Where a call is between two hooks."""

    READY = "a hook is to be called"
    WAITS = "waits for a place"
    DONE = "all hooks have been called"


@dataclass(frozen=True, slots=True)
class CallHolder:
    """What has a call now.

    Attributes:
        ticket: Has one item; the thread that pops it moves the call on.
        seat: The hook that is called; None while the call waits for a place.
        where: The runner or coroutine that the hook runs in.
        deadline: When the hook is overdue.
    """

    ticket: list[bool]
    seat: HookSlots | None
    where: Runner | HookTask | None
    deadline: float


class Dispatch:
    """One event, its hooks, and their answers so far."""

    __slots__ = (
        "_always", "_answers", "_arrived_once", "_at", "_context", "_done", "_end", "_late", "_lost", "_open",
        "_queued", "_seat", "_seats", "_then", "_timer", "_token", "_validators", "_waiters", "due", "event",
        "held", "outcome",
    )  # fmt: skip

    def __init__(
        self,
        context: DispatchContext,
        event: Point,
        seats: Sequence[HookSlots],
        validators: Sequence[HookSlots] | None = None,
        then: Callable[[Dispatch], None] | None = None,
        always: float = 0.0,
    ) -> None:
        """Make a call.

        Args:
            context: What all calls share.
            event: The event that hooks receive.
            seats: The hooks to call, in order.
            validators: The hooks that validate their merged answers.
            then: Called on the loop when there is an outcome.
            always: Not 0: call the hooks whatever their breakers say, with at least this many seconds each.
        """
        self._context = context
        self.event = event
        self.outcome: Outcome | None = None
        self._seats = seats
        self._validators = validators or None
        self._always = always
        self._answers = MergedAnswers()
        self._at = 0
        self._seat: HookSlots
        self._token = 0
        self._queued = False
        self._end = context.clock() + LONGEST_S
        self.held = CallHolder([], None, None, self._end)
        self.due = 0.0
        self._open = [True]
        self._lost: dict[Runner, HookSlots] = {}
        self._then = then
        self._done: Any = None
        self._late = False
        self._arrived_once = False
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[None]] = []

    # Starting, waiting and the outcome: on the event loop.

    def start(self, inline: bool, alarm: Alarm | None = None) -> None:
        """Call the hooks.

        Args:
            inline: Block briefly for the outcome.
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

    def _start_here(self, alarm: Alarm) -> None:
        """Call pure hooks on the loop itself; a call that takes too long continues in a thread."""
        step = self._advance()
        while step is DispatchStep.READY:
            seat, begun = self._seat, self._context.clock()
            answered = alarm.call(invoke.invoke, seat.hook, self.event, self._answers)
            if answered is None:
                seat.interrupted += 1
                self._late = True
                if not self._send():
                    self.go_on()
                break
            self._ended(seat, *answered, self._context.clock() - begun)
            step = self._advance()
        else:
            if step is DispatchStep.DONE:
                self._conclude()
            self._late = self.outcome is None
        self._arrived() if self.outcome is not None else self._arm(SLOW_S)

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
        """Notify the loop that there is an outcome, unless it is looking itself; from any thread."""
        done, self._done = self._done, None
        if done is not None:
            done.release()
        if self._late:
            self._context.post(self._arrived)

    def _arrived(self) -> None:
        if self._arrived_once:
            return
        self._arrived_once = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for hook, failure in self._answers.failures:
            self._context.note(hook, failure)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self._then is not None:
            self._then(self)

    @property
    def error(self) -> str | None:
        """The text of the last failure."""
        return self._answers.failures[-1][1].text if self._answers.failures else None

    # Deadlines: on the event loop.

    def look(self) -> None:
        """Check which hook has the call and whether it is overdue; set a timer for the next check."""
        try:
            if self._watch():
                return
        except Exception as error:  # noqa: BLE001 - an internal error must not leave the call hanging
            self.broke(error, None)
        self._arrived()

    def _watch(self) -> bool:
        """Act on what is overdue; return False if there is an outcome."""
        while self.outcome is None:
            held, now = self.held, self._context.clock()
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
        self.due = self._context.clock() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self.look)

    def _taken(self, held: CallHolder) -> bool:
        """Take the call away from its hook; return False if it has just moved on."""
        if isinstance(held.where, Runner) and held.seat is not None:
            self._lost[held.where] = held.seat  # set first: the runner may find at once that it lost the call
            if not _won(held):
                del self._lost[held.where]
                return False
            return True
        return _won(held)

    def _hurry(self, held: CallHolder, runner: Runner) -> None:
        """Shorten the interpreter's switch interval while a hook's function takes long."""
        if held.seat is None or held.seat.hook.remote:
            return
        pace = self._context.runners.pace
        pace.hurry(runner)
        if not held.ticket:
            pace.calm(runner)  # the function has just ended

    def _overdue(self, held: CallHolder, now: float) -> None:
        """Continue without the hook that had the call: it is past its deadline, and the ticket is ours."""
        seat, where = held.seat, held.where
        if seat is None or where is None:
            failure = HookFailure("queue", "it did not begin in time: it is busy with other calls")
            self._left_out(self._seat, failure)
        else:
            given = max(seat.hook.timeout, self._always)
            failure = self._overtime(seat)
            seat.leave(self._token, given, failure, now, astray=where)
            self._at += 1
            self._answers.failed(seat, failure, self.event)
            cancel(self._context, seat, where)
        self.go_on()

    # Moving on: in the thread that holds the ticket.

    def go_on(self) -> None:
        """Find the next hook and start its call elsewhere; never called from a runner."""
        while True:
            step = self._advance()
            if step is DispatchStep.DONE:
                self._conclude()
                self.settle()
            elif step is DispatchStep.READY and not self._send():
                continue
            return

    def _send(self) -> bool:
        if self.event.NAME in self._seat.coroutines:
            return self._begin(self._seat)
        try:
            self._context.runners.start(self)
        except RuntimeError as error:
            self._ended(self._seat, None, HookFailure("error", f"it cannot be called: {error}"), None)
            return False
        return True

    def _advance(self) -> DispatchStep:
        while not self._answers.refusal:
            if self._at == len(self._seats) and not self._to_validation():
                break
            seat = self._seats[self._at]
            if seat.hook.skip is not None and invoke.is_skipped(seat.hook, self.event):
                self._at += 1
                continue
            now = self._context.clock()
            if now >= self._end:
                failure = HookFailure("queue", "no time was left for it: the hooks before it took all")
                self._left_out(seat, failure)
                continue
            self._seat = seat
            permit = seat.enter(self, now, self._always > 0, self._context.runners.crowded)
            if permit is None:
                return DispatchStep.WAITS
            if isinstance(permit, int):
                self._token = permit
                return DispatchStep.READY
            self._left_out(seat, permit)
        return DispatchStep.DONE

    def _permitted(self, seat: HookSlots) -> bool:
        """Return whether the hook may be called, now that a place is free."""
        self._queued = False
        now = self._context.clock()
        permit = seat.permit(now, self._always > 0, self._context.runners.crowded)
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
        self.event = point(self.event, self._answers.shown(), self._answers.owners)  # type: ignore[call-arg]
        self._seats, self._validators, self._at = self._validators, None, 0
        return True

    # Calling: in a runner, or on the loop of a hook's coroutines.

    def run(self, runner: Runner) -> JobResult:
        """Call hooks in a runner, as long as they are plain functions."""
        ready = self._permitted(self._seat) if self._queued else True
        while True:
            if ready:
                if self.event.NAME in self._seat.coroutines:
                    if self._begin(self._seat):
                        return JobResult.HANDED
                elif not self._call(self._seat, runner):
                    return JobResult.LOST
            step = self._advance()
            if step is DispatchStep.DONE:
                self._conclude()
                return JobResult.DONE
            if step is DispatchStep.WAITS:
                return JobResult.HANDED
            ready = True

    def _deadline(self, seat: HookSlots, now: float) -> float:
        hook = seat.hook
        return min(now + max(hook.timeout, self._always) + (SPARE_S if hook.remote else 0.0), self._end)

    def _call(self, seat: HookSlots, runner: Runner) -> bool:
        """Call a function and take its answer; return False if it took too long and lost the ticket."""
        clock = self._context.clock
        start = clock()
        ticket = [True]
        held = CallHolder(ticket, seat, runner, self._deadline(seat, start))
        self._hold(held)
        answer, failure = invoke.invoke(seat.hook, self.event, self._answers)
        try:
            ticket.pop()
        except IndexError:
            return False
        self._came(held, seat, answer, failure, start)
        return True

    def _came(
        self,
        held: CallHolder,
        seat: HookSlots,
        answer: AnswerFields | Veto | None,
        failure: HookFailure | None,
        start: float,
    ) -> None:
        """Take an answer whose ticket is ours; that it is late may not have been noticed yet."""
        now = self._context.clock()
        if now > held.deadline:
            answer, failure = None, self._overtime(seat)
        self._ended(seat, answer, failure, now - start)

    def _overtime(self, seat: HookSlots) -> HookFailure:
        given = max(seat.hook.timeout, self._always)
        return HookFailure("timeout", f"no answer within {duration(given)} at {self.event.NAME}")

    def _begin(self, seat: HookSlots) -> bool:
        """Start a coroutine on the hook's loop; return False if that fails and the ticket is still ours."""
        try:
            hook_task = HookTask(seat.looper())
            now = self._context.clock()
            held = CallHolder([True], seat, hook_task, self._deadline(seat, now))
            self._hold(held)
            hook_task.start(partial(self._await, seat, held, now), seat.came_back)
        except (RuntimeError, OSError) as error:
            self.held = CallHolder([], None, None, self._end)
            self._ended(seat, None, HookFailure("error", f"it cannot be called: {error}"), None)
            return False
        return True

    async def _await(self, seat: HookSlots, held: CallHolder, start: float) -> None:
        answer, failure = await invoke.invoke_async(seat.hook, self.event, self._answers)
        try:
            held.ticket.pop()
        except IndexError:
            return
        try:
            self._came(held, seat, answer, failure, start)
            self.go_on()
        except Exception as error:  # noqa: BLE001 - an internal error must not leave the call hanging
            self.broke(error, None)
            self.settle()

    def _hold(self, held: CallHolder) -> None:
        """Return a hook the call; have the loop look again if its timer is too late for this deadline."""
        self.held = held
        if held.deadline < self.due:
            self._context.post(self.look)

    # Results: in the thread that holds the ticket.

    def _ended(
        self,
        seat: HookSlots,
        answer: AnswerFields | Veto | None,
        failure: HookFailure | None,
        took: float | None,
    ) -> None:
        """Record that a hook has answered or failed."""
        if answer is not None:
            failure = self._answers.add(seat, answer, self.event)
        seat.leave(self._token, took, failure, self._context.clock())
        self._at += 1
        if failure is not None:
            self._answers.failed(seat, failure, self.event)

    def _left_out(self, seat: HookSlots, failure: HookFailure) -> None:
        """Record that a hook is not called."""
        seat.note(failure)
        self._at += 1
        self._answers.failed(seat, failure, self.event)

    def _conclude(self) -> None:
        outcome = self._answers.outcome()  # first: if it raises, another thread must be able to conclude
        try:
            self._open.pop()
        except IndexError:
            return
        self.outcome = outcome

    # Called by runners (``runners.Job``); from any thread.

    def broke(self, error: BaseException, runner: Runner | None) -> JobResult:
        """Handle an internal error: the call goes on as it came, unless one of its hooks has policy Fail."""
        if runner in self._lost:
            return JobResult.LOST
        try:
            self._open.pop()
        except IndexError:
            return JobResult.HANDED
        seats = (*self._seats, *(self._validators or ()))
        text = f"calls cannot be taken through the hooks: {type(error).__name__}: {error}"
        self._answers.failures.append((seats[0].hook, HookFailure("error", text)))
        firm = self._answers.firm or any(seat.hook.policy is HookFailurePolicy.FAIL for seat in seats)
        if firm and self.event.VETO:
            why = f"cannot {task(self.event)}: its hooks cannot be called: {type(error).__name__}"
            self.outcome = Outcome(refusal=why)
        else:
            self.outcome = Outcome()
        return JobResult.DONE

    def came_back(self, runner: Runner) -> None:
        """A runner that was abandoned with this call has returned."""
        if (seat := self._lost.get(runner)) is not None:
            seat.came_back(runner)

    # Called by seats (``seats.Waiter``); from any thread.

    def waits(self) -> None:
        """There is no free place yet."""
        self._queued = True
        self.held = CallHolder([True], None, None, self._end)

    def turn(self) -> bool:
        """A place is free; return False if the call does not wait for it any more."""
        return _won(self.held)

    def resume(self) -> None:
        """Continue with the place."""
        try:
            self._context.runners.start(self)
        except RuntimeError as error:
            self._context.post(self._not_started, HookFailure("error", f"it cannot be called: {error}"))

    def _not_started(self, failure: HookFailure) -> None:
        self._queued, self._token = False, 0
        self._ended(self._seat, None, failure, None)
        self.go_on()


def _won(held: CallHolder) -> bool:
    try:
        held.ticket.pop()
    except IndexError:
        return False
    return True
