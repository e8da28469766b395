"""How many writes an agent may send: a token bucket. Pure: times come from the caller."""

from __future__ import annotations

_ROUNDING = 1e-6


class WriteBudget:
    """A token bucket that starts full; a write takes a token."""

    __slots__ = ("_burst", "_filled", "_per_second", "_tokens")

    def __init__(self, per_second: float, burst: int) -> None:
        """Start with a full bucket.

        Args:
            per_second: Tokens that come in a second.
            burst: The most that there are.
        """
        self._per_second, self._burst = per_second, burst
        self._tokens, self._filled = float(burst), 0.0

    def wait(self, now: float, spare: int = 0) -> float:
        """Return the seconds until a write may begin; 0: now.

        Args:
            now: Seconds that only grow.
            spare: So many tokens must be left after it.
        """
        grown = max(0.0, now - self._filled) * self._per_second
        self._tokens, self._filled = min(self._burst, self._tokens + grown), now
        lacking = 1 + spare - self._tokens
        return lacking / self._per_second if lacking > _ROUNDING else 0.0

    def take(self) -> None:
        """A write begins, for which there was no wait."""
        self._tokens -= 1

    def give_back(self) -> None:
        """A write has not reached the API server."""
        self._tokens = min(self._burst, self._tokens + 1)
