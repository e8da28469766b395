"""Align a pod by its own policy: Koordinator's annotation ``numa-topology-spec``, applied on a node.

A pod with this annotation is decided as a whole when its sandbox is created, whatever the scope of the node
is. If a scheduler has decided already, there is nothing to decide. Sets of NUMA nodes are tried by size. Each
set that has the amounts that the pod requests is a hint, with a score for how full or how empty its nodes
would be. The policy of the pod merges one hint from those of CPUs, memory and devices. If both the pod and
the node have a policy, the two must be the same. A pod may also require exclusivity: a pod on several NUMA
nodes then avoids nodes with pods on a single node, and a pod on a single node avoids nodes with pods on
several.

Exclusive CPUs are then divided evenly over the chosen nodes. A pod that shares CPUs is bound to the part of
its pool on these nodes. All CPUs of that part count as free, because the usage of other pods is unknown here.

Source: koordinator a7a1b76, pkg/scheduler/plugins/nodenumaresource (hints and amounts) and
pkg/scheduler/frameworkext/topologymanager (policies and merge).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec import structs

from proxy.allocation.cpu_request import CPU, MILLI, NO_SHARES, running_request_milli
from proxy.allocation.koordinator.bind import usable
from proxy.allocation.koordinator.hints import Answer, ScoredHint
from proxy.allocation.koordinator.node_shares import Amounts
from proxy.allocation.koordinator.scored_hints import node_status, policy_of, score_of, scored_hints
from proxy.allocation.koordinator.scored_merge import Tenancy, align
from proxy.allocation.memory import request as memory_request
from proxy.allocation.merge_record import record_answer
from proxy.allocation.policies import UNALIGNED
from proxy.allocation.providers.cpu import CpuProvider
from proxy.allocation.providers.devices import DEVICES
from proxy.allocation.providers.memory import MemoryProvider
from proxy.allocation.providers.provider import Provider
from proxy.engine.owners import is_undecided
from proxy.engine.state import NodeState
from proxy.engine.topology_manager import AdmissionContext, TopologyDecision
from proxy.model.explanation import Merge
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.koordinator import KUBERNETES, NumaPolicy, NumaStrategy
from proxy.model.options import Scope
from proxy.model.requests import in_bytes
from proxy.model.workload import Pod, Request, Verdict
from proxy.pools.claims import pool_of


def wants_alignment(pod: Pod) -> bool:
    """Return whether a pod requests alignment by its own policy, and the node has to decide it."""
    return pod.aligned is not NumaPolicy.NONE and is_undecided(pod)


def shared_request_milli(pod: Pod, total: Request) -> int:
    """Return how much CPU a pod that shares CPUs requests, in thousandths; 0 if that is unknown."""
    if pod.requests is not None:
        return running_request_milli(pod.requests)
    return total.requested_milli if total.cpu_shares > NO_SHARES else 0


def bind_to_nodes(pod: Pod, hint: TopologyHint, nodes: Mask) -> Pod:
    """Return a pod that shares CPUs, bound to the NUMA nodes of a hint; unbound if the hint has all nodes."""
    return pod if hint.affinity == nodes else structs.replace(pod, nodes=hint.affinity)


P = TypeVar("P", bound=Provider)
_KOORDINATORS = {kubernetes: own for own, kubernetes in KUBERNETES.items()}


def align_pod(state: NodeState, context: AdmissionContext, milli: int) -> TopologyDecision:
    """Decide on which NUMA nodes a pod runs; nothing is granted yet.

    Args:
        state: The node as it is.
        context: The request and the providers; the pod wants to be aligned (``wants_alignment``).
        milli: Thousandths of a CPU that the pod requests.

    Raises:
        PolicyConflictError: The node has another policy.
        BindError: CPUs cannot be bound as the pod or the node requires.
    """
    node, pod, pod_requests = state.node, context.request.pod, context.request.requests
    policy = policy_of(pod.aligned, _KOORDINATORS[node.policy])
    requests: dict[str, int] = {CPU: milli} if milli else {}
    memory = _provider(context, MemoryProvider)
    if memory is not None and memory.wants(context.request) and not memory.bound:
        requests |= memory_request.pod_amounts(pod_requests)
    total, free = _amounts(state, context, requests)
    strategy = node.strategy or NumaStrategy.MOST_ALLOCATED

    def fits(nodes: Mask) -> bool:
        return all(sum(free[n].get(r, 0) for n in nodes) >= amount for r, amount in requests.items())

    def score(nodes: Mask) -> int:
        return score_of(requests, free, total, nodes, strategy)

    scored = scored_hints(requests, free, fits, policy, score)
    answers: list[Answer] = [scored, *_unscored(context)]
    tenancy = Tenancy(pod.numa_exclusive, node_status(_tenants(state, pod)))
    aligned = align(policy, answers, node.nodes, tenancy)
    hint = TopologyHint(aligned.hint.affinity, aligned.hint.preferred)
    recorded = tuple(
        record for name, hints in _hints_by_provider(answers) for record in record_answer(name, hints)
    )
    merge = Merge(str(policy), Scope.POD.value, hint, conflicts=aligned.reasons)
    return TopologyDecision(Verdict() if aligned.admitted else UNALIGNED, hint, answers=recorded, merge=merge)


def _amounts(
    state: NodeState, context: AdmissionContext, requests: Amounts
) -> tuple[dict[int, dict[str, int]], dict[int, dict[str, int]]]:
    """Return the amounts of the requested resources that every NUMA node has, and those that are free."""
    node = state.node
    cpus = _free_cpus(state, context, requests.get(CPU, 0) // MILLI)
    total: dict[int, dict[str, int]] = {}
    free: dict[int, dict[str, int]] = {}
    for numa_node in node.machine.nodes:
        if CPU in requests:
            total.setdefault(numa_node.id, {})[CPU] = len(numa_node.cpus) * MILLI
            free.setdefault(numa_node.id, {})[CPU] = len(numa_node.cpus & cpus) * MILLI
        memory = state.memory.nodes.get(numa_node.id) if state.memory is not None else None
        for resource in requests.keys() - {CPU} if memory is not None else ():
            assert memory is not None
            table = memory.table(resource)
            total.setdefault(numa_node.id, {})[resource] = table.allocatable
            free.setdefault(numa_node.id, {})[resource] = table.free
    return total, free


def _free_cpus(state: NodeState, context: AdmissionContext, count: int) -> CpuSet:
    provider = _provider(context, CpuProvider)
    if provider is None or not context.request.exclusive:
        return state.pools.cpus_of(pool_of(context.request.pod)[0])
    free = provider.free(context.request)
    return usable(state.node.topology, free, provider.binding.request, count) if provider.binding else free


def _provider(context: AdmissionContext, kind: type[P]) -> P | None:
    return next((provider for provider in context.providers if isinstance(provider, kind)), None)


def _unscored(context: AdmissionContext) -> Iterable[Answer]:
    """Return the hints of all providers but those of CPUs and memory, whose amounts are scored."""
    for provider in context.providers:
        if isinstance(provider, CpuProvider | MemoryProvider):
            continue
        yield {
            resource: tuple(ScoredHint(h.affinity, h.preferred) for h in each or ())
            for resource, each in (provider.hints(context.request) or {}).items()
            if each is not None
        }


def _hints_by_provider(
    answers: Iterable[Answer],
) -> Iterable[tuple[str, Mapping[str, tuple[TopologyHint, ...]]]]:
    for answer in answers:
        for resource, hints in (answer or {}).items():
            provider = resource if resource == CPU else "memory" if in_bytes(resource) else DEVICES
            yield provider, {resource: tuple(TopologyHint(h.affinity, h.preferred) for h in hints or ())}


def _tenants(state: NodeState, pod: Pod) -> Iterable[Mask]:
    """Return the NUMA nodes of all other pods that are bound to some NUMA nodes."""
    machine = state.node.machine
    owned: dict[str, int] = {}
    for container in state.containers.values():
        if container.owns_cpus:
            key = container.pod.key
            owned[key] = owned.get(key, 0) | container.placement.exclusive.bits
    for reserved in state.reservation_cpus.values():
        key = reserved.owner.partition("/")[0]
        owned[key] = owned.get(key, 0) | reserved.cpus.bits
    owned.pop("", None)  # CPUs without a known pod
    bound: dict[str, Mask] = {}
    for other in state.pods.values():
        if other.reserved_for_pod is not None:
            owned[other.key] = owned.get(other.key, 0) | other.reserved_for_pod.cpus.bits
        if other.nodes:
            bound[other.key] = other.nodes
    for key, bits in owned.items():
        if bits:
            bound[key] = machine.nodes_of(CpuSet.from_bits(bits))
    return [nodes for key, nodes in bound.items() if key != pod.key and nodes]
