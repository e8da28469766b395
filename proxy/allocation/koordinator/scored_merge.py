"""Merge hints with scores, and apply a policy to the result.

Source: koordinator a7a1b76, pkg/scheduler/frameworkext/topologymanager/policy.go. As in kubelet, every
combination of one hint from each list counts. Its mask is the intersection; the combination is preferred if
all masks are equal, all hints are preferred, and no pod on its nodes forbids the new pod to share them (see
``allowed``). It is *unsatisfied* if its mask is smaller than that of one of its hints, or if one of
its hints is unsatisfied. Its score is the sum of the scores of the hints with exactly this mask. A preferred
combination is better than one that is not preferred; then fewer nodes, then the higher score, then the lower
node ids are better. The set of all nodes, not preferred, with score 0, always takes part.

Koordinator compares the combinations one by one, and lower node ids win over a higher score whenever they
come later. So its result depends on an order that is partly that of a hash table. Here the order above
decides. If scores are equal, or if hints come by size and then by mask as numbers, both agree.

The best combination is found without trying all of them:

- A preferred combination takes the same mask, or a preferred "any node", from each list. So there are at most
  as many as a list has masks, and the best combination for a mask is made of the best hints of each list.
- Other combinations count only if there is no preferred one, and of them only the smallest masks.
  ``proxy.allocation.intersections`` finds the masks that can be reached. What a list can add to the score of
  mask m is the best of its hints with mask m; any other hint of a combination that meets in m adds nothing.
  So again the best combination is made of the best hints of each list, and it is satisfied if it can be made
  of hints with mask m and of "any node" alone.

So the time is that of ``intersections``: bounded by the number of *different* intersections, at most
2**nodes.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from proxy.allocation.intersections import meet_all
from proxy.allocation.koordinator.hints import Answer, ScoredHint, gather, single_numa
from proxy.model.idset import Mask, union
from proxy.model.koordinator import NumaExclusive
from proxy.model.options import TopologyPolicy


class NodeStatus(enum.StrEnum):
    """The use of a NUMA node by bound pods: none, only pods on one node, or also pods that span several."""

    IDLE = "idle"
    SINGLE = "single"
    SHARED = "shared"


class Tenancy(Struct, frozen=True):
    """Which pods may share NUMA nodes.

    Attributes:
        exclusive: Whether pods on one NUMA node and pods on several may share a node. Only ``Required``
            forbids it.
        status: NUMA node to its use; a node that is not here is idle.
    """

    exclusive: NumaExclusive = NumaExclusive.NONE
    status: Mapping[int, NodeStatus] | None = None


class Aligned(Struct, frozen=True):
    """The result of a policy: a hint, and whether the pod is admitted.

    Attributes:
        hint: The hint for the allocators.
        admitted: The pod may be placed.
        reasons: Why not, in Koordinator's words.
    """

    hint: ScoredHint
    admitted: bool
    reasons: tuple[str, ...] = ()


def align(
    policy: TopologyPolicy, answers: Sequence[Answer], nodes: Mask, tenancy: Tenancy | None = None
) -> Aligned:
    """Merge the providers' hints under a policy.

    Args:
        policy: The policy.
        answers: The providers' answers; their order does not matter.
        nodes: All NUMA nodes of the machine.
        tenancy: Which pods may share NUMA nodes; None: all of them.
    """
    if policy is TopologyPolicy.NONE:
        return Aligned(ScoredHint(None), admitted=True)
    gathered = gather(answers)
    if gathered.reasons and policy is not TopologyPolicy.BEST_EFFORT:
        return Aligned(
            ScoredHint(None if policy is TopologyPolicy.SINGLE_NUMA_NODE else nodes), False, gathered.reasons
        )
    single = policy is TopologyPolicy.SINGLE_NUMA_NODE
    hint = merge(single_numa(gathered.lists) if single else gathered.lists, nodes, tenancy)
    if policy is TopologyPolicy.BEST_EFFORT:
        return Aligned(ScoredHint(nodes, hint.preferred) if hint.unsatisfied else hint, admitted=True)
    if single and hint.affinity == nodes:
        hint = ScoredHint(None, hint.preferred)
    if admits(policy, hint):
        return Aligned(hint, admitted=True)
    between = "," if single else " & "
    return Aligned(hint, False, (f"Unaligned NUMA Hint cause {between.join(gathered.summary)}",))


def admits(policy: TopologyPolicy, hint: ScoredHint) -> bool:
    """Return whether a policy admits a pod with this hint."""
    return hint.preferred or policy in (TopologyPolicy.NONE, TopologyPolicy.BEST_EFFORT)


def allowed(affinity: Mask | None, tenancy: Tenancy) -> bool:
    """Return whether a pod may share these NUMA nodes with the pods there; False without nodes.

    Required exclusivity keeps a pod on several nodes away from nodes with pods that are on one node only, and
    a pod on one node away from nodes with pods on several.
    """
    if affinity is None:
        return False
    if tenancy.exclusive is not NumaExclusive.REQUIRED:
        return True
    forbidden = NodeStatus.SINGLE if len(affinity) > 1 else NodeStatus.SHARED
    return all((tenancy.status or {}).get(node) is not forbidden for node in affinity)


def merge(lists: Sequence[Sequence[ScoredHint]], nodes: Mask, tenancy: Tenancy | None = None) -> ScoredHint:
    """Find the best hint for all lists.

    Args:
        lists: Hints by resource; if a list is empty, no hint suits all.
        nodes: All NUMA nodes of the machine.
        tenancy: Which pods may share NUMA nodes.
    """
    tenancy = tenancy or Tenancy()
    fallback = ScoredHint(nodes)
    if not all(lists):
        return fallback
    tables = [_List(hints) for hints in lists]
    preferred = [h for h in _preferred(tables, nodes) if h.affinity and allowed(h.affinity, tenancy)]
    if preferred:
        return min(preferred, key=_rank)
    families = [r.masks | {nodes.bits} if r.open else r.masks for r in tables]
    whole = functools.reduce(operator.and_, map(union, families), nodes.bits)
    best = [r.best for r in tables]
    reached = (_best(best, mask, nodes, preferred=False) for mask in meet_all(families, whole))
    return min([fallback, *reached], key=_rank)


_Table = dict[int | None, ScoredHint]


class _List:
    """The hints of one list by mask: the best hint of each mask, and the best preferred one.

    Attributes:
        best, best_preferred: Mask (None: any node) to its hint with the highest score; of equal hints a
            satisfied one.
        masks: All masks, as integers.
        open: The list has a hint for any node.
    """

    def __init__(self, hints: Iterable[ScoredHint]) -> None:
        self.best: _Table = {}
        self.best_preferred: _Table = {}
        for hint in hints:
            key = None if hint.affinity is None else hint.affinity.bits
            for table in (self.best, self.best_preferred) if hint.preferred else (self.best,):
                if key not in table or _worth(hint) > _worth(table[key]):
                    table[key] = hint
        self.masks = {key for key in self.best if key is not None}
        self.open = None in self.best


def _preferred(lists: Sequence[_List], nodes: Mask) -> Iterable[ScoredHint]:
    """Return the best preferred combination of each mask."""
    tables = [r.best_preferred for r in lists]
    strict = [set(table) for table in tables if None not in table]
    masks = set.intersection(*strict) if strict else {mask for table in tables for mask in (*table, None)}
    if not tables or None in masks:
        masks = masks - {None} | {nodes.bits}
    for mask in masks:
        if mask is not None:
            yield _best(tables, mask, nodes, preferred=True)


def _best(tables: Sequence[_Table], mask: int, nodes: Mask, *, preferred: bool) -> ScoredHint:
    """Return the best combination of hints whose intersection is a mask, or its part on this machine."""
    met = mask & nodes.bits
    if met != mask:  # the hints with this mask are larger than what they meet in
        return ScoredHint(Mask.from_bits(met), preferred, unsatisfied=True)
    score, satisfied, named = 0, True, mask == nodes.bits
    for table in tables:
        own, anywhere = table.get(mask), table.get(None)
        score += own.score if own else 0
        if own and not own.unsatisfied:
            named = True
        else:
            # A hint with this mask and a score is needed; without a score, "any node" does as well.
            satisfied &= not (own and own.score) and anywhere is not None and not anywhere.unsatisfied
    return ScoredHint(Mask.from_bits(mask), preferred, not (satisfied and named), score)


def _worth(hint: ScoredHint) -> tuple[int, bool]:
    return hint.score, not hint.unsatisfied


def _rank(hint: ScoredHint) -> tuple[int, int, int, bool]:
    bits = hint.affinity.bits if hint.affinity is not None else 0
    return bits.bit_count(), -hint.score, bits, hint.unsatisfied
