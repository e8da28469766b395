"""What the runtime sends to systemd: cpusets as they are, or with the bytes of their masks in reverse order.

Which order a runtime sends is its own matter (``RuntimeQuirks.mask_as_sent``). Nothing but a unit's own
property shows it, after a call that carried a cpuset which does not read the same both ways.
"""

from __future__ import annotations

from enum import StrEnum

from proxy.model.idset import CpuSet


class MaskOrder(StrEnum):
    """What is known of the runtime."""

    UNKNOWN = "not known"
    RIGHT = "right"
    REVERSED = "wrong"


def learned(known: MaskOrder, has: CpuSet, meant: CpuSet, reverse: CpuSet, *, sent: bool) -> MaskOrder:
    """Return what is known after a look at a unit.

    Args:
        known: What was known.
        has: What the unit is to have, as systemd reports it.
        meant: What it should be.
        reverse: What systemd reads where the bytes of that cpuset's mask come in reverse order.
        sent: Whether the runtime, and no other program, has sent it just now; else it may have been ours.
    """
    if reverse == meant:
        return known
    if has == reverse:
        return MaskOrder.REVERSED
    return MaskOrder.RIGHT if has == meant and sent else known
