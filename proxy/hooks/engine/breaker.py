"""A circuit breaker: a hook that failed several times in a row is not called for a while.

Theory. *Closed*: every call is permitted, and consecutive failures are counted. After ``FAILURES_TO_OPEN``
failures the breaker *opens*: no call is permitted until a pause has passed. Then exactly one call is
permitted as a probe; all others are still refused. If the probe succeeds the breaker closes; if it fails the
breaker opens again, for twice the pause, up to a maximum.

Each permitted call holds a token. The result of a call that began in an earlier state is ignored, so an old
failure that arrives late is not mistaken for the result of the probe.
"""

from __future__ import annotations

from proxy.model.backoff import Backoff

FAILURES_TO_OPEN = 3
"""This many consecutive failures open the breaker."""
OPEN_PAUSES = Backoff(1.0, 60.0, tolerated=FAILURES_TO_OPEN - 1)
"""How long it stays open, in seconds."""


class Breaker:
    """One breaker; times are seconds of a monotonic clock."""

    __slots__ = ("_failures", "_open_until", "_probing", "_token")

    def __init__(self) -> None:
        self._token = 1  # the token of calls that are permitted now; changes with each change of state
        self._failures = 0
        self._open_until: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are refused (a probe may be running)."""
        return self._open_until is not None

    @property
    def is_probing(self) -> bool:
        """Whether a probe is running."""
        return self._probing

    @property
    def failures(self) -> int:
        """How many calls in a row have failed."""
        return self._failures

    def permit(self, now: float) -> int:
        """Request permission for a call.

        Returns:
            A token for ``succeeded``, ``failed`` or ``unused``; 0 if the call is refused.
        """
        if self._open_until is None:
            return self._token
        if self._probing or now < self._open_until:
            return 0
        self._probing = True
        return self._token

    def seconds_until_probe(self, now: float) -> float:
        """Return the seconds until the next probe is permitted; 0 if it is permitted now."""
        return max(0.0, self._open_until - now) if self._open_until is not None else 0.0

    def succeeded(self, token: int) -> None:
        """Record the success of a call."""
        if token != self._token:
            return
        self._failures = 0
        if self._open_until is not None:
            self._open_until, self._probing = None, False
            self._token += 1

    def failed(self, token: int, now: float) -> None:
        """Record the failure of a call."""
        if token != self._token:
            return
        self._failures += 1
        if self._open_until is None and self._failures < FAILURES_TO_OPEN:
            return
        self._open_until, self._probing = now + OPEN_PAUSES.delay(self._failures), False
        self._token += 1

    def unused(self, token: int) -> None:
        """Record that a permitted call was not made, or that its result does not count."""
        if token == self._token:
            self._probing = False
