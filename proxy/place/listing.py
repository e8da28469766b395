"""Lists that stand for families of hints, so that a merge can read them.

Theory. A merge (kubelet 1.36, reference B) looks at an affinity in three ways: by AND with those of the
other lists, by equality with them, and by the count of the narrowest of its list. So real hints can be
picked from a ``Family`` that bring a merge to the same result as all of them.

*A window.* Let all affinities of some other list lie in a few nodes, the window, none of them open (the
CPUs of a machine with many memory nodes, the nodes of a device). Then the AND lies inside the window
whatever an affinity has outside, and only an affinity inside the window can be equal. ``Family.through``
gives one hint for each part of the window that affinities can share with it, and one narrowest hint;
nothing else can matter. Where a preferred hint lies inside the window it stands for the others with the
same part: a merge that one of these brings to a non-preferred mask is brought there by the preferred one
too, or else to a preferred result, which wins anyway. That is exact, distances included.

*No window.* All lists are families over many nodes. A result is preferred exactly if one mask is a
preferred hint of every list. Preferred masks have the least size that their list can have, so the wanted
mask is the best of those that meet the demands of all lists at once: ``fittest`` finds it without listing
any. That is exact as long as the smaller integer decides between masks of equal size; distances are not
looked at here. If there is only one family, its best hint is the result, preferred or not. For several
without a preferred result the same search gives the smallest mask on which all lists agree; kubelet, if it
could list the hints, would rather give a mask that different hints have in common, which need not suit any
of them. This is on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask
from proxy.place.demand import LISTED, fittest
from proxy.place.family import Family, hint
from proxy.place.hint_lists import HintList, hint_lists


def lists_of(answers: Sequence[Hints]) -> tuple[HintList, ...]:
    """Bring providers' answers into lists that a merge can read, families included."""
    lists = hint_lists(answers)
    if not any(isinstance(entry.hints, Family) for entry in lists):
        return tuple(lists)
    short = hint_lists(listable(answers))
    return tuple(
        replace(entry, family=whole.hints) if isinstance(whole.hints, Family) else entry
        for entry, whole in zip(short, lists, strict=True)
    )


def listable(answers: Sequence[Hints]) -> list[Hints]:
    """Put lists in the place of all families in providers' answers."""
    lists = [hints for answer in answers for hints in (answer or {}).values() if hints]
    families = [hints for hints in lists if isinstance(hints, Family)]
    if not families:
        return list(answers)
    windows = [w for hints in lists if not isinstance(hints, Family) and (w := _window(hints))]
    window = min(windows, key=len, default=None)
    agreed = None if window else _agreed(families)
    return [
        answer and {name: _short(hints, window, agreed) if hints else hints for name, hints in answer.items()}
        for answer in answers
    ]


def _window(hints: Sequence[TopologyHint]) -> Mask | None:
    """Give the nodes in which all affinities of a list lie; None where they are many or one is open."""
    bits = 0
    for each in hints:
        if each.affinity is None:
            return None
        bits |= each.affinity.bits
    return Mask.from_bits(bits) if bits.bit_count() <= LISTED else None


def _agreed(families: Sequence[Family]) -> int | None:
    """Give the best mask that is a hint of every family: preferred by all, then fewest nodes, then lowest."""
    nodes = families[0].nodes
    for family in families[1:]:
        nodes = tuple(node for node in nodes if node in family.nodes)
    demands = [demand for family in families for demand in family.demands]
    found = {bits for family in families for bits in family.explicit}
    floor = max(family.floor for family in families)
    if (best := fittest(nodes, demands, floor=floor)) is not None:
        found.add(best)
    if best is None or _cool(families, best):
        for family in families:
            found.update(family.favourites(nodes, demands, floor))
    shared = [bits for bits in found if all(family.holds(bits) for family in families)]
    return min(shared, key=lambda bits: (_cool(families, bits), bits.bit_count(), bits), default=None)


def _cool(families: Sequence[Family], bits: int) -> bool:
    return not all(family.prefers(bits) for family in families)


def _short(hints: Sequence[TopologyHint], window: Mask | None, agreed: int | None) -> Sequence[TopologyHint]:
    if not isinstance(hints, Family):
        return hints
    if window is not None:
        return hints.through(window)
    if agreed is not None:
        return (hint(agreed, hints.prefers(agreed)),)
    best = hints.best()  # no mask suits all: let the merge see what the best have in common
    return (best,) if best is not None else ()
