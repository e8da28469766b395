"""Keeps problems for the operator: each once, with how often it occurred and when. The list is bounded.

A problem is its message and its keys. The cause (``err``) is not part of that: a problem that comes again
with another cause is the same problem with a newer cause.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.model.quoting import message as fit
from proxy.telemetry.text import CAUSE, Keys, identity, rendered

LIMIT = 100


@dataclass(slots=True)
class Problem:
    """One thing that went wrong (times are seconds since the epoch)."""

    message: str
    keys: Keys
    first: float
    last: float
    count: int = 1

    @property
    def what(self) -> str:
        """The message with its keys, as the log shows it."""
        return fit(rendered(self.message, self.keys))


class Problems:
    """A bounded list of problems, the oldest forgotten first. For one thread at a time."""

    def __init__(self, clock: Callable[[], float], limit: int = LIMIT) -> None:
        self._clock = clock
        self._limit = limit
        self._known: OrderedDict[tuple[object, ...], Problem] = OrderedDict()

    def note(self, message: str, keys: Keys) -> bool:
        """Record a problem; report whether it, or its cause, is new."""
        now = self._clock()
        known = self._known.get(what := identity(message, keys))
        if known is not None:
            known.count += 1
            known.last = now
            new = known.keys.get(CAUSE) != keys.get(CAUSE)
            known.keys = keys
            return new
        self._known[what] = Problem(message, keys, now, now)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)
        return True

    def resolve(self, message: str, keys: Keys) -> list[Problem]:
        """Remove the problems with this message whose keys include the given ones, and return them."""
        over = {
            what: problem
            for what, problem in self._known.items()
            if problem.message == message and keys.items() <= problem.keys.items()
        }
        for what in over:
            del self._known[what]
        return list(over.values())

    def page(self) -> list[dict[str, object]]:
        """Return all problems as plain data, the newest last."""
        return [
            {
                "what": p.what,
                "message": p.message,
                "keys": _plain(p.keys),
                "count": p.count,
                "first": p.first,
                "last": p.last,
            }
            for p in self._known.values()
        ]


def _plain(keys: Mapping[str, object]) -> dict[str, object]:
    return {key: fit(value) if isinstance(value, str) else value for key, value in keys.items()}
