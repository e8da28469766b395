"""How often something that keeps being needed is tried again: a few times at once, then ever more rarely.

Counted in passes, not in seconds, as all comparing is.
"""

from __future__ import annotations

from collections.abc import Collection

PATIENCE = 3
"""So often in a row it is tried in each pass; then the gaps double."""
RAREST = 32
"""Passes between two attempts at most."""


class BackOff:
    """Remembers by key how often in a row, and when it is due again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}
        self._now = 0

    def tick(self, there: Collection[str]) -> None:
        """A pass begins; what is no longer there is forgotten."""
        self._now += 1
        self._known = {key: value for key, value in self._known.items() if key in there}

    def due(self, key: str) -> bool:
        """Tell whether to try in this pass."""
        return self._now >= self._known.get(key, (0, 0))[1]

    def again(self, key: str) -> None:
        """It was needed, or failed, once more."""
        count = self._known.get(key, (0, 0))[0] + 1
        self._known[key] = count, self._now + min(RAREST, 1 << max(0, count - PATIENCE))

    def calm(self, key: str) -> None:
        """It was not needed, or it worked: begin anew."""
        self._known.pop(key, None)
