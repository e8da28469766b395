"""What all calls of an engine share, and what is known of a call while a hook has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from proxy.hooks.engine.loops import Looper
from proxy.hooks.engine.runners import Runner, Runners, Way
from proxy.hooks.engine.seats import Seat
from proxy.hooks.engine.traces import Fault


class Shared:
    """The clock, the runners, and the way back to the loop that asks."""

    def __init__(self, clock: Callable[[], float], note: Callable[[Seat, Fault], None]) -> None:
        """Make it.

        Args:
            clock: Seconds that do not go back.
            note: Tells people of a failure; called on the loop.
        """
        self.clock = clock
        self.note = note
        self.runners = Runners()
        self.loop: asyncio.AbstractEventLoop | None = None

    def post(self, what: Callable[..., None], *args: Any) -> None:
        """Have something done on the loop; nothing if it is closed: nobody waits there any more."""
        if self.loop is None:
            return
        try:
            self.loop.call_soon_threadsafe(what, *args)
        except RuntimeError:
            return


@dataclass(slots=True, eq=False)
class Errand:
    """A coroutine of a hook, on its own loop; ``tasks`` has it once it has begun."""

    looper: Looper
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    reached: bool = False
    ended: bool = False

    @property
    def back(self) -> bool:
        """It has ended, or its loop has."""
        return self.ended or self.looper.gone

    def start(self, make: Callable[[], Coroutine[Any, Any, None]], back: Callable[[Errand], None]) -> None:
        """Begin; ``back`` is called when it has ended, also where it was cancelled before its first step.

        Raises:
            RuntimeError: Its loop is closed.
        """

        def over(_: asyncio.Task[None]) -> None:
            self.ended = True
            back(self)

        self.looper.start(make, self.tasks, over)

    def heard(self) -> None:
        """Its loop has been told to cancel it."""
        self.reached = True


@dataclass(frozen=True, slots=True)
class Held:
    """Who has a call now.

    Attributes:
        ticket: Has one item; whoever pops it moves the call on.
        seat: Whose hook is called; None while it waits for a place.
        where: The runner or coroutine that the hook is in.
        deadline: When its time is over.
    """

    ticket: list[bool]
    seat: Seat | None
    where: Runner | Errand | None
    deadline: float


class Followed:
    """What a course needs of whoever follows it (``chain``)."""

    __slots__ = ()

    def look(self) -> None:
        """See who has the call, and whether for too long; on the loop."""
        raise NotImplementedError

    def came_back(self, runner: Runner) -> None:
        """A runner that was abandoned with this call is back."""
        raise NotImplementedError

    def turn(self) -> bool:
        """There is a place; False if it is not waited for any more."""
        raise NotImplementedError

    def resume(self) -> None:
        """Go on with a place."""
        raise NotImplementedError

    def broke(self, error: BaseException, runner: Runner | None) -> Way:
        """Our own code has failed."""
        raise NotImplementedError

    def settle(self) -> None:
        """Tell who waits that there is an outcome; from any thread."""
        raise NotImplementedError
