"""Compute which resources a rejected request was short of, on one NUMA node or on the machine.

If the NUMA nodes were the reason for the rejection, only single nodes are considered, because operators think
in single nodes, and only those that could hold the request if they were empty. Of these, the node with the
smallest shortfall is reported: the one with the fewest resources missing, then the fewest CPUs.

If no node can be reported, or if the CPUs of the whole machine did not suffice under any policy, the CPUs of
the machine are counted, including those that must stay in the shared pool. The answer names the containers
and pods that have the missing CPUs.
"""

from __future__ import annotations

from msgspec import structs

from proxy.allocation.cpu_request import CPU
from proxy.allocation.providers.cpu import CpuProvider
from proxy.allocation.rejection import UNEXPECTED
from proxy.engine.node import Node
from proxy.engine.owners import spare_shared_cpus
from proxy.engine.state import NodeState
from proxy.engine.topology_manager import AdmissionContext
from proxy.model.admission import SHARED_POOL_EXHAUSTED, AdmissionRule
from proxy.model.explanation import HOLDERS, CpuHolder, Shortfall
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import TopologyPolicy
from proxy.model.requests import in_bytes
from proxy.model.workload import TOPOLOGY_AFFINITY, Pod

FLOORS = (SHARED_POOL_EXHAUSTED, AdmissionRule.SHARED_FLOOR.reason)
"""Reasons of verdicts that reject a request because the shared pool would be left too small."""


def shortfall(state: NodeState, context: AdmissionContext, reason: str) -> tuple[Shortfall, ...]:
    """Return the shortfalls of a rejected request; empty if they are unknown.

    Args:
        state: The node.
        context: The input of the decision: request, rules and providers.
        reason: The reason in the verdict.
    """
    request, provider = context.request, _cpu_provider(context)
    if reason == TOPOLOGY_AFFINITY and (on_node := _on_one_node(context)):
        return tuple(with_holders(state, shortfall, request.pod) for shortfall in on_node)
    if reason not in (TOPOLOGY_AFFINITY, UNEXPECTED) or provider is None:
        return ()
    return on_machine(state, request.pod, provider.requested_cpus(request), provider.free(request))


def on_machine(
    state: NodeState, pod: Pod, requested: int, free: CpuSet | None = None
) -> tuple[Shortfall, ...]:
    """Return how many CPUs the machine is short of; empty if it has enough.

    Args:
        state: The node.
        pod: The pod that requests exclusive CPUs.
        requested: How many CPUs it requests.
        free: The CPUs that it may get; computed if None.
    """
    ownable, most = ownable_cpus(state.node), state.node.most_ownable
    count = len(spare_shared_cpus(state, pod) & ownable if free is None else free)
    shortfall = Shortfall(CPU, None, requested, count, len(ownable) - most, most)
    return (with_holders(state, shortfall, pod),) if requested and shortfall.missing else ()


def ownable_cpus(node: Node) -> CpuSet:
    """Return the CPUs that can have an owner."""
    return node.machine.online - node.cpu.reserved


def with_holders(state: NodeState, shortfall: Shortfall, pod: Pod) -> Shortfall:
    """Return a shortfall of CPUs with the containers and pods that have them."""
    if shortfall.resource != CPU:
        return shortfall
    machine = state.node.machine
    cpus = shortfall.named or (
        machine.online if shortfall.nodes is None else machine.cpus_of(shortfall.nodes)
    )
    holders = holders_of(state, cpus, pod.key)
    return structs.replace(shortfall, holders=holders[:HOLDERS], more_holders=max(0, len(holders) - HOLDERS))


def _on_one_node(context: AdmissionContext) -> tuple[Shortfall, ...]:
    """Return the shortfalls of the best NUMA node.

    If a single node must hold the request and none ever could, that is the node with the most CPUs.
    """
    shortfalls: list[tuple[int, int, int, tuple[Shortfall, ...]]] = []
    for node in context.node.nodes:
        missing = _on_node(context, node)
        if missing:
            cpus = sum(shortfall.missing for shortfall in missing if shortfall.resource == CPU)
            shortfalls.append((len(missing), cpus, node, tuple(missing)))
    if not shortfalls and (context.policy or context.node.policy) is TopologyPolicy.SINGLE_NUMA_NODE:
        return _beyond_each_node(context)
    return min(shortfalls)[-1] if shortfalls else ()


def _beyond_each_node(context: AdmissionContext) -> tuple[Shortfall, ...]:
    """Return the shortfall of the NUMA node with the most CPUs, if even that node is too small."""
    provider = _cpu_provider(context)
    if provider is None:
        return ()
    requested, free = provider.requested_cpus(context.request), provider.free(context.request)
    machine = context.node.machine
    counts = {node.id: len((node.cpus & machine.online) - provider.policy.reserved) for node in machine.nodes}
    largest = max(counts, key=lambda node: counts[node])
    if counts[largest] >= requested:
        return ()
    free_here = len(free & machine.cpus_of(Mask([largest])))
    return (Shortfall(CPU, Mask([largest]), requested, free_here, most=counts[largest]),)


def _cpu_provider(context: AdmissionContext) -> CpuProvider | None:
    return next((each for each in context.providers if isinstance(each, CpuProvider)), None)


def _on_node(context: AdmissionContext, node: int) -> list[Shortfall] | None:
    """Return what one NUMA node is short of; None if it could not hold the request even when empty."""
    shortfalls: list[Shortfall] = []
    for provider in context.providers:
        missing = provider.explain_shortfall(context.request, node)
        if missing is None:
            return None
        shortfalls += missing
    return sorted(shortfalls, key=_reading_order)


def _reading_order(shortfall: Shortfall) -> int:
    """Sort CPUs before memory, and memory before resources that are counted."""
    return 0 if shortfall.resource == CPU else 1 if in_bytes(shortfall.resource) else 2


def holders_of(state: NodeState, cpus: CpuSet, excluded: str = "") -> tuple[CpuHolder, ...]:
    """Return the containers and pods that have some of these CPUs, those with the most of them first.

    Args:
        state: The node.
        cpus: The CPUs.
        excluded: An owner, or the key of a pod, that is left out.
    """
    cpus_by_ref: dict[str, CpuSet] = {}

    def add(ref: str, held: CpuSet) -> None:
        if not held.isdisjoint(cpus):
            cpus_by_ref[ref] = cpus_by_ref.get(ref, CpuSet()) | (held & cpus)

    present = set()
    for container in state.containers.values():
        present.add(container.owner)
        if container.owner not in ("", excluded) and (owned := state.owners.get(container.owner)):
            # The CPUs that the owner has now, not those that its container was given: an owner whose
            # container has ended may be placed elsewhere.
            add(container.ref if "/" in container.owner else container.pod.ref, owned.cpus)
    for pod in state.pods.values():
        if pod.reserved_for_pod is not None and pod.key != excluded and pod.ref not in cpus_by_ref:
            add(f"{pod.ref} (set aside)", pod.reserved_for_pod.cpus)
    for key, held in state.owners.items():
        if key not in present and key != excluded:
            add(f"{key} (by kubelet's CPU manager)", held.cpus)
    return tuple(
        CpuHolder(ref, held)
        for ref, held in sorted(cpus_by_ref.items(), key=lambda item: (-len(item[1]), item[0]))
    )
