"""Calling one hook: the call, its checked answer, the merged answers so far, and cancelling an overdue hook.

``invoke`` and ``invoke_async`` run the hook's own code and never raise: whatever the hook does becomes an
answer or a ``HookFailure``. ``MergedAnswers`` collects the answers of one call. ``cancel`` stops a hook that
is past its deadline if that is possible (``thread_interrupt``, ``event_loops``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.hooks import forks
from proxy.hooks.answers import NOTHING, Adjustment, Veto
from proxy.hooks.engine import errors
from proxy.hooks.engine.checks import checked_answer
from proxy.hooks.engine.claims import AnswerFields, FieldClaims
from proxy.hooks.engine.errors import HookFailure, call_description, pod_of
from proxy.hooks.engine.event_loops import LoopThread
from proxy.hooks.engine.runners import Runner, Runners
from proxy.hooks.engine.slots import HookSlots
from proxy.hooks.engine.thread_interrupt import InterruptTarget
from proxy.hooks.events import Point
from proxy.hooks.hook import NO_CHANGE, Hook, HookFailurePolicy, Outcome
from proxy.model.backoff import Backoff

_INTERRUPT_PAUSES = Backoff(0.005, 5.0)
_MOST_INTERRUPTS = 24
_CANCEL_WAIT_S = 0.25

CheckedAnswer = tuple[AnswerFields | Veto | None, HookFailure | None]
"""A hook's checked answer, and the failure if the hook failed."""


class MergedAnswers:
    """The merged answers of one call, whether it is refused, and what failed.

    Only the thread that holds the call's ticket (``call_holder``) may change it.
    """

    __slots__ = ("_claims", "failures", "firm", "refusal")

    def __init__(self) -> None:
        self._claims = FieldClaims()
        self.firm = False
        self.refusal = ""
        self.failures: list[tuple[Hook, HookFailure]] = []

    def merged(self) -> Adjustment:
        """Return a copy of the merged answers so far; a hook that changes it changes nothing else."""
        return self._claims.merged()

    @property
    def owners(self) -> Mapping[str, str]:
        """Field to the hook that set it."""
        return self._claims.owners

    def add(self, slots: HookSlots, answer: AnswerFields | Veto, event: Point) -> HookFailure | None:
        """Add a hook's answer; return a conflict if another hook has already set one of its fields."""
        if isinstance(answer, Veto):
            slots.count_veto()
            self.refusal = f"cannot {call_description(event)}: hook {slots.hook.name}: {answer.reason}"
            return None
        if clash := self._claims.claim(slots.hook.name, answer):
            return HookFailure("conflict", clash)
        self.firm = self.firm or slots.hook.policy is HookFailurePolicy.FAIL
        return None

    def failed(self, slots: HookSlots, failure: HookFailure, event: Point) -> None:
        """Record that a hook failed or was not called; policy Fail refuses the call."""
        if failure.kind != "open":  # the failures that opened the breaker were reported when they happened
            self.failures.append((slots.hook, failure))
        if slots.hook.policy is HookFailurePolicy.FAIL and event.VETO and not self.refusal:
            self.refusal = f"cannot {call_description(event)}: hook {slots.hook.name}: {failure.text}"

    def outcome(self) -> Outcome:
        """Return the outcome of the call."""
        if self.refusal:
            return Outcome(refusal=self.refusal)
        claims = self._claims
        adjustment = claims.merged()
        return Outcome(adjustment, claims.owners, "", self.firm) if adjustment is not NOTHING else NO_CHANGE


# Calling.


def invoke(hook: Hook, event: Point, answers: MergedAnswers) -> CheckedAnswer:
    """Call a plain function. All of the hook's own code runs here, including that of its answer's values."""
    try:
        handler = hook.handlers[event.NAME]
        answer = handler(event, answers.merged()) if hook.receives_earlier_changes else handler(event)
        return _checked(answer, event) if answer is not None else (None, None)
    except BaseException as error:  # noqa: BLE001 - a hook may raise anything
        return None, errors.failure_of(error, hook)
    finally:
        forks.exit_if_child()


async def invoke_async(hook: Hook, event: Point, answers: MergedAnswers) -> CheckedAnswer:
    """Call a coroutine function."""
    try:
        handler = hook.handlers[event.NAME]
        answer = await (handler(event, answers.merged()) if hook.receives_earlier_changes else handler(event))
        return _checked(answer, event)
    except BaseException as error:  # noqa: BLE001 - a hook may raise anything
        return None, errors.failure_of(error, hook)
    finally:
        forks.exit_if_child()


def _checked(answer: object, event: Point) -> CheckedAnswer:
    try:
        return checked_answer(answer, event), None
    except Exception as error:  # noqa: BLE001 - reading an answer may raise anything
        return None, HookFailure("answer", errors.text_of(error) or "its answer cannot be read")


def is_skipped(hook: Hook, event: Point) -> bool:
    """Return whether the labels of the event's pod exclude it from this hook."""
    if hook.skip is None or (pod := pod_of(event)) is None:
        return False
    try:
        return hook.skip_in.admits(pod.namespace) and bool(hook.skip(pod.labels))
    except Exception:  # noqa: BLE001 - a hook whose ``skip`` fails is called
        return False


# What all calls share, and cancelling.


class EngineContext:
    """What all calls of an engine share: the clock, the runners, and a way to post to the event loop."""

    def __init__(
        self, clock: Callable[[], float], report_failure: Callable[[Hook, HookFailure], None]
    ) -> None:
        """Create a context.

        Args:
            clock: Monotonic seconds.
            report_failure: Reports a failure of a hook; called on the loop.
        """
        self.clock = clock
        self.report_failure = report_failure
        self.runners = Runners()
        self.loop: asyncio.AbstractEventLoop | None = None

    def post(self, what: Callable[..., None], *args: Any) -> None:
        """Run a function on the loop; do nothing if the loop is closed, because no call waits then."""
        if self.loop is None:
            return
        try:
            self.loop.call_soon_threadsafe(what, *args)
        except RuntimeError:
            return


@dataclass(slots=True, eq=False)
class HookTask:
    """A coroutine of a hook on the hook's own loop; ``tasks`` holds the task once it has started."""

    loop_thread: LoopThread
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_cancel_processed: bool = False
    has_ended: bool = False

    @property
    def has_returned(self) -> bool:
        """Whether the coroutine or its loop has ended."""
        return self.has_ended or self.loop_thread.has_exited

    def start(
        self, make: Callable[[], Coroutine[Any, Any, None]], on_end: Callable[[HookTask], None]
    ) -> None:
        """Start the coroutine; ``on_end`` is called at its end, even if that comes before its first step.

        Raises:
            RuntimeError: Its loop is closed.
        """

        def mark_ended(_: asyncio.Task[None]) -> None:
            self.has_ended = True
            on_end(self)

        self.loop_thread.start(make, self.tasks, mark_ended)

    def record_cancel(self) -> None:
        """Record that the loop has processed the cancellation."""
        self.is_cancel_processed = True


def cancel(context: EngineContext, slots: HookSlots, runs_in: Runner | HookTask) -> None:
    """Stop an overdue hook if that is possible; runs on the loop."""
    if isinstance(runs_in, HookTask):
        runs_in.loop_thread.cancel(runs_in.tasks, runs_in.record_cancel)
        if context.loop is not None:
            context.loop.call_later(_CANCEL_WAIT_S, _check_cancelled, context, runs_in)
        return
    context.runners.abandon(runs_in)
    if not slots.hook.remote:  # gRPC holds locks that other threads need, and has its own deadline
        _interrupt(context, runs_in, 0)


def _check_cancelled(context: EngineContext, hook_task: HookTask) -> None:
    """Abandon the hook's loop if it has not even processed the cancellation: it is blocked."""
    loop_thread = hook_task.loop_thread
    if hook_task.is_cancel_processed or loop_thread.is_abandoned or loop_thread.has_returned:
        return
    loop_thread.abandon()
    _interrupt(context, loop_thread, 0)


def _interrupt(context: EngineContext, target: InterruptTarget, count: int) -> None:
    """Raise an exception in a thread until the hook returns: at once, then less often, for two minutes."""
    if target.has_returned or count >= _MOST_INTERRUPTS or context.loop is None or context.loop.is_closed():
        return
    context.runners.switch_interval.interrupt(target)
    context.loop.call_later(_INTERRUPT_PAUSES.delay(count + 1), _interrupt, context, target, count + 1)
