"""What went wrong, kept for the operator: each thing once, with how often and when. Bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from proxy.keeper.throttle import Throttle
from proxy.model.quoting import message

_KEY_LENGTH = 80


@dataclass(slots=True)
class Problem:
    """One thing that went wrong (times are seconds since the epoch)."""

    what: str
    first: float
    last: float
    count: int = 1


class Problems:
    """A bounded list of problems, the oldest forgotten first."""

    def __init__(self, clock: Callable[[], float], say: Callable[[str], None], limit: int = 100) -> None:
        self._clock = clock
        self._throttle = Throttle(clock, say)
        self._limit = limit
        self._known: OrderedDict[str, Problem] = OrderedDict()

    def note(self, what: str) -> None:
        """Record a problem, and log it when it is new and not one of many like it.

        What it quotes of input is escaped, and it is cut to 2,000 bytes.
        """
        what = message(what)
        now = self._clock()
        known = self._known.get(what)
        if known is not None:
            known.count += 1
            known.last = now
            return
        self._known[what] = Problem(what, now, now)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)
        self._throttle.say(what.partition(":")[0][:_KEY_LENGTH], what)

    def page(self) -> list[dict[str, object]]:
        """Give all problems as plain data, the newest last."""
        return [
            {"what": p.what, "count": p.count, "first": p.first, "last": p.last} for p in self._known.values()
        ]
