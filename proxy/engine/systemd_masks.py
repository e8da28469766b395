"""How a runtime sends a cpuset to systemd: correctly, or with the bytes of its mask in reverse order.

Only the property ``AllowedCPUs`` of a unit shows the order, after a call with a cpuset whose mask differs
from its reverse. ``RuntimeQuirks.mask_as_sent`` computes what systemd reads in reverse order.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from proxy.model.idset import CpuSet


class MaskOrder(StrEnum):
    """The order in which the runtime sends the bytes of a mask."""

    UNKNOWN = "not known"
    CORRECT = "right"
    REVERSED = "wrong"


class UnitCpusRead(Struct, frozen=True):
    """The property ``AllowedCPUs`` of a unit was read.

    Attributes:
        has: The property, as systemd reports it.
        planned: The cpuset that the unit should have.
        reverse: The cpuset that systemd reads if the bytes of the mask of ``planned`` come in reverse order.
        sent: Whether the runtime has just sent ``planned``; otherwise topoproxy may have written the
            property.
    """

    has: CpuSet
    planned: CpuSet
    reverse: CpuSet
    sent: bool


class ReportReversedMask(Struct, frozen=True):
    """Count a unit that has the CPUs of a reversed mask, and report it if that was unknown before."""

    unit: UnitCpusRead
    is_new: bool


def step(known: MaskOrder, event: UnitCpusRead) -> tuple[MaskOrder, tuple[ReportReversedMask, ...]]:
    """Return the byte order that follows from a unit's property, and the report to make.

    Only a call shows the order. Without one, the property may come from an earlier plan: if an owner has
    moved from CPUs 8-11 of 16 to 0-3, the earlier shared pool looks like the reverse of the present one.
    """
    if event.reverse == event.planned:
        return known, ()
    if event.has == event.reverse and (event.sent or known is MaskOrder.REVERSED):
        return MaskOrder.REVERSED, (ReportReversedMask(event, known is not MaskOrder.REVERSED),)
    return MaskOrder.CORRECT if event.has == event.planned and event.sent else known, ()
