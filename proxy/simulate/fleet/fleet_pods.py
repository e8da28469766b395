"""The pods of a fleet simulation: what equal ones have in common is worked out once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from proxy.allocation.cpu_request import container_cpus
from proxy.model.requests import ContainerKind
from proxy.scheduler.pod_demand import PodDemand, demand_of
from proxy.simulate.fleet.stock_scheduler import StockDemand, stock_demand
from proxy.simulate.pods import PodTemplate, SimulatedPod


@dataclass(frozen=True, slots=True, eq=False)
class PodKind:
    """What pods request that are alike.

    Attributes:
        stock: What the stock scheduler counts.
        demand: What the scheduler extender reads; of each pod with a key of its own.
        sizes: CPUs of each container that owns some and stays; empty where the pod shares.
    """

    stock: StockDemand
    demand: PodDemand
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FleetPod:
    """A pod of a fleet simulation.

    Attributes:
        simulated_pod: The pod.
        kind: What it requests; the same object for pods that are alike.
    """

    simulated_pod: SimulatedPod
    kind: PodKind

    @property
    def demand(self) -> PodDemand:
        """What the scheduler extender reads."""
        pod = self.simulated_pod.arrival.pod
        spec = replace(self.simulated_pod.pod_template.spec, uid=pod.uid, name=pod.name)
        return replace(self.kind.demand, key=pod.uid, spec=spec, pod=pod)


def fleet_pods(simulated_pods: Iterable[SimulatedPod]) -> list[FleetPod]:
    """Work out what pods request; once for those that are alike."""
    kind_of: dict[int, PodKind] = {}
    alike: dict[Hashable, PodKind] = {}
    made = []
    for simulated_pod in simulated_pods:
        kind = kind_of.get(id(simulated_pod.pod_template))
        if kind is None:
            kind = _kind(simulated_pod.pod_template)
            stock, demand = kind.stock, kind.demand
            needs = demand.signature, tuple(sorted(stock.needs.items())), stock.scored
            kind = kind_of[id(simulated_pod.pod_template)] = alike.setdefault(needs, kind)
        made.append(FleetPod(simulated_pod, kind))
    return made


def _kind(pod_template: PodTemplate) -> PodKind:
    requests = pod_template.spec.requests
    staying = requests.of(ContainerKind.APP, ContainerKind.SIDECAR)
    sizes = tuple(cpus for container in staying if (cpus := container_cpus(requests, container)))
    return PodKind(stock_demand(pod_template.spec), demand_of(pod_template.spec), sizes)
