"""A run of one scheduler: its own fleet, and pods that arrive, are bound, admitted or rejected, and leave.

Theory. Pods come at their times. The scheduler chooses a node by its view of the nodes; the node's engine,
the code that ``serve`` runs, then admits or rejects the pod. A rejected pod has failed, as under kubelet: it
holds nothing. A pod that no node has room for waits, and is tried again when a pod leaves; of equal pods, the
first that fails decides for the others. In the end all waiting pods are tried until none finds a node,
because the scheduler may have examined only some of the nodes. Time passes between events: a decision takes
none.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from proxy.engine.pod_dry_run import ArrivingPod, DryRunOutcome, dry_run, without_pod
from proxy.model.workload import Pool
from proxy.simulate.fleet.fleet_pods import FleetPod, PodKind
from proxy.simulate.nodes import SimulatedNode


class FreeCpus:
    """CPUs that could still be given to one container alone, by node and NUMA node."""

    def __init__(self, simulated_nodes: Sequence[SimulatedNode]) -> None:
        """Count the free CPUs of some nodes."""
        self._numa = {
            id(simulated_node.node): [numa.cpus.bits for numa in simulated_node.node.machine.nodes]
            for simulated_node in simulated_nodes
        }
        self._free: list[list[int]] = [self._counts(simulated_node) for simulated_node in simulated_nodes]

    def update(self, at: int, simulated_node: SimulatedNode) -> None:
        """Count the free CPUs of a node again."""
        self._free[at] = self._counts(simulated_node)

    def total(self) -> int:
        """Return the number of these CPUs on all nodes."""
        return sum(map(sum, self._free))

    def unusable(self, size: int) -> int:
        """Return how many stay unused when all NUMA nodes are filled with containers of some size."""
        return sum(free % size for node in self._free for free in node)

    def holds(self, at: int, sizes: Sequence[int]) -> bool:
        """Return whether a node has room for containers of these sizes, each on one of its NUMA nodes.

        Larger containers are placed first, each on the NUMA node with the least room that is enough for it.
        """
        if len(sizes) == 1:
            return max(self._free[at]) >= sizes[0]
        remaining = sorted(self._free[at])
        for size in sorted(sizes, reverse=True):
            index = next((number for number, free in enumerate(remaining) if free >= size), None)
            if index is None:
                return False
            remaining[index] -= size
            remaining.sort()
        return True

    def _counts(self, simulated_node: SimulatedNode) -> list[int]:
        remaining = simulated_node.ownable.bits
        return [(remaining & cpus).bit_count() for cpus in self._numa[id(simulated_node.node)]]


class FleetScheduler(Protocol):
    """A scheduler that chooses nodes."""

    def choose(self, pod: FleetPod) -> int:
        """Return the index of the node for a pod; -1 if no node is suitable."""

    def bind(self, at: int, pod: FleetPod) -> ArrivingPod | None:
        """Return a pod as it arrives at the node that was chosen; None if it cannot be bound."""

    def fitting(self, pod: FleetPod) -> Sequence[int]:
        """Return all nodes on which a pod fits by requests."""

    def bound(self, at: int, pod: FleetPod, outcome: DryRunOutcome, simulated_node: SimulatedNode) -> None:
        """Record the decision of a node on a pod that was bound to it."""

    def running(self, at: int, pod: FleetPod, simulated_node: SimulatedNode) -> None:
        """Record a pod that runs already and whose CPUs its node shows as taken."""

    def removed(self, at: int, pod: FleetPod, simulated_node: SimulatedNode) -> None:
        """Record that a pod was removed from its node."""


class FleetPodState(enum.StrEnum):
    """The outcome for a pod."""

    PLACED = "placed"
    REJECTED = "rejected"
    WAITING = "waiting"


@dataclass(slots=True)
class FleetPodResult:
    """The result for one pod.

    Attributes:
        pod: The pod.
        outcome: The outcome so far.
        node: Where it runs, has run or was rejected; empty if it was never bound.
        reason: Why it was rejected.
        is_on_one_numa_node: Whether each of its containers with CPUs of its own was placed on one NUMA node.
        could_be_on_one_numa_node: Whether that was possible on some node when it was bound or last tried.
        arrived, bound: When, in seconds of the simulation; ``bound`` is negative if it was never bound.
    """

    pod: FleetPod
    arrived: float
    outcome: FleetPodState = FleetPodState.WAITING
    node: str = ""
    reason: str = ""
    is_on_one_numa_node: bool = False
    could_be_on_one_numa_node: bool = False
    bound: float = -1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at a moment.

    Attributes:
        time: In seconds of the simulation.
        arrived, placed, rejected, waiting: Pods so far; ``placed`` includes those that have left.
        free: CPUs that could still be owned.
        unusable: Of these, by size of container, those that none of that size can use.
    """

    time: float
    arrived: int
    placed: int
    rejected: int
    waiting: int
    free: int
    unusable: dict[int, int]


_Leaving = list[tuple[float, int, int, FleetPodResult]]
"""A heap of pods that will leave: when, a number that decides among equals, the node, the pod."""


@dataclass(slots=True)
class FleetRun:
    """A run of one scheduler. ``records`` and ``samples`` show it.

    Attributes:
        name: The name of the scheduler.
        simulated_nodes: The nodes; they change.
        scheduler: The scheduler.
        sizes: Sizes of containers for which fragmentation is measured.
        every: Arrivals between two samples.
        records: The result for each pod that has come.
        samples: The fleet over time.
        decisions: The time that each decision took, in seconds of real time.
    """

    name: str
    simulated_nodes: Sequence[SimulatedNode]
    scheduler: FleetScheduler
    sizes: Sequence[int]
    every: int = 100
    records: list[FleetPodResult] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    decisions: list[float] = field(default_factory=list)
    _free: FreeCpus = field(init=False)
    _placed: int = 0
    _rejected: int = 0
    _waiting: dict[int, FleetPodResult] = field(default_factory=dict)
    _order: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        """Count the free CPUs of the nodes."""
        self._free = FreeCpus(self.simulated_nodes)

    def place_running(self, pods: Iterable[FleetPod], shown: Mapping[str, Container[str]]) -> list[str]:
        """Place the pods that run already; return the names of those that their nodes reject.

        Args:
            pods: The pods, each with the node that it is bound to.
            shown: By node, the uids of pods whose CPUs it shows as taken: only their requests are counted.
        """
        at = {simulated_node.name: number for number, simulated_node in enumerate(self.simulated_nodes)}
        rejected = []
        for pod in pods:
            number, record = at[pod.simulated_pod.node_name], FleetPodResult(pod, 0.0)
            if pod.simulated_pod.pod_template.spec.uid in shown.get(pod.simulated_pod.node_name, ()):
                self.simulated_nodes[number].take(pod.simulated_pod.needs)
                self.scheduler.running(number, pod, self.simulated_nodes[number])
            elif not self._arrive(number, record, pod.simulated_pod.arrival, 0.0):
                rejected.append(pod.simulated_pod.ref)
        self._placed = self._rejected = 0
        return rejected

    def play(
        self, pods: Sequence[FleetPod], times: Sequence[tuple[float, float]], step: Callable[[], object]
    ) -> None:
        """Let pods arrive.

        Args:
            pods: The pods.
            times: For each when it comes and how long it runs, in seconds.
            step: Called after each arrival.
        """
        leaving: _Leaving = []
        for pod, (now, _) in zip(pods, times, strict=True):
            while leaving and leaving[0][0] <= now:
                self._depart(leaving, times)
            record = FleetPodResult(pod, now)
            self.records.append(record)
            number = len(self.records) - 1
            if not self._attempt(record, now, leaving, times[number][1]):
                self._waiting[number] = record
            if number % self.every == 0:
                self._sample(now)
            step()
        last = times[-1][0] if times else 0.0
        while leaving and self._waiting:
            last = leaving[0][0]
            self._depart(leaving, times)
        while self._retry(last, leaving, times, by_kind=False):
            pass
        self._sample(last)

    def _depart(self, leaving: _Leaving, times: Sequence[tuple[float, float]]) -> None:
        """Remove a pod, and retry the pods that wait."""
        now, _, at, departed = heapq.heappop(leaving)
        simulated_node = self.simulated_nodes[at]
        simulated_node.state = without_pod(
            simulated_node.state, departed.pod.simulated_pod.arrival.pod.sandbox_id
        )
        simulated_node.take(departed.pod.simulated_pod.needs, -1)
        self._free.update(at, simulated_node)
        self.scheduler.removed(at, departed.pod, simulated_node)
        self._retry(now, leaving, times, by_kind=True)

    def _retry(
        self, now: float, leaving: _Leaving, times: Sequence[tuple[float, float]], *, by_kind: bool
    ) -> bool:
        """Try the pods that wait again; return whether some node was found for any of them.

        Args:
            now: The time of the simulation.
            leaving: The heap to which placed pods are added.
            times: How long they run.
            by_kind: Whether the first pod that fails decides for all that request the same and may go to the
                same nodes.
        """
        unplaceable: set[tuple[PodKind, str]] = set()
        before = len(self._waiting)
        for number, record in list(self._waiting.items()):
            alike = record.pod.kind, record.pod.simulated_pod.node_name
            if alike in unplaceable:
                continue
            if self._attempt(record, now, leaving, times[number][1]):
                del self._waiting[number]
            elif by_kind:
                unplaceable.add(alike)
        return len(self._waiting) < before

    def _attempt(self, record: FleetPodResult, now: float, leaving: _Leaving, stays: float) -> bool:
        """Schedule a pod; return whether a node was found for it."""
        began = time.perf_counter()
        at = self.scheduler.choose(record.pod)
        arrival = self.scheduler.bind(at, record.pod) if at >= 0 else None
        self.decisions.append(time.perf_counter() - began)
        sizes = record.pod.kind.sizes
        if sizes:
            # The chosen node first: if it has room, no other node is examined.
            chosen_has_room = at >= 0 and self._free.holds(at, sizes)
            record.could_be_on_one_numa_node = chosen_has_room or self._could_be_on_one_numa_node(record.pod)
        if arrival is None:
            return False
        if self._arrive(at, record, arrival, now) and stays != float("inf"):
            heapq.heappush(leaving, (now + stays, next(self._order), at, record))
        return True

    def _arrive(self, at: int, record: FleetPodResult, arrival: ArrivingPod, now: float) -> bool:
        """Let a node admit a pod; return whether it did."""
        simulated_node, pod = self.simulated_nodes[at], record.pod
        outcome = dry_run(simulated_node.state, arrival)
        record.node, record.bound = simulated_node.name, now
        if outcome.verdict.admitted:
            simulated_node.state = outcome.state
            simulated_node.take(pod.simulated_pod.needs)
            record.outcome = FleetPodState.PLACED
            record.is_on_one_numa_node = _is_on_one_numa_node(simulated_node, outcome)
            self._placed += 1
            self._free.update(at, simulated_node)
        else:
            record.outcome, record.reason = FleetPodState.REJECTED, outcome.verdict.reason
            self._rejected += 1
        self.scheduler.bound(at, pod, outcome, simulated_node)
        return outcome.verdict.admitted

    def _could_be_on_one_numa_node(self, pod: FleetPod) -> bool:
        """Return whether some node has room for a pod with each of its containers on one NUMA node."""
        sizes = pod.kind.sizes
        return any(self._free.holds(at, sizes) for at in self.scheduler.fitting(pod))

    def _sample(self, now: float) -> None:
        unusable = {size: self._free.unusable(size) for size in self.sizes}
        self.samples.append(
            Sample(
                now, len(self.records), self._placed, self._rejected, len(self._waiting),
                self._free.total(), unusable,
            )
        )  # fmt: skip


def _is_on_one_numa_node(simulated_node: SimulatedNode, outcome: DryRunOutcome) -> bool:
    """Return whether some container owns CPUs, and each that does has them on one NUMA node."""
    placements = (container.placement for container in outcome.containers)
    owned = [placement.exclusive for placement in placements if placement.pool is Pool.OWN]
    return bool(owned) and all(len(simulated_node.node.machine.nodes_of(cpus)) == 1 for cpus in owned)
