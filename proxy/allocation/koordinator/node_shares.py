"""What each of the chosen NUMA nodes gives of each resource.

Source: koordinator a7a1b76, pkg/scheduler/plugins/nodenumaresource/resource_manager.go
``allocateResourcesByHint``. Resource by resource the nodes are visited, those with the least available first,
and each gives an even part of what is still missing, at most what it has. So a node that cannot give its part
says so before the others have given theirs, and nothing is missing in the end as long as the nodes together
have enough in whole units. The unit is a thousandth of a CPU for shared CPUs, a CPU for bound ones, a core
where ``FullPCPUs`` is required, and one of anything else.

Koordinator sorts by the available amounts of the nodes 0, 1, 2 and so on in place of the chosen nodes, and so
rightly only for these. It also lets a node give a part of a unit, after which the CPUs do not add up and the
pod is refused. Here the order is that of the chosen nodes, and units are never broken.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.model.idset import Mask

CPU = "cpu"

Amounts = Mapping[str, int]
"""Resource to amount: thousandths of a CPU, else bytes or pieces."""

Shares = dict[int, dict[str, int]]
"""NUMA node to what it gives; only nodes that give something, ascending."""


class InsufficientError(ValueError):
    """The NUMA nodes have too little of a resource.

    Attributes:
        reasons: One for each resource, in Koordinator's words.
    """

    def __init__(self, resources: list[str]) -> None:
        self.reasons = tuple(f"Insufficient NUMA {resource}" for resource in resources)
        super().__init__("; ".join(self.reasons))


def cpu_unit(threads: int, *, bound: bool, required_full: bool) -> int:
    """Return the unit in which CPUs are divided, in thousandths.

    Args:
        threads: CPUs of a core.
        bound: The pod owns exclusive CPUs.
        required_full: It must have whole cores.
    """
    if not bound:
        return 1
    return 1000 * max(threads, 1) if required_full else 1000


def divide(requests: Amounts, available: Mapping[int, Amounts], nodes: Mask, unit: int = 1) -> Shares:
    """Divide a request over NUMA nodes.

    Args:
        requests: What is wanted; resources that no node of the machine has are left out.
        available: What every node of the machine could still give.
        nodes: The chosen nodes.
        unit: In which CPUs are divided, see ``cpu_unit``.

    Returns:
        What each node gives. The sum is the request, in whole units but for what the request itself leaves.

    Raises:
        InsufficientError: The nodes have too little of something.
    """
    known = {resource for own in available.values() for resource in own}
    shares: Shares = {node: {} for node in nodes}
    lacking: list[str] = []
    for resource in sorted(known & requests.keys()):
        step = unit if resource == CPU else 1
        has = {node: available.get(node, {}).get(resource, 0) // step for node in nodes}
        missing, left = requests[resource] // step, len(has)
        for node in sorted(has, key=lambda node: (has[node], node)):
            part = max(0, min(has[node], missing // left))
            if part:
                shares[node][resource] = part * step
            missing, left = missing - part, left - 1
        if missing or requests[resource] % step:
            lacking.append(resource)
    if lacking:
        raise InsufficientError(lacking)
    return {node: own for node, own in shares.items() if own}


def whole_cpus(shares: Mapping[int, Amounts]) -> dict[int, int]:
    """Return the number of CPUs that are to be bound on each node."""
    return {node: own[CPU] // 1000 for node, own in shares.items() if own.get(CPU, 0) >= 1000}
