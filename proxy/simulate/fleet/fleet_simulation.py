"""The whole of a fleet simulation: nodes and pods from documents, and a run for each scheduler.

Each run has the same nodes and the same pods, which come at the same times and stay for the same time.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from proxy.model.errors import InputError
from proxy.model.phrases import counted
from proxy.pools.pod_fields import CPU
from proxy.scheduler.scores import Strategy
from proxy.simulate.documents import Document
from proxy.simulate.fleet import generation, recorded
from proxy.simulate.fleet.fleet_pods import FleetPod, fleet_pods
from proxy.simulate.fleet.fleet_run import FleetRun, FreeCpus
from proxy.simulate.fleet.schedulers import ExtendedFleetScheduler, StockFleetScheduler
from proxy.simulate.manifests import pods_of
from proxy.simulate.nodes import SimulatedNode

SAMPLES = 200
SIZES = 6
"""For how many sizes of containers fragmentation is measured at most."""


class Arrival(enum.StrEnum):
    """A pattern in which pods come."""

    BURST = "burst"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True)
class ArrivalPattern:
    """When pods come, and how long they stay.

    Attributes:
        arrival: All at once, or each at a time that does not depend on the others.
        rate: Pods that come in a second, on average; for ``POISSON``.
        lifetime: Seconds for which a pod runs, on average (exponentially distributed); 0: it stays.
    """

    arrival: Arrival = Arrival.BURST
    rate: float = 10.0
    lifetime: float = 0.0

    def times(self, pods: int, chance: random.Random) -> Iterator[tuple[float, float]]:
        """Return for each pod when it comes and how long it runs, in seconds; an infinite time: it stays."""
        now = 0.0
        for _ in range(pods):
            if self.arrival is Arrival.POISSON:
                now += chance.expovariate(self.rate)
            yield now, chance.expovariate(1 / self.lifetime) if self.lifetime else float("inf")


_BURST = ArrivalPattern()


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How a fleet simulation is run.

    Attributes:
        pattern: When pods come, and how long they stay.
        seed: Of all random numbers.
        percentage: ``percentageOfNodesToScore`` of the stock scheduler; 0: by the number of nodes.
        extended_percentage: The same of the scheduler with the extender.
        weight: The extender's weight in the scheduler's configuration.
        strategy: How the extender scores nodes.
        replicas: Copies of each recorded pod.
        anywhere: Whether recorded pods come again, and their nodes are empty in the beginning.
    """

    pattern: ArrivalPattern = _BURST
    seed: int = 1
    percentage: int = 0
    extended_percentage: int = 100
    weight: int = 10
    strategy: Strategy = Strategy.FEWEST_NUMA_NODES
    replicas: int = 1
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class FleetSize:
    """The size of a fleet.

    Attributes:
        nodes, numa_nodes: How many there are.
        cpus: CPUs that containers may own in the beginning.
        running: Pods that run in the beginning.
        pods: Pods that come.
        requested_milli, offered_milli: Thousandths of CPUs that these request together, and that nodes offer.
    """

    nodes: int
    numa_nodes: int
    cpus: int
    running: int
    pods: int
    requested_milli: int
    offered_milli: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """Nodes, and pods that are there or come.

    Attributes:
        simulated_nodes: The nodes in the beginning.
        shown: By node, uids of pods whose CPUs are taken already.
        running: Pods that are bound to a node in the beginning.
        coming: Pods that come.
        notes: What was not followed, in sentences.
    """

    simulated_nodes: tuple[SimulatedNode, ...]
    shown: dict[str, frozenset[str]]
    running: tuple[FleetPod, ...]
    coming: tuple[FleetPod, ...]
    notes: tuple[str, ...]

    def size(self) -> FleetSize:
        """Count it."""
        return FleetSize(
            len(self.simulated_nodes),
            sum(len(simulated_node.node.machine.nodes) for simulated_node in self.simulated_nodes),
            FreeCpus(self.simulated_nodes).total(),
            len(self.running),
            len(self.coming),
            sum(pod.simulated_pod.needs.get(CPU, 0) for pod in self.coming),
            sum(simulated_node.offers.get(CPU, 0) for simulated_node in self.simulated_nodes),
        )


@dataclass(frozen=True, slots=True)
class FleetSimulation:
    """A fleet simulation that is done.

    Attributes:
        fleet: What was simulated.
        settings: How.
        runs: A run for each scheduler.
        notes: What was not followed, in sentences.
    """

    fleet: FleetSize
    settings: FleetSettings
    runs: tuple[FleetRun, ...]
    notes: tuple[str, ...]


def fleet_of(
    documents: Sequence[Document], simulated_nodes: Iterable[SimulatedNode], settings: FleetSettings
) -> Fleet:
    """Read nodes and pods.

    Args:
        documents: Objects and descriptions of fleets.
        simulated_nodes: More nodes, with nothing on them.
        settings: How they are read.

    Raises:
        InputError: A document is invalid, or there are no nodes or no pods.
    """
    nodes = recorded.recorded_nodes(documents, empty=settings.anywhere)
    fleets = [
        generation.read_fleet(document) for document in documents if generation.is_fleet(document.value)
    ]
    all_nodes = [
        *simulated_nodes,
        *nodes.simulated_nodes,
        *(simulated_node for generated, _ in fleets for simulated_node in generated),
    ]
    names = _names(all_nodes)
    other_kinds = (generation.KIND, *recorded.KINDS)
    pods = pods_of(
        documents, tuple(names), settings.replicas, bound=not settings.anywhere, others=other_kinds
    )
    simulated_pods = [*pods.simulated_pods]
    milli, chance = sum(simulated_node.offers.get(CPU, 0) for simulated_node in all_nodes), _chance(settings)
    for _, mix in fleets:
        if mix is not None:
            simulated_pods += generation.pods_of(mix, milli, chance, len(simulated_pods))
    found = fleet_pods(simulated_pods)
    running = tuple(pod for pod in found if pod.simulated_pod.names_node)
    coming = tuple(pod for pod in found if not pod.simulated_pod.names_node)
    for simulated_pod in (pod.simulated_pod for pod in running):
        if simulated_pod.node_name not in names:
            raise InputError(
                f"cannot place the pod {simulated_pod.ref} of {simulated_pod.where}:"
                f" no node {simulated_pod.node_name}"
            )
    if not coming:
        raise InputError("cannot simulate a cluster without arriving pods: give Pods, workloads or a Fleet")
    shown = {name: frozenset(uids) for name, uids in nodes.shown.items()}
    notes = (*nodes.notes, *pods.notes, *_absent_nodes(coming, names))
    return Fleet(tuple(all_nodes), shown, running, coming, notes)


def _absent_nodes(coming: Iterable[FleetPod], names: Mapping[str, int]) -> Iterator[str]:
    """Yield a note about pods that require a node that is not simulated."""
    required = [pod.simulated_pod for pod in coming if pod.simulated_pod.node_name]
    if absent := [pod for pod in required if pod.node_name not in names]:
        example = f"such as {absent[0].ref} (node {absent[0].node_name})"
        yield f"not placed: {counted(len(absent), 'pod')} that can only go to a node not simulated, {example}"


def _names(simulated_nodes: Sequence[SimulatedNode]) -> dict[str, int]:
    """Return the names of nodes and how often each is there, which is once.

    Raises:
        InputError: A name is there twice, or there are no nodes.
    """
    if not simulated_nodes:
        raise InputError("cannot simulate a cluster without nodes: give Node objects, a Fleet or --machine")
    names = Counter(simulated_node.name for simulated_node in simulated_nodes)
    name, count = names.most_common(1)[0]
    if count > 1:
        raise InputError(f"cannot simulate two nodes of the name {name}")
    return names


def simulate_fleet(
    fleet: Fleet, settings: FleetSettings, step: Callable[[], object] = lambda: None
) -> FleetSimulation:
    """Run both schedulers.

    Args:
        fleet: Nodes and pods.
        settings: How.
        step: Called after each pod of each run.
    """
    size = fleet.size()
    times = list(settings.pattern.times(len(fleet.coming), _chance(settings)))
    most = max(
        (
            max(len(numa.cpus) for numa in simulated_node.node.machine.nodes)
            for simulated_node in fleet.simulated_nodes
        ),
        default=1,
    )
    requested = {cpus for pod in fleet.coming for cpus in pod.kind.sizes if cpus <= most}
    runs = []
    rejected: list[str] = []
    for scheduler_of in (_stock, _with_extender):
        simulated_nodes = [
            replace(simulated_node, free=dict(simulated_node.free))
            for simulated_node in fleet.simulated_nodes
        ]
        scheduler = scheduler_of(simulated_nodes, settings)
        interval = max(1, len(fleet.coming) // SAMPLES)
        run = FleetRun(scheduler.name, simulated_nodes, scheduler, sorted(requested)[-SIZES:], interval)
        rejected = run.place_running(fleet.running, fleet.shown)
        run.play(fleet.coming, times, step)
        runs.append(run)
    notes = [*fleet.notes]
    if rejected:
        where = f"their nodes reject them, such as {rejected[0]}"
        notes.append(f"left out: {counted(len(rejected), 'pod')} that run already, because {where}")
    return FleetSimulation(size, settings, tuple(runs), tuple(notes))


def _stock(simulated_nodes: Sequence[SimulatedNode], settings: FleetSettings) -> StockFleetScheduler:
    return StockFleetScheduler(simulated_nodes, _chance(settings), settings.percentage)


def _with_extender(simulated_nodes: Sequence[SimulatedNode], settings: FleetSettings) -> StockFleetScheduler:
    return ExtendedFleetScheduler(
        simulated_nodes, _chance(settings), settings.extended_percentage, settings.weight, settings.strategy
    )


def _chance(settings: FleetSettings) -> random.Random:
    return random.Random(settings.seed)  # noqa: S311 - not a secret
