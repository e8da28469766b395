"""What the runtime tells systemd: sets as they are, or with the bytes of their masks in the wrong order.

Which order a runtime sends is its own matter (``RuntimeQuirks.mask_as_sent``). Nothing but a unit's own
property shows it, after a call that carried a set which does not read the same both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from proxy.model.idset import CpuSet


class UnitMask(Enum):
    """What a look at a unit has shown."""

    NOTHING = 0
    REVERSED = 1
    REVERSED_FIRST = 2


class Masks:
    """What is known of the runtime.

    Attributes:
        reverses: Whether it tells systemd wrong sets; None while nobody knows.
    """

    def __init__(self, backwards: Callable[[CpuSet], CpuSet]) -> None:
        """Begin.

        Args:
            backwards: Returns the set that systemd reads where the bytes of a set's mask are reversed.
        """
        self._backwards = backwards
        self.reverses: bool | None = None

    def is_trusted(self, carried: CpuSet) -> bool:
        """Tell whether a set that the runtime tells is known to be understood."""
        return self.reverses is False or self._backwards(carried) == carried

    def judge(self, has: CpuSet, meant: CpuSet, *, told: bool) -> UnitMask:
        """Learn from a unit.

        Args:
            has: What the unit is to have, as systemd says.
            meant: What it should be.
            told: Whether the runtime, and nobody else, has told systemd just now; else it may be we who did.

        Returns:
            Whether the set was reversed, and whether that is news.
        """
        if self._backwards(meant) == meant:
            return UnitMask.NOTHING
        if has == self._backwards(meant):
            known, self.reverses = self.reverses is True, True
            return UnitMask.REVERSED if known else UnitMask.REVERSED_FIRST
        if has == meant and told:
            self.reverses = False
        return UnitMask.NOTHING
