"""One node of the table: its facts, and the pods that are bound to it or assumed there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import inf

from msgspec import Struct, field

from proxy.model.idset import CpuSet
from proxy.model.requests import MEMORY
from proxy.scheduler.assumed_pods import AssumedPod
from proxy.scheduler.decision import ExpectedNode, expected_node
from proxy.scheduler.node_facts import SchedulableNode
from proxy.scheduler.pod_demand import PodDemand
from proxy.scheduler.shown_ended_pods import ShownEndedPods
from proxy.scheduler.taints import Taint

NOT_KNOWN = "no object describes the node"
JOIN_S = 60.0
"""How long the table waits for the object of a node that has joined: its agent has to start first."""
COUNTED_RESOURCES = ("cpu", MEMORY)


class NodeRow(Struct):
    """One node of the table.

    Attributes:
        node: The facts of the node; None if nothing can be decided for it.
        problem: Why nothing can be decided for it; empty otherwise.
        pending: The assumed pods that the object of the node does not show.
        counts: The counts on which verdicts depend, in addition to the pending pods.
        free: How many CPUs are free after subtracting those of the pending pods.
        most_free_on_numa_node: The most CPUs that are free on one NUMA node.
        allocatable: The allocatable amounts of the Node object.
        taints: Those of the Node object that keep pods away.
        requested: What the bound pods request, together.
        pods: The bound pods by key: their namespaces and names.
        ended: Pods that the object still shows although they have ended.
        joined: When the Node object was created; a Node object that is older than the table has no time.
    """

    node: SchedulableNode | None = None
    problem: str = NOT_KNOWN
    pending: tuple[AssumedPod, ...] = ()
    counts: tuple[object, ...] = ()
    free: int = 0
    most_free_on_numa_node: int = 0
    allocatable: Mapping[str, int] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    requested: dict[str, int] = field(default_factory=dict)
    pods: dict[str, tuple[str, str]] = field(default_factory=dict)
    ended: ShownEndedPods = field(default_factory=ShownEndedPods)
    joined: float = -inf
    _expected: ExpectedNode | None = None

    def awaits_object(self, now: float) -> bool:
        """Return whether the node joined a short while ago and has no object yet."""
        return self.node is None and now - self.joined <= JOIN_S

    def ended_cpus(self) -> tuple[CpuSet, ...]:
        """Return the CPUs that the object still shows for pods that have ended."""
        return self.ended.cpus(self.node)

    def pending_signatures(self) -> tuple[Hashable, ...]:
        """Return the signatures of the pending pods, as far as they matter for verdicts on this node."""
        by_namespace = self.node is not None and self.node.rules.admission.distinguish_namespaces
        return tuple(assumed.demand.signature_for(by_namespace=by_namespace) for assumed in self.pending)

    def owned_by(self, demand: PodDemand, count: int) -> int:
        """Return how many of the exclusive CPUs that a pod requests the node gives it: all or none."""
        return count if self.node and self.node.gives_cpus(demand) else 0

    def count(self, demand: PodDemand, sign: int) -> None:
        """Add the resources of a pod to those that are requested on the node; ``sign`` -1 subtracts them."""
        for resource in COUNTED_RESOURCES:
            self.requested[resource] = self.requested.get(resource, 0) + sign * demand.needs.get(resource, 0)
        if sign > 0:
            self.pods[demand.key] = demand.spec.namespace, demand.spec.name
        else:
            self.pods.pop(demand.key, None)

    def expected(self) -> ExpectedNode:
        """Return the node with its pending pods; it is made once for all demands."""
        assert self.node is not None
        pending, ended = tuple(assumed.demand for assumed in self.pending), self.ended_cpus()
        cached = self._expected
        if (
            cached is None
            or cached.node is not self.node
            or cached.ended != ended
            or cached.pending != pending[: len(cached.pending)]
        ):
            cached = expected_node(self.node, ended=ended)
        self._expected = cached = cached.with_more(pending[len(cached.pending) :])
        return cached
