"""The two schedulers of a fleet simulation: the stock one, and the stock one with the scheduler extender.

The extender's decisions are made by ``proxy.scheduler``, the code of ``topoproxy scheduler-extender``: it
filters the nodes that kube-scheduler has found feasible, scores them, and assumes the pod on the node that is
chosen. A node publishes the CPUs of a pod before the next pod arrives, and the clock of the assumed pods
advances accordingly.

Theory. With ``percentageOfNodesToScore`` 100 kube-scheduler queries the extender about every node that has
room, and adds its scores to its own: thousands of nodes for each pod, of which one has changed since the last
pod. So nodes are sorted into ranks, by the input of the extender's score and by the stock score, and a node
moves to another rank when it changes. The answers are those of ``NodeTable.filter`` and ``NodeTable.scores``:
the engine evaluates classes of nodes that no pod of the kind has met, only one class for each pod once enough
other nodes fit.
"""

from __future__ import annotations

import bisect
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from proxy.engine.pod_dry_run import ArrivingPod, DryRunOutcome
from proxy.model.idset import CpuSet
from proxy.pools.claims import STRICT
from proxy.scheduler.assumed_pods import GRACE_S
from proxy.scheduler.decision import NodeVerdict, resource_status
from proxy.scheduler.node_facts import DeviceCounts, SchedulableNode
from proxy.scheduler.node_table import ENOUGH_FITTING_NODES, NEW_CLASSES_PER_ANSWER, NodeTable
from proxy.scheduler.pod_demand import PodDemand, with_cpus
from proxy.scheduler.resource_topology import MemoryRows
from proxy.scheduler.scores import Strategy, volcano_scores
from proxy.simulate.fleet.fleet_pods import FleetPod, PodKind
from proxy.simulate.fleet.stock_scheduler import BEST, INFEASIBLE, MOST_KINDS, StockScheduler, StockView
from proxy.simulate.nodes import SimulatedNode

STOCK = "stock"
WITH_EXTENDER = "with extender"
EXTENDER_SCALE = 10
"""kube-scheduler's MaxNodeScore divided by MaxExtenderPriority."""

_Rank = tuple[int, int]
"""The input of the extender's score, and the stock score."""
_NEW = (-1, INFEASIBLE)
"""The rank of nodes of a class that was not evaluated."""


class Ranking:
    """The nodes for one kind of pod."""

    def __init__(self, table: NodeTable, names: Sequence[str], strategy: Strategy) -> None:
        """Rank no nodes yet.

        Args:
            table: The nodes as the extender knows them.
            names: Their names, by position.
            strategy: How the extender scores nodes.
        """
        self._table = table
        self._names = names
        self._strategy = strategy
        self._ranks: dict[_Rank, list[int]] = {}
        self._rank_of: list[_Rank | None] = [None] * len(names)
        self._fitting = 0
        self._changes_read = 0
        self._known: dict[int, NodeVerdict] | None = None

    def update(self, demand: PodDemand, changes: Sequence[int], view: StockView) -> None:
        """Rank the nodes that have changed, and evaluate classes of nodes as the extender does.

        Args:
            demand: A pod of the kind.
            changes: The nodes that have changed, one for each change.
            view: The nodes as the stock scheduler sees them now for this kind.
        """
        verdicts = self._table.verdicts_of(demand)
        fresh = verdicts is not self._known  # verdicts are forgotten when there are too many
        changed: Iterable[int] = range(len(self._names)) if fresh else set(changes[self._changes_read :])
        self._known, self._changes_read = verdicts, len(changes)
        for at in changed:
            self._rank(at, self._rank_now(at, demand, verdicts, view.scores[at]))
        evaluated, fits = 0, self._fitting
        for at in [*self._ranks.get(_NEW, ())]:
            if self._rank_of[at] == _NEW:
                if evaluated >= NEW_CLASSES_PER_ANSWER and fits >= ENOUGH_FITTING_NODES:
                    break
                evaluated += 1
                self._table.verdict(self._names[at], demand, verdicts)
                for index in [*self._ranks[_NEW]]:
                    self._rank(index, self._rank_now(index, demand, verdicts, view.scores[index]))
            fits += self._rank_of[at] is not None

    def best(self, added: Sequence[int]) -> list[int]:
        """Return the nodes with the best sum of scores, in ascending order; empty if none fits.

        Args:
            added: The amount to add to the stock score, by the score of the extender.
        """
        scores = self._scores()
        totals = {rank: added[scores[rank[0]]] + rank[1] for rank in self._ranks if rank != _NEW}
        highest = max(totals.values(), default=0)
        return sorted(at for rank, total in totals.items() if total == highest for at in self._ranks[rank])

    def scores(self) -> dict[int, int]:
        """Return the score that the extender gives each node that fits."""
        scores = self._scores()
        return {at: scores[rank[0]] for at, rank in enumerate(self._rank_of) if rank not in (None, _NEW)}

    def _scores(self) -> dict[int, int]:
        """Return the extender's scores by their input."""
        inputs = [*{value for value, _ in self._ranks.keys() - {_NEW}}]
        if self._strategy is not Strategy.FEWEST_NUMA_NODES:
            return dict(zip(inputs, inputs, strict=True))
        return dict(zip(inputs, volcano_scores(inputs), strict=True))

    def _rank(self, at: int, after: _Rank | None) -> None:
        """Put a node into a rank; None: it does not fit."""
        before = self._rank_of[at]
        if before == after:
            return
        self._rank_of[at] = after
        if before is not None:
            existing = self._ranks[before]
            del existing[bisect.bisect_left(existing, at)]
            if not existing:
                del self._ranks[before]
        if after is not None:
            bisect.insort(self._ranks.setdefault(after, []), at)
        self._fitting += (after not in (None, _NEW)) - (before not in (None, _NEW))

    def _rank_now(
        self, at: int, demand: PodDemand, verdicts: Mapping[int, NodeVerdict], score: int
    ) -> _Rank | None:
        """Return the rank of a node as it is now."""
        if score == INFEASIBLE:
            return None
        name = self._names[at]
        verdict = self._table.known_verdict(name, demand, verdicts)
        if verdict is None:
            return _NEW
        if not verdict.fits:
            return None
        if self._strategy is Strategy.FEWEST_NUMA_NODES:
            return len(verdict.numa_nodes), score
        return self._table.scores(demand, [name], self._strategy)[0], score


class StockFleetScheduler:
    """kube-scheduler alone."""

    name = STOCK

    def __init__(
        self, simulated_nodes: Sequence[SimulatedNode], chance: random.Random, percentage: int = 0
    ) -> None:
        """Prepare to choose among nodes.

        Args:
            simulated_nodes: The nodes.
            chance: Decides among equal nodes.
            percentage: ``percentageOfNodesToScore``; 0: by the number of nodes.
        """
        self._stock = StockScheduler(simulated_nodes, chance, percentage)
        self._at = {simulated_node.name: at for at, simulated_node in enumerate(simulated_nodes)}

    def choose(self, pod: FleetPod) -> int:
        """Return the position of the node for a pod; -1 if no node is suitable."""
        return self._stock.choose(pod.kind.stock, only=self._required(pod))

    def bind(self, at: int, pod: FleetPod) -> ArrivingPod | None:
        """Return a pod as it arrives at the node that was chosen; None if it cannot be bound."""
        return pod.simulated_pod.arrival

    def fitting(self, pod: FleetPod) -> Sequence[int]:
        """Return all nodes on which a pod fits by requests."""
        fitting, required = self._stock.fitting(pod.kind.stock), self._required(pod)
        return fitting if required is None else [at for at in required if at in fitting]

    def bound(self, at: int, pod: FleetPod, outcome: DryRunOutcome, simulated_node: SimulatedNode) -> None:
        """Record the decision of a node on a pod that was bound to it."""
        if outcome.verdict.admitted:
            self._stock.take(at, pod.kind.stock)

    def running(self, at: int, pod: FleetPod, simulated_node: SimulatedNode) -> None:
        """Record a pod that runs already and whose CPUs its node shows as taken."""
        self._stock.take(at, pod.kind.stock)

    def removed(self, at: int, pod: FleetPod, simulated_node: SimulatedNode) -> None:
        """Record that a pod was removed from its node."""
        self._stock.take(at, pod.kind.stock, -1)

    def _required(self, pod: FleetPod) -> Sequence[int] | None:
        """Return the positions of the nodes that a pod may go to; None for all."""
        node_name = pod.simulated_pod.node_name
        if not node_name:
            return None
        return [self._at[node_name]] if node_name in self._at else []


class ExtendedFleetScheduler(StockFleetScheduler):
    """kube-scheduler with the scheduler extender."""

    name = WITH_EXTENDER

    def __init__(
        self,
        simulated_nodes: Sequence[SimulatedNode],
        chance: random.Random,
        percentage: int,
        weight: int,
        strategy: Strategy,
    ) -> None:
        """Prepare to choose among nodes.

        Args:
            simulated_nodes: The nodes.
            chance: Decides among equal nodes.
            percentage: ``percentageOfNodesToScore``.
            weight: The extender's weight in the scheduler's configuration; its scores are 0 to 10, and those
                of plugins 0 to 100.
            strategy: How the extender scores nodes.
        """
        super().__init__(simulated_nodes, chance, percentage)
        self._names = [simulated_node.name for simulated_node in simulated_nodes]
        self._added = [score // EXTENDER_SCALE * weight * EXTENDER_SCALE for score in range(BEST + 1)]
        self._strategy = strategy
        self._table, self._now = NodeTable(), 0.0
        self._rankings: OrderedDict[PodKind, Ranking] = OrderedDict()
        self._shown: list[dict[str, CpuSet]] = [{} for _ in simulated_nodes]
        for at, simulated_node in enumerate(simulated_nodes):
            self._table.put_allocatable(simulated_node.name, simulated_node.offers)
            self._publish(at, simulated_node)

    def choose(self, pod: FleetPod) -> int:
        """Return the position of the node for a pod; -1 if no node is suitable."""
        required = self._required(pod)
        if required is None and self._stock.examines_all:
            best = self.ranking(pod).best(self._added)
            return self._stock.pick(best) if best else -1
        demand = pod.demand

        def extend(nodes: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
            names = list(map(self._names.__getitem__, nodes))
            fits = self._table.filter(demand, names).fits
            scores = self._table.scores(demand, fits, self._strategy)
            passed = nodes if len(fits) == len(names) else list(map(self._at.__getitem__, fits))
            return passed, list(map(self._added.__getitem__, scores))

        return self._stock.choose(pod.kind.stock, extend, required)

    def ranking(self, pod: FleetPod) -> Ranking:
        """Return the nodes as they are now for a pod."""
        kind = pod.kind
        cached = self._rankings.get(kind)
        if cached is None:
            cached = self._rankings[kind] = Ranking(self._table, self._names, self._strategy)
            if len(self._rankings) > MOST_KINDS:
                self._rankings.popitem(last=False)
        self._rankings.move_to_end(kind)
        cached.update(pod.demand, self._stock.changes, self._stock.view(kind.stock))
        return cached

    def bind(self, at: int, pod: FleetPod) -> ArrivingPod | None:
        """Return a pod as it arrives at the node that was chosen; None if it cannot be bound."""
        demand, name = pod.demand, self._names[at]
        verdict = self._table.place(name, demand)
        if not verdict.fits:
            return None
        arrival = pod.simulated_pod.arrival
        facts = self._table.node(name)
        if demand.pod.qos in STRICT and verdict.cpus and facts:
            demand = with_cpus(demand, resource_status(facts, verdict))
            arrival = demand.arrival()
        self._table.assume(name, demand, self._now)
        return arrival

    def bound(self, at: int, pod: FleetPod, outcome: DryRunOutcome, simulated_node: SimulatedNode) -> None:
        """Record the decision of a node on a pod that was bound to it."""
        super().bound(at, pod, outcome, simulated_node)
        uid = pod.simulated_pod.arrival.pod.uid
        if outcome.verdict.admitted:
            cpus = CpuSet.union_of(container.placement.exclusive for container in outcome.containers)
            if cpus:
                self._shown[at][uid] = cpus
            self._table.observe(replace(pod.demand, node=simulated_node.name), self._now, running=True)
            self._publish(at, simulated_node)
        else:
            self._table.release(uid, self._now)

    def running(self, at: int, pod: FleetPod, simulated_node: SimulatedNode) -> None:
        """Record a pod that runs already and whose CPUs its node shows as taken."""
        super().running(at, pod, simulated_node)
        self._table.observe(replace(pod.demand, node=simulated_node.name), self._now, running=True)
        self._publish(at, simulated_node)  # later: the table does not count the pod in addition to the node

    def removed(self, at: int, pod: FleetPod, simulated_node: SimulatedNode) -> None:
        """Record that a pod was removed from its node."""
        super().removed(at, pod, simulated_node)
        uid = pod.simulated_pod.arrival.pod.uid
        self._shown[at].pop(uid, None)
        self._table.release(uid, self._now)
        self._publish(at, simulated_node)

    def _publish(self, at: int, simulated_node: SimulatedNode) -> None:
        """Publish the free resources of a node."""
        node = simulated_node.node
        devices = _devices(simulated_node) if simulated_node.state.devices.registered else {}
        shown = self._shown[at]
        facts = SchedulableNode(
            simulated_node.name,
            node,
            node.reserved,
            simulated_node.ownable,
            devices,
            shown,
            memory=_memory(simulated_node),
        )
        self._now += 2 * GRACE_S
        self._table.put(facts, self._now)


def _memory(simulated_node: SimulatedNode) -> MemoryRows:
    """Return the memory of each NUMA node and its free part, if memory is counted."""
    memory = simulated_node.state.memory
    return tuple(
        (numa, resource, table.allocatable, table.free)
        for numa, numa_memory in (memory.nodes.items() if memory else ())
        for resource, table in numa_memory.tables.items()
    )


def _devices(simulated_node: SimulatedNode) -> DeviceCounts:
    """Return how many devices each NUMA node has, and how many of them are free."""
    counts: dict[str, dict[int, tuple[int, int]]] = {}
    for resource, registered in simulated_node.state.devices.registered.items():
        available = simulated_node.state.devices.available(resource)
        zones = counts.setdefault(resource, {})
        for device in registered.values():
            if device.nodes:
                numa = device.nodes.first()
                total, free = zones.get(numa, (0, 0))
                zones[numa] = total + device.healthy, free + (device.id in available)
    return counts
