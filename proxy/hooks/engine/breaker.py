"""A circuit breaker: who failed several times in a row is left alone for a while.

Theory. *Closed*: every call is let through, and failures in a row are counted. At ``FAILURES`` of them the
breaker *opens*: nobody is let through until a pause has passed. Then exactly one call is let through as a
probe; everybody else is still turned away. If it succeeds the breaker closes; if it fails the breaker opens
again, for twice the pause, up to a longest one.

Each call that is let through holds a token. A call that began in an earlier state ends without effect, so
an old failure that arrives late is not taken for the probe's.
"""

from __future__ import annotations

FAILURES = 3
"""So many in a row open it."""
FIRST_S = 1.0
"""The first pause, in seconds; each that follows without a success between is twice as long."""
LONGEST_S = 60.0
"""The longest pause."""


class Breaker:
    """One breaker; times are seconds of any clock that does not go back."""

    __slots__ = ("_failures", "_pause", "_probing", "_state", "_until")

    def __init__(self) -> None:
        self._state = 1  # the token of calls that are let through now; changes with each change of state
        self._failures = 0
        self._until: float | None = None
        self._pause = FIRST_S
        self._probing = False

    @property
    def open(self) -> bool:
        """Whether calls are turned away (a probe may be on its way)."""
        return self._until is not None

    @property
    def probing(self) -> bool:
        """Whether a probe is on its way."""
        return self._probing

    @property
    def failures(self) -> int:
        """How many calls in a row have failed."""
        return self._failures

    def permit(self, now: float) -> int:
        """Ask to call.

        Returns:
            A token for ``succeeded``, ``failed`` or ``unused``; 0 if the call is turned away.
        """
        if self._until is None:
            return self._state
        if self._probing or now < self._until:
            return 0
        self._probing = True
        return self._state

    def left(self, now: float) -> float:
        """Tell in how many seconds the next probe is let through; 0 if at once."""
        return max(0.0, self._until - now) if self._until is not None else 0.0

    def succeeded(self, token: int) -> None:
        """A call has ended well."""
        if token != self._state:
            return
        self._failures = 0
        if self._until is not None:
            self._until, self._probing, self._pause = None, False, FIRST_S
            self._state += 1

    def failed(self, token: int, now: float) -> None:
        """A call has failed."""
        if token != self._state:
            return
        self._failures += 1
        if self._until is None and self._failures < FAILURES:
            return
        if self._until is not None:
            self._pause = min(self._pause * 2, LONGEST_S)
        self._until, self._probing = now + self._pause, False
        self._state += 1

    def unused(self, token: int) -> None:
        """A call that was let through has not been made, or says nothing about its health."""
        if token == self._state:
            self._probing = False
