"""Records of the providers' answers and of the policy's decision, for explanations.

A record has to be small and cheap, because every decision leaves one. So of a list of hints only the first
few are kept, best first: preferred ones, then fewest nodes, then the smaller integer, as the merge prefers
them (``proxy.allocation.merge``). Providers give their lists by size already, so only the masks of as many
sizes as fill the sample are read. A ``Family`` is not read at all: its first masks are found directly, with a
bounded number of tries, and it is not counted.

If the result is not preferred, the record names the resources that prevent it. A preferred result is one mask
that every resource prefers, so there are three ways to miss it: a resource cannot be given at all; a resource
has no preferred mask left; or each resource has some, but none that all share. Then the first two resources
that share none are named; if any two share some, all resources are named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from msgspec import Struct

from proxy.allocation.hint_family import Family
from proxy.allocation.hint_lists import HintList
from proxy.allocation.policies import PolicyDecision, usable_hints
from proxy.model.explanation import SAMPLE, Merge, ProviderAnswer
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.phrases import counted, listed

NO_PREFERENCE, IMPOSSIBLE = "no preference", "impossible"
_NAMED = 4
"""How many masks a sentence names."""


def record_answer(provider: str, answer: Hints) -> tuple[ProviderAnswer, ...]:
    """Record a provider's answer, resource by resource.

    Args:
        provider: ``cpu``, ``memory`` or ``devices``.
        answer: Its answer; lists by number of nodes, as all providers give them.
    """
    if not answer:
        return (ProviderAnswer(provider, "", NO_PREFERENCE),)
    return tuple(_record(provider, resource, hints) for resource, hints in answer.items())


def record_merge(decision: PolicyDecision, scope: Scope) -> Merge | None:
    """Record what a policy decided; None under ``none``, which decides nothing."""
    merged = decision.merged
    if merged is None:
        return None
    conflicts = () if decision.hint.preferred else _conflicts(decision)
    return Merge(
        str(decision.policy), str(scope), decision.hint, merged.runner_up, str(merged.decided), conflicts
    )


def _record(provider: str, resource: str, hints: Sequence[TopologyHint] | None) -> ProviderAnswer:
    if hints is None:
        return ProviderAnswer(provider, resource, NO_PREFERENCE)
    if not hints:
        return ProviderAnswer(provider, resource, IMPOSSIBLE)
    if isinstance(hints, Family):
        return ProviderAnswer(provider, resource, "", hints.best_few(SAMPLE), None, None)
    preferred = [hint for hint in hints if hint.preferred]
    sample = _first(preferred, SAMPLE)
    sample += _first((hint for hint in hints if not hint.preferred), SAMPLE - len(sample))
    return ProviderAnswer(provider, resource, "", tuple(sample), len(hints), len(preferred))


def _first(hints: Iterable[TopologyHint], most: int) -> list[TopologyHint]:
    """Return the first hints of a sequence that is ordered by size, best first."""
    first: list[TopologyHint] = []
    for _, row in itertools.groupby(hints, _size):
        first += sorted(row, key=_bits)
        if len(first) >= most:
            return first[:most]
    return first


def _size(hint: TopologyHint) -> int:
    return len(hint.affinity) if hint.affinity is not None else 0


def _bits(hint: TopologyHint) -> int:
    return hint.affinity.bits if hint.affinity is not None else 0


def _conflicts(decision: PolicyDecision) -> tuple[str, ...]:
    conflicts = [f"{resource} cannot be given at all" for resource in decision.unsatisfiable]
    strict: list[_Preference] = []
    for entry in decision.lists:
        if entry.unsatisfiable:
            continue
        hints = usable_hints(entry, decision.policy)
        if not hints:
            conflicts.append(_narrowest(entry, decision.policy))
        if all(hint.affinity is not None for hint in hints):
            masks = {hint.affinity.bits for hint in hints if hint.affinity is not None}
            strict.append(_Preference(entry.resource, masks, whole=entry.family is None))
    return tuple(conflicts or _conflicting_preferences(strict))


class _Preference(Struct, frozen=True):
    """The masks that a resource prefers, and whether these are all."""

    resource: str
    masks: set[int]
    whole: bool

    @property
    def few(self) -> bool:
        return self.whole and (len(self.masks) <= _NAMED or self.single)

    @property
    def single(self) -> bool:
        return max(map(int.bit_count, self.masks)) == 1

    @property
    def places(self) -> str:
        if self.single:
            return f"{'one of nodes' if len(self.masks) > 1 else 'node'} {Mask.from_bits(sum(self.masks))}"
        first = sorted(self.masks, key=lambda mask: (mask.bit_count(), mask))
        return " or ".join(f"nodes {Mask.from_bits(mask)} together" for mask in first)


def _narrowest(entry: HintList, policy: TopologyPolicy) -> str:
    masks = (hint.affinity for hint in entry.hints if hint.affinity)
    least = min(masks, key=lambda mask: (len(mask), mask.bits), default=None)
    is_single_node = least is not None and len(least) == 1
    if policy is TopologyPolicy.SINGLE_NUMA_NODE:
        lack = "prefers no single NUMA node" if is_single_node else "does not fit on one NUMA node"
    else:
        lack = "has no preferred NUMA nodes left"
    if least is None:
        return f"{entry.resource} {lack}"
    fewest = f"it {'fits on node' if is_single_node else 'needs at least nodes'} {listed(least)} now"
    return f"{entry.resource} {lack}; {fewest}"


def _conflicting_preferences(strict: Sequence[_Preference]) -> list[str]:
    for first, other in itertools.combinations(strict, 2):
        sizes = min(map(int.bit_count, first.masks)), min(map(int.bit_count, other.masks))
        if first.few and other.few and first.masks.isdisjoint(other.masks):
            return [
                f"{first.resource} can only be on {first.places} and {other.resource} only on {other.places}"
            ]
        if first.masks.isdisjoint(other.masks) and sizes[0] != sizes[1]:
            count, other_count = (counted(size, "NUMA node") for size in sizes)
            return [f"{first.resource} prefers {count} and {other.resource} {other_count}"]
    names = ", ".join(preference.resource for preference in strict)
    return [f"no NUMA nodes are preferred by all of {names}"]
