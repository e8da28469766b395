"""Placing pods one after the other on some nodes.

Theory. Two parts decide, as in a real cluster. First a scheduler that knows sums only: it leaves out nodes
that lack CPU, memory, huge pages, devices or room for one more pod by requests (if the pod names a node,
only that one is considered), and of the others takes the one with the most free CPU, or with ``fill`` the
least; equal nodes come in the order in which they were given. Then the node's engine decides, the same
code that ``serve`` runs: it knows NUMA nodes and may reject the pod. A rejected pod has failed there, as it
does under kubelet: it holds nothing, and is not tried elsewhere unless ``retry`` is set.

Affinities, taints, priorities and preemption are not simulated.

Nodes are kept sorted by free CPU, so a pod that fits somewhere is usually placed at the first attempt.
"""

from __future__ import annotations

import bisect
import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from proxy.engine.pod_dry_run import DryRunOutcome, dry_run
from proxy.model.explanation import Explanation
from proxy.model.workload import Container
from proxy.simulate.nodes import SimulatedNode
from proxy.simulate.pods import SimulatedPod

NO_SUCH_MACHINE = "NoSuchMachine"


class PodOutcome(enum.StrEnum):
    """The outcome for a pod."""

    PLACED = "placed"
    REJECTED = "refused"
    UNSCHEDULABLE = "unschedulable"


@dataclass(frozen=True, slots=True)
class Result:
    """The result for one pod.

    Attributes:
        simulated_pod: The pod.
        outcome: The outcome.
        node_name: The node where it runs, or that rejected it last; empty if none fits.
        reason: Short CamelCase reason (``TopologyAffinityError``, ``Unschedulable``, ``NoSuchMachine``);
            empty when placed.
        message: The reason as text.
        tried: Nodes that rejected it, in their order.
        lacking: Resources of which the nodes have too little; only if it is unschedulable.
        container: The container that was rejected; empty for the pod as a whole.
        containers: Its containers as placed.
        explanations: Records of the decisions, only if they were requested.
    """

    simulated_pod: SimulatedPod
    outcome: PodOutcome
    node_name: str = ""
    reason: str = ""
    message: str = ""
    tried: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    container: str = ""
    containers: tuple[Container, ...] = ()
    explanations: tuple[Explanation, ...] = ()


class Cluster:
    """A set of nodes that places arriving pods; ``simulated_nodes`` holds the result."""

    def __init__(self, simulated_nodes: Sequence[SimulatedNode], *, fill: bool, retry: bool) -> None:
        """Prepare a simulation on some nodes.

        Args:
            simulated_nodes: The nodes, names unique.
            fill: Take the node with the least free CPU that fits, not the one with the most.
            retry: Let a rejected pod try the next node.
        """
        self.simulated_nodes = tuple(simulated_nodes)
        self._by_name = {simulated_node.name: at for at, simulated_node in enumerate(self.simulated_nodes)}
        self._fill = fill
        self._retry = retry
        self._order = sorted(map(self._key, range(len(self.simulated_nodes))))

    def run(
        self,
        simulated_pods: Iterable[SimulatedPod],
        step: Callable[[], object] = lambda: None,
        explain: frozenset[str] = frozenset(),
    ) -> list[Result]:
        """Place pods.

        Args:
            simulated_pods: The pods, in their order.
            step: Called after each.
            explain: Pods (``namespace/name``) whose decisions are kept.
        """
        results = []
        for simulated_pod in simulated_pods:
            results.append(self._place(simulated_pod, explain=simulated_pod.ref in explain))
            step()
        return results

    def _place(self, simulated_pod: SimulatedPod, *, explain: bool) -> Result:
        rejections: list[tuple[SimulatedNode, DryRunOutcome]] = []
        for at in self._fitting(simulated_pod):
            simulated_node = self.simulated_nodes[at]
            outcome = dry_run(simulated_node.state, simulated_pod.arrival)
            explanations = outcome.explanations if explain else ()
            if outcome.verdict.admitted:
                self._record_placement(at, simulated_pod, outcome)
                tried = tuple(rejecting.name for rejecting, _ in rejections)
                return Result(
                    simulated_pod,
                    PodOutcome.PLACED,
                    simulated_node.name,
                    tried=tried,
                    containers=outcome.containers,
                    explanations=explanations,
                )
            rejections.append((simulated_node, outcome))
            if not self._retry:
                break
        if not rejections:
            return self._unschedulable(simulated_pod)
        simulated_node, outcome = rejections[-1]
        return Result(
            simulated_pod,
            PodOutcome.REJECTED,
            simulated_node.name,
            outcome.verdict.reason,
            outcome.verdict.operator_message,
            tuple(rejecting.name for rejecting, _ in rejections),
            container=outcome.refused,
            explanations=outcome.explanations if explain else (),
        )

    def _fitting(self, simulated_pod: SimulatedPod) -> Iterator[int]:
        """Return the nodes that fit by requests, the best first."""
        if simulated_pod.node_name:
            at = self._by_name.get(simulated_pod.node_name)
            if at is not None and not self.simulated_nodes[at].lacks(simulated_pod.needs):
                yield at
            return
        cpu = simulated_pod.needs.get("cpu", 0)
        first = bisect.bisect_left(self._order, (cpu, -1)) if self._fill else 0
        for key, at in self._order[first:]:
            if not self._fill and -key < cpu:
                return  # nor do the machines after it
            if not self.simulated_nodes[at].lacks(simulated_pod.needs):
                yield at

    def _record_placement(self, at: int, simulated_pod: SimulatedPod, outcome: DryRunOutcome) -> None:
        simulated_node = self.simulated_nodes[at]
        del self._order[bisect.bisect_left(self._order, self._key(at))]
        simulated_node.state = outcome.state
        simulated_node.take(simulated_pod.needs)
        bisect.insort(self._order, self._key(at))

    def _key(self, at: int) -> tuple[int, int]:
        free = self.simulated_nodes[at].free["cpu"]
        return (free if self._fill else -free, at)

    def _unschedulable(self, simulated_pod: SimulatedPod) -> Result:
        if simulated_pod.node_name and simulated_pod.node_name not in self._by_name:
            message = f"it requires the machine {simulated_pod.node_name}, which is not among the machines"
            return Result(simulated_pod, PodOutcome.UNSCHEDULABLE, "", NO_SUCH_MACHINE, message)
        examined = (
            [self._by_name[simulated_pod.node_name]]
            if simulated_pod.node_name
            else range(len(self.simulated_nodes))
        )
        short = Counter(
            resource for at in examined for resource in self.simulated_nodes[at].lacks(simulated_pod.needs)
        )
        lacking = tuple(sorted(short))
        if len(examined) == 1:
            message = f"{self.simulated_nodes[examined[0]].name} has too little {', '.join(lacking)}"
        else:
            counts = ", ".join(f"{short[resource]} have too little {resource}" for resource in lacking)
            message = f"none of {len(examined)} machines fits: {counts}"
        return Result(simulated_pod, PodOutcome.UNSCHEDULABLE, "", "Unschedulable", message, lacking=lacking)
