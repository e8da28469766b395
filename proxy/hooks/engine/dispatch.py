"""Call the hooks of one event, one after the other, each within its deadline.

Theory. A dispatch calls one hook at a time. Only the thread that owns its *ticket* may continue it. The
ticket is a list with one item, and the thread that pops the item owns it. The thread that calls a hook pops
it when the hook has answered and the answer is checked; the event loop pops it when the hook's deadline has
passed. One of the two gets the item; the other finds the list empty and discards its result. So a dispatch
needs no lock, and a late answer cannot be used.

Hooks that are plain functions are called one after the other in one runner, coroutines on their own loops.
When all hooks have answered, the validating hooks receive the merged answers. The outcome is set at the end,
exactly once.

The event loop blocks briefly for hooks that were quick recently, and then watches the dispatch with a timer.
``notify_outcome`` notifies it of the outcome. Each section below names the thread that runs it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from msgspec import Struct

from proxy.hooks.answers import Veto
from proxy.hooks.engine import invoke
from proxy.hooks.engine.claims import AnswerFields
from proxy.hooks.engine.errors import HookFailure, duration, task
from proxy.hooks.engine.invoke import DispatchContext, HookTask, MergedAnswers, cancel
from proxy.hooks.engine.loop_interrupt import Alarm
from proxy.hooks.engine.runners import JobResult, Runner
from proxy.hooks.engine.slots import HookSlots
from proxy.hooks.events import POINTS, VALIDATES, Point
from proxy.hooks.hook import LONGEST_TIMEOUT_S, HookFailurePolicy, Outcome

INLINE_WAIT_S = 0.0003
"""How long the loop blocks for hooks that were quick recently."""
SHORTEN_SWITCH_S = 0.005
"""After this time the interpreter's switch interval is shortened while a hook still runs."""
SPARE_S = 0.1
"""The client of a server has the same deadline and a better error, so the dispatch waits this much longer."""
_LAST_S = 2.0
_LEAST_S = 0.001


class DispatchStep(Enum):
    """The next step of a dispatch."""

    READY = "a hook is to be called"
    WAITS = "waits for a slot"
    DONE = "all hooks have been called"


class CallHolder(Struct, frozen=True, eq=False):
    """The hook that a dispatch is calling, and the ticket to continue from there.

    Attributes:
        ticket: Has one item; the thread that pops it continues the dispatch.
        slots: The slots of the hook that is called; None while the dispatch waits for a slot.
        where: The runner or coroutine that the hook runs in.
        deadline: When the hook is overdue.
    """

    ticket: list[bool]
    slots: HookSlots | None
    where: Runner | HookTask | None
    deadline: float


class Dispatch:
    """One event, its hooks, and their answers so far."""

    __slots__ = (
        "_abandoned", "_always", "_answers", "_arrived_once", "_at", "_context", "_done", "_end",
        "_hook_slots", "_late", "_open", "_queued", "_slots", "_then", "_timer", "_token", "_validators",
        "_waiters", "due", "event", "held", "outcome",
    )  # fmt: skip

    def __init__(
        self,
        context: DispatchContext,
        event: Point,
        hook_slots: Sequence[HookSlots],
        validators: Sequence[HookSlots] | None = None,
        then: Callable[[Dispatch], None] | None = None,
        always: float = 0.0,
    ) -> None:
        """Make a call.

        Args:
            context: What all calls share.
            event: The event that hooks receive.
            hook_slots: The hooks to call, in order.
            validators: The hooks that validate their merged answers.
            then: Called on the loop when there is an outcome.
            always: If not 0, call the hooks even if their breakers are open, and give each at least this many
                seconds.
        """
        self._context = context
        self.event = event
        self.outcome: Outcome | None = None
        self._hook_slots = hook_slots
        self._validators = validators or None
        self._always = always
        self._answers = MergedAnswers()
        self._at = 0
        self._slots: HookSlots
        self._token = 0
        self._queued = False
        self._end = context.clock() + LONGEST_TIMEOUT_S
        self.held = CallHolder([], None, None, self._end)
        self.due = 0.0
        self._open = [True]
        self._abandoned: dict[Runner, HookSlots] = {}
        self._then = then
        self._done: threading.Lock | None = None
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
                self._start_on_loop(alarm)
            else:
                self._start(inline)
        except Exception as error:  # noqa: BLE001 - as in ``check_deadline``
            self.on_internal_error(error, None)
            self._arrived()

    def _start_on_loop(self, alarm: Alarm) -> None:
        """Call pure hooks on the loop itself; a call that takes too long continues in a thread."""
        step = self._select_next()
        while step is DispatchStep.READY:
            slots, begun = self._slots, self._context.clock()
            answered = alarm.call(invoke.invoke, slots.hook, self.event, self._answers)
            if answered is None:
                slots.interrupted()
                self._late = True
                if not self._start_call():
                    self.start_next()
                break
            self._record_result(slots, *answered, self._context.clock() - begun)
            step = self._select_next()
        else:
            if step is DispatchStep.DONE:
                self._conclude()
            self._late = self.outcome is None
        self._arrived() if self.outcome is not None else self._arm(SHORTEN_SWITCH_S)

    def _start(self, inline: bool) -> None:
        done: threading.Lock | None = None
        if inline:
            self._done = done = threading.Lock()
            done.acquire()
        self.start_next()
        if done is not None and self.outcome is None:
            done.acquire(timeout=INLINE_WAIT_S)
        if self.outcome is None:
            self._late = True
        if self.outcome is not None:
            self._arrived()
        else:
            self._arm(SHORTEN_SWITCH_S)

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

    def notify_outcome(self) -> None:
        """Notify the loop that there is an outcome, unless it is checking already; from any thread."""
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

    def check_deadline(self) -> None:
        """Check which hook has the call and whether it is overdue; set a timer for the next check."""
        try:
            if self._watch():
                return
        except Exception as error:  # noqa: BLE001 - an internal error must not leave the call hanging
            self.on_internal_error(error, None)
        self._arrived()

    def _watch(self) -> bool:
        """Continue without a hook that is overdue; return False if there is an outcome."""
        while self.outcome is None:
            held, now = self.held, self._context.clock()
            if held.deadline <= now:
                if self._take_from_hook(held):
                    self._continue_without(held, now)
                    continue
                if now > self._end + _LAST_S:
                    self.on_internal_error(TimeoutError(), None)
                    continue
            elif isinstance(held.where, Runner):
                self._shorten_switch_interval(held, held.where)
            self._arm(held.deadline - now)
            if self.held is held:
                return True
        return False

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = max(seconds, _LEAST_S)
        self.due = self._context.clock() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self.check_deadline)

    def _take_from_hook(self, held: CallHolder) -> bool:
        """Withdraw the ticket of the hook that is called; return False if the hook has just answered."""
        if isinstance(held.where, Runner) and held.slots is not None:
            self._abandoned[held.where] = (
                held.slots
            )  # set first: the runner may find at once that it lost the call
            if not _pop_ticket(held):
                del self._abandoned[held.where]
                return False
            return True
        return _pop_ticket(held)

    def _shorten_switch_interval(self, held: CallHolder, runner: Runner) -> None:
        """Shorten the interpreter's switch interval while a hook's function takes long."""
        if held.slots is None or held.slots.hook.remote:
            return
        interval = self._context.runners.switch_interval
        interval.shorten(runner)
        if not held.ticket:
            interval.restore(runner)  # the function has just ended

    def _continue_without(self, held: CallHolder, now: float) -> None:
        """Continue without the hook that had the call: it is past its deadline, and the ticket is ours."""
        slots, where = held.slots, held.where
        if slots is None or where is None:
            failure = HookFailure("queue", "it did not begin in time: it is busy with other calls")
            self._record_skipped(self._slots, failure)
        else:
            given = max(slots.hook.timeout, self._always)
            failure = self._timeout_failure(slots)
            slots.leave(self._token, given, failure, now, overdue=where)
            self._at += 1
            self._answers.failed(slots, failure, self.event)
            cancel(self._context, slots, where)
        self.start_next()

    # Continuing with the next hook: in the thread that owns the ticket.

    def start_next(self) -> None:
        """Find the next hook and start its call elsewhere; never called from a runner."""
        while True:
            step = self._select_next()
            if step is DispatchStep.DONE:
                self._conclude()
                self.notify_outcome()
            elif step is DispatchStep.READY and not self._start_call():
                continue
            return

    def _start_call(self) -> bool:
        if self.event.NAME in self._slots.coroutines:
            return self._start_coroutine(self._slots)
        try:
            self._context.runners.start(self)
        except RuntimeError as error:
            self._record_result(
                self._slots, None, HookFailure("error", f"it cannot be called: {error}"), None
            )
            return False
        return True

    def _select_next(self) -> DispatchStep:
        while not self._answers.refusal:
            if self._at == len(self._hook_slots):
                if self._validators is None:
                    break
                self._start_validation(self._validators)
            slots = self._hook_slots[self._at]
            if slots.hook.skip is not None and invoke.is_skipped(slots.hook, self.event):
                self._at += 1
                continue
            now = self._context.clock()
            if now >= self._end:
                failure = HookFailure("queue", "no time was left for it: the hooks before it took all")
                self._record_skipped(slots, failure)
                continue
            self._slots = slots
            permit = slots.enter(self, now, self._always > 0, self._context.runners.is_overloaded)
            if permit is None:
                return DispatchStep.WAITS
            if isinstance(permit, int):
                self._token = permit
                return DispatchStep.READY
            self._record_skipped(slots, permit)
        return DispatchStep.DONE

    def _may_call(self, slots: HookSlots) -> bool:
        """Return whether the hook may be called, now that a slot is free."""
        self._queued = False
        now = self._context.clock()
        permit = slots.permit(now, self._always > 0, self._context.runners.is_overloaded)
        if isinstance(permit, int):
            self._token = permit
            return True
        slots.leave(0, None, None, now)
        self._record_skipped(slots, permit)
        return False

    def _start_validation(self, validators: Sequence[HookSlots]) -> None:
        point = POINTS[VALIDATES[self.event.NAME]]
        self.event = point(self.event, self._answers.shown(), self._answers.owners)  # type: ignore[call-arg]
        self._hook_slots, self._validators, self._at = validators, None, 0

    # Calling: in a runner, or on the loop of a hook's coroutines.

    def run(self, runner: Runner) -> JobResult:
        """Call hooks in a runner, as long as they are plain functions."""
        ready = self._may_call(self._slots) if self._queued else True
        while True:
            if ready:
                if self.event.NAME in self._slots.coroutines:
                    if self._start_coroutine(self._slots):
                        return JobResult.HANDED
                elif not self._call(self._slots, runner):
                    return JobResult.LOST
            step = self._select_next()
            if step is DispatchStep.DONE:
                self._conclude()
                return JobResult.DONE
            if step is DispatchStep.WAITS:
                return JobResult.HANDED
            ready = True

    def _deadline(self, slots: HookSlots, now: float) -> float:
        hook = slots.hook
        return min(now + max(hook.timeout, self._always) + (SPARE_S if hook.remote else 0.0), self._end)

    def _call(self, slots: HookSlots, runner: Runner) -> bool:
        """Call a function and take its answer; return False if it took too long and lost the ticket."""
        clock = self._context.clock
        start = clock()
        ticket = [True]
        held = CallHolder(ticket, slots, runner, self._deadline(slots, start))
        self._hand_to(held)
        answer, failure = invoke.invoke(slots.hook, self.event, self._answers)
        try:
            ticket.pop()
        except IndexError:
            return False
        self._accept_answer(held, slots, answer, failure, start)
        return True

    def _accept_answer(
        self,
        held: CallHolder,
        slots: HookSlots,
        answer: AnswerFields | Veto | None,
        failure: HookFailure | None,
        start: float,
    ) -> None:
        """Process an answer whose ticket is ours; the loop may not have detected yet that it is late."""
        now = self._context.clock()
        if now > held.deadline:
            answer, failure = None, self._timeout_failure(slots)
        self._record_result(slots, answer, failure, now - start)

    def _timeout_failure(self, slots: HookSlots) -> HookFailure:
        given = max(slots.hook.timeout, self._always)
        return HookFailure("timeout", f"no answer within {duration(given)} at {self.event.NAME}")

    def _start_coroutine(self, slots: HookSlots) -> bool:
        """Start a coroutine on the hook's loop; return False if that fails and the ticket is still ours."""
        try:
            hook_task = HookTask(slots.loop_thread())
            now = self._context.clock()
            held = CallHolder([True], slots, hook_task, self._deadline(slots, now))
            self._hand_to(held)
            hook_task.start(partial(self._await, slots, held, now), slots.on_returned)
        except (RuntimeError, OSError) as error:
            self.held = CallHolder([], None, None, self._end)
            self._record_result(slots, None, HookFailure("error", f"it cannot be called: {error}"), None)
            return False
        return True

    async def _await(self, slots: HookSlots, held: CallHolder, start: float) -> None:
        answer, failure = await invoke.invoke_async(slots.hook, self.event, self._answers)
        try:
            held.ticket.pop()
        except IndexError:
            return
        try:
            self._accept_answer(held, slots, answer, failure, start)
            self.start_next()
        except Exception as error:  # noqa: BLE001 - an internal error must not leave the call hanging
            self.on_internal_error(error, None)
            self.notify_outcome()

    def _hand_to(self, held: CallHolder) -> None:
        """Record the hook that is called; let the loop check again if its timer would come too late."""
        self.held = held
        if held.deadline < self.due:
            self._context.post(self.check_deadline)

    # Results: in the thread that owns the ticket.

    def _record_result(
        self,
        slots: HookSlots,
        answer: AnswerFields | Veto | None,
        failure: HookFailure | None,
        took: float | None,
    ) -> None:
        """Record that a hook has answered or failed."""
        if answer is not None:
            failure = self._answers.add(slots, answer, self.event)
        slots.leave(self._token, took, failure, self._context.clock())
        self._at += 1
        if failure is not None:
            self._answers.failed(slots, failure, self.event)

    def _record_skipped(self, slots: HookSlots, failure: HookFailure) -> None:
        """Record that a hook is not called."""
        slots.note(failure)
        self._at += 1
        self._answers.failed(slots, failure, self.event)

    def _conclude(self) -> None:
        outcome = self._answers.outcome()  # first: if it raises, another thread must be able to conclude
        try:
            self._open.pop()
        except IndexError:
            return
        self.outcome = outcome

    # Called by runners (``runners.Job``); from any thread.

    def on_internal_error(self, error: BaseException, runner: Runner | None) -> JobResult:
        """Handle an internal error: the call continues unchanged, unless one of its hooks has policy Fail."""
        if runner in self._abandoned:
            return JobResult.LOST
        try:
            self._open.pop()
        except IndexError:
            return JobResult.HANDED
        hook_slots = (*self._hook_slots, *(self._validators or ()))
        text = f"calls cannot be taken through the hooks: {type(error).__name__}: {error}"
        self._answers.failures.append((hook_slots[0].hook, HookFailure("error", text)))
        firm = self._answers.firm or any(slots.hook.policy is HookFailurePolicy.FAIL for slots in hook_slots)
        if firm and self.event.VETO:
            why = f"cannot {task(self.event)}: its hooks cannot be called: {type(error).__name__}"
            self.outcome = Outcome(refusal=why)
        else:
            self.outcome = Outcome()
        return JobResult.DONE

    def on_returned(self, runner: Runner) -> None:
        """A runner that was abandoned with this call has returned."""
        if (slots := self._abandoned.get(runner)) is not None:
            slots.on_returned(runner)

    # Called by the slots of a hook (``slots.Waiter``); from any thread.

    def on_queued(self) -> None:
        """Record that the dispatch waits for a slot."""
        self._queued = True
        self.held = CallHolder([True], None, None, self._end)

    def take_turn(self) -> bool:
        """Accept a free slot; return False if the dispatch does not wait for one any more."""
        return _pop_ticket(self.held)

    def resume(self) -> None:
        """Continue with the slot."""
        try:
            self._context.runners.start(self)
        except RuntimeError as error:
            self._context.post(self._not_started, HookFailure("error", f"it cannot be called: {error}"))

    def _not_started(self, failure: HookFailure) -> None:
        self._queued, self._token = False, 0
        self._record_result(self._slots, None, failure, None)
        self.start_next()


def _pop_ticket(held: CallHolder) -> bool:
    try:
        held.ticket.pop()
    except IndexError:
        return False
    return True
