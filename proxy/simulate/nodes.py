"""The nodes of a simulation: the capacity of each, the free part, and the engine's state.

The offer of a node is what kubelet would report to the scheduler as allocatable: the capacity without the
reserve, memory without huge pages, healthy devices of the simulated plugins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.config import Config
from proxy.config.list_kinds import EVICTION_DEFAULT
from proxy.config.machine_checks import usable_memory
from proxy.config.schema import MemoryManagerPolicy
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.requests import MEMORY
from proxy.simulate import MAX_PODS

PODS = "pods"
_ALWAYS = ("cpu", MEMORY)


@dataclass(frozen=True, slots=True)
class Reserve:
    """The part of a node that is not for pods: thousandths of a CPU, and bytes of memory."""

    milli: int = 0
    memory: int = 0


@dataclass(slots=True)
class SimulatedNode:
    """A simulated Kubernetes node and the pods on it. The output calls it a machine.

    Attributes:
        name: The node's name.
        node: The machine and its rules, as the engine reads them.
        state: The engine's state.
        offers: Resource to amount; memory is left out if the node does not report it.
        free: The free part of the offer, by requests.
        pod_count: How many pods run here.
    """

    name: str
    node: Node
    state: NodeState
    offers: Mapping[str, int]
    free: dict[str, int] = field(default_factory=dict)
    pod_count: int = 0

    @property
    def owned(self) -> CpuSet:
        """Exclusive CPUs."""
        return CpuSet.union_of(owner.cpus for owner in self.state.owners.values())

    @property
    def ownable(self) -> CpuSet:
        """CPUs without an owner that are not reserved. The floor of the shared pool counts among them."""
        return (self.state.pools.shared & self.node.machine.online) - self.node.reserved

    def lacks(self, needs: Mapping[str, int]) -> list[str]:
        """Return the resources of which too little is free for one more pod."""
        free = self.free
        short = [
            resource
            for resource, amount in needs.items()
            if amount > free.get(resource, 0) and (resource in self.offers or resource != MEMORY)
        ]
        return [*short, PODS] if free.get(PODS) == 0 else short

    def take(self, needs: Mapping[str, int], sign: int = 1) -> None:
        """Subtract the requests of a pod; ``sign`` -1: add them again, because the pod has left."""
        for resource, amount in needs.items():
            if resource in self.free:
                self.free[resource] -= sign * amount
        if PODS in self.free:
            self.free[PODS] -= sign
        self.pod_count += sign


def simulated_node_of(name: str, node: Node, reserve: Reserve, pods: int = MAX_PODS) -> SimulatedNode:
    """Make an empty node.

    Args:
        name: Its name.
        node: The machine and its rules, as the engine reads them.
        reserve: The part of it that is not for pods.
        pods: Most pods that it takes; 0 for no limit.
    """
    offers = offers_of(node, reserve)
    if pods:
        offers[PODS] = pods
    return SimulatedNode(name, node, NodeState.empty(node), offers, dict(offers))


def reserve_of(config: Config) -> Reserve:
    """Return the amounts that kubelet would withhold from the scheduler under a configuration.

    Source: kubelet's node allocatable: kubeReserved, systemReserved and the hard eviction threshold; a list
    of reserved CPUs wins over the amounts. If no amount of memory is set, the memory manager's counts.
    """
    parts = (config.kube_reserved, config.system_reserved)
    milli = sum(part.cpu or 0 for part in parts)
    if config.reserved_system_cpus:
        milli = 1000 * len(config.reserved_system_cpus)
    evicted = EVICTION_DEFAULT if config.eviction_memory is None else config.eviction_memory
    memory = sum(part.memory or 0 for part in parts) + evicted
    counted = config.memory_manager_policy is MemoryManagerPolicy.STATIC
    if counted and all(part.memory is None for part in parts):
        memory = max(memory, sum(amounts.get(MEMORY, 0) for amounts in config.reserved_memory.values()))
    return Reserve(milli, memory)


def offers_of(node: Node, reserve: Reserve) -> dict[str, int]:
    """Return the amounts that a node offers to pods, by resource."""
    usable = [usable_memory(numa) for numa in node.machine.nodes]
    offers = {"cpu": max(0, 1000 * len(node.machine.online) - reserve.milli)}
    for resource in dict.fromkeys(resource for amounts in usable for resource in amounts):
        offers[resource] = sum(amounts.get(resource, 0) for amounts in usable)
    if any(MEMORY not in amounts for amounts in usable):
        offers.pop(MEMORY, None)
    else:
        offers[MEMORY] = max(0, offers[MEMORY] - reserve.memory)
    for resource, plugin in node.devices.items():
        offers[resource] = sum(device.healthy for device in plugin.values())
    return {resource: offer for resource, offer in offers.items() if offer or resource in _ALWAYS}
