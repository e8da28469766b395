"""Replace families of hints by short lists with which a merge has the same result.

Theory. A merge (kubernetes v1.36, pkg/kubelet/cm/topologymanager/policy.go ``HintMerger``) uses an affinity
in three ways: by AND with those of the other lists, by equality with them, and by the count of the narrowest
of its list. So it is enough to pick some hints from a ``Family``: those that bring a merge to the same result
as all of them.

*A window.* Let all affinities of some other list lie in a few nodes, the window, and none of them be open
(the CPUs of a machine with many memory nodes, the nodes of a device). Then the AND lies inside the window,
whatever nodes an affinity has outside, and only an affinity inside the window can be equal.
``Family.for_window`` gives one hint for each part of the window that affinities can share with it, and one
narrowest hint; nothing else matters. If a preferred hint lies inside the window, it represents the other
hints with the same part: if one of these brings a merge to a non-preferred mask, the preferred hint brings it
to the same mask, or to a preferred result, which wins anyway. This is exact, distances included.

*No window.* All lists are families over many nodes. A result is preferred exactly if one mask is a
preferred hint of every list. Preferred masks have the least size that their list can have, so the wanted
mask is the best of those that meet the demands of all lists at once: ``best_mask`` finds it without listing
any. (A list that prefers masks for another reason than their size names the best of these:
``preferred_masks``.) This is exact if the smaller integer decides between masks of equal size. If distances
decide (``closest``), all masks of that size that suit all lists represent the others, if they are found
within ``TRIES`` tried nodes; this is exact for pairs on 64 nodes, and for larger masks on fewer nodes. If
there is only one family, its best hint is the result, preferred or not. For several families without a
preferred result, the same search gives the smallest mask on which all lists agree. kubelet, if it could list
the hints, would instead give a mask that different hints have in common, which need not suit any of the
lists. The difference is intentional.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from proxy.allocation.demand import MOST_LISTED_NODES, best_mask, lowest_masks
from proxy.allocation.hint_family import Family, hint
from proxy.allocation.hint_lists import HintList, hint_lists
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask

TRIES = 3000
"""How many nodes are tried to find masks whose nodes may be closer to each other than the first's."""


def lists_of(answers: Sequence[Hints], *, closest: bool = False) -> tuple[HintList, ...]:
    """Convert providers' answers to lists that a merge can read, families included; see ``listable``."""
    lists = hint_lists(answers)
    short = hint_lists(listable(answers, closest=closest))
    return tuple(
        replace(entry, family=whole.hints) if isinstance(whole.hints, Family) else entry
        for entry, whole in zip(short, lists, strict=True)
    )


def listable(answers: Sequence[Hints], *, closest: bool = False) -> list[Hints]:
    """Replace all families in providers' answers by lists.

    Args:
        answers: The answers, one per provider.
        closest: Whether distances decide between masks of equal size.
    """
    lists = [hints for answer in answers for hints in (answer or {}).values() if hints]
    families = [hints for hints in lists if isinstance(hints, Family)]
    if not families:
        return list(answers)
    windows = [w for hints in lists if not isinstance(hints, Family) and (w := _window(hints))]
    window = min(windows, key=len, default=None)
    agreed = () if window else _agreed(families, closest=closest)
    return [
        answer and {name: _short(hints, window, agreed) if hints else hints for name, hints in answer.items()}
        for answer in answers
    ]


def _window(hints: Sequence[TopologyHint]) -> Mask | None:
    """Return the nodes in which all affinities of a list lie; None if they are many or one is open."""
    bits = 0
    for entry in hints:
        if entry.affinity is None:
            return None
        bits |= entry.affinity.bits
    return Mask.from_bits(bits) if bits.bit_count() <= MOST_LISTED_NODES else None


def _agreed(families: Sequence[Family], *, closest: bool) -> tuple[int, ...]:
    """Return the best mask that is a hint of every family: preferred by all, then fewest nodes, then lowest.

    With ``closest``, all masks of the same rank are returned, whatever their integer.
    """
    nodes = families[0].nodes
    for family in families[1:]:
        nodes = tuple(node for node in nodes if node in family.nodes)
    demands = [demand for family in families for demand in family.demands]
    candidates = {bits for family in families for bits in family.explicit}
    floor = max(family.floor for family in families)
    if (best := best_mask(nodes, demands, floor=floor)) is not None:
        candidates.add(best)
        if _not_preferred_by_all(families, best):
            for family in families:
                candidates.update(family.preferred_masks(nodes, demands, floor))
    shared = [bits for bits in candidates if all(family.holds(bits) for family in families)]
    if not shared:
        return ()
    first = min(shared, key=lambda bits: (_not_preferred_by_all(families, bits), bits.bit_count(), bits))
    if not closest:
        return (first,)
    rank = _not_preferred_by_all(families, first), first.bit_count()
    others = lowest_masks(nodes, rank[1], demands, TRIES) if rank[1] >= floor else ()
    alike = {
        bits
        for bits in (*shared, *others)
        if (_not_preferred_by_all(families, bits), bits.bit_count()) == rank
    }
    return tuple(sorted(alike))


def _not_preferred_by_all(families: Sequence[Family], bits: int) -> bool:
    return not all(family.prefers(bits) for family in families)


def _short(
    hints: Sequence[TopologyHint], window: Mask | None, agreed: tuple[int, ...]
) -> Sequence[TopologyHint]:
    if not isinstance(hints, Family):
        return hints
    if window is not None:
        return hints.for_window(window)
    if agreed:
        return tuple(hint(bits, hints.prefers(bits)) for bits in agreed)
    return hints.best_few(1)  # no mask suits all families: let the merge intersect the best ones
