"""A simulation in a few numbers, and nodes that are too small for a pod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from proxy.allocation.cpu_request import pod_cpus
from proxy.model.phrases import counted
from proxy.observe.value_text import clean
from proxy.simulate.cluster import PodOutcome, Result
from proxy.simulate.nodes import SimulatedNode
from proxy.simulate.quality import Alignment, AlignmentMeter, RemainingCpus, alignments_of, remaining_cpus_of
from proxy.simulate.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Summary:
    """A simulation in a few numbers; numbers of pods unless stated otherwise.

    Attributes:
        machines, pods: How many nodes and pods there were.
        placed: How many run.
        together: Placed, and each container is on as few NUMA nodes as possible.
        spread: Placed, and some container is on more NUMA nodes than necessary.
        sharing: Placed, without resources of a NUMA node.
        rejected: Rejected by the node's engine, by reason.
        unschedulable: No node has enough by requests, by the resources that are short; ``NoSuchMachine``
            if the pod requests a node that does not exist.
        cpus: Online CPUs of all nodes.
        owned: Exclusive CPUs.
        left: CPUs that can still become exclusive.
        whole: The part of ``left`` in whole cores.
        largest: The largest request for CPUs that one NUMA node anywhere still holds.
        largest_whole: The same in whole cores.
        largest_when_empty: The value of ``largest`` on the empty nodes.
    """

    machines: int
    pods: int
    placed: int
    together: int
    spread: int
    sharing: int
    rejected: Mapping[str, int]
    unschedulable: Mapping[str, int]
    cpus: int
    owned: int
    left: int
    whole: int
    largest: int
    largest_whole: int
    largest_when_empty: int


@dataclass(frozen=True, slots=True)
class Findings:
    """The measurements of a simulation.

    Attributes:
        alignments: The alignments of the containers of each pod, in the order of the results.
        remaining: The CPUs that remain of each node, in their order.
    """

    alignments: tuple[tuple[Alignment, ...], ...]
    remaining: tuple[RemainingCpus, ...]
    summary: Summary


def find(simulation: Simulation) -> Findings:
    """Measure a simulation."""
    meter = AlignmentMeter()
    simulated_nodes = {simulated_node.name: simulated_node for simulated_node in simulation.simulated_nodes}
    alignments = tuple(_alignments(meter, simulated_nodes, result) for result in simulation.results)
    remaining = tuple(
        remaining_cpus_of(simulated_node.node, simulated_node.ownable)
        for simulated_node in simulation.simulated_nodes
    )
    return Findings(alignments, remaining, _summary(simulation, alignments, remaining))


def _alignments(
    meter: AlignmentMeter, simulated_nodes: Mapping[str, SimulatedNode], result: Result
) -> tuple[Alignment, ...]:
    if result.outcome is not PodOutcome.PLACED:
        return ()
    return tuple(alignments_of(meter, simulated_nodes[result.node_name].node, result.containers))


def _summary(
    simulation: Simulation,
    alignments: tuple[tuple[Alignment, ...], ...],
    remaining: tuple[RemainingCpus, ...],
) -> Summary:
    results, simulated_nodes = simulation.results, simulation.simulated_nodes
    outcomes = Counter(result.outcome for result in results)
    together = sum(
        bool(pod_alignments) and all(alignment.together for alignment in pod_alignments)
        for pod_alignments in alignments
    )
    placed_on_nodes = sum(map(bool, alignments))
    rejected = Counter(r.reason for r in results if r.outcome is PodOutcome.REJECTED)
    short = Counter(
        ", ".join(r.lacking) or r.reason for r in results if r.outcome is PodOutcome.UNSCHEDULABLE
    )
    return Summary(
        machines=len(simulated_nodes),
        pods=len(results),
        placed=outcomes[PodOutcome.PLACED],
        together=together,
        spread=placed_on_nodes - together,
        sharing=outcomes[PodOutcome.PLACED] - placed_on_nodes,
        rejected=dict(rejected.most_common()),
        unschedulable=dict(short.most_common()),
        cpus=sum(len(simulated_node.node.machine.online) for simulated_node in simulated_nodes),
        owned=sum(len(simulated_node.owned) for simulated_node in simulated_nodes),
        left=sum(cpus.cpus for cpus in remaining),
        whole=sum(cpus.whole for cpus in remaining),
        largest=max((cpus.largest for cpus in remaining), default=0),
        largest_whole=max((cpus.largest_whole for cpus in remaining), default=0),
        largest_when_empty=max((cpus.largest_when_empty for cpus in remaining), default=0),
    )


def too_small(simulation: Simulation) -> Iterator[str]:
    """Report the nodes that can never have as many CPUs as the pods requested that they rejected.

    Yields:
        A sentence for each node and number of CPUs.
    """
    simulated_nodes = {simulated_node.name: simulated_node for simulated_node in simulation.simulated_nodes}
    rejections: Counter[tuple[str, int]] = Counter()
    for result in simulation.results:
        requests = result.simulated_pod.arrival.pod.requests
        simulated_node = simulated_nodes.get(result.node_name)
        if (
            result.outcome is PodOutcome.REJECTED
            and requests is not None
            and simulated_node is not None
            and simulated_node.node.static
        ):
            rejections[simulated_node.name, pod_cpus(requests)] += 1
    for (name, requested), count in rejections.items():
        node = simulated_nodes[name].node
        if requested > node.most_ownable:
            yield (
                f"{clean(name)} is too small for {counted(count, 'pod')} that requested {requested} CPUs of"
                f" {'its' if count == 1 else 'their'} own: of its {counted(len(node.machine.online), 'CPU')},"
                f" {node.most_ownable} can be owned"
            )
