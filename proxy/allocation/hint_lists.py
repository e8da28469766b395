"""Hints as the merge reads them: the providers' answers, list by list."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from proxy.allocation.hint_family import Family
from proxy.model.hint import Hints, TopologyHint

_NO_PREFERENCE = (TopologyHint(None, preferred=True),)
_UNSATISFIABLE = (TopologyHint(None, preferred=False),)


class HintList(Struct, frozen=True):
    """The hints of one resource as the merge reads them.

    Attributes:
        resource: Name; empty for a provider that has no preference at all.
        hints: Never empty, except after a policy has filtered them.
        unsatisfiable: Whether the provider reported that the resource cannot be allocated.
        family: All hints, if ``hints`` only represents them (see ``proxy.allocation.hint_sampling``).
    """

    resource: str
    hints: Sequence[TopologyHint]
    unsatisfiable: bool = False
    family: Family | None = None


def hint_lists(providers: Sequence[Hints]) -> list[HintList]:
    """Turn the three forms of an empty answer into hints.

    Source: kubernetes v1.36, pkg/kubelet/cm/topologymanager/policy.go ``filterProvidersHints``.

    Args:
        providers: The answers, one per provider.
    """
    lists: list[HintList] = []
    for answer in providers:
        if not answer:
            lists.append(HintList("", _NO_PREFERENCE))
        for resource, hints in (answer or {}).items():
            if hints is None:
                lists.append(HintList(resource, _NO_PREFERENCE))
            elif not hints:
                lists.append(HintList(resource, _UNSATISFIABLE, unsatisfiable=True))
            else:
                lists.append(HintList(resource, hints))
    return lists


class MaskList(Struct, frozen=True):
    """One list, prepared for the merge: masks as integers.

    Attributes:
        preferred: Masks of preferred hints.
        masks: Masks of all hints.
        has_preferred_hint_without_mask: Whether there is a preferred hint without a mask.
        has_hint_without_mask: Whether there is any hint without a mask.
    """

    preferred: set[int]
    masks: set[int]
    has_preferred_hint_without_mask: bool
    has_hint_without_mask: bool

    @classmethod
    def of(cls, hints: Sequence[TopologyHint]) -> MaskList:
        """Return the masks of a list of hints."""
        preferred: set[int] = set()
        masks: set[int] = set()
        preferred_without_mask = without_mask = False
        for hint in hints:
            if hint.affinity is None:
                without_mask = True
                preferred_without_mask = preferred_without_mask or hint.preferred
            else:
                bits = hint.affinity.bits
                masks.add(bits)
                if hint.preferred:
                    preferred.add(bits)
        return cls(preferred, masks, preferred_without_mask, without_mask)

    @property
    def narrowest(self) -> int:
        """Size of the narrowest mask, 0 without masks."""
        return min(map(int.bit_count, self.masks), default=0)
