"""What a round of Koordinator's BE suppression does, and what it undoes of the other way."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from proxy.model.koordinator import SuppressMode


class Status(enum.StrEnum):
    """What became of one of the two ways."""

    USING = "using"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class Statuses:
    """What became of both ways; None where nothing was done yet, as others may have left something."""

    cpuset: Status | None = None
    quota: Status | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """What one round does.

    Attributes:
        mode: Which way the budget is put into force; OFF for none.
        give_back_cpus: Whether BE pods get all their CPUs back (written whenever they are not suppressed, for
            pools change under them).
        give_back_quota: Whether their quota is taken off (once).
        after: The statuses when it is done.
    """

    mode: SuppressMode
    give_back_cpus: bool
    give_back_quota: bool
    after: Statuses


def turn(mode: SuppressMode, before: Statuses) -> Turn:
    """Return what a round does in a mode, and what of the other mode has to be undone."""
    used = Statuses(
        Status.USING if mode is SuppressMode.CPUSET else Status.RECOVERED,
        Status.USING if mode is SuppressMode.QUOTA else Status.RECOVERED,
    )
    quota = mode is not SuppressMode.QUOTA and before.quota is not Status.RECOVERED
    return Turn(mode, mode is not SuppressMode.CPUSET, quota, used)
