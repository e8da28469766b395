"""How a runtime sends a cpuset to systemd: as it is, or with the bytes of its mask in reverse order.

Nothing but the property ``AllowedCPUs`` of a unit shows the order, after a call with a cpuset that does not
read the same both ways. ``RuntimeQuirks.mask_as_sent`` computes what systemd reads in reverse order.
"""

from __future__ import annotations

from enum import StrEnum

from proxy.model.idset import CpuSet


class MaskOrder(StrEnum):
    """The order in which the runtime sends the bytes of a mask."""

    UNKNOWN = "not known"
    RIGHT = "right"
    REVERSED = "wrong"


def observed_order(known: MaskOrder, has: CpuSet, meant: CpuSet, reverse: CpuSet, *, sent: bool) -> MaskOrder:
    """Return the order that follows from a unit's property.

    Args:
        known: The order known so far.
        has: The unit's property, as systemd reports it.
        meant: The cpuset that the unit should have.
        reverse: What systemd reads where the bytes of the mask of ``meant`` come in reverse order.
        sent: Whether the runtime has just sent ``meant``; else topoproxy may have written the property.
    """
    if reverse == meant:
        return known
    if has == reverse:
        return MaskOrder.REVERSED
    return MaskOrder.RIGHT if has == meant and sent else known
