"""Plain data of hooks, read back."""

from __future__ import annotations

from proxy.hooks.answers import Adjustment
from proxy.hooks.serialize import _object, _record


def adjustment_from(data: object) -> Adjustment:
    """Make an adjustment of plain data.

    Raises:
        InputError: As for ``event_from_data``.
    """
    made: Adjustment = _record(Adjustment, _object(data, "the adjustment"), "")
    return made
