"""The topology policies: from providers' answers to a hint and a verdict (kubelet 1.36, reference B.5).

All but ``none`` merge. ``best-effort`` takes what comes; ``restricted`` admits only what is preferred.
``single-numa-node`` first drops every hint but the preferred ones that have one node or no mask, so that a
preferred result is on one node; a list may become empty, and then nothing is preferred. Its result has no
mask where all nodes would be in it: to the allocators that is the same as having no wish. It never asks for
distances, as there are none within one node.

Hints that are too many to be listed are brought into lists first, here, so that nobody has to think of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.model.grpc_status import GrpcStatus
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask
from proxy.model.options import Policy
from proxy.model.workload import TOPOLOGY_AFFINITY, Verdict
from proxy.place.distance import Distances
from proxy.place.hint_lists import HintList
from proxy.place.listing import lists_of
from proxy.place.merge import Merged, merge

"""The gRPC status of a refusal."""
UNALIGNED = Verdict(
    GrpcStatus.FAILED_PRECONDITION, TOPOLOGY_AFFINITY, "Resources cannot be allocated with Topology locality"
)
"""The refusal of a policy, in kubelet's words."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy made of the providers' answers.

    Attributes:
        policy: The policy.
        hint: What the allocators are to follow.
        verdict: Admit, or refuse with kubelet's reason and text.
        lists: The hints by resource, before the policy dropped any.
        merged: Winner and runner-up of the merge; None under ``none``, which does not merge.
    """

    policy: Policy
    hint: TopologyHint
    verdict: Verdict
    lists: tuple[HintList, ...] = ()
    merged: Merged | None = None

    @property
    def unsatisfiable(self) -> tuple[str, ...]:
        """Resources that cannot be given at all."""
        return tuple(entry.resource for entry in self.lists if entry.unsatisfiable)


def decide(
    policy: Policy, providers: Sequence[Hints], nodes: Mask, distances: Distances | None = None
) -> Decision:
    """Merge the providers' hints under a policy.

    Args:
        policy: The policy.
        providers: The answers, one per provider; their order does not matter.
        nodes: All NUMA nodes of the machine.
        distances: The distance table where ``prefer-closest-numa-nodes`` is on. Always exact where some
            resource's hints lie within a few nodes (its CPUs, its devices); else exact as long as the
            preferred masks of the least size can be listed, see ``proxy.place.listing``.

    Raises:
        KeyError: A node is not in the distance table.
    """
    if policy is Policy.NONE:
        return Decision(policy, TopologyHint(None, preferred=False), Verdict())
    closest = distances is not None and policy is not Policy.SINGLE_NUMA_NODE
    lists = lists_of(providers, closest=closest)
    if policy is Policy.SINGLE_NUMA_NODE:
        merged = merge(single_numa([entry.hints for entry in lists]), nodes)
    else:
        merged = merge([entry.hints for entry in lists], nodes, distances)
    hint = merged.hint
    if policy is Policy.SINGLE_NUMA_NODE and hint.affinity == nodes:
        hint = TopologyHint(None, hint.preferred)
    return Decision(policy, hint, _verdict(policy, hint), lists, merged)


def single_numa(lists: Sequence[Sequence[TopologyHint]]) -> list[list[TopologyHint]]:
    """Keep the hints that ``single-numa-node`` can use; lists may become empty."""
    return [[hint for hint in hints if is_single(hint)] for hints in lists]


def is_single(hint: TopologyHint) -> bool:
    """Tell whether a hint is preferred and names one node or no mask."""
    return hint.preferred and (hint.affinity is None or len(hint.affinity) == 1)


def wanted(entry: HintList, policy: Policy) -> list[TopologyHint]:
    """Give the hints of a list that could be part of a preferred result; of a family at least the best."""
    hints: Sequence[TopologyHint] = entry.hints
    if entry.family is not None and (best := entry.family.best()) is not None:
        hints = (*hints, best)
    if policy is Policy.SINGLE_NUMA_NODE:
        return [hint for hint in hints if is_single(hint)]
    return [hint for hint in hints if hint.preferred]


def admits(policy: Policy, hint: TopologyHint) -> bool:
    """Tell whether a policy lets a pod with this hint in."""
    return hint.preferred or policy in (Policy.NONE, Policy.BEST_EFFORT)


def _verdict(policy: Policy, hint: TopologyHint) -> Verdict:
    return Verdict() if admits(policy, hint) else UNALIGNED
