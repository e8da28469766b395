"""What a round of Koordinator's BE suppression does, and what it undoes of the other mode."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from proxy.model.koordinator import SuppressMode


class ModeStatus(enum.StrEnum):
    """The state of one of the two modes."""

    USING = "using"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class ModeStatuses:
    """The state of both modes; None if nothing was done yet: other programs may have left something."""

    cpuset: ModeStatus | None = None
    quota: ModeStatus | None = None


@dataclass(frozen=True, slots=True)
class SuppressionRound:
    """What one round does.

    Attributes:
        mode: How the budget is applied; OFF if it is not.
        give_back_cpus: Whether BE pods get all their CPUs back (written whenever they are not suppressed,
            because pools change).
        give_back_quota: Whether their quota is removed (once).
        after: The statuses when it is done.
    """

    mode: SuppressMode
    give_back_cpus: bool
    give_back_quota: bool
    after: ModeStatuses


def suppression_round(mode: SuppressMode, before: ModeStatuses) -> SuppressionRound:
    """Return what a round does in a mode, and what must be undone of the other mode."""
    used = ModeStatuses(
        ModeStatus.USING if mode is SuppressMode.CPUSET else ModeStatus.RECOVERED,
        ModeStatus.USING if mode is SuppressMode.QUOTA else ModeStatus.RECOVERED,
    )
    quota = mode is not SuppressMode.QUOTA and before.quota is not ModeStatus.RECOVERED
    return SuppressionRound(mode, mode is not SuppressMode.CPUSET, quota, used)
