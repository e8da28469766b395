"""The pods of a fleet simulation: the common part of equal pods is computed once."""

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
    """The request that equal pods have in common.

    Attributes:
        stock: The amounts that the stock scheduler counts.
        demand: The demand that the scheduler extender reads; each pod has a copy with its own key.
        sizes: CPUs of each container that owns some and stays; empty if the pod shares CPUs.
    """

    stock: StockDemand
    demand: PodDemand
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FleetPod:
    """A pod of a fleet simulation.

    Attributes:
        simulated_pod: The pod.
        kind: Its request; the same object for equal pods.
    """

    simulated_pod: SimulatedPod
    kind: PodKind

    @property
    def demand(self) -> PodDemand:
        """The demand that the scheduler extender reads."""
        pod = self.simulated_pod.arrival.pod
        spec = replace(self.simulated_pod.pod_template.spec, uid=pod.uid, name=pod.name)
        return replace(self.kind.demand, key=pod.uid, spec=spec, pod=pod)


def fleet_pods(simulated_pods: Iterable[SimulatedPod]) -> list[FleetPod]:
    """Compute the requests of pods, once for equal ones."""
    kind_of: dict[int, PodKind] = {}
    kinds: dict[Hashable, PodKind] = {}
    pods = []
    for simulated_pod in simulated_pods:
        kind = kind_of.get(id(simulated_pod.pod_template))
        if kind is None:
            kind = _kind(simulated_pod.pod_template)
            stock, demand = kind.stock, kind.demand
            needs = demand.signature, tuple(sorted(stock.needs.items())), stock.scored
            kind = kind_of[id(simulated_pod.pod_template)] = kinds.setdefault(needs, kind)
        pods.append(FleetPod(simulated_pod, kind))
    return pods


def _kind(pod_template: PodTemplate) -> PodKind:
    requests = pod_template.spec.requests
    staying = requests.of_kinds(ContainerKind.APP, ContainerKind.SIDECAR)
    sizes = tuple(cpus for container in staying if (cpus := container_cpus(requests, container)))
    return PodKind(stock_demand(pod_template.spec), demand_of(pod_template.spec), sizes)
