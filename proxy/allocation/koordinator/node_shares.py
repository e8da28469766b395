"""Divide a request over the chosen NUMA nodes, resource by resource.

Source: koordinator a7a1b76, pkg/scheduler/plugins/nodenumaresource/resource_manager.go
``allocateResourcesByHint``. Resource by resource the nodes are visited, those with the least available first,
and each gives an even part of the missing amount, at most what it has. So the nodes with too little come
before the others, which make up for them, and nothing is missing in the end if the nodes together have enough
in whole units. The unit is a thousandth of a CPU for shared CPUs, a CPU for bound ones, a core if
``FullPCPUs`` is required, and 1 for any other resource.

Koordinator sorts by the available amounts of the nodes 0, 1, 2 and so on instead of those of the chosen
nodes, so the order is right only if the chosen nodes are these. It also lets a node give a part of a unit;
then the CPUs do not add up and the pod is rejected. Here the order is that of the chosen nodes, and units are
never broken.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.model.idset import Mask

CPU = "cpu"

Amounts = Mapping[str, int]
"""Resource to amount: thousandths of a CPU; of other resources bytes or pieces."""

Shares = dict[int, dict[str, int]]
"""NUMA node to the amounts that it gives; only nodes that give any, ascending."""


class InsufficientError(ValueError):
    """The NUMA nodes have too little of a resource.

    Attributes:
        reasons: One for each resource, in Koordinator's words.
    """

    def __init__(self, resources: list[str]) -> None:
        self.reasons = tuple(f"Insufficient NUMA {resource}" for resource in resources)
        super().__init__("; ".join(self.reasons))


def cpu_unit(threads: int, *, required_full: bool) -> int:
    """Return the unit in which the CPUs of a pod that owns CPUs are divided, in thousandths.

    Args:
        threads: CPUs of a core.
        required_full: The pod must have whole cores.
    """
    return 1000 * max(threads, 1) if required_full else 1000


def divide(requests: Amounts, available: Mapping[int, Amounts], nodes: Mask, unit: int = 1) -> Shares:
    """Divide a request over NUMA nodes.

    Args:
        requests: The requested amounts; resources that no node of the machine has are left out.
        available: The free amounts of every node of the machine.
        nodes: The chosen nodes.
        unit: The unit in which CPUs are divided, see ``cpu_unit``.

    Returns:
        The share of each node. The sum is the request.

    Raises:
        InsufficientError: The nodes have too little of a resource.
    """
    known_resources = {resource for amounts in available.values() for resource in amounts}
    shares: Shares = {node: {} for node in nodes}
    lacking: list[str] = []
    for resource in sorted(known_resources & requests.keys()):
        step = unit if resource == CPU else 1
        units = {node: available.get(node, {}).get(resource, 0) // step for node in nodes}
        missing, nodes_left = requests[resource] // step, len(units)
        for node in sorted(units, key=lambda node: (units[node], node)):
            part = max(0, min(units[node], missing // nodes_left))
            if part:
                shares[node][resource] = part * step
            missing, nodes_left = missing - part, nodes_left - 1
        if missing or requests[resource] % step:
            lacking.append(resource)
    if lacking:
        raise InsufficientError(lacking)
    return {node: amounts for node, amounts in shares.items() if amounts}


def whole_cpus(shares: Mapping[int, Amounts]) -> dict[int, int]:
    """Return the number of CPUs to bind on each node."""
    return {node: own[CPU] // 1000 for node, own in shares.items() if own.get(CPU, 0) >= 1000}
