"""Hints with scores, as Koordinator's scheduler merges them, and how it writes them down.

Source: koordinator a7a1b76, pkg/scheduler/frameworkext/topologymanager/policy.go. A hint says more than
kubelet's: a *score* decides between sets of nodes of equal size, and *unsatisfied* says that the nodes are
not enough for the request.

A list of hints is summed up as ``cpu prefer [01] among [01 10]``: masks in binary, lowest node right, padded
to an even number of digits. Koordinator does not pad if the highest node is even and is alone (node 2 alone
is ``100``), and its users read logs, so this module does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from proxy.model.idset import Mask


class ScoredHint(Struct, frozen=True):
    """The NUMA nodes on which a request could be satisfied, and how well.

    Attributes:
        affinity: NUMA nodes; None for any.
        preferred: No smaller set of nodes suffices, or the policy treats all sizes alike.
        unsatisfied: The nodes have too little.
        score: 0 or more; more is better.
    """

    affinity: Mask | None
    preferred: bool = False
    unsatisfied: bool = False
    score: int = 0


Answer = Mapping[str, Sequence[ScoredHint] | None] | None
"""A provider's answer, with the three forms of an empty answer of ``proxy.model.hint.Hints``."""

_NO_PREFERENCE = (ScoredHint(None, preferred=True),)
_IMPOSSIBLE = (ScoredHint(None, unsatisfied=True),)


class Gathered(Struct, frozen=True):
    """The providers' answers, list by list.

    Attributes:
        lists: Hints by resource; never empty.
        reasons: One for each resource that cannot be allocated at all.
        summary: The other lists as text, sorted.
    """

    lists: tuple[Sequence[ScoredHint], ...]
    reasons: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()


def gather(answers: Sequence[Answer]) -> Gathered:
    """Convert the answers of providers to lists.

    Args:
        answers: One per provider; their order does not matter.
    """
    lists: list[Sequence[ScoredHint]] = []
    reasons: list[str] = []
    summary: list[str] = []
    for answer in answers:
        if not answer:
            lists.append(_NO_PREFERENCE)
        for resource, hints in (answer or {}).items():
            if hints is None:
                lists.append(_NO_PREFERENCE)
            elif not hints:
                lists.append(_IMPOSSIBLE)
                reasons.append(f"Unsatisfied NUMA {resource}")
            else:
                lists.append(hints)
                summary.append(summed_up(resource, hints))
    return Gathered(tuple(lists), tuple(reasons), tuple(sorted(summary)))


def summed_up(resource: str, hints: Sequence[ScoredHint]) -> str:
    """Write a list of hints on one line."""
    possible = [hint for hint in hints if not hint.unsatisfied]
    preferred = " ".join(digits(hint.affinity) for hint in possible if hint.preferred)
    return f"{resource} prefer [{preferred}] among [{' '.join(digits(hint.affinity) for hint in possible)}]"


def digits(affinity: Mask | None) -> str:
    """Write a mask in binary as Koordinator does."""
    if affinity is None:
        return "<nil>"
    bits = affinity.bits
    alone = bits & (bits - 1) == 0
    width = bits.bit_length()
    return f"{bits:0{max(2, width if alone else width + width % 2)}b}"


def single_numa(lists: Sequence[Sequence[ScoredHint]]) -> list[list[ScoredHint]]:
    """Keep the hints that ``single-numa-node`` can use; lists may become empty."""
    return [
        [h for h in hints if h.preferred and (h.affinity is None or len(h.affinity) == 1)] for hints in lists
    ]
