"""The pods of a fleet simulation: what equal ones have in common is worked out once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from proxy.allocation.cpu_request import container_cpus
from proxy.model.requests import ContainerKind
from proxy.scheduler.pod_demand import PodDemand, demand_of
from proxy.simulate.fleet.stock_scheduler import StockDemand, stock_demand
from proxy.simulate.pods import Guest, Mould


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
        guest: The pod.
        kind: What it requests; the same object for pods that are alike.
    """

    guest: Guest
    kind: PodKind

    @property
    def demand(self) -> PodDemand:
        """What the scheduler extender reads."""
        pod = self.guest.arrival.pod
        spec = replace(self.guest.mould.spec, uid=pod.uid, name=pod.name)
        return replace(self.kind.demand, key=pod.uid, spec=spec, pod=pod)


def fleet_pods(guests: Iterable[Guest]) -> list[FleetPod]:
    """Work out what pods request; once for those that are alike."""
    of_mould: dict[int, PodKind] = {}
    alike: dict[Hashable, PodKind] = {}
    made = []
    for guest in guests:
        kind = of_mould.get(id(guest.mould))
        if kind is None:
            kind = _kind(guest.mould)
            stock, demand = kind.stock, kind.demand
            asks = demand.signature, tuple(sorted(stock.needs.items())), stock.scored
            kind = of_mould[id(guest.mould)] = alike.setdefault(asks, kind)
        made.append(FleetPod(guest, kind))
    return made


def _kind(mould: Mould) -> PodKind:
    asks = mould.spec.ask
    staying = asks.of(ContainerKind.APP, ContainerKind.SIDECAR)
    sizes = tuple(cpus for ask in staying if (cpus := container_cpus(asks, ask)))
    return PodKind(stock_demand(mould.spec), demand_of(mould.spec), sizes)
