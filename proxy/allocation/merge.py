"""Merge topology hints: find the NUMA nodes that suit all resources together.

Source: kubernetes v1.36, pkg/kubelet/cm/topologymanager/policy.go ``mergePermutation``, ``HintMerger``. Every
resource brings a list of hints. kubelet tries each combination of one hint from every list: its mask is the
intersection of the hints' masks with all nodes D (a hint without a mask does not narrow it), and it is
*preferred* when all its hints are and all their masks are equal. The best combination with a mask that is not
empty wins:

- a preferred one before all others; among preferred ones the *fitter* mask;
- otherwise, with ``target`` = the largest, over the lists, of the size of the list's narrowest mask: sizes up
  to the target before larger ones, then the size nearest to the target, then the fitter mask.

Fitter is fewer nodes, then (only with ``prefer-closest-numa-nodes``) the smaller mean distance, then the
smaller integer, which is the mask with lower nodes. This is one total order over (mask, preferred): kubelet
compares pair by pair, but the outcome does not depend on the order in which it meets the pairs. So the result
is the least element of the set of *different* (mask, preferred) pairs, and that set is found without trying
all combinations:

1. A combination is preferred exactly if there is one mask f such that it takes from each list either the
   preferred hint f or a preferred hint without a mask. So the candidates are the masks that are preferred in
   every list that has no preferred hint without a mask: an intersection of sets. If all lists have one, the
   candidates are the masks preferred in any list, and D for the combination without a mask. Masks are
   compared as they were given; D is applied afterwards.
2. If there are any, non-preferred combinations cannot win. If there are none, no combination is preferred,
   and whatever can be reached by intersecting is a non-preferred candidate: ``intersections`` finds these
   masks, each once, list by list. It never holds more than the different masks, and with many nodes it drops
   those that are already smaller than a size up to the target that some combination is known to have
   (intersections only shrink, so they could no longer win).

Nodes that some list never names cannot be in an intersection, and are left out first. The providers' answers
then name few nodes, however many the machine has: each provider brings a list over few nodes or, for more
nodes (``proxy.allocation.hint_sampling``), hints made for the few nodes of such a list, or a single hint. So
the time of a merge is bounded by the ``DENSE_NODES`` nodes for which ``intersections`` counts; only lists
made by hand can be worse.

The runner-up, which explains the winner, is the least element after it with another mask.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct

from proxy.allocation.distance import Distances
from proxy.allocation.hint_lists import MaskList
from proxy.allocation.intersections import DENSE_NODES, meet_all
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask, union

_RUNNER_UP_PAIRS = 1 << 17
"""On machines with more than ``DENSE_NODES`` nodes, no runner-up is looked for among more pairs than this."""
_STARTS = 16
"""How many masks are tried to find a possible size."""


class Decided(enum.StrEnum):
    """Why the winner comes before the runner-up, or why there is none."""

    NO_PREFERENCE = "no resource has a preference"
    NOTHING_COMMON = "the hints of the resources have no node in common"
    ONLY = "no other nodes suit all resources"
    PREFERRED = "all resources prefer it"
    FEWER_NODES = "fewer nodes"
    NEAREST_COUNT = "number of nodes nearest to what the widest resource needs"
    CLOSER = "nodes closer to each other"
    LOWER_IDS = "lower node ids"


class Merged(Struct, frozen=True):
    """The result of a merge.

    Attributes:
        hint: The winner; its affinity is None only if a policy has removed it.
        runner_up: The best hint with other nodes; None if there is none, or if finding it is too expensive.
        decided: Why the winner comes before the runner-up.
        target: The size with which non-preferred masks are compared.
    """

    hint: TopologyHint
    runner_up: TopologyHint | None
    decided: Decided
    target: int


def merge(lists: Sequence[Sequence[TopologyHint]], nodes: Mask, distances: Distances | None = None) -> Merged:
    """Find the best hint for all lists.

    Args:
        lists: Hints by resource; without any list all nodes are preferred.
        nodes: All NUMA nodes of the machine.
        distances: The distance table if ``prefer-closest-numa-nodes`` is on.

    Returns:
        The winner, or all nodes and not preferred if no combination has a node in common.

    Raises:
        KeyError: A node is not in the distance table.
    """
    whole = nodes.bits
    mask_lists = [MaskList.of(hints) for hints in lists]
    target = _target(mask_lists)
    if all(r.has_preferred_hint_without_mask and not r.masks for r in mask_lists):
        return Merged(TopologyHint(nodes, preferred=True), None, Decided.NO_PREFERENCE, target)
    preferred = _preferred(mask_lists, whole)
    others, floor = (set[int](), 1) if len(preferred) > 1 else _others(mask_lists, whole, target, preferred)
    first = _first(preferred, others, target, distances, most=2)
    if not first:
        return Merged(TopologyHint(nodes, preferred=False), None, Decided.NOTHING_COMMON, target)
    best, runner_up = first[0], first[1] if len(first) > 1 else None
    if floor > 1 and runner_up is not None and len(runner_up[0]) > target:
        runner_up = None  # a mask below the floor might come before it
    decided = _decided(best, runner_up, distances, cut=floor != 1)
    return Merged(TopologyHint(*best), runner_up and TopologyHint(*runner_up), decided, target)


def _first(
    preferred: Collection[int],
    others: Collection[int],
    target: int,
    distances: Distances | None,
    most: int,
) -> list[tuple[Mask, bool]]:
    result: list[tuple[Mask, bool]] = []
    for masks, is_preferred in ((set(preferred), True), (set(others) - set(preferred), False)):
        target_size = 0 if is_preferred else target
        by_size: dict[int, list[int]] = {}
        for mask in masks:
            by_size.setdefault(mask.bit_count(), []).append(mask)
        by_size.pop(0, None)
        for _, size in sorted(((size > target_size, abs(size - target_size)), size) for size in by_size):
            best = heapq.nsmallest(most - len(result), by_size[size], key=_fitness(distances))
            result += [(Mask.from_bits(mask), is_preferred) for mask in best]
    return result


def _target(mask_lists: Sequence[MaskList]) -> int:
    return max((r.narrowest for r in mask_lists), default=0)


def _preferred(mask_lists: Sequence[MaskList], whole: int) -> set[int]:
    """Return the masks of preferred combinations (step 1 of the theory)."""
    strict = [r.preferred for r in mask_lists if not r.has_preferred_hint_without_mask]
    common = set.intersection(*strict) if strict else {whole}.union(*(r.preferred for r in mask_lists))
    return {mask & whole for mask in common} - {0}


def _others(
    mask_lists: Sequence[MaskList], whole: int, target: int, preferred: set[int]
) -> tuple[set[int], int]:
    """Return the masks that can be reached at all (step 2), and the size below which they may be missing.

    If there is a preferred mask, the others only serve to name a runner-up. If finding them is expensive,
    none are returned, and the size is 0.
    """
    families = [r.masks | {whole} if r.has_hint_without_mask else r.masks for r in mask_lists]
    for family in families:
        whole &= union(family)
    if whole.bit_count() <= DENSE_NODES:
        return meet_all(families, whole), 1
    if preferred:
        reachable = meet_all(families, whole, most=_RUNNER_UP_PAIRS)
        return (set(), 0) if reachable is None else (reachable, 1)
    floor = _known_size(mask_lists, families, whole, target)
    return meet_all(families, whole, floor), floor


def _known_size(mask_lists: Sequence[MaskList], families: Sequence[set[int]], whole: int, target: int) -> int:
    """Return a size up to the target that some combination is known to have; 1 if none was found.

    Starts at narrow masks of the list that sets the target, and takes the largest intersection with each
    list.
    """
    widest = next((r.masks for r in mask_lists if r.narrowest == target), set[int]())
    known = 1
    for start in itertools.islice((mask for mask in widest if mask.bit_count() == target), _STARTS):
        common = start & whole
        for family in families:
            common = max((common & mask for mask in family), key=int.bit_count, default=0)
        known = max(known, common.bit_count())
        if known == target:
            break
    return known


def _fitness(distances: Distances | None) -> Callable[[int], tuple[int, int]] | None:
    if distances is None:
        return None
    return lambda mask: (distances.total(Mask.from_bits(mask)), mask)


def _decided(
    best: tuple[Mask, bool], runner_up: tuple[Mask, bool] | None, distances: Distances | None, *, cut: bool
) -> Decided:
    if runner_up is None and not cut:
        return Decided.ONLY
    (winner, preferred), (other, other_preferred) = best, runner_up or (Mask(), False)
    if preferred != other_preferred or runner_up is None:
        return Decided.PREFERRED if preferred else Decided.NEAREST_COUNT
    if len(winner) != len(other):
        return Decided.FEWER_NODES if preferred else Decided.NEAREST_COUNT
    if distances is not None and distances.total(winner) != distances.total(other):
        return Decided.CLOSER
    return Decided.LOWER_IDS
