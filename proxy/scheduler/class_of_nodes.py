"""What a verdict depends on besides a node's rules, as counts: nodes with equal ones are of one class."""

from __future__ import annotations

from proxy.model.options import TopologyPolicy
from proxy.scheduler.node_facts import SchedulableNode


def largest_of(node: SchedulableNode) -> int:
    """Return the most CPUs that one container may own, as far as a sum says it."""
    if not node.rules.static or node.rules.policy is not TopologyPolicy.SINGLE_NUMA_NODE:
        return len(node.rules.machine.online)
    return max((len(node.free & each.cpus) for each in node.rules.machine.nodes), default=0)


def counts_of(node: SchedulableNode) -> tuple[object, ...]:
    """Return what a verdict depends on besides the rules: free CPUs, cores and devices by NUMA node."""
    free, machine = node.free.bits, node.rules.machine
    cores: dict[int | None, tuple[int, int, int]] = {}
    for cpus in machine.cores.values():
        part = (cpus.bits & free).bit_count()
        if part:
            numa = machine.by_id[cpus.first()].numa
            whole = part == cpus.bits.bit_count()
            old = cores.get(numa, (0, 0, 0))
            cores[numa] = old[0] + part, old[1] + whole, old[2] + (not whole)
    devices = tuple(
        (resource, tuple(sorted(zones.items()))) for resource, zones in sorted(node.devices.items())
    )
    return tuple(sorted(cores.items())), bool(node.reserved), devices, node.memory
