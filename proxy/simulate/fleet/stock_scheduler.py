"""The rules by which an unmodified kube-scheduler chooses a node, for pods without affinity.

Theory (kubernetes v1.36 pkg/scheduler). NodeResourcesFit leaves out nodes that lack room for one more pod,
CPU, memory or any other resource by requests (framework/plugins/noderesources/fit.go, fitsRequest). The
search begins where the last one ended and stops at enough feasible nodes (schedule_one.go,
numFeasibleNodesToFind).
Two plugins tell those nodes apart, each with weight 1 (apis/config/v1/default_plugins.go):

- NodeResourcesFit with LeastAllocated: the free share of CPU and memory; a container without a request counts
  with 100m and 200Mi (noderesources/least_allocated.go);
- NodeResourcesBalancedAllocation: how much closer the pod brings the used shares of CPU and memory to each
  other (noderesources/balanced_allocation.go, balancedResourceScorer). It skips pods that request neither.

The other plugins give every node the same score if nodes have no taints and no images, and pods no affinity,
no spread constraints and no owner that a Service or a ReplicaSet selects. A random number decides among
equals.

A score depends on the node and on the pod's request. So it is kept for each kind of pod and computed again
for the nodes that have changed since, which is one for each pod that was bound.
"""

from __future__ import annotations

import bisect
import operator
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy.model.requests import MEMORY, peak_request
from proxy.pools.pod_fields import CPU
from proxy.pools.pod_spec import PodSpec
from proxy.simulate.nodes import PODS, SimulatedNode
from proxy.simulate.pods import needs_of

ExtenderCall = Callable[[Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""An extender: returns the nodes that pass, and the scores to add; empty for equal scores."""

BEST = 100
"""The best score of a plugin."""
LEAST_FEASIBLE = 100
"""Nodes that are always looked for (minFeasibleNodesToFind)."""
LEAST_PERCENTAGE = 5
UNREQUESTED = {CPU: 100, MEMORY: 200 << 20}
"""The request that LeastAllocated counts for a container without one, in thousandths of a CPU and bytes."""
_SCORED = (CPU, MEMORY)
INFEASIBLE = -1
"""The value in place of a score for a node that lacks room."""
MOST_KINDS = 256
"""The most kinds of pods whose scores are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class StockDemand:
    """The request of a pod as the stock scheduler counts it; one object for each kind of pod.

    Attributes:
        needs: Resource to amount, without zeros.
        scored: CPU and memory as LeastAllocated counts them.
    """

    needs: Mapping[str, int]
    scored: tuple[int, int]


def stock_demand(spec: PodSpec) -> StockDemand:
    """Return the request of a pod as the stock scheduler counts it."""
    counted = peak_request(spec.requests.containers, lambda container: {**UNREQUESTED, **container.requests})
    scored = {**counted, **(spec.requests.pod_level_requests or {})}
    first, second = (scored.get(name, 0) + spec.overhead.get(name, 0) for name in _SCORED)
    return StockDemand(needs_of(spec), (first, second))


def enough_nodes(nodes: int, percentage: int = 0) -> int:
    """Return the number of feasible nodes at which the search stops.

    Args:
        nodes: How many there are.
        percentage: ``percentageOfNodesToScore``; 0: by the number of nodes, as by default.
    """
    if nodes < LEAST_FEASIBLE:
        return nodes
    share = percentage or max(LEAST_PERCENTAGE, 50 - nodes // 125)
    return max(LEAST_FEASIBLE, nodes * min(share, 100) // 100)


@dataclass(slots=True)
class StockView:
    """The nodes as the stock scheduler sees them for one kind of pod.

    Attributes:
        scores: Of all nodes; ``INFEASIBLE`` if a node lacks room.
        fitting: The nodes with room, in ascending order.
        changes_read: How many changes of nodes are counted.
    """

    scores: list[int]
    fitting: list[int]
    changes_read: int


class StockScheduler:
    """kube-scheduler with its default plugins. ``take`` keeps its view of the nodes.

    Attributes:
        changes: The nodes that have changed, one for each change.
    """

    def __init__(
        self, simulated_nodes: Sequence[SimulatedNode], chance: random.Random, percentage: int = 0
    ) -> None:
        """Prepare to choose among some nodes.

        Args:
            simulated_nodes: The nodes, in the order in which the scheduler came to know them.
            chance: Decides among equals.
            percentage: ``percentageOfNodesToScore``.
        """
        self._nodes = [_NodeSums(simulated_node.offers) for simulated_node in simulated_nodes]
        self._chance = chance
        self._start = 0
        self._enough = enough_nodes(len(simulated_nodes), percentage)
        self._views: OrderedDict[StockDemand, StockView] = OrderedDict()
        self.changes: list[int] = []

    @property
    def examines_all(self) -> bool:
        """Whether no node that fits is left out."""
        return self._enough >= len(self._nodes)

    def take(self, at: int, demand: StockDemand, sign: int = 1) -> None:
        """Count a pod that was bound to a node; ``sign`` -1: a pod that has left it."""
        self._nodes[at].take(demand, sign)
        self.changes.append(at)

    def fitting(self, demand: StockDemand) -> Sequence[int]:
        """Return all nodes that pass NodeResourcesFit for a pod."""
        return self.view(demand).fitting

    def view(self, demand: StockDemand) -> StockView:
        """Return the nodes as they are now for a pod; it is kept up to date for ``MOST_KINDS``."""
        view = self._views.get(demand)
        if view is None:
            scores = [self._score(at, demand) for at in range(len(self._nodes))]
            fitting = [at for at, score in enumerate(scores) if score != INFEASIBLE]
            view = self._views[demand] = StockView(scores, fitting, len(self.changes))
            if len(self._views) > MOST_KINDS:
                self._views.popitem(last=False)
        self._views.move_to_end(demand)
        for at in set(self.changes[view.changes_read :]):
            score, before = self._score(at, demand), view.scores[at]
            view.scores[at] = score
            if before == INFEASIBLE != score:
                bisect.insort(view.fitting, at)
            elif before != INFEASIBLE == score:
                del view.fitting[bisect.bisect_left(view.fitting, at)]
        view.changes_read = len(self.changes)
        return view

    def choose(
        self, demand: StockDemand, extend: ExtenderCall | None = None, only: Sequence[int] | None = None
    ) -> int:
        """Return the index of the node for a pod; -1 if no node is suitable.

        Args:
            demand: The pod.
            extend: The extender, if there is one.
            only: The nodes that the pod may go to; None for all.
        """
        view = self.view(demand)
        nodes: Sequence[int] = (
            self._feasible(view) if only is None else [at for at in only if view.scores[at] != INFEASIBLE]
        )
        added: Sequence[int] = ()
        if extend is not None and nodes:
            nodes, added = extend(nodes)
        if len(nodes) < 2:
            return nodes[0] if nodes else -1
        totals = [view.scores[at] for at in nodes]
        if added:
            totals = list(map(operator.add, totals, added))
        best = max(totals)
        return self.pick([at for at, total in zip(nodes, totals, strict=True) if total == best])

    def pick(self, best: Sequence[int]) -> int:
        """Return one of the best nodes."""
        return self._chance.choice(best)

    def _score(self, at: int, demand: StockDemand) -> int:
        node = self._nodes[at]
        return node.score(demand) if node.fits(demand) else INFEASIBLE

    def _feasible(self, view: StockView) -> list[int]:
        """Return the nodes that the scheduler continues with, in the order in which it finds them."""
        start, count, fitting = self._start, len(self._nodes), view.fitting
        first = bisect.bisect_left(fitting, start)
        feasible = fitting[first : first + self._enough]
        feasible += fitting[: min(first, self._enough - len(feasible))]
        examined = (feasible[-1] - start) % count + 1 if len(feasible) == self._enough else count
        self._start = (start + examined) % count
        return feasible


class _NodeSums:
    """The requests on one node as kube-scheduler counts them."""

    __slots__ = ("_limited", "_offers", "_pods", "_scored", "_used")

    def __init__(self, offers: Mapping[str, int]) -> None:
        self._offers = offers
        self._used = dict.fromkeys((*offers, *_SCORED), 0)
        self._scored = [0, 0]
        self._pods = offers.get(PODS)
        self._limited = MEMORY in offers

    def take(self, demand: StockDemand, sign: int) -> None:
        for resource, amount in demand.needs.items():
            self._used[resource] = self._used.get(resource, 0) + sign * amount
        for at, amount in enumerate(demand.scored):
            self._scored[at] += sign * amount
        self._used[PODS] = self._used.get(PODS, 0) + sign

    def fits(self, demand: StockDemand) -> bool:
        used, offers = self._used, self._offers
        if self._pods is not None and used[PODS] >= self._pods:
            return False
        return all(
            offers.get(resource, 0) - used.get(resource, 0) >= amount
            or (resource == MEMORY and not self._limited)
            for resource, amount in demand.needs.items()
        )

    def score(self, demand: StockDemand) -> int:
        """Return the sum of the weighted scores."""
        total = self._least_allocated(demand)
        if any(resource in demand.needs for resource in _SCORED):
            total += self._balanced_allocation(demand)
        return total

    def _least_allocated(self, demand: StockDemand) -> int:
        total = weights = 0
        for resource, used, amount in zip(_SCORED, self._scored, demand.scored, strict=True):
            if offer := self._offers.get(resource, 0):
                total += max(offer - used - amount, 0) * BEST // offer
                weights += 1
        return total // weights if weights else 0

    def _balanced_allocation(self, demand: StockDemand) -> int:
        without = self._balance({})
        within = self._balance(demand.needs)
        return BEST // 2 + (BEST // 2 + within - without) // 2

    def _balance(self, more: Mapping[str, int]) -> int:
        """Return how close the used shares are: 100 for equal ones."""
        shares = [
            min((self._used[resource] + more.get(resource, 0)) / offer, 1.0)
            for resource in _SCORED
            if (offer := self._offers.get(resource, 0))
        ]
        deviation = abs((shares[0] - shares[1]) / 2) if len(shares) == 2 else 0.0
        return int((1 - deviation) * BEST)
