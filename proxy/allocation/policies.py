"""The topology policies: from the providers' answers to a hint and a verdict.

One class per policy, as in kubelet (kubernetes v1.36, pkg/kubelet/cm/topologymanager/policy_none.go,
policy_best_effort.go, policy_restricted.go, policy_single_numa_node.go). A policy says which hints it can
use, what happens to the merged hint, and whether it rejects a hint that is not preferred
(``proxy.model.options.TopologyPolicy.is_strict``, the one list of such policies).

If there are too many hints to list, short lists first replace them (``proxy.allocation.hint_sampling``), so
that callers need not distinguish the two cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from msgspec import Struct

from proxy.allocation.distance import Distances
from proxy.allocation.hint_lists import HintList
from proxy.allocation.hint_sampling import lists_of
from proxy.allocation.merge import Merged, merge
from proxy.model.grpc_status import GrpcStatus
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import Mask
from proxy.model.options import TopologyPolicy
from proxy.model.workload import TOPOLOGY_AFFINITY, Verdict

UNALIGNED = Verdict(
    GrpcStatus.FAILED_PRECONDITION, TOPOLOGY_AFFINITY, "Resources cannot be allocated with Topology locality"
)
"""The rejection by a policy, in kubelet's words."""


class PolicyDecision(Struct, frozen=True):
    """The decision of a policy about the providers' answers.

    Attributes:
        policy: The policy.
        hint: The hint for the allocators.
        verdict: Admit, or reject with kubelet's reason and text.
        lists: The hints by resource, before the policy dropped any.
        merged: Winner and runner-up of the merge; None under ``none``, which does not merge.
    """

    policy: TopologyPolicy
    hint: TopologyHint
    verdict: Verdict
    lists: tuple[HintList, ...] = ()
    merged: Merged | None = None

    @property
    def unsatisfiable(self) -> tuple[str, ...]:
        """Resources that cannot be allocated at all."""
        return tuple(entry.resource for entry in self.lists if entry.unsatisfiable)


class PolicyRules:
    """The default rules of a policy: merge all hints, and admit what its name allows.

    Attributes:
        name: kubelet's name of the policy.
    """

    name: ClassVar[TopologyPolicy]

    def uses_distances(self) -> bool:
        """Return whether ``prefer-closest-numa-nodes`` makes a difference."""
        return True

    def usable(self, hint: TopologyHint) -> bool:
        """Return whether a hint could be part of a preferred result."""
        return hint.preferred

    def merge(
        self, lists: Sequence[Sequence[TopologyHint]], nodes: Mask, distances: Distances | None
    ) -> tuple[Merged, TopologyHint]:
        """Merge hints.

        Args:
            lists: The hints by resource.
            nodes: All NUMA nodes of the machine.
            distances: The distance table if ``prefer-closest-numa-nodes`` is on.

        Returns:
            Winner and runner-up, and the hint for the allocators.
        """
        merged = merge(lists, nodes, distances)
        return merged, merged.hint

    def admits(self, hint: TopologyHint) -> bool:
        """Return whether a request with this merged hint is admitted."""
        return hint.preferred or not self.name.is_strict


class NonePolicy(PolicyRules):
    """``none``: nothing is merged (see ``decide``), and everything is admitted."""

    name = TopologyPolicy.NONE


class BestEffortPolicy(PolicyRules):
    """``best-effort``: merges, and also admits a hint that is not preferred."""

    name = TopologyPolicy.BEST_EFFORT


class RestrictedPolicy(PolicyRules):
    """``restricted``: merges as ``best-effort``, and admits only a preferred hint."""

    name = TopologyPolicy.RESTRICTED


class SingleNumaNodePolicy(PolicyRules):
    """``single-numa-node``: uses only preferred hints of one NUMA node or without a mask.

    Lists may become empty by that, and then no result is preferred. A result with all NUMA nodes loses its
    mask, as in kubelet: to the allocators that is the same as having no preference. Distances are never
    used, as there are none within one node.
    """

    name = TopologyPolicy.SINGLE_NUMA_NODE

    def uses_distances(self) -> bool:
        """Return False: within one NUMA node there are no distances."""
        return False

    def usable(self, hint: TopologyHint) -> bool:
        """Return whether a hint is preferred and names one NUMA node or no mask."""
        return hint.preferred and (hint.affinity is None or len(hint.affinity) == 1)

    def merge(
        self, lists: Sequence[Sequence[TopologyHint]], nodes: Mask, distances: Distances | None
    ) -> tuple[Merged, TopologyHint]:
        """Merge the usable hints, see ``PolicyRules.merge``."""
        merged = merge([[hint for hint in hints if self.usable(hint)] for hints in lists], nodes)
        if merged.hint.affinity == nodes:
            return merged, TopologyHint(None, merged.hint.preferred)
        return merged, merged.hint


POLICIES: dict[TopologyPolicy, PolicyRules] = {
    policy.name: policy
    for policy in (NonePolicy(), BestEffortPolicy(), RestrictedPolicy(), SingleNumaNodePolicy())
}
"""The policies by name. A new one is a class and an entry here, and its name in ``TopologyPolicy``."""


def decide(
    policy: TopologyPolicy, providers: Sequence[Hints], nodes: Mask, distances: Distances | None = None
) -> PolicyDecision:
    """Merge the providers' hints under a policy.

    Args:
        policy: The policy.
        providers: The answers, one per provider; their order does not matter.
        nodes: All NUMA nodes of the machine.
        distances: The distance table if ``prefer-closest-numa-nodes`` is on. The result is always exact if
            some resource's hints lie within a few nodes (its CPUs, its devices); otherwise it is exact if the
            preferred masks of the least size can be listed, see ``proxy.allocation.hint_sampling``.

    Raises:
        KeyError: A node is not in the distance table.
    """
    if policy is TopologyPolicy.NONE:
        return PolicyDecision(policy, TopologyHint(None, preferred=False), Verdict())
    rules = POLICIES[policy]
    lists = lists_of(providers, closest=distances is not None and rules.uses_distances())
    merged, hint = rules.merge([entry.hints for entry in lists], nodes, distances)
    verdict = Verdict() if rules.admits(hint) else UNALIGNED
    return PolicyDecision(policy, hint, verdict, lists, merged)


def usable_hints(entry: HintList, policy: TopologyPolicy) -> list[TopologyHint]:
    """Return the hints of a list that could be part of a preferred result; of a family at least the best."""
    hints: Sequence[TopologyHint] = entry.hints
    if entry.family is not None and (best := entry.family.best()) is not None:
        hints = (*hints, best)
    return [hint for hint in hints if POLICIES[policy].usable(hint)]
