"""The hints of the CPU manager: sets of NUMA nodes on which a request for CPUs could be met.

Source: kubernetes v1.36, pkg/kubelet/cm/cpumanager/policy_static.go ``generateCPUTopologyHints``. Every set
of NUMA nodes that own CPUs is a hint if it holds all CPUs that the pod may use again (those of its finished
init containers) and if these CPUs, together with the available CPUs in the set, are enough. The hint is
*preferred* if no smaller set would suffice on an empty machine: all CPUs of the nodes count, not only the
free ones. With ``align-by-socket`` a set is also preferred if it touches no more sockets than the smallest
such set needs.

kubelet has no ``SpreadByPCPUs``. If a pod or the node requires it, each CPU of a container is on a core of
its own. So a set of nodes also needs as many cores with a CPU as the largest container has CPUs. The smallest
set on an empty machine has both, enough CPUs and enough cores (koordinator a7a1b76,
pkg/scheduler/plugins/nodenumaresource/resource_manager.go ``trimNUMANodeResources``).

n nodes have up to 2^n sets. For up to ``MOST_LISTED_NODES`` nodes the sets are listed. The sum of each set is
that of an earlier set plus one node, so a list costs one addition per set; masks and hints are made once for
all machines with these nodes. For more nodes the answer is a ``Family``: the sets are those that meet a
demand, and "holds all reusable CPUs" is a demand for as many nodes as have reusable CPUs, so the family's
closed form is exact. ``proxy.allocation.sockets`` adds the masks that are preferred because of their sockets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from proxy.allocation.cpu_topology import CpuTopology
from proxy.allocation.demand import MOST_LISTED_NODES, Demand, covers, least_node_count, masks
from proxy.allocation.hint_family import Family, hint
from proxy.allocation.sockets import SocketFamily, Sockets
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import CpuSet

CPU = "cpu"


def container_request_hints(
    topo: CpuTopology,
    request: int,
    assigned: CpuSet | None,
    available: CpuSet,
    reusable: CpuSet,
    *,
    by_socket: bool = False,
    cores: int = 0,
) -> Hints:
    """Return the hints for a container.

    Args:
        topo: The machine.
        request: Exclusive CPUs requested; 0 for none.
        assigned: CPUs that the container already owns; None if it owns none.
        available: CPUs that may become exclusive.
        reusable: CPUs of the pod's init containers that it may have.
        by_socket: kubelet's ``align-by-socket``.
        cores: As in ``cpu_hints``.
    """
    if request == 0:
        return None
    if assigned is None:
        return {CPU: cpu_hints(topo, available, reusable, request, by_socket=by_socket, cores=cores)}
    if len(assigned) != request:
        return {CPU: ()}
    return {CPU: _hints_of_owned(topo, assigned, by_socket=by_socket, cores=cores)}


def pod_request_hints(
    topo: CpuTopology,
    request: int,
    assigned: Iterable[tuple[int, CpuSet]],
    available: CpuSet,
    reusable: CpuSet,
    *,
    by_socket: bool = False,
    cores: int = 0,
) -> Hints:
    """Return the hints for a pod.

    Args:
        topo: The machine.
        request: The most exclusive CPUs that the pod requests at any time.
        assigned: For each container that already owns CPUs, how many it requests and which it owns.
        available: CPUs that may become exclusive.
        reusable: CPUs of the pod's init containers that it may have.
        by_socket: kubelet's ``align-by-socket``.
        cores: As in ``cpu_hints``.
    """
    if request == 0:
        return None
    owned = CpuSet()
    for requested, cpus in assigned:
        if len(cpus) != requested:
            return {CPU: ()}
        owned |= cpus
    if len(owned) == request:
        return {CPU: _hints_of_owned(topo, owned, by_socket=by_socket, cores=cores)}
    return {CPU: cpu_hints(topo, available, reusable | owned, request, by_socket=by_socket, cores=cores)}


def _hints_of_owned(
    topo: CpuTopology, owned: CpuSet, *, by_socket: bool, cores: int
) -> Sequence[TopologyHint]:
    """Return the hints for CPUs that stay where they are, on as many cores as they have."""
    cores = min(cores, len(topo.one_of_each_core(owned)))
    return cpu_hints(topo, owned, CpuSet(), len(owned), by_socket=by_socket, cores=cores)


def cpu_hints(
    topo: CpuTopology,
    available: CpuSet,
    reusable: CpuSet,
    request: int,
    *,
    by_socket: bool = False,
    cores: int = 0,
) -> Sequence[TopologyHint]:
    """Return the hints for a number of CPUs.

    Args:
        topo: The machine.
        available: CPUs to count.
        reusable: CPUs to count that every hint must hold.
        request: CPUs requested, at least 1.
        by_socket: kubelet's ``align-by-socket``.
        cores: How many cores must have one of the CPUs: the number of CPUs of one container if they must be
            on different cores; 0 if a container may get several CPUs of a core.

    Returns:
        In kubelet's order: by number of nodes, then by node list. A ``Family`` beyond ``MOST_LISTED_NODES``
        nodes; empty when nothing fits.
    """
    nodes = tuple(topo.nodes)
    if reusable.bits & ~topo.cpus.bits:
        return ()
    free = {node: (bits & available.bits).bit_count() for node, bits in topo.nodes.items()}
    reusable_nodes = [node for node, bits in topo.nodes.items() if bits & reusable.bits]
    size = _fewest(topo, request, cores)
    sockets = Sockets.of(topo, size) if by_socket else None
    need = request - len(reusable)
    on_cores = (_on_cores(topo, available | reusable, cores),) if cores else ()
    if len(nodes) <= MOST_LISTED_NODES:
        hints = _list(nodes, free.values(), sum(1 << node for node in reusable_nodes), need, size, sockets)
        return tuple(h for h in hints if h.affinity and covers(on_cores, h.affinity.bits)) if cores else hints
    amounts = tuple((1 << node, count) for node, count in free.items())
    holds_reusable = Demand(len(reusable_nodes), tuple((1 << node, 1) for node in reusable_nodes))
    demands = (Demand(need, amounts), holds_reusable, *on_cores)
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
        preferred if bits.bit_count() == size or sockets.is_aligned(bits) else plain
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


def _fewest(topo: CpuTopology, request: int, cores: int) -> int:
    """Return the least number of empty nodes that hold the request; the number of all nodes if none do."""
    if cores:
        cpus = Demand(request, tuple((1 << node, bits.bit_count()) for node, bits in topo.nodes.items()))
        return least_node_count(tuple(topo.nodes), (cpus, _on_cores(topo, topo.cpus, cores))) or len(
            topo.nodes
        )
    missing = request
    for count, size in enumerate(sorted((b.bit_count() for b in topo.nodes.values()), reverse=True), start=1):
        missing -= size
        if missing <= 0:
            return count
    return len(topo.nodes)


def _on_cores(topo: CpuTopology, cpus: CpuSet, cores: int) -> Demand:
    """Return the demand that ``cores`` cores of some nodes have one of these CPUs."""
    one_each = topo.one_of_each_core(cpus).bits
    by_node = ((1 << node, (bits & one_each).bit_count()) for node, bits in topo.nodes.items())
    return Demand(cores, tuple(by_node))
