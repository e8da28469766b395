"""What applies a part of the configuration to the running daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from proxy.config.schema import Config

Commit = Callable[[], None]
"""Makes a change that has been prepared. It does not wait, and nothing that it does can be refused."""


@dataclass(frozen=True, slots=True)
class LiveStep:
    """Applies some keys.

    Attributes:
        keys: Keys, or sections of which all live keys are meant.
        prepare: Takes the running and the new configuration and returns what changes the one into the other.
            Changes nothing. Runs on the event loop, right before the commits of all steps. Raises
            ConfigError where the node cannot follow.
    """

    keys: tuple[str, ...]
    prepare: Callable[[Config, Config], Commit]

    def applies(self, key: str) -> bool:
        """Return whether the step applies a key."""
        return any(key == own or key.startswith(f"{own}.") for own in self.keys)

    def concerned(self, changed: Iterable[str]) -> bool:
        """Return whether one of some keys is applied by the step."""
        return any(self.applies(key) for key in changed)
