"""Computes how long to wait before a retry. Pure: times come from the caller.

``Backoff`` is the rule: a first delay, then each twice as long, up to the longest. ``RetryDelays`` follows a
rule through one sequence of attempts, in a loop. ``RetryTimes`` keeps a sequence for each of many keys, with
the time from which each may be tried again. A delay is in the unit of the caller's clock: seconds, or passes.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Generic, TypeVar

from msgspec import Struct

K = TypeVar("K")

_DOUBLINGS_LIMIT = 64
"""More doublings than this make any first delay longer than any longest one."""


class Backoff(Struct, frozen=True):
    """A rule for the delays between attempts.

    Attributes:
        first: The first delay.
        longest: The longest delay.
        steady: An attempt that lasted this long counts as a success: the delay after it is the first again.
        tolerated: This many failures in a row cost no more than the first delay.
        least: The shortest delay, also of a tolerated failure.
    """

    first: float
    longest: float
    steady: float = math.inf
    tolerated: int = 0
    least: float = 0.0

    def delay(self, failures: int) -> float:
        """Return the delay after a number of failures in a row (at least one)."""
        doublings = failures - self.tolerated - 1
        if doublings < 0:
            return self.least
        if doublings > _DOUBLINGS_LIMIT:
            return self.longest
        return max(self.least, min(self.first * 2.0**doublings, self.longest))


class RetryDelays:
    """The delays of one sequence of attempts."""

    __slots__ = ("_failures", "_rule")

    def __init__(self, rule: Backoff) -> None:
        self._rule = rule
        self._failures = 0

    def next(self, lasted: float = 0.0) -> float:
        """Return the delay before the next attempt.

        Args:
            lasted: How long the attempt before it lasted.
        """
        if lasted >= self._rule.steady:
            self._failures = 0
        self._failures += 1
        return self._rule.delay(self._failures)

    def reset(self) -> None:
        """An attempt has succeeded: the next delay is the first."""
        self._failures = 0


class RetryTimes(Generic[K]):
    """When each of many keys may be tried again."""

    __slots__ = ("_known", "_rule")

    def __init__(self, rule: Backoff) -> None:
        self._rule = rule
        self._known: dict[K, tuple[int, float]] = {}  # failures in a row, and when the next attempt is due

    def due(self, key: K, now: float) -> bool:
        """Return whether a key may be tried."""
        return self.remaining(key, now) <= 0

    def remaining(self, key: K, now: float) -> float:
        """Return the time until a key may be tried; 0 if it may be now."""
        entry = self._known.get(key)
        return 0.0 if entry is None else max(0.0, entry[1] - now)

    def failed(self, key: K, now: float, at_least: float = 0.0) -> None:
        """An attempt has failed, or what it repaired is broken again.

        Args:
            key: The key.
            now: The caller's time.
            at_least: The shortest delay, as the other side has requested it.
        """
        failures = self._known.get(key, (0, 0.0))[0] + 1
        self._known[key] = failures, now + max(self._rule.delay(failures), at_least)

    def succeeded(self, key: K) -> None:
        """An attempt has succeeded: the next failure is the first."""
        self._known.pop(key, None)

    def keep(self, keys: Container[K]) -> None:
        """Forget all keys but these."""
        self._known = {key: entry for key, entry in self._known.items() if key in keys}


PASSES = Backoff(1, 32, tolerated=2, least=1)
"""The first four attempts are in four passes in a row; then the gaps double, up to 32 passes."""


class PassRetries:
    """When each of many keys may be tried again, counted in passes over all of them."""

    def __init__(self) -> None:
        self._times = RetryTimes[str](PASSES)
        self._pass = 0

    def start_pass(self, keys: Container[str]) -> None:
        """A pass begins over these keys; all others are forgotten."""
        self._pass += 1
        self._times.keep(keys)

    def due(self, key: str) -> bool:
        """Return whether a key may be tried in this pass."""
        return self._times.due(key, self._pass)

    def failed(self, key: str) -> None:
        """An attempt has failed, or what it repaired is broken again."""
        self._times.failed(key, self._pass)

    def succeeded(self, key: str) -> None:
        """An attempt has succeeded, or none was needed."""
        self._times.succeeded(key)
