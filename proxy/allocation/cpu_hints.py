"""The hints of the CPU manager: sets of NUMA nodes on which a request for CPUs could be met.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/policy_static.go ``generateCPUTopologyHints``. Every set
of NUMA nodes that own CPUs is a hint if it holds all CPUs that the pod may use again (those of its finished
init containers) and if these with the available CPUs in the set are enough. It is *preferred* if no smaller
set would suffice on an empty machine: all CPUs of the nodes count, not only the free ones. With
``align-by-socket`` a set is also preferred if it touches no more sockets than the smallest such set needs.

n nodes are up to 2^n sets. Up to ``MOST_LISTED_NODES`` nodes they are listed, and each has the sum of one
that was summed before it and one node, so a list costs one addition per set; masks and hints are made once
for all machines with these nodes. Beyond that the answer is a ``Family``: the sets are those that meet a
demand, and "holds all reusable CPUs" is a demand for as many nodes as have some, so the family's closed form
is exact. ``proxy.allocation.sockets`` knows in addition what is preferred for its sockets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.demand import MOST_LISTED_NODES, Demand, masks
from proxy.allocation.hint_family import Family, hint
from proxy.allocation.sockets import SocketFamily, Sockets
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import CpuSet

CPU = "cpu"


def container_hints(
    topo: CpuTopology,
    request: int,
    assigned: CpuSet | None,
    available: CpuSet,
    reusable: CpuSet,
    *,
    by_socket: bool = False,
) -> Hints:
    """Return the hints for a container.

    Args:
        topo: The machine.
        request: Exclusive CPUs requested; 0 for none.
        assigned: CPUs that the container already owns, None where it owns none.
        available: CPUs that may become exclusive.
        reusable: CPUs of the pod's init containers that it may have.
        by_socket: kubelet's ``align-by-socket``.
    """
    if request == 0:
        return None
    if assigned is None:
        return {CPU: cpu_hints(topo, available, reusable, request, by_socket=by_socket)}
    if len(assigned) != request:
        return {CPU: ()}
    return {CPU: cpu_hints(topo, assigned, CpuSet(), request, by_socket=by_socket)}


def pod_hints(
    topo: CpuTopology,
    request: int,
    assigned: Iterable[tuple[int, CpuSet]],
    available: CpuSet,
    reusable: CpuSet,
    *,
    by_socket: bool = False,
) -> Hints:
    """Return the hints for a pod.

    Args:
        topo: The machine.
        request: The most exclusive CPUs that the pod requests at any time.
        assigned: For each container that already owns CPUs, how many it requests and which it owns.
        available: CPUs that may become exclusive.
        reusable: CPUs of the pod's init containers that it may have.
        by_socket: kubelet's ``align-by-socket``.
    """
    if request == 0:
        return None
    owned = CpuSet()
    for requested, cpus in assigned:
        if len(cpus) != requested:
            return {CPU: ()}
        owned |= cpus
    if len(owned) == request:
        return {CPU: cpu_hints(topo, owned, CpuSet(), request, by_socket=by_socket)}
    return {CPU: cpu_hints(topo, available, reusable | owned, request, by_socket=by_socket)}


def cpu_hints(
    topo: CpuTopology, available: CpuSet, reusable: CpuSet, request: int, *, by_socket: bool = False
) -> Sequence[TopologyHint]:
    """Return the hints for a number of CPUs.

    Args:
        topo: The machine.
        available: CPUs to count.
        reusable: CPUs to count that every hint must hold.
        request: CPUs requested, at least 1.
        by_socket: kubelet's ``align-by-socket``.

    Returns:
        In kubelet's order: by number of nodes, then by node list. A ``Family`` beyond ``MOST_LISTED_NODES``
        nodes; empty when nothing fits.
    """
    nodes = tuple(topo.nodes)
    if reusable.bits & ~topo.cpus.bits:
        return ()
    free = {node: (bits & available.bits).bit_count() for node, bits in topo.nodes.items()}
    reusable_nodes = [node for node, bits in topo.nodes.items() if bits & reusable.bits]
    size = _fewest(topo, request)
    sockets = Sockets.of(topo, size) if by_socket else None
    need = request - len(reusable)
    if len(nodes) <= MOST_LISTED_NODES:
        return _list(nodes, free.values(), sum(1 << node for node in reusable_nodes), need, size, sockets)
    amounts = tuple((1 << node, count) for node, count in free.items())
    holds_reusable = Demand(len(reusable_nodes), tuple((1 << node, 1) for node in reusable_nodes))
    demands = (Demand(need, amounts), holds_reusable)
    if sockets is not None:
        return SocketFamily((), nodes, 1, demands, size, sockets) or ()
    return Family((), nodes, 1, demands, size) or ()


def _list(
    nodes: tuple[int, ...],
    free: Iterable[int],
    reusable_nodes: int,
    need: int,
    size: int,
    sockets: Sockets | None,
) -> tuple[TopologyHint, ...]:
    sums = [0]
    for count in free:
        sums += [amount + count for amount in sums]
    if sockets is None:
        return tuple(
            preferred if bits.bit_count() == size else plain
            for place, bits, plain, preferred in _table(nodes)
            if sums[place] >= need and not reusable_nodes & ~bits
        )
    return tuple(
        preferred if bits.bit_count() == size or sockets.aligned(bits) else plain
        for place, bits, plain, preferred in _table(nodes)
        if sums[place] >= need and not reusable_nodes & ~bits
    )


@functools.lru_cache(maxsize=8)
def _table(nodes: tuple[int, ...]) -> tuple[tuple[int, int, TopologyHint, TopologyHint], ...]:
    """Return for every mask, in order: its index in the sums, its bits, and its plain and preferred hint."""
    place = {1 << node: 1 << i for i, node in enumerate(nodes)}
    for bits in masks(nodes):
        low = bits & -bits
        place[bits] = place[low] | (place[bits ^ low] if bits != low else 0)
    return tuple((place[b], b, hint(b, False), hint(b, True)) for b in masks(nodes))


def _fewest(topo: CpuTopology, request: int) -> int:
    """Return the least number of empty nodes that hold the request; the number of all nodes where none do."""
    missing = request
    for count, cpus in enumerate(sorted((b.bit_count() for b in topo.nodes.values()), reverse=True), start=1):
        missing -= cpus
        if missing <= 0:
            return count
    return len(topo.nodes)
