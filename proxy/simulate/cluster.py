"""Placing pods one after the other on some machines.

Theory. Two parts decide, as in a real cluster. First a scheduler that knows sums only: it leaves out machines
that lack CPU, memory, huge pages, devices or room for one more pod by requests (if the pod names a machine,
only that one is considered), and of the others takes the one with the most free CPU, or with ``fill`` the
least; equal machines come in the order in which they were given. Then the machine's engine decides, the same
code that ``serve`` runs: it knows NUMA nodes and may reject the pod. A rejected pod has failed there, as it
does under kubelet: it holds nothing, and is not tried elsewhere unless ``retry`` is set.

Affinities, taints, priorities and preemption are not simulated.

Machines are kept sorted by free CPU, so a pod that fits somewhere is usually placed at the first attempt.
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
from proxy.simulate.hosts import Host
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
        host: The machine where it runs, or that rejected it last; empty if no machine fits.
        reason: Short CamelCase reason (``TopologyAffinityError``, ``Unschedulable``, ``NoSuchMachine``);
            empty when placed.
        message: The reason as text.
        tried: Machines that rejected it, in their order.
        lacking: Resources of which the machines have too little; only if it is unschedulable.
        container: The container that was rejected; empty for the pod as a whole.
        containers: Its containers as placed.
        explanations: Records of the decisions, only if they were requested.
    """

    simulated_pod: SimulatedPod
    outcome: PodOutcome
    host: str = ""
    reason: str = ""
    message: str = ""
    tried: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    container: str = ""
    containers: tuple[Container, ...] = ()
    explanations: tuple[Explanation, ...] = ()


class Cluster:
    """A set of machines that places arriving pods; ``hosts`` holds the result."""

    def __init__(self, hosts: Sequence[Host], *, fill: bool, retry: bool) -> None:
        """Prepare a simulation on some machines.

        Args:
            hosts: The machines, names unique.
            fill: Take the machine with the least free CPU that fits, not the one with the most.
            retry: Let a rejected pod try the next machine.
        """
        self.hosts = tuple(hosts)
        self._by_name = {host.name: at for at, host in enumerate(self.hosts)}
        self._fill = fill
        self._retry = retry
        self._order = sorted(map(self._key, range(len(self.hosts))))

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
        rejections: list[tuple[Host, DryRunOutcome]] = []
        for at in self._fitting(simulated_pod):
            host = self.hosts[at]
            outcome = dry_run(host.state, simulated_pod.arrival)
            explanations = outcome.explanations if explain else ()
            if outcome.verdict.admitted:
                self._record_placement(at, simulated_pod, outcome)
                tried = tuple(rejecting.name for rejecting, _ in rejections)
                return Result(
                    simulated_pod,
                    PodOutcome.PLACED,
                    host.name,
                    tried=tried,
                    containers=outcome.containers,
                    explanations=explanations,
                )
            rejections.append((host, outcome))
            if not self._retry:
                break
        if not rejections:
            return self._unschedulable(simulated_pod)
        host, outcome = rejections[-1]
        return Result(
            simulated_pod,
            PodOutcome.REJECTED,
            host.name,
            outcome.verdict.reason,
            outcome.verdict.operator_message,
            tuple(rejecting.name for rejecting, _ in rejections),
            container=outcome.refused,
            explanations=outcome.explanations if explain else (),
        )

    def _fitting(self, simulated_pod: SimulatedPod) -> Iterator[int]:
        """Return the machines that fit by requests, the best first."""
        if simulated_pod.host:
            at = self._by_name.get(simulated_pod.host)
            if at is not None and not self.hosts[at].lacks(simulated_pod.needs):
                yield at
            return
        cpu = simulated_pod.needs.get("cpu", 0)
        first = bisect.bisect_left(self._order, (cpu, -1)) if self._fill else 0
        for key, at in self._order[first:]:
            if not self._fill and -key < cpu:
                return  # nor do the machines after it
            if not self.hosts[at].lacks(simulated_pod.needs):
                yield at

    def _record_placement(self, at: int, simulated_pod: SimulatedPod, outcome: DryRunOutcome) -> None:
        host = self.hosts[at]
        del self._order[bisect.bisect_left(self._order, self._key(at))]
        host.state = outcome.state
        host.take(simulated_pod.needs)
        bisect.insort(self._order, self._key(at))

    def _key(self, at: int) -> tuple[int, int]:
        free = self.hosts[at].free["cpu"]
        return (free if self._fill else -free, at)

    def _unschedulable(self, simulated_pod: SimulatedPod) -> Result:
        if simulated_pod.host and simulated_pod.host not in self._by_name:
            message = f"it requires the machine {simulated_pod.host}, which is not among the machines"
            return Result(simulated_pod, PodOutcome.UNSCHEDULABLE, "", NO_SUCH_MACHINE, message)
        examined = [self._by_name[simulated_pod.host]] if simulated_pod.host else range(len(self.hosts))
        short = Counter(resource for at in examined for resource in self.hosts[at].lacks(simulated_pod.needs))
        lacking = tuple(sorted(short))
        if len(examined) == 1:
            message = f"{self.hosts[examined[0]].name} has too little {', '.join(lacking)}"
        else:
            counts = ", ".join(f"{short[resource]} have too little {resource}" for resource in lacking)
            message = f"none of {len(examined)} machines fits: {counts}"
        return Result(simulated_pod, PodOutcome.UNSCHEDULABLE, "", "Unschedulable", message, lacking=lacking)
