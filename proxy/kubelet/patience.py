"""Leaving alone who lets us wait."""

from __future__ import annotations

from collections.abc import Callable

PATIENCE = 2
"""A source that has let us wait so often in a row is left alone,"""
REST, LONGEST_REST_S = 10, 30.0
"""for so many times what one question may cost, but not for longer than this."""
_NEVER = float("-inf")


class Rests:
    """Leaves a source alone for a while that has let us wait several times in a row.

    Each pod waits for kubelet's answer, for its whole time where kubelet hangs. What is not known then is
    done without, so it is better not to wait for it again and again.
    """

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        """Take what one question may cost, in seconds."""
        self._rest = min(LONGEST_REST_S, timeout * REST)
        self._clock = clock
        self._hung: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def rests(self, source: str) -> bool:
        """Tell whether a source is left alone."""
        return self._clock() < self._until.get(source, _NEVER)

    def asked(self, source: str, *, hung: bool) -> None:
        """Take note of how a question went."""
        times = self._hung.get(source, 0) + 1 if hung else 0
        self._hung[source] = times
        if times >= PATIENCE:
            self._until[source] = self._clock() + self._rest
