"""What people are told of failures of hooks: not more than they can read."""

from __future__ import annotations

from collections.abc import Callable

from proxy.hooks.engine.seats import Seat
from proxy.hooks.engine.traces import Fault
from proxy.logs import log

MOST = 10
"""Complaints about one hook in ``EACH_S`` seconds; the rest is counted."""
EACH_S = 60.0


class Complaints:
    """Tells of failures, each hook's for itself."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._known: dict[str, tuple[float, int]] = {}

    def note(self, seat: Seat, fault: Fault) -> None:
        """Tell of a failure."""
        if fault.trace:
            log.debug("hook failed", hook=seat.hook.name, error=fault.text, trace=fault.trace)
        self.complain(seat.hook.name, fault.text)

    def complain(self, hook: str, text: str) -> None:
        """Tell something about a hook."""
        now = self._clock()
        since, count = self._known.get(hook, (now, 0))
        if now - since >= EACH_S:
            if count > MOST:
                self._say(f"hook {hook}: {count - MOST} failures before this one were not told")
            since, count = now, 0
        self._known[hook] = (since, count + 1)
        if count < MOST:
            self._say(f"hook {hook}: {text}")

    def forget(self, names: set[str]) -> None:
        """Forget hooks other than these."""
        self._known = {name: value for name, value in self._known.items() if name in names}
