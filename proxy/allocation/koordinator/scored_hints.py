"""Find the NUMA nodes that suit a pod, with a score: the hints that ``scored_merge`` merges.

Source: koordinator a7a1b76, pkg/scheduler/plugins/nodenumaresource: topology_hint.go, resource_manager.go
``generateResourceHints``, scoring.go. Sets of nodes are tried by size, each by a trial allocation of the
whole pod. If it succeeds, each resource gets a hint, except that a node with none of a resource is in no hint
for it. A hint is preferred if no smaller set succeeded for its resource; under ``restricted`` all hints are
preferred. The score of a hint says how full (``MostAllocated``) or how empty (any other strategy) the nodes
would be. It is the weighted mean of each resource's used or free part in percent, rounded down.

Koordinator tries all ``2**nodes - 1`` sets. This module does so for up to ``ALL_SETS`` nodes. For more nodes:

- The last size is the first at which every resource has a hint; after it comes the set of all nodes. Larger
  sets are never preferred (and under ``restricted`` never win over the smaller ones), so only a pod whose
  other resources lie on more nodes than its CPUs need is aligned worse than possible.
- Sizes at which even the richest nodes have too little are left out. If the pod has to be on one node, all
  sizes between one node and all nodes are left out too.
- Of a size with more than ``MOST_SETS`` sets a few for each node are tried: neighbours by id, and the richest
  nodes of each resource, which are replaced by poorer nodes one by one while the pod fits. So the time grows
  with the square of the nodes, and a pod that fits on the richest nodes is not rejected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from proxy.allocation.koordinator.bind_request import PolicyConflictError
from proxy.allocation.koordinator.hints import ScoredHint
from proxy.allocation.koordinator.node_shares import CPU, Amounts
from proxy.allocation.koordinator.scored_merge import NodeStatus
from proxy.model.idset import Mask
from proxy.model.koordinator import KUBERNETES, NumaPolicy, NumaStrategy
from proxy.model.options import TopologyPolicy

ALL_SETS = 8
"""Up to this many nodes every set of them is tried."""
MOST_SETS = math.comb(36, 2)
"""Of a size with more sets than this only some are tried."""

WEIGHTS: Mapping[str, int] = {CPU: 1, "memory": 1}


def policy_of(pod: NumaPolicy, node: NumaPolicy) -> TopologyPolicy:
    """Return the policy that applies to a pod.

    Raises:
        PolicyConflictError: Pod and node have different policies.
    """
    if pod and node and pod is not node:
        raise PolicyConflictError(f"cannot align the pod: the pod requires {pod} and the node has {node}")
    return KUBERNETES[pod or node]


def node_status(pods: Iterable[Mask]) -> dict[int, NodeStatus]:
    """Return how bound pods use NUMA nodes.

    Args:
        pods: The nodes of each pod.

    Returns:
        The used nodes; a node with a pod that spans several nodes is shared.
    """
    status: dict[int, NodeStatus] = {}
    for nodes in pods:
        for node in nodes:
            if len(nodes) > 1:
                status[node] = NodeStatus.SHARED
            else:
                status.setdefault(node, NodeStatus.SINGLE)
    return status


def scored_hints(
    requests: Amounts,
    available: Mapping[int, Amounts],
    fits: Callable[[Mask], bool],
    policy: TopologyPolicy,
    score: Callable[[Mask], int] = lambda _: 0,
) -> dict[str, list[ScoredHint]]:
    """Return the hints of a pod.

    Args:
        requests: The amounts that it requests.
        available: The free amounts of every NUMA node; a resource that no node names gets no hints.
        fits: Returns whether the whole pod can be placed on these nodes.
        policy: The policy that applies.
        score: Returns how well these NUMA nodes suit the pod, see ``score_of``; only called if the pod fits
            on them.

    Returns:
        Resource to hints, by size and then by node ids; an empty list if the resource cannot be given.
    """
    known_resources = {resource for amounts in available.values() for resource in amounts}
    hints_of: dict[str, list[ScoredHint]] = {
        resource: [] for resource in sorted(known_resources & requests.keys())
    }
    least: dict[str, int] = {}
    if not hints_of:
        return hints_of
    search = _NodeSetSearch(requests, available, fits, single=policy is TopologyPolicy.SINGLE_NUMA_NODE)
    for nodes in search.sets(lambda: all(hints_of.values())):
        if not fits(nodes):
            continue
        score_of_nodes = score(nodes)
        for resource, hints in hints_of.items():
            if all(available[node].get(resource, 0) > 0 for node in nodes):
                smallest = least.setdefault(resource, len(nodes)) == len(nodes)
                hints.append(
                    ScoredHint(nodes, smallest or policy is TopologyPolicy.RESTRICTED, score=score_of_nodes)
                )
    return hints_of


def score_of(
    requests: Amounts,
    available: Mapping[int, Amounts],
    total: Mapping[int, Amounts],
    nodes: Mask,
    strategy: NumaStrategy,
    weights: Mapping[str, int] = WEIGHTS,
) -> int:
    """Score nodes for a pod.

    Args:
        requests: The amounts that it requests.
        available: The free amounts of every node.
        total: The amounts that every node has in total.
        nodes: The nodes.
        strategy: Whether full or empty nodes are better.
        weights: Resource to weight; resources that the nodes do not have are ignored.

    Returns:
        0 to 100.
    """
    points = weight_sum = 0
    for resource, weight in weights.items():
        total_amount = sum(total.get(node, {}).get(resource, 0) for node in nodes)
        free = sum(available.get(node, {}).get(resource, 0) for node in nodes)
        if total_amount <= 0:
            continue
        used = max(total_amount - free, 0) + requests.get(resource, 0)
        part = (
            min(used, total_amount)
            if strategy is NumaStrategy.MOST_ALLOCATED
            else max(total_amount - used, 0)
        )
        points += weight * (part * 100 // total_amount)
        weight_sum += weight
    return points // weight_sum if weight_sum else 0


class _NodeSetSearch:
    """The sets of nodes to try, in order."""

    def __init__(
        self,
        requests: Amounts,
        available: Mapping[int, Amounts],
        fits: Callable[[Mask], bool],
        *,
        single: bool,
    ) -> None:
        self._available = available
        self._fits = fits
        self._single = single
        self._nodes = sorted(available)
        self._asked = sorted(
            r for r, amount in requests.items() if amount and any(r in own for own in available.values())
        )
        self._fewest = max((self._needed(r, requests[r]) for r in self._asked), default=1)

    def sets(self, enough: Callable[[], bool]) -> Iterator[Mask]:
        """Return sets of nodes by size.

        Args:
            enough: Called after each size; true when only the set of all nodes is still to be tried.
        """
        nodes = self._nodes
        if len(nodes) <= ALL_SETS:
            for size in range(1, len(nodes) + 1):
                yield from map(Mask, itertools.combinations(nodes, size))
            return
        for size in range(self._fewest, 2 if self._single else len(nodes)):
            if math.comb(len(nodes), size) <= MOST_SETS:
                yield from map(Mask, itertools.combinations(nodes, size))
            else:
                yield from self._sample(size)
            if enough():
                break
        yield Mask(nodes)

    def _needed(self, resource: str, amount: int) -> int:
        """Return how many of the richest nodes have enough of a resource; all nodes if they do not."""
        for count, node in enumerate(self._by_amount(resource), 1):
            amount -= self._has(resource, node)
            if amount <= 0:
                return count
        return len(self._nodes)

    def _sample(self, size: int) -> Iterator[Mask]:
        """Return some sets of a size, each once."""
        nodes = self._nodes
        neighbours = (Mask(nodes[first : first + size]) for first in range(len(nodes) - size + 1))
        sets = dict.fromkeys(neighbours)
        for resource in self._asked:
            order = self._by_amount(resource)
            chosen = order[:size]
            sets[Mask(chosen)] = None
            for at, poorer in zip(reversed(range(size)), reversed(order[size:]), strict=False):
                swapped = [*chosen[:at], poorer, *chosen[at + 1 :]]
                if self._fits(Mask(swapped)):
                    chosen = swapped
                    sets[Mask(chosen)] = None
        yield from sets

    def _by_amount(self, resource: str) -> list[int]:
        return sorted(self._nodes, key=lambda node: -self._has(resource, node))

    def _has(self, resource: str, node: int) -> int:
        return self._available[node].get(resource, 0)
