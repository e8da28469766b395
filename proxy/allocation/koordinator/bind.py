"""Bind a pod to CPUs: required policies, preferred CPUs, and an even distribution over NUMA nodes.

Source: koordinator a7a1b76, pkg/scheduler/plugins/nodenumaresource: resource_manager.go ``allocateCPUSet``,
cpu_accumulator.go ``takePreferredCPUs``. The accumulator only prefers. Around it:

- A *required* ``FullPCPUs`` needs a whole number of cores and chooses among wholly free cores only; a
  required ``SpreadByPCPUs`` chooses among the lowest free CPU of each core. The result is checked.
- *Preferred* CPUs, such as those given back by a reservation, are taken first if they are free; the rest is
  chosen independently of them.
- ``DistributeEvenly`` has no effect in Koordinator's code. Its design means equal parts from
  the NUMA nodes that are needed, as kubelet's ``distribute-cpus-across-numa``: as few nodes as can give equal
  parts (``proxy.allocation.even_split``), otherwise as few as have enough, each as close to its part as
  possible. The parts are whole cores for ``FullPCPUs`` if there are enough. In each node the accumulator
  chooses.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.even_split import split
from proxy.allocation.koordinator.accumulator import accumulate, avoided_cpus
from proxy.allocation.koordinator.bind_request import (
    Allocated,
    BindRequest,
    RequiredPolicyError,
    WholeCoresError,
)
from proxy.allocation.packed import NotEnoughCpus
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import BindPolicy, NumaStrategy
from proxy.model.phrases import numa_nodes_text


def bind(
    topology: CpuTopology,
    free: CpuSet,
    n: int,
    request: BindRequest,
    taken: Allocated | None = None,
    steps: list[str] | None = None,
) -> CpuSet:
    """Choose the CPUs of a pod.

    Args:
        topology: The machine.
        free: CPUs to choose from.
        n: How many; below 1, none are chosen.
        request: How they are bound.
        taken: What other pods have.
        steps: Sentences about what was done are added here; None for no record.

    Returns:
        Exactly n CPUs, a subset of ``free``; the same for the same arguments.

    Raises:
        NotEnoughCpus: Fewer than n are free, or fewer than n that a required policy may take.
        WholeCoresError: Whole cores are required and n is not a whole number of cores.
        RequiredPolicyError: The chosen CPUs break the required policy.
    """
    taken = taken or Allocated()
    chosen = _attempt(topology, usable(topology, free, request, n), n, request, taken, steps)
    if not request.required or holds(topology, chosen, request.policy):
        return chosen
    # Whole cores can add up to another number than n only if cores differ in size: take cores of one size.
    equal = topology.largest_cores(free)
    if len(equal) < n:
        raise RequiredPolicyError(request.policy)
    if steps is not None:
        steps.append("once more, with cores of one size only")
    return _attempt(topology, equal, n, request, taken, steps)


def bind_on_nodes(
    topology: CpuTopology,
    free: CpuSet,
    shares: Mapping[int, int],
    request: BindRequest,
    taken: Allocated | None = None,
    steps: list[str] | None = None,
) -> CpuSet:
    """Choose the CPUs of a pod whose NUMA nodes are decided.

    Args:
        topology: The machine.
        free: CPUs to choose from.
        shares: Node to the number of its CPUs, see ``proxy.allocation.koordinator.node_shares``.
        request: How they are bound.
        taken: What other pods have.
        steps: As for ``bind``.

    Raises:
        NotEnoughCpus, WholeCoresError, RequiredPolicyError: As ``bind``; also for a single node.
    """
    taken = taken or Allocated()
    candidates = usable(topology, free, request, sum(shares.values()))
    chosen = CpuSet()
    for node, share in sorted(shares.items()):
        inside = CpuSet.from_bits(topology.nodes.get(node, 0)) & candidates
        if steps is not None:
            steps.append(f"{share} of NUMA node {node}")
        chosen |= _attempt(topology, inside, share, request, taken, steps)
    if request.required and not holds(topology, chosen, request.policy):
        raise RequiredPolicyError(request.policy)
    return chosen


def usable(topology: CpuTopology, free: CpuSet, request: BindRequest, n: int) -> CpuSet:
    """Return the CPUs that a required policy may take; all free CPUs if the policy is only preferred.

    Raises:
        WholeCoresError: Whole cores are required and n is not a whole number of cores.
    """
    threads = topology.cpus_per_core
    if request.required and request.policy is BindPolicy.FULL_PCPUS and threads and n % threads:
        raise WholeCoresError(n, threads)
    return eligible(topology, free, request)


def eligible(topology: CpuTopology, free: CpuSet, request: BindRequest) -> CpuSet:
    """Return the CPUs that a required policy may take, whatever their number."""
    on_machine = free & topology.cpus
    if not request.required:
        return on_machine
    if request.policy is BindPolicy.FULL_PCPUS:
        return _whole_cores(topology, on_machine.bits)
    return topology.one_of_each_core(on_machine)


def holds(topology: CpuTopology, cpus: CpuSet, policy: BindPolicy) -> bool:
    """Return whether CPUs are as a required policy demands: whole cores, or one CPU of each core."""
    inside = [bits & cpus.bits for bits in topology.cores.values()]
    if policy is BindPolicy.FULL_PCPUS:
        return all(own in (0, bits) for own, bits in zip(inside, topology.cores.values(), strict=True))
    return all(own & (own - 1) == 0 for own in inside)


def take_preferred(
    topology: CpuTopology,
    free: CpuSet,
    n: int,
    request: BindRequest,
    taken: Allocated,
    *,
    degrade: bool = True,
    steps: list[str] | None = None,
) -> CpuSet:
    """Choose from the preferred CPUs first, then from the others; arguments as ``accumulate``."""
    first = free & request.preferred
    chosen = CpuSet()
    if first:
        if steps is not None:
            steps.append(f"first of the preferred CPUs that are free, {first}")
        most = min(n, len(first))
        chosen = accumulate(topology, first, most, request, taken, degrade=degrade, steps=steps)
    missing = n - len(chosen)
    return chosen | accumulate(topology, free - first, missing, request, taken, degrade=degrade, steps=steps)


def even_shares(counts: Mapping[int, int], n: int, group: int = 1) -> dict[int, int] | None:
    """Divide a request over as few NUMA nodes as possible, as evenly as possible.

    Args:
        counts: Node to its free CPUs.
        n: CPUs requested, a multiple of ``group``.
        group: CPUs that stay together.

    Returns:
        Node to its part, or None if there are not enough groups.
    """
    order = sorted((node for node, count in counts.items() if count >= group), key=lambda i: (-counts[i], i))
    even = split([counts[node] for node in order], n, group, 1)
    shares: dict[int, int] = {}
    if even is not None:
        for at in even.members:
            shares[order[at]] = even.per_node
        for at in even.extra:
            shares[order[at]] += group
        return shares
    groups = [counts[node] // group for node in order]
    groups_left = n // group
    most = next((k for k in range(1, len(order) + 1) if sum(groups[:k]) >= groups_left), 0)
    # Nodes with fewer free CPUs take their part first; the others take the rest.
    for at in reversed(range(most)):
        part = min(groups[at], groups_left // (at + 1))
        shares[order[at]] = part * group
        groups_left -= part
    return shares if most else None


def _attempt(
    topo: CpuTopology, free: CpuSet, n: int, request: BindRequest, taken: Allocated, steps: list[str] | None
) -> CpuSet:
    if n > len(free):
        raise NotEnoughCpus(n, len(free))
    if request.required and request.policy is BindPolicy.FULL_PCPUS:
        request = replace(request, preferred=_whole_cores(topo, (request.preferred & free).bits))
    if request.strategy is not NumaStrategy.DISTRIBUTE_EVENLY or n < 1:
        return take_preferred(topo, free, n, request, taken, steps=steps)
    first = free & request.preferred
    if 0 < len(first) < n:  # two independent choices, as always with preferred CPUs
        chosen = _evenly(topo, first, len(first), request, taken, steps)
        return chosen | _evenly(topo, free - first, n - len(chosen), request, taken, steps)
    return _evenly(topo, first or free, n, request, taken, steps)


def _evenly(
    topo: CpuTopology, free: CpuSet, n: int, request: BindRequest, taken: Allocated, steps: list[str] | None
) -> CpuSet:
    """Choose in equal parts; whole cores matter more than avoiding the CPUs of others."""
    threads = topo.cpus_per_core
    whole = request.policy is BindPolicy.FULL_PCPUS and n % threads == 0
    cores, avoided_nodes = avoided_cpus(topo, request, taken)
    for group in (threads, 1) if whole and threads > 1 else (1,):
        for avoided in dict.fromkeys((avoided_nodes or cores, cores, 0)):
            candidates = free.bits & ~avoided
            if group > 1:
                candidates = topo.largest_cores(CpuSet.from_bits(candidates)).bits
            shares = even_shares({i: (candidates & b).bit_count() for i, b in topo.nodes.items()}, n, group)
            if shares is None:
                continue
            shares = {node: part for node, part in sorted(shares.items()) if part}
            if steps is not None:
                parts = " + ".join(map(str, shares.values()))
                steps.append(f"in even parts over {numa_nodes_text(Mask(shares))}: {parts}")
            chosen = CpuSet()
            for node, part in shares.items():
                inside = CpuSet.from_bits(candidates & topo.nodes[node])
                chosen |= accumulate(topo, inside, part, request, taken, steps=steps)
            return chosen
    raise NotEnoughCpus(n, len(free))


def _whole_cores(topo: CpuTopology, bits: int) -> CpuSet:
    return CpuSet.from_bits(sum(core for core in topo.cores.values() if not core & ~bits))
