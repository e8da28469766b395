"""The hook engine: calls all hooks of a point, and isolates the daemon from their failures.

Theory. A call runs the hooks of its point in order of their names (``sequence``). Each answer is checked
(``checks``) and claims the fields that it sets (``claims``); the merged answers go to the validating hooks;
then there is an outcome. If a hook raises, answers something invalid, is late or sets a field that another
hook has set, its whole answer is dropped or the call is refused, depending on its policy. A hook that fails
repeatedly is not called for a while (``breaker``).

The engine itself runs on the event loop. Plain functions run in threads (``runners``), coroutines on their
own loops (``event_loops``), so the worst that a hook can do is to use interpreter time that others need.
Only hooks that declare that they are pure run on the loop, for milliseconds at most (``loop_interrupt``).
``thread_interrupt`` lists what the engine cannot prevent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy.hooks.answers import Update
from proxy.hooks.engine.claims import FieldClaims
from proxy.hooks.engine.errors import FailureLog
from proxy.hooks.engine.invoke import EngineContext
from proxy.hooks.engine.log_capture import HookLogHandler
from proxy.hooks.engine.loop_interrupt import Alarm, make_alarm
from proxy.hooks.engine.notifier import HookNotifier
from proxy.hooks.engine.sequence import HookSequence
from proxy.hooks.engine.slots import HookSlots
from proxy.hooks.engine.stats import HookReport
from proxy.hooks.events import POINTS, VALIDATES, Configure, Point, Shutdown, Synchronize
from proxy.hooks.hook import NO_HOOKS_CALLED, Hook, PendingOutcome
from proxy.telemetry.port import Report

LEAST_SETUP_S = 5.0
"""The least time for ``Configure`` and ``Synchronize``: no call waits for these."""
INLINE_BUDGET_S = 0.0002
"""The loop blocks for hooks that usually take less than this together."""
_LINGER_S = 60.0
_POINTS_BEFORE_USE = frozenset(
    name
    for name in POINTS
    if name.startswith("post_") or name.endswith("_changed") or name == Synchronize.NAME
)
"""Points of past events and of the whole state; a hook that is notified before its use receives them."""


@dataclass(frozen=True, slots=True)
class _PointHooks:
    """The hooks of one point, and those that validate their answers."""

    hook_slots: tuple[HookSlots, ...]
    validators: tuple[HookSlots, ...]
    plain: bool
    pure: bool

    def runs_on_loop(self) -> bool:
        """Whether all are pure, and have been quick enough for the loop."""
        if not self.pure:
            return False
        for slots in self.hook_slots:
            if not slots.suits_loop:
                return False
        return not self.validators or all(each.suits_loop for each in self.validators)

    def is_quick(self) -> bool:
        """Whether all have been quick recently."""
        if not self.plain:
            return False
        total = 0.0
        for slots in self.hook_slots:
            if not slots.stats.is_quick:
                return False
            total += slots.stats.usual_s
        for slots in self.validators:
            if not slots.stats.is_quick:
                return False
            total += slots.stats.usual_s
        return total < INLINE_BUDGET_S


class HookEngine:
    """Calls hooks; implements ``proxy.hooks.hook.HookCaller``. All methods are called on the event loop."""

    points: frozenset[str]

    def __init__(
        self,
        report_problem: Report,
        apply_updates: Callable[[Mapping[str, Update], Mapping[str, str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an engine without hooks; no thread is started before there are some.

        Args:
            report_problem: Reports a failure of a hook as a sentence with its name.
            apply_updates: Applies updates of containers from hooks that received a notification: runtime's id
                to update, and field to hook.
            clock: Monotonic seconds.
        """
        self.points = frozenset()
        self._clock = clock
        self._apply_updates = apply_updates
        self._failures = FailureLog(report_problem, clock)
        self._logs = HookLogHandler()
        self._context = EngineContext(clock, self._failures.report_failure)
        self._hooks: tuple[Hook, ...] = ()
        self._notifiers: dict[Hook, HookNotifier] = {}
        self._by_point: dict[str, _PointHooks] = {}
        self._alarm: Alarm | None = None
        self._notified_before_use: set[Hook] = set()
        self._closed = False

    def use(self, hooks: Sequence[Hook]) -> None:
        """Call these hooks from now on, in order of their names.

        Hooks that were in use keep their statistics; running calls finish with the hooks that they began
        with. A hook that was removed can still receive ``Shutdown``.
        """
        self._hooks = tuple(sorted(hooks, key=lambda hook: hook.name))
        for hook in set(self._notifiers) - set(self._hooks):
            self._retire(hook)
        hook_slots = [self._notifier(hook).slots for hook in self._hooks]
        self._failures.forget({hook.name for hook in self._hooks})
        self._logs.keep_only(self._notifiers)
        by_point: dict[str, list[HookSlots]] = {}
        for slots in hook_slots:
            for name in slots.hook.handlers:
                by_point.setdefault(name, []).append(slots)
        names = set(by_point)
        names |= {name for name, validate in VALIDATES.items() if validate in by_point}
        self._by_point = {name: _point_hooks(name, by_point) for name in names}
        if self._alarm is None and any(each.pure for each in self._by_point.values()):
            self._alarm = make_alarm()
        self._notified_before_use.difference_update(self._hooks)
        self._update_points()

    def _update_points(self) -> None:
        early = {
            name for hook in self._notified_before_use for name in hook.handlers if name in _POINTS_BEFORE_USE
        }
        self.points = frozenset(self._by_point.keys() | early)

    def _notifier(self, hook: Hook) -> HookNotifier:
        notifier = self._notifiers.get(hook)
        if notifier is None:
            slots = HookSlots(
                hook, lambda text: self._context.post(self._failures.report_problem, hook.name, text)
            )
            notifier = self._notifiers[hook] = HookNotifier(self._context, slots, self._apply_updates)
            self._logs.add_hooks((hook,))
            if hook not in self._hooks:
                self._retire(hook)
        return notifier

    def _retire(self, hook: Hook, after: float = _LINGER_S) -> None:
        """Keep a hook for a while after its use: it still receives ``Shutdown``, and its calls can end."""
        if self._context.loop is not None:
            self._context.loop.call_later(after, self._drop, hook)
        else:
            self._drop(hook)

    def _drop(self, hook: Hook) -> None:
        if hook not in self._hooks and (notifier := self._notifiers.pop(hook, None)) is not None:
            notifier.slots.close()
            self._stop_notifying_before_use(hook)

    def _stop_notifying_before_use(self, hook: Hook) -> None:
        if hook in self._notified_before_use:
            self._notified_before_use.discard(hook)
            self._update_points()

    def call_hooks(self, event: Point, forced_timeout_s: float = 0.0) -> PendingOutcome:
        """Call all hooks of an event's point. Its ``outcome`` is set at once if all were quick.

        Args:
            event: The event.
            forced_timeout_s: If not 0, hooks are called even if their breakers are open, and each has at
                least this many seconds.
        """
        at_point = self._by_point.get(event.NAME)
        if at_point is None or self._closed:
            return NO_HOOKS_CALLED
        if self._context.loop is None:
            self._context.loop = asyncio.get_running_loop()
        call = HookSequence(
            self._context, event, at_point.hook_slots, at_point.validators, forced_timeout_s=forced_timeout_s
        )
        if self._alarm is not None and at_point.runs_on_loop():
            call.start(inline=False, alarm=self._alarm)
        else:
            call.start(at_point.is_quick())
        return call

    def notify(self, event: Point) -> None:
        """Send an event to all hooks of its point in the background; apply the updates in their answers."""
        if event.NAME not in self.points or self._closed:
            return
        if self._context.loop is None:
            self._context.loop = asyncio.get_running_loop()
        claims = FieldClaims()
        at_point = self._by_point.get(event.NAME)
        for slots in at_point.hook_slots if at_point is not None else ():
            self._notifiers[slots.hook].notify(event, claims)
        for hook in self._notified_before_use:
            if event.NAME in hook.handlers and event.NAME in _POINTS_BEFORE_USE:
                self._notifier(hook).notify(event, FieldClaims())  # its previous version may answer the same

    def begin_notifying(self, hook: Hook) -> None:
        """Notify a hook that is not in use yet; otherwise it would miss the events until it is."""
        self._context.loop = asyncio.get_running_loop()
        if hook not in self._hooks:
            self._notifier(hook)
            self._notified_before_use.add(hook)
            self._update_points()

    def notify_one(self, hook: Hook, event: Point) -> Awaitable[str | None]:
        """Send an event to one hook, even if it is not in use (yet or any more) or its breaker is open.

        After ``Synchronize`` the hook is notified of later events, too (``begin_notifying``). After
        ``Shutdown`` it is forgotten, and events that still wait are dropped.

        Returns:
            The error's text, or None.
        """
        self._context.loop = loop = asyncio.get_running_loop()
        last = isinstance(event, Shutdown)
        if event.NAME in hook.handlers:
            notifier = self._notifier(hook)
            least = least_seconds(event) or hook.timeout
            done = (notifier.notify_last if last else notifier.notify_one)(event, least)
            if isinstance(event, Synchronize):
                self.begin_notifying(hook)
        else:
            done = loop.create_future()
            done.set_result(None)
        if last:
            self._stop_notifying_before_use(hook)
            done.add_done_callback(lambda _: self._retire(hook, hook.timeout + 1.0))
        return done

    def report(self) -> list[HookReport]:
        """Return the state and statistics of each hook, in order."""
        now = self._clock()
        notifiers = [self._notifiers[hook] for hook in self._hooks]
        return [
            notifier.slots.report(now, notifier.waiting, self._logs.dropped(notifier.slots.hook.name))
            for notifier in notifiers
        ]

    def close(self) -> None:
        """Call no hooks any more; threads end when their hooks do, or with the process."""
        self._closed = True
        self.points = frozenset()
        self._by_point = {}
        self._hooks = ()
        self._notified_before_use.clear()
        for hook in list(self._notifiers):
            self._drop(hook)
        self._context.runners.close()
        self._logs.close()
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None


def least_seconds(event: Point) -> float:
    """Return the least time for an event, whatever the hook's timeout; 0 if only the timeout counts."""
    return LEAST_SETUP_S if isinstance(event, Configure | Synchronize) else 0.0


def _point_hooks(name: str, by_point: Mapping[str, Sequence[HookSlots]]) -> _PointHooks:
    hook_slots = tuple(by_point.get(name, ()))
    validators = tuple(by_point.get(VALIDATES.get(name, ""), ()))
    plain = all(
        not slots.hook.remote and not slots.coroutines.intersection((name, VALIDATES.get(name, "")))
        for slots in hook_slots + validators
    )
    pure = plain and all(slots.hook.pure for slots in hook_slots + validators)
    return _PointHooks(hook_slots, validators, plain, pure)
