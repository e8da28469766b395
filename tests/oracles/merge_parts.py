"""Parts of the merge, as kubelet's own tests look at them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from proxy.allocation.distance import Distances
from proxy.allocation.hint_lists import MaskList
from proxy.allocation.merge import _first, _target
from proxy.model.hint import TopologyHint


def target_count(lists: Sequence[Sequence[TopologyHint]]) -> int:
    """Return the largest size of a list's narrowest mask, 0 for none; lists without masks do not count."""
    return _target([MaskList.of(hints) for hints in lists])


def first_of(
    preferred: Collection[int],
    others: Collection[int],
    target: int,
    distances: Distances | None,
    most: int = 2,
) -> list[TopologyHint]:
    """Return the first hints, in the order in which the merge prefers them.

    Args:
        preferred: Masks that are preferred.
        others: Masks that are not; one that is in ``preferred`` too counts there only.
        target: The size that ``others`` are measured by.
        distances: Decides between masks of equal size; None: the smaller integer does.
        most: How many to give.
    """
    return [TopologyHint(*each) for each in _first(preferred, others, target, distances, most)]
