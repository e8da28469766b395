"""The engine: who has hooks asks here, and nothing that a hook does can hurt more than its own answer.

Theory. A call asks the hooks of its point in order of their names (``course``). Each answer is checked
(``checks``) and claims what it says (``claims``); what they want together is validated by those who
validate; then there is an outcome. A hook that raises, answers what cannot be, comes too late or says what
another has said is left out with all of its answer, or the call is refused, as its policy says. One that
fails again and again is not asked for a while (``breaker``).

The engine's own part is the event loop's. Plain functions run in threads (``runners``), coroutines on loops
of their own (``loops``), so the worst that a hook does to others is to take turns of the interpreter. Only
hooks that say that they do nothing but compute run on the loop, for milliseconds at most (``alarm``). What
cannot be helped is said in ``pace``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy.hooks.answers import Update
from proxy.hooks.engine.alarm import Alarm, alarm
from proxy.hooks.engine.chain import Call
from proxy.hooks.engine.chatter import Chatter
from proxy.hooks.engine.claims import Claims
from proxy.hooks.engine.complaints import Complaints
from proxy.hooks.engine.seats import Seat
from proxy.hooks.engine.shared import Shared
from proxy.hooks.engine.standing import HookReport
from proxy.hooks.engine.telling import Teller
from proxy.hooks.hook import AS_IT_IS, Answers, Hook, Outcome
from proxy.hooks.points import POINTS, VALIDATES, Configure, Point, Shutdown, Synchronize

ALONE_S = 5.0
"""A hook has at least so long to be configured and to see all that exists: no call waits for that."""
INLINE_S = 0.0002
"""The loop waits at once for hooks that usually take less than this together."""
_LINGER_S = 60.0
_TOLD = frozenset(name for name in POINTS if name.startswith("post_") or name.endswith("_changed"))
"""Points of what has happened; who is asked before something happens is in use."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Who is asked at one point, and who validates."""

    seats: tuple[Seat, ...]
    validators: tuple[Seat, ...]
    plain: bool
    pure: bool

    def here(self) -> bool:
        """Whether all only compute, and have done so in time."""
        return self.pure and all(seat.here for seat in self.seats + self.validators)

    def quick(self) -> bool:
        """Whether all have been quick lately."""
        if not self.plain:
            return False
        total = 0.0
        for seat in self.seats:
            if not seat.standing.quick:
                return False
            total += seat.standing.usual
        for seat in self.validators:
            if not seat.standing.quick:
                return False
            total += seat.standing.usual
        return total < INLINE_S


class _Nobody:
    """The answers where nobody is asked."""

    outcome: Outcome | None = AS_IT_IS

    async def wait(self) -> Outcome:
        """Give the outcome."""
        return AS_IT_IS


_NOBODY = _Nobody()


class Engine:
    """Asks hooks; implements ``proxy.hooks.hook.Asking``. All methods are the event loop's."""

    points: frozenset[str]

    def __init__(
        self,
        complain: Callable[[str], None],
        updated: Callable[[Mapping[str, Update], Mapping[str, str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an engine without hooks; no thread is started before there are some.

        Args:
            complain: Tells people of a failure of a hook, in a sentence with its name.
            updated: Takes what hooks that were told something want for containers: runtime's id to update,
                and field to hook.
            clock: Seconds that do not go back.
        """
        self.points = frozenset()
        self._clock = clock
        self._updated = updated
        self._complaints = Complaints(complain, clock)
        self._chatter = Chatter()
        self._shared = Shared(clock, self._complaints.note)
        self._hooks: tuple[Hook, ...] = ()
        self._tellers: dict[Hook, Teller] = {}
        self._lines: dict[str, _Line] = {}
        self._alarm: Alarm | None = None
        self._coming: set[Hook] = set()
        self._closed = False

    def use(self, hooks: Sequence[Hook]) -> None:
        """Ask these hooks from now on, in order of their names.

        Those that were there keep how they stand; calls on their way end with the hooks that they began with.
        A hook that is not there any more can still be told ``Shutdown``.
        """
        self._hooks = tuple(sorted(hooks, key=lambda hook: hook.name))
        for hook in set(self._tellers) - set(self._hooks):
            self._retire(hook)
        seats = [self._teller(hook).seat for hook in self._hooks]
        self._complaints.forget({hook.name for hook in self._hooks})
        self._chatter.keep(self._tellers)
        by_point: dict[str, list[Seat]] = {}
        for seat in seats:
            for name in seat.hook.handlers:
                by_point.setdefault(name, []).append(seat)
        names = set(by_point)
        names |= {name for name, validate in VALIDATES.items() if validate in by_point}
        self._lines = {name: _line(name, by_point) for name in names}
        if self._alarm is None and any(line.pure for line in self._lines.values()):
            self._alarm = alarm()
        self._coming.difference_update(self._hooks)
        self._name_points()

    def _name_points(self) -> None:
        told = {name for hook in self._coming for name in hook.handlers if name in _TOLD}
        self.points = frozenset(self._lines.keys() | told)

    def _teller(self, hook: Hook) -> Teller:
        teller = self._tellers.get(hook)
        if teller is None:
            seat = Seat(hook, lambda text: self._shared.post(self._complaints.complain, hook.name, text))
            teller = self._tellers[hook] = Teller(self._shared, seat, self._updated)
            self._chatter.know((hook,))
            if hook not in self._hooks:
                self._retire(hook)
        return teller

    def _retire(self, hook: Hook, after: float = _LINGER_S) -> None:
        """Keep a hook that is not asked (any more) for a while: it is told so, and calls in it end."""
        if self._shared.loop is not None:
            self._shared.loop.call_later(after, self._drop, hook)
        else:
            self._drop(hook)

    def _drop(self, hook: Hook) -> None:
        if hook not in self._hooks and (teller := self._tellers.pop(hook, None)) is not None:
            teller.seat.close()
            self._go_away(hook)

    def _go_away(self, hook: Hook) -> None:
        if hook in self._coming:
            self._coming.discard(hook)
            self._name_points()

    def ask(self, event: Point) -> Answers:
        """Ask all hooks of an event's point. Its ``outcome`` is there at once where all were quick."""
        line = self._lines.get(event.NAME)
        if line is None or self._closed:
            return _NOBODY
        if self._shared.loop is None:
            self._shared.loop = asyncio.get_running_loop()
        call = Call(self._shared, event, line.seats, line.validators)
        if self._alarm is not None and line.here():
            call.start(inline=False, alarm=self._alarm)
        else:
            call.start(line.quick())
        return call

    def tell(self, event: Point) -> None:
        """Tell all hooks of an event's point beside everything else; ``updated`` takes what they want."""
        if event.NAME not in self.points or self._closed:
            return
        if self._shared.loop is None:
            self._shared.loop = asyncio.get_running_loop()
        claims = Claims()
        line = self._lines.get(event.NAME)
        for seat in line.seats if line is not None else ():
            self._tellers[seat.hook].tell(event, claims)
        for hook in self._coming:
            if event.NAME in hook.handlers and event.NAME in _TOLD:
                self._teller(hook).tell(event, Claims())  # the version before it may say the same

    def tell_one(self, hook: Hook, event: Point) -> Awaitable[str | None]:
        """Tell one hook something, also one that is not used yet or not any more, whatever its breaker says.

        After ``Synchronize`` the hook is told of what happens, also before it is used: else nobody would tell
        it of what comes between. After ``Shutdown`` it is forgotten; what waited to be told is not told any
        more.

        Returns:
            The error in words, or None.
        """
        self._shared.loop = loop = asyncio.get_running_loop()
        last = isinstance(event, Shutdown)
        if event.NAME in hook.handlers:
            teller = self._teller(hook)
            least = ALONE_S if isinstance(event, Configure | Synchronize) else hook.timeout
            done = (teller.tell_last if last else teller.tell_one)(event, least)
            if isinstance(event, Synchronize) and hook not in self._hooks:
                self._coming.add(hook)
                self._name_points()
        else:
            done = loop.create_future()
            done.set_result(None)
        if last:
            self._go_away(hook)
            done.add_done_callback(lambda _: self._retire(hook, hook.timeout + 1.0))
        return done

    def report(self) -> list[HookReport]:
        """Tell how each hook stands, in order."""
        now = self._clock()
        tellers = [self._tellers[hook] for hook in self._hooks]
        return [
            teller.seat.report(now, teller.waiting, self._chatter.quiet(teller.seat.hook.name))
            for teller in tellers
        ]

    def close(self) -> None:
        """Ask nobody any more; threads end when their hooks do, or with the process."""
        self._closed = True
        self.points = frozenset()
        self._lines = {}
        self._hooks = ()
        self._coming.clear()
        for hook in list(self._tellers):
            self._drop(hook)
        self._shared.runners.close()
        self._chatter.close()
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None


def _line(name: str, by_point: Mapping[str, Sequence[Seat]]) -> _Line:
    seats = tuple(by_point.get(name, ()))
    validators = tuple(by_point.get(VALIDATES.get(name, ""), ()))
    plain = all(
        not seat.hook.remote and not seat.coroutines.intersection((name, VALIDATES.get(name, "")))
        for seat in seats + validators
    )
    pure = plain and all(seat.hook.pure for seat in seats + validators)
    return _Line(seats, validators, plain, pure)
