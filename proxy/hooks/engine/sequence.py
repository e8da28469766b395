"""Call the hooks of one event, one after the other, each within its deadline.

Theory. A sequence calls one hook at a time. Either the thread that calls the hook continues with the next one
when the hook has answered, or the event loop does when the hook's deadline has passed. The ticket of the hook
decides which of them (``call_holder``), so no lock is needed, and a late answer cannot be used.

Hooks that are plain functions are called one after the other in one runner, coroutines on their own loops.
When all hooks have answered, the validating hooks receive the merged answers. The outcome is set at the end,
exactly once.

The event loop blocks briefly for hooks that were quick recently, and then watches the sequence with a timer.
``outcome_signal`` notifies it of the outcome. Each section below names the thread that runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from proxy.hooks.answers import Veto
from proxy.hooks.engine import invoke
from proxy.hooks.engine.call_holder import CallHolder
from proxy.hooks.engine.claims import AnswerFields
from proxy.hooks.engine.errors import HookFailure, call_description, duration
from proxy.hooks.engine.invoke import EngineContext, HookTask, MergedAnswers, cancel
from proxy.hooks.engine.loop_interrupt import Alarm
from proxy.hooks.engine.outcome_signal import OutcomeSignal
from proxy.hooks.engine.runners import JobResult, Runner
from proxy.hooks.engine.slots import HookSlots
from proxy.hooks.events import POINTS, VALIDATES, Point
from proxy.hooks.hook import LONGEST_TIMEOUT_S, HookFailurePolicy, Outcome

INLINE_WAIT_S = 0.0003
"""How long the loop blocks for hooks that were quick recently."""
SHORTEN_SWITCH_S = 0.005
"""After this time the interpreter's switch interval is shortened while a hook still runs."""
REMOTE_EXTRA_S = 0.1
"""The client of a server has the same deadline and a better error, so the sequence waits this much longer."""
_END_GRACE_S = 2.0
_SHORTEST_TIMER_S = 0.001


class NextStep(Enum):
    """The next step of a sequence."""

    READY = "a hook is to be called"
    WAITS = "waits for a slot"
    DONE = "all hooks have been called"


class HookSequence:
    """One event, the hooks to call for it in order, and their answers so far."""

    __slots__ = (
        "_abandoned", "_answers", "_context", "_forced_timeout_s", "_hook_slots", "_is_delivered",
        "_next_index", "_on_outcome", "_outcome_ticket", "_overall_deadline", "_queued", "_signal", "_slots",
        "_timer", "_token", "_validators", "event", "holder", "outcome", "timer_due",
    )  # fmt: skip

    def __init__(
        self,
        context: EngineContext,
        event: Point,
        hook_slots: Sequence[HookSlots],
        validators: Sequence[HookSlots] | None = None,
        on_outcome: Callable[[HookSequence], None] | None = None,
        forced_timeout_s: float = 0.0,
    ) -> None:
        """Make a sequence; no hook is called yet.

        Args:
            context: What all sequences share.
            event: The event that hooks receive.
            hook_slots: The hooks to call, in order.
            validators: The hooks that validate their merged answers.
            on_outcome: Called on the loop when there is an outcome.
            forced_timeout_s: If not 0, call the hooks even if their breakers are open, and give each at least
                this many seconds.
        """
        self._context = context
        self.event = event
        self.outcome: Outcome | None = None
        self._hook_slots = hook_slots
        self._validators = validators or None
        self._forced_timeout_s = forced_timeout_s
        self._answers = MergedAnswers()
        self._next_index = 0
        self._slots: HookSlots
        self._token = 0
        self._queued = False
        self._overall_deadline = context.clock() + LONGEST_TIMEOUT_S
        self.holder = CallHolder([], None, None, self._overall_deadline)
        self.timer_due = 0.0
        self._outcome_ticket = [True]
        self._abandoned: dict[Runner, HookSlots] = {}
        self._on_outcome = on_outcome
        self._signal = OutcomeSignal(context)
        self._is_delivered = False
        self._timer: asyncio.TimerHandle | None = None

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
            self._deliver_outcome()

    def _start_on_loop(self, alarm: Alarm) -> None:
        """Call pure hooks on the loop itself; a call that takes too long continues in a thread."""
        step = self._select_next()
        while step is NextStep.READY:
            slots, begun = self._slots, self._context.clock()
            answered = alarm.call(invoke.invoke, slots.hook, self.event, self._answers)
            if answered is None:
                slots.count_interruption()
                self._signal.post_from_now()
                if not self._start_call():
                    self.start_next()
                break
            self._record_result(slots, *answered, self._context.clock() - begun)
            step = self._select_next()
        else:
            if step is NextStep.DONE:
                self._conclude()
            if self.outcome is None:
                self._signal.post_from_now()
        self._deliver_or_watch()

    def _start(self, inline: bool) -> None:
        if inline:
            self._signal.expect_soon()
        self.start_next()
        if inline and self.outcome is None:
            self._signal.wait_briefly(INLINE_WAIT_S)
        if self.outcome is None:
            self._signal.post_from_now()
        self._deliver_or_watch()

    def _deliver_or_watch(self) -> None:
        if self.outcome is not None:
            self._deliver_outcome()
        else:
            self._set_timer(SHORTEN_SWITCH_S)

    async def wait(self) -> Outcome:
        """Wait for the outcome."""
        while self.outcome is None:
            await self._signal.wait()
        return self.outcome

    def _deliver_outcome(self) -> None:
        if self._is_delivered:
            return
        self._is_delivered = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for hook, failure in self._answers.failures:
            self._context.report_failure(hook, failure)
        self._signal.wake()
        if self._on_outcome is not None:
            self._on_outcome(self)

    @property
    def error(self) -> str | None:
        """The text of the last failure."""
        return self._answers.failures[-1][1].text if self._answers.failures else None

    # Deadlines: on the event loop.

    def check_deadline(self) -> None:
        """Check which hook has the call and whether it is overdue; set a timer for the next check."""
        try:
            if self._skip_overdue_hooks():
                return
        except Exception as error:  # noqa: BLE001 - an internal error must not leave the call hanging
            self.on_internal_error(error, None)
        self._deliver_outcome()

    def _skip_overdue_hooks(self) -> bool:
        """Continue without a hook that is overdue; return False if there is an outcome."""
        while self.outcome is None:
            holder, now = self.holder, self._context.clock()
            if holder.deadline <= now:
                if self._take_from_hook(holder):
                    self._continue_without(holder, now)
                    continue
                if now > self._overall_deadline + _END_GRACE_S:
                    self.on_internal_error(TimeoutError(), None)
                    continue
            elif isinstance(holder.runs_in, Runner):
                self._shorten_switch_interval(holder, holder.runs_in)
            self._set_timer(holder.deadline - now)
            if self.holder is holder:
                return True
        return False

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = max(seconds, _SHORTEST_TIMER_S)
        self.timer_due = self._context.clock() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self.check_deadline)

    def _take_from_hook(self, holder: CallHolder) -> bool:
        """Withdraw the ticket of the hook that is called; return False if the hook has just answered."""
        if not holder.ticket:
            return False  # it may have been withdrawn before: the next hook has not begun yet
        if isinstance(holder.runs_in, Runner) and holder.slots is not None:
            # Set first: the runner may find at once that it lost the call.
            self._abandoned[holder.runs_in] = holder.slots
            if not holder.take_ticket():
                del self._abandoned[holder.runs_in]
                return False
            return True
        return holder.take_ticket()

    def _shorten_switch_interval(self, holder: CallHolder, runner: Runner) -> None:
        """Shorten the interpreter's switch interval while a hook's function takes long."""
        if holder.slots is None or holder.slots.hook.remote:
            return
        interval = self._context.runners.switch_interval
        interval.shorten(runner)
        if not holder.ticket:
            interval.restore(runner)  # the function has just ended

    def _continue_without(self, holder: CallHolder, now: float) -> None:
        """Continue without the hook that had the call: it is past its deadline, and the ticket is ours."""
        slots, runs_in = holder.slots, holder.runs_in
        if slots is None or runs_in is None:
            failure = HookFailure("queue", "it did not begin in time: it is busy with other calls")
            self._record_skipped(self._slots, failure)
        else:
            given = max(slots.hook.timeout, self._forced_timeout_s)
            failure = self._timeout_failure(slots)
            slots.release(self._token, given, failure, now, overdue=runs_in)
            self._next_index += 1
            self._answers.failed(slots, failure, self.event)
            cancel(self._context, slots, runs_in)
        self.start_next()

    # Continuing with the next hook: in the thread that owns the ticket.

    def start_next(self) -> None:
        """Find the next hook and start its call elsewhere; never called from a runner."""
        while True:
            step = self._select_next()
            if step is NextStep.DONE:
                self._conclude()
                self._signal.notify(self._deliver_outcome)
            elif step is NextStep.READY and not self._start_call():
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

    def _select_next(self) -> NextStep:
        while not self._answers.refusal:
            if self._next_index == len(self._hook_slots):
                if self._validators is None:
                    break
                self._start_validation(self._validators)
            slots = self._hook_slots[self._next_index]
            if slots.hook.skip is not None and invoke.is_skipped(slots.hook, self.event):
                self._next_index += 1
                continue
            now = self._context.clock()
            if now >= self._overall_deadline:
                failure = HookFailure("queue", "no time was left for it: the hooks before it used it all")
                self._record_skipped(slots, failure)
                continue
            self._slots = slots
            permit = slots.acquire(self, now, self._forced_timeout_s > 0, self._context.runners.is_overloaded)
            if permit is None:
                return NextStep.WAITS
            if isinstance(permit, int):
                self._token = permit
                return NextStep.READY
            self._record_skipped(slots, permit)
        return NextStep.DONE

    def _may_call(self, slots: HookSlots) -> bool:
        """Return whether the hook may be called, now that a slot is free."""
        self._queued = False
        now = self._context.clock()
        permit = slots.permit(now, self._forced_timeout_s > 0, self._context.runners.is_overloaded)
        if isinstance(permit, int):
            self._token = permit
            return True
        slots.release(0, None, None, now)
        self._record_skipped(slots, permit)
        return False

    def _start_validation(self, validators: Sequence[HookSlots]) -> None:
        point = POINTS[VALIDATES[self.event.NAME]]
        self.event = point(self.event, self._answers.merged(), self._answers.owners)  # type: ignore[call-arg]
        self._hook_slots, self._validators, self._next_index = validators, None, 0

    # Calling: in a runner, or on the loop of a hook's coroutines.

    def run(self, runner: Runner) -> JobResult:
        """Call hooks in a runner, as long as they are plain functions."""
        ready = self._may_call(self._slots) if self._queued else True
        while True:
            if ready:
                if self.event.NAME in self._slots.coroutines:
                    if self._start_coroutine(self._slots):
                        return JobResult.HANDED_ON
                elif not self._call(self._slots, runner):
                    return JobResult.ABANDONED
            step = self._select_next()
            if step is NextStep.DONE:
                self._conclude()
                return JobResult.DONE
            if step is NextStep.WAITS:
                return JobResult.HANDED_ON
            ready = True

    def _deadline(self, slots: HookSlots, now: float) -> float:
        hook = slots.hook
        return min(
            now + max(hook.timeout, self._forced_timeout_s) + (REMOTE_EXTRA_S if hook.remote else 0.0),
            self._overall_deadline,
        )

    def _call(self, slots: HookSlots, runner: Runner) -> bool:
        """Call a function and take its answer; return False if it took too long and lost the ticket."""
        clock = self._context.clock
        start = clock()
        holder = CallHolder([True], slots, runner, self._deadline(slots, start))
        self._set_holder(holder)
        answer, failure = invoke.invoke(slots.hook, self.event, self._answers)
        if not holder.take_ticket():
            return False
        self._accept_answer(holder, slots, answer, failure, start)
        return True

    def _accept_answer(
        self,
        holder: CallHolder,
        slots: HookSlots,
        answer: AnswerFields | Veto | None,
        failure: HookFailure | None,
        start: float,
    ) -> None:
        """Process an answer whose ticket is ours; the loop may not have detected yet that it is late."""
        now = self._context.clock()
        if now > holder.deadline:
            answer, failure = None, self._timeout_failure(slots)
        self._record_result(slots, answer, failure, now - start)

    def _timeout_failure(self, slots: HookSlots) -> HookFailure:
        given = max(slots.hook.timeout, self._forced_timeout_s)
        return HookFailure("timeout", f"no answer within {duration(given)} at {self.event.NAME}")

    def _start_coroutine(self, slots: HookSlots) -> bool:
        """Start a coroutine on the hook's loop; return False if that fails and the ticket is still ours."""
        try:
            hook_task = HookTask(slots.loop_thread())
            now = self._context.clock()
            holder = CallHolder([True], slots, hook_task, self._deadline(slots, now))
            self._set_holder(holder)
            hook_task.start(partial(self._run_coroutine, slots, holder, now), slots.on_returned)
        except (RuntimeError, OSError) as error:
            self.holder = CallHolder([], None, None, self._overall_deadline)
            self._record_result(slots, None, HookFailure("error", f"it cannot be called: {error}"), None)
            return False
        return True

    async def _run_coroutine(self, slots: HookSlots, holder: CallHolder, start: float) -> None:
        answer, failure = await invoke.invoke_async(slots.hook, self.event, self._answers)
        if not holder.take_ticket():
            return
        try:
            self._accept_answer(holder, slots, answer, failure, start)
            self.start_next()
        except Exception as error:  # noqa: BLE001 - an internal error must not leave the call hanging
            self.on_internal_error(error, None)
            self._signal.notify(self._deliver_outcome)

    def _set_holder(self, holder: CallHolder) -> None:
        """Record the hook that is called; let the loop check again if its timer would come too late."""
        self.holder = holder
        if holder.deadline < self.timer_due:
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
        slots.release(self._token, took, failure, self._context.clock())
        self._next_index += 1
        if failure is not None:
            self._answers.failed(slots, failure, self.event)

    def _record_skipped(self, slots: HookSlots, failure: HookFailure) -> None:
        """Record that a hook is not called."""
        slots.record_failure(failure)
        self._next_index += 1
        self._answers.failed(slots, failure, self.event)

    def _conclude(self) -> None:
        outcome = self._answers.outcome()  # first: if it raises, another thread must be able to conclude
        try:
            self._outcome_ticket.pop()
        except IndexError:
            return
        self.outcome = outcome

    # Called by runners (``runners.Job``); from any thread.

    def on_internal_error(self, error: BaseException, runner: Runner | None) -> JobResult:
        """Handle an internal error: the call continues unchanged, unless one of its hooks has policy Fail."""
        if runner in self._abandoned:
            return JobResult.ABANDONED
        try:
            self._outcome_ticket.pop()
        except IndexError:
            return JobResult.HANDED_ON
        hook_slots = (*self._hook_slots, *(self._validators or ()))
        text = f"calls cannot be taken through the hooks: {type(error).__name__}: {error}"
        self._answers.failures.append((hook_slots[0].hook, HookFailure("error", text)))
        firm = self._answers.firm or any(slots.hook.policy is HookFailurePolicy.FAIL for slots in hook_slots)
        if firm and self.event.VETO:
            why = f"cannot {call_description(self.event)}: its hooks cannot be called: {type(error).__name__}"
            self.outcome = Outcome(refusal=why)
        else:
            self.outcome = Outcome()
        return JobResult.DONE

    def notify_outcome(self) -> None:
        """See ``runners.Job``."""
        self._signal.notify(self._deliver_outcome)

    def on_returned(self, runner: Runner) -> None:
        """A runner that was abandoned with this call has returned."""
        if (slots := self._abandoned.get(runner)) is not None:
            slots.on_returned(runner)

    # Called by the slots of a hook (``slots.Waiter``); from any thread.

    def on_queued(self) -> None:
        """Record that the sequence waits for a slot."""
        self._queued = True
        self.holder = CallHolder([True], None, None, self._overall_deadline)

    def take_turn(self) -> bool:
        """Accept a free slot; return False if the sequence does not wait for one any more."""
        return self.holder.take_ticket()

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
