"""What a round of Koordinator's BE suppression does, and what it undoes of the other mode."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from proxy.model.koordinator import SuppressMode


class Status(enum.StrEnum):
    """The state of one of the two modes."""

    USING = "using"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class Statuses:
    """The state of both modes; None if nothing was done yet: other programs may have left something."""

    cpuset: Status | None = None
    quota: Status | None = None


@dataclass(frozen=True, slots=True)
class Turn:
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
    after: Statuses


def turn(mode: SuppressMode, before: Statuses) -> Turn:
    """Return what a round does in a mode, and what must be undone of the other mode."""
    used = Statuses(
        Status.USING if mode is SuppressMode.CPUSET else Status.RECOVERED,
        Status.USING if mode is SuppressMode.QUOTA else Status.RECOVERED,
    )
    quota = mode is not SuppressMode.QUOTA and before.quota is not Status.RECOVERED
    return Turn(mode, mode is not SuppressMode.CPUSET, quota, used)
