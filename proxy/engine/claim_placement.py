"""Find a placement for a claim: on CPUs that are named, in a pool, or by the topology manager.

The limits of the node and the CPUs that the shared pool keeps are checked afterwards
(``engine.container_create``).
"""

from __future__ import annotations

from msgspec import structs

from proxy.allocation.providers.provider import NO_PREFERENCES, Preferences, ProviderRequest
from proxy.allocation.rejection import AllocationRejectedError
from proxy.engine.admission import exhausted_verdict
from proxy.engine.numa_alignment import wants_alignment
from proxy.engine.placement import (
    counted_memory_reason,
    counted_nodes,
    owner_memory_nodes,
    pool_memory_nodes,
    pool_placement,
    unmet_limit,
    with_burst_limit,
)
from proxy.engine.pod_admission import detailed_verdict
from proxy.engine.preassigned_cpus import FoundPlacement, PlacementRejectedError, place_on_named_cpus
from proxy.engine.shortfall import shortfall
from proxy.engine.state import NodeState, with_grants
from proxy.engine.topology_manager import (
    ANYWHERE,
    AdmissionContext,
    TopologyDecision,
    admit_container,
    allocate,
    build_context,
    conflict_verdict,
    pod_requests,
    requests_devices,
)
from proxy.engine.volcano_hints import decide_with_preferences
from proxy.model.defects import InputDefect
from proxy.model.grpc_status import GrpcStatus
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet
from proxy.model.koordinator import KUBERNETES
from proxy.model.phrases import listed, numa_nodes_text
from proxy.model.workload import Placement, Pod, Pool, Request, SetAside, Verdict
from proxy.pools.claims import STRICT, Claim, pool_of


def find_placement(
    state: NodeState,
    pod: Pod,
    name: str,
    request: Request,
    claimed: Claim,
    preferred: Preferences = NO_PREFERENCES,
    avoid: CpuSet | None = None,
) -> FoundPlacement:
    """Find a placement for the claim of a container.

    Args:
        state: The node as it is.
        pod: The pod with its permitted claim.
        name: Container name.
        request: The container's request.
        claimed: The claim.
        preferred: What device plugins prefer.
        avoid: CPUs that must not be chosen.

    Raises:
        PlacementRejectedError: There is no placement.
        PreferenceMissing: A device plugin has to be queried first.
    """
    ref = f"{pod.ref}/{name}"
    if claimed.fatal:
        raise PlacementRejectedError(
            Verdict(GrpcStatus.INVALID_ARGUMENT, "InvalidCPUSet", f"cannot place {ref}: {claimed.problem}")
        )
    if claimed.pool is Pool.OWN and claimed.cpus is not None:
        on_named = place_on_named_cpus(state, pod, name, request, claimed, claimed.cpus, preferred)
        if isinstance(on_named, FoundPlacement):
            return on_named
        claimed = on_named
    claimed = with_burst_limit(state, pod, request, claimed)
    nowhere = unmet_limit(state, claimed)
    if nowhere and pod.qos in STRICT:
        raise PlacementRejectedError(exhausted_verdict(f"place {ref}", nowhere.partition(":")[0]))
    try:
        context = _context(state, pod, name, request, claimed, preferred, avoid)
    except AllocationRejectedError as conflict:
        verdict = conflict_verdict(conflict)
        raise PlacementRejectedError(
            detailed_verdict(verdict, ref, TopologyDecision(verdict, ANYWHERE))
        ) from conflict
    if context is None:
        mems = pool_memory_nodes(state, request, claimed.nodes)
        placement = pool_placement(claimed.pool, mems, claimed.reason, claimed.within, claimed.nodes)
        return FoundPlacement(placement, problem=claimed.problem or nowhere)
    decision, unmet = _decide(state, context)
    if not decision.verdict.admitted and claimed.count and claimed.problem:
        # kubelet pinned the container to CPUs of other owners, and no CPUs can replace them.
        pool, _ = pool_of(pod)
        reason = f"{claimed.reason}; there are not enough: it runs on the {pool} pool"
        shared = Claim(pool, reason, problem=claimed.problem)
        return find_placement(state, pod, name, request, shared, preferred)
    if not decision.verdict.admitted:
        missing = shortfall(state, context, decision.verdict.reason)
        raise PlacementRejectedError(detailed_verdict(decision.verdict, ref, decision), decision, missing)
    placement = _placed(state, pod, name, request, claimed, decision)
    owner = pod.owner_key(name) if placement.pool is Pool.OWN else ""
    return FoundPlacement(placement, owner, claimed.problem or unmet or nowhere, decision)


def _context(
    state: NodeState,
    pod: Pod,
    name: str,
    request: Request,
    claimed: Claim,
    preferred: Preferences,
    avoid: CpuSet | None,
) -> AdmissionContext | None:
    """Return the input of the topology manager for a container; None if no provider has to be queried."""
    count = claimed.count
    is_served = count or request.devices or state.node.serves(pod)
    if not is_served and not requests_devices(state, pod, name):
        return None
    requests = pod_requests(pod, name, request, count, state.devices)
    provider_request = ProviderRequest(
        pod,
        requests,
        name,
        request,
        exclusive=count > 0,
        cpus=count,
        avoid=avoid or CpuSet(),
        preferred=preferred,
    )
    return build_context(state, provider_request)


def _decide(state: NodeState, context: AdmissionContext) -> tuple[TopologyDecision, InputDefect | None]:
    request, pod = context.request, context.request.pod
    aside = pod.reserved_for_pod
    if aside is None:
        return decide_with_preferences(context, admit_container)
    hint = TopologyHint(aside.affinity, aside.preferred)
    if request.cpus <= len(_cpus_set_aside_for(state, pod, aside, request.name)):
        return allocate(context, hint), None
    # The claim differs from the decision for the pod: the container was resized since, or the sum over the
    # pod's containers did not show that it owns CPUs.
    policy = KUBERNETES[pod.aligned] if wants_alignment(pod) else None
    return admit_container(structs.replace(context, pod_hint=hint, policy=policy)), None


def _cpus_set_aside_for(state: NodeState, pod: Pod, aside: SetAside, name: str) -> CpuSet:
    """Return the part of the CPUs set aside for a pod that one of its containers may take.

    That is the container's own part if the parts are known, otherwise all that no other container owns.
    """
    part = aside.part(name)
    others = (c for c in state.in_sandbox(pod.sandbox_id) if c.owns_cpus and c.name != name)
    cpus = part.cpus if part is not None else aside.cpus
    return cpus - CpuSet.union_of(other.placement.exclusive for other in others)


def _placed(
    state: NodeState, pod: Pod, name: str, request: Request, claimed: Claim, decision: TopologyDecision
) -> Placement:
    granted = decision.granted
    if claimed.pool is not Pool.OWN:
        bound = counted_nodes(pod, granted.blocks)
        mems = bound or pool_memory_nodes(state, request, claimed.nodes)
        reasons = (claimed.reason, counted_memory_reason(bound)) if bound else (claimed.reason,)
        pooled_placement = Placement(
            claimed.pool,
            CpuSet(),
            mems,
            reasons,
            pool_cpus_limit=claimed.within,
            pool_numa_limit=claimed.nodes,
        )
        return with_grants(pooled_placement, granted)
    cpus = granted.cpus
    mems, memory_reasons = owner_memory_nodes(
        state, request, cpus, f"{pod.key}/{name} {name}", counted_nodes(pod, granted.blocks)
    )
    where = numa_nodes_text(state.node.machine.nodes_of(cpus))
    if cpus == state.last_cpus(pod.owner_key(name)):
        reason = f"{claimed.reason}; keeps the CPUs of its earlier attempt"
    elif pod.reserved_for_pod is not None and cpus <= pod.reserved_for_pod.cpus:
        reason = f"{claimed.reason}; {listed(cpus)} on {where}, set aside for its pod"
    else:
        reason = f"{claimed.reason}; picked {listed(cpus)} on {where}"
    return with_grants(
        Placement(Pool.OWN, cpus, mems, (reason, *memory_reasons), claimed.excludes_be), granted
    )
