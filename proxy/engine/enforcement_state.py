"""To which pods of a node the plan is applied, as one value."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from proxy.model.mode import NodeMode
from proxy.model.pod_selection import ALL_PODS, PodSelection

ENFORCEMENT_RECORD = "e/pods"
"""The ledger's key of the record."""


class Enforcement(Struct, frozen=True):
    """To which pods the plan is applied, unless the mode alone decides it.

    Attributes:
        selection: The pods that mode ``enforce`` selects.
        lagging: Keys of pods that a change of the mode or of the selection has not reached yet; they are
            still treated as before the change.
        moving: Keys of pods that the step under way changes.
        paused: Whether no further step begins.
    """

    selection: PodSelection = ALL_PODS
    lagging: frozenset[str] = frozenset()
    moving: frozenset[str] = frozenset()
    paused: bool = False

    def dump(self, mode: NodeMode) -> dict[str, object] | None:
        """Return the ledger's record; None if the plan is applied to every pod."""
        if mode is not NodeMode.OBSERVE and self == APPLIED_TO_ALL:
            return None
        return {
            "mode": (NodeMode.OBSERVE if mode is NodeMode.OBSERVE else NodeMode.ENFORCE).value,
            "selection": self.selection.dump(),
            "lagging": sorted(self.lagging),
            "moving": sorted(self.moving),
            "paused": self.paused,
        }

    @classmethod
    def load(cls, record: Mapping[str, object]) -> tuple[NodeMode, Enforcement]:
        """Return the mode and the value of a record.

        Raises:
            ValueError: It is not such a record.
        """
        try:
            selection, keys = record["selection"], (record["lagging"], record["moving"])
            lagging, moving = (frozenset(str(key) for key in group) for group in keys)  # type: ignore[attr-defined]
            mode = NodeMode(str(record["mode"]))
        except (KeyError, TypeError) as error:
            raise ValueError("it is not a record of enforcement") from error
        if not isinstance(selection, dict):
            raise ValueError("it is not a record of enforcement")  # noqa: TRY004 - the value is wrong
        return mode, cls(PodSelection.load(selection), lagging, moving, record.get("paused") is True)


APPLIED_TO_ALL = Enforcement()
"""The plan is applied to every pod if the mode is ``enforce``; creates compare it by identity, for speed."""


def canonical(enforcement: Enforcement) -> Enforcement:
    """Return ``APPLIED_TO_ALL`` itself if the value equals it, because callers compare by identity."""
    return APPLIED_TO_ALL if enforcement == APPLIED_TO_ALL else enforcement
