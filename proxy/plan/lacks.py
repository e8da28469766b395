"""What would have made a refused request fit: how much one NUMA node has too little of.

Only single nodes are looked at, as they are what operators think in, and only such as could hold the request
if they were empty. Of these the one is told that lacks least: the fewest resources, then the fewest CPUs.
"""

from __future__ import annotations

from proxy.model.explanation import Lack
from proxy.model.idset import CpuSet, Mask
from proxy.place import cpu_static
from proxy.place.cpu_request import container_cpus, pod_cpus
from proxy.place.memory.request import container_amounts, pod_amounts
from proxy.plan.desk import Case, nodes_of


def lacks_of(case: Case, name: str) -> tuple[Lack, ...]:
    """Tell what was missing.

    Args:
        case: What was refused.
        name: The container; empty for the pod as a whole.
    """
    near = nodes_of(case.near)
    found: list[tuple[int, int, int, tuple[Lack, ...]]] = []
    for node in case.node.nodes:
        if near is not None and near != Mask((node,)):
            continue
        lacks = _on(case, name, node)
        if lacks:
            missing = sum(lack.wanted - lack.free for lack in lacks if lack.resource == "cpu")
            found.append((len(lacks), missing, node, tuple(lacks)))
    return min(found)[-1] if found else ()


def _on(case: Case, name: str, node: int) -> list[Lack] | None:
    """Give what one node lacks; None where it could not hold the request even if it were empty."""
    lacks: list[Lack] = []
    nodes = Mask((node,))
    whole = name == "" and case.asks.containers[0].name != ""
    cpus = _cpus(case, name, whole=whole)
    if cpus:
        here = CpuSet.from_bits(case.node.topology.nodes.get(node, 0))
        if len(here - case.node.cpu.reserved) < cpus:
            return None
        free = cpu_static.available(case.node.cpu, case.cpu) | case.cpu.reusable_by(case.asks.uid)
        if len(free & here) < cpus:
            lacks.append(Lack("cpu", nodes, cpus, len(free & here)))
    if case.memory is not None and case.binds and case.asks.guaranteed:
        there = case.memory.nodes.get(node)
        amounts = pod_amounts(case.asks) if whole else container_amounts(case.asks, case.asks.named(name))
        if there is None or (amounts and len(there.cells) > 1):
            return None
        for resource, size in amounts.items():
            if there.table(resource).allocatable < size:
                return None
            if there.table(resource).free < size:
                lacks.append(Lack(resource, nodes, size, there.table(resource).free))
    return _devices(case, name, node, lacks) if not whole else lacks


def _cpus(case: Case, name: str, *, whole: bool) -> int:
    if not case.owns:
        return 0
    return pod_cpus(case.asks) if whole else container_cpus(case.asks, case.asks.named(name))


def _devices(case: Case, name: str, node: int, lacks: list[Lack]) -> list[Lack] | None:
    for resource, count in case.asks.named(name).limits.items():
        devices = case.devices.registered.get(resource, {})
        if not case.devices.has_topology(resource):
            continue
        near = {i for i, device in devices.items() if device.nodes and node in device.nodes}
        if len(near) < count:
            return None
        free = len(case.devices.available(resource) & near)
        if free < count:
            lacks.append(Lack(resource, Mask((node,)), count, free))
    return lacks
