"""Decide a CreateContainer call: the request and the node's state in, a plan out.

The order is: the claim (what the pod's class and request entitle it to), the CPUs (named by a scheduler or
kubelet, or chosen by the topology manager), the verdict (no other container owns these CPUs, the shared pool
keeps at least one CPU), the memory nodes, and the containers that have to move. Nothing here changes
anything: the plan holds the whole next state.
"""

from __future__ import annotations

from msgspec import Struct, structs

from proxy.allocation.cpu_request import container_cpus
from proxy.allocation.providers.provider import NO_PREFERENCES, Preferences, ProviderRequest
from proxy.allocation.rejection import AllocationRejectedError
from proxy.engine.admission import (
    NO_POOL_CPUS,
    RESTRICTED_CLASSES,
    exhausted_verdict,
    permitted_claim,
    rejection_verdict,
    rejects_claims,
    sharing_problem,
    sum_requests,
)
from proxy.engine.explain_record import explain, moved_containers
from proxy.engine.held_devices import granted
from proxy.engine.numa_alignment import wants_alignment
from proxy.engine.owners import cpus_to_avoid, exceeded_limit, why_pod_total_exceeded
from proxy.engine.placement import (
    counted_memory_reason,
    counted_nodes,
    moves,
    owner_memory_nodes,
    pool_memory_nodes,
    pool_placement,
    unmet_limit,
    with_burst_limit,
)
from proxy.engine.pod_admission import detailed_verdict
from proxy.engine.preassigned_cpus import FoundPlacement, PlacementRejectedError, place_on_named_cpus
from proxy.engine.quotas import pool_forbids_quota, without_quota
from proxy.engine.shortfall import FLOORS, on_machine, shortfall
from proxy.engine.state import NodeState, with_grants
from proxy.engine.topology_manager import (
    ANYWHERE,
    AdmissionContext,
    TopologyDecision,
    admit_container,
    allocate,
    build_context,
    pod_requests,
    refusal_verdict,
    requests_devices,
)
from proxy.engine.volcano_hints import decide_with_preferences
from proxy.model.admission import AdmissionRule, Breach
from proxy.model.defects import DefectKind, InputDefect
from proxy.model.explanation import CREATE, Explanation, Shortfall
from proxy.model.grpc_status import GrpcStatus
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet
from proxy.model.koordinator import KUBERNETES
from proxy.model.phrases import cpus as named_cpus
from proxy.model.phrases import listed, numa_nodes_text
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, Request, SetAside, Verdict
from proxy.pools.claims import STRICT, Claim, claim, pool_of, whole_cpus


class Plan(Struct, frozen=True):
    """The decision on the placement of one container, which is created or adopted.

    Attributes:
        verdict: Admit or reject; on a rejection ``state`` is the state before.
        state: The whole next state.
        container: The container as placed; None on a rejection.
        shrink: Ids of containers that must leave CPUs before the request continues.
        problem: The problem with the request, for the operator; empty if there is none.
        explanation: The record of the decision; None for a container that could only go to a pool
            (``engine.explain_record``).
        limit: The admission rule that the claim exceeded; None if it exceeded none.
    """

    verdict: Verdict
    state: NodeState
    container: Container | None = None
    shrink: tuple[str, ...] = ()
    problem: str = ""
    explanation: Explanation | None = None
    limit: AdmissionRule | None = None


_ADMITTED = Verdict()


def place(
    state: NodeState,
    pod: Pod,
    name: str,
    attempt: int,
    request: Request,
    token: str,
    allowed: CpuSet | None = None,
    current: CpuSet | None = None,
    preferred: Preferences = NO_PREFERENCES,
) -> Plan:
    """Decide the placement of a container.

    Args:
        state: The node as it is.
        pod: The container's pod.
        name: Container name.
        attempt: Its attempt.
        request: The container's request.
        token: Its id until the runtime has assigned one.
        allowed: CPUs that may be named; the online ones if None.
        current: CPUs that it runs on already; None for none. Exactly these it may own even beyond the limits.
        preferred: What device plugins prefer.

    Raises:
        PreferenceMissing: A device plugin has to be queried first.
    """
    placement = _pooled_at_once(state, pod, name, request)
    if placement is not None:
        container = Container(token, name, pod, request, placement, Phase.CREATING, attempt)
        return Plan(_ADMITTED, state.with_container("", container), container)
    permitted, breach = permitted_container_claim(state, pod, name, request)
    claimed = _claimed(state, permitted, name, request, allowed, breach)
    draft = ContainerDraft(
        state, pod, permitted, name, request, token, attempt, current or CpuSet(), preferred
    )
    if breach is not None and rejects_claims(state.node):
        return draft.rejected(rejection_verdict(breach, f"place {pod.ref}/{name}"), limit=breach.rule)
    try:
        drafted = _within_limits(draft, claimed)
    except PlacementRejectedError as refusal:
        return draft.rejected(
            refusal.verdict, refusal.decision, refusal.shortfalls, claimed.problem, refusal.limit
        )
    return _planned(draft, drafted, breach)


def rejected_without_cpus(state: NodeState, container: Container) -> Plan:
    """Return the plan that rejects a container whose pool has no CPUs; ``state`` is the state before."""
    verdict = exhausted_verdict(f"place {container.ref}", NO_POOL_CPUS)
    pod, name, attempt = container.pod, container.name, container.attempt
    explanation = explain(CREATE, pod, name, attempt, container.request, verdict, None)
    return Plan(verdict, state, explanation=explanation)


def permitted_container_claim(
    state: NodeState, pod: Pod, name: str, request: Request
) -> tuple[Pod, Breach | None]:
    """Return the permitted claim of a pod, from what is known when one of its containers is created."""
    if pod.cpuset is None and pod.nodes is None and not pod.problem and pod.qos not in RESTRICTED_CLASSES:
        return pod, None
    if pod.cpuset is None or pod.total is not None or pod.requests is not None:
        return permitted_claim(state.node, pod, None, state.retained_cpus(pod.key))
    requests = {c.name: c.request for c in state.in_sandbox(pod.sandbox_id) if c.phase is not Phase.EXITED}
    known = sum_requests(list({**requests, name: request}.values()))
    return permitted_claim(state.node, pod, known, state.retained_cpus(pod.key))


def _claimed(
    state: NodeState,
    permitted: Pod,
    name: str,
    request: Request,
    allowed: CpuSet | None,
    breach: Breach | None,
) -> Claim:
    """Return the claim of a container, according to the permitted claim of its pod."""
    online = state.node.machine.online
    if (
        allowed is None
        and permitted.cpuset
        and permitted.cpuset & online
        and permitted.cpuset <= state.last_cpus(permitted.key)
    ):
        allowed = permitted.cpuset | online  # its offline CPUs may come back; it continues on the others
    claimed = claim(
        permitted,
        request,
        allowed or online,
        static=state.node.static,
        kubelet_reported_count=_known_exclusive_cpus(permitted, name),
    )
    if claimed.pool is Pool.OWN and claimed.cpus is None:
        problem = why_pod_total_exceeded(state, permitted, name, claimed.count)
        if problem:
            pool, reason = pool_of(permitted)
            claimed = Claim(pool, reason, problem=problem)
    if breach is None or claimed.problem:
        return claimed
    return structs.replace(claimed, problem=sharing_problem(breach))


class ContainerDraft(Struct, frozen=True):
    """A container whose placement is being decided.

    Attributes:
        state: The node as it is.
        pod: Its pod.
        permitted: The pod with its permitted claim.
        name, request, token, attempt: As in ``place``.
        current: CPUs that it runs on already.
        preferred: What device plugins prefer.
    """

    state: NodeState
    pod: Pod
    permitted: Pod
    name: str
    request: Request
    token: str
    attempt: int
    current: CpuSet
    preferred: Preferences

    def of(self, found: FoundPlacement, limit: AdmissionRule | None = None) -> DraftedContainer:
        """Return the container with a placement, and the state with it."""
        placement = found.placement
        if pool_forbids_quota(self.state, self.pod, self.name, placement.pool):
            placement = without_quota(placement, self.request)
        container = Container(
            self.token,
            self.name,
            self.pod,
            self.request,
            placement,
            Phase.CREATING,
            self.attempt,
            found.owner,
        )
        after = self.state.changed(put=(container,))
        if placement.devices:
            after = granted(after, container)
        return DraftedContainer(found, container, after, limit)

    def breach(self, drafted: DraftedContainer) -> Breach | None:
        """Return the limit that a placement exceeds."""
        own = drafted.found.placement.exclusive
        if not own or own == self.current:
            return None
        return exceeded_limit(self.state, drafted.after, self.permitted, drafted.found.owner, own)

    def find(self, claimed: Claim, avoid: CpuSet | None = None) -> FoundPlacement:
        """Find a placement for a claim."""
        return _find_placement(self, claimed, avoid)

    def rejected(
        self,
        verdict: Verdict,
        decision: TopologyDecision | None = None,
        shortfalls: tuple[Shortfall, ...] = (),
        problem: str = "",
        limit: AdmissionRule | None = None,
    ) -> Plan:
        """Return the plan that rejects the container, with the reason."""
        explanation = explain(
            CREATE, self.pod, self.name, self.attempt, self.request, verdict, decision, shortfalls=shortfalls
        )
        return Plan(verdict, self.state, problem=problem, explanation=explanation, limit=limit)


class DraftedContainer(Struct, frozen=True):
    """A container with its placement, and the state with it.

    Attributes:
        found: The placement, and the decision of the topology manager.
        container: The container with that placement.
        after: The state with the container.
        limit: The rule because of which the container owns no CPUs; None if there is none.
    """

    found: FoundPlacement
    container: Container
    after: NodeState
    limit: AdmissionRule | None = None


def _within_limits(draft: ContainerDraft, claimed: Claim) -> DraftedContainer:
    """Find a placement that stays within the limits.

    Raises:
        PlacementRejectedError: There is no placement, or only one beyond a limit.
    """
    drafted = draft.of(draft.find(claimed))
    breach = draft.breach(drafted)
    if breach is None:
        return drafted
    node, pod, found = draft.state.node, draft.permitted, drafted.found
    pinned = claimed.pool is Pool.OWN and claimed.cpus is not None and not claimed.per_pod  # by kubelet
    if not claimed.per_pod and breach.rule is AdmissionRule.SHARED_FLOOR:
        again = claimed
        if pinned:
            count = len(claimed.cpus or ())
            message = f"other CPUs than kubelet's CPU manager named ({breach.rule}): {breach.message}"
            problem = InputDefect(message, DefectKind.ADMISSION)
            again = structs.replace(claimed, cpus=None, count=count, problem=problem)
        try:
            other = draft.of(draft.find(again, cpus_to_avoid(draft.state, pod)))
            if draft.breach(other) is None and other.container.placement.pool is Pool.OWN:
                return other
        except PlacementRejectedError:
            pass  # then the rule is the reason for the rejection
    if rejects_claims(node) and not pinned:
        # kubelet's CPU manager has admitted and pinned the container, so kubelet would retry a rejected
        # create forever.
        action = f"give {named_cpus(found.placement.exclusive)} to {pod.ref}/{draft.name}"
        verdict = rejection_verdict(breach, action)
        missing = (
            on_machine(draft.state, pod, len(found.placement.exclusive)) if verdict.reason in FLOORS else ()
        )
        raise PlacementRejectedError(verdict, found.decision, missing, breach.rule)
    pool, reason = pool_of(pod)
    shared = Claim(pool, reason, problem=sharing_problem(breach))
    return draft.of(draft.find(shared), breach.rule)


def _planned(draft: ContainerDraft, drafted: DraftedContainer, breach: Breach | None) -> Plan:
    """Return the plan with a placement; it rejects the container if the shared pool would have no CPUs."""
    state, pod, found = draft.state, draft.pod, drafted.found
    container, after = drafted.container, drafted.after
    placement = container.placement
    shrink: tuple[str, ...] = ()
    if placement.pool is Pool.OWN:
        if not after.pools.shared - after.cpus_set_aside(pod.key):
            missing = on_machine(state, pod, len(placement.exclusive))
            verdict = exhausted_verdict(f"give {named_cpus(placement.exclusive)} to {container.ref}")
            return draft.rejected(verdict, found.decision, missing, found.problem)
        shrink, _ = moves(state, after)
    explanation = explain(
        CREATE, pod, draft.name, draft.attempt, draft.request, _ADMITTED, found.decision, placement, after
    )
    if shrink:
        moved, more_moved = moved_containers(state, after, shrink)
        explanation = structs.replace(explanation, moved=moved, more_moved=more_moved)
    limit = breach.rule if breach is not None else drafted.limit
    return Plan(_ADMITTED, after, container, shrink, found.problem, explanation, limit)


def _known_exclusive_cpus(pod: Pod, name: str) -> int | None:
    """Return how many CPUs a container may own according to kubelet's report of its pod; None without one.

    In a pod with resources of its own, a container that was not reported (an ephemeral one) owns no CPUs: its
    create may carry the resources of the pod.
    """
    known = (
        next((container for container in pod.requests.containers if container.name == name), None)
        if pod.requests
        else None
    )
    if pod.requests is None or (known is None and pod.requests.pod_level_requests is None):
        return None
    return 0 if known is None else container_cpus(pod.requests, known)


def _pooled_at_once(state: NodeState, pod: Pod, name: str, request: Request) -> Placement | None:
    """Return the placement of a container that can only go to a pool; None if more has to be decided.

    Most containers can only go to a pool, and for them only the class matters. The answer comes from a table,
    and is the same as that of the full decision.
    """
    if (
        pod.cpuset is not None
        or pod.problem
        or request.cpuset_mems
        or request.devices
        or state.node.serves_all
    ):
        return None
    if pod.nodes is not None or pod.volcano_nodes is not None or pod.bind_required or pod.bind_preferred:
        return None
    if pod.reserved_for_pod is not None:
        return None  # the container may use what is set aside for its pod
    if requests_devices(state, pod, name):
        return None
    if pod.qos in RESTRICTED_CLASSES and permitted_claim(state.node, pod)[1] is not None:
        return None
    if pod.kube_qos is KubeQos.GUARANTEED and (
        state.node.serves_guaranteed or pod.requests is not None or whole_cpus(request)
    ):
        return None
    key = (pod.qos, pod.kube_qos)
    placement = state.node.pool_placements.get(key)
    if placement is None:
        claimed = claim(pod, request, state.node.machine.online, static=state.node.static)
        placement = state.node.pool_placements[key] = pool_placement(
            claimed.pool, state.node.machine.memory_nodes, claimed.reason
        )
    return placement


def _find_placement(draft: ContainerDraft, claimed: Claim, avoid: CpuSet | None = None) -> FoundPlacement:
    state, pod, name, request = draft.state, draft.permitted, draft.name, draft.request
    ref = f"{pod.ref}/{name}"
    if claimed.fatal:
        raise PlacementRejectedError(
            Verdict(GrpcStatus.INVALID_ARGUMENT, "InvalidCPUSet", f"cannot place {ref}: {claimed.problem}")
        )
    if claimed.pool is Pool.OWN and claimed.cpus is not None:
        on_named = place_on_named_cpus(state, pod, name, request, claimed, claimed.cpus, draft.preferred)
        if isinstance(on_named, FoundPlacement):
            return on_named
        claimed = on_named
    claimed = with_burst_limit(state, pod, request, claimed)
    nowhere = unmet_limit(state, claimed)
    if nowhere and pod.qos in STRICT:
        raise PlacementRejectedError(exhausted_verdict(f"place {ref}", nowhere.partition(":")[0]))
    try:
        context = _context(draft, claimed, avoid)
    except AllocationRejectedError as conflict:
        verdict = refusal_verdict(conflict)
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
        return _find_placement(draft, Claim(pool, reason, problem=claimed.problem))
    if not decision.verdict.admitted:
        missing = shortfall(state, context, decision.verdict.reason)
        raise PlacementRejectedError(detailed_verdict(decision.verdict, ref, decision), decision, missing)
    placement = _placed(state, pod, name, request, claimed, decision)
    owner = pod.owner_key(name) if placement.pool is Pool.OWN else ""
    return FoundPlacement(placement, owner, claimed.problem or unmet or nowhere, decision)


def _context(draft: ContainerDraft, claimed: Claim, avoid: CpuSet | None) -> AdmissionContext | None:
    """Return the input of the topology manager for a container; None if no provider has to be queried."""
    state, pod, name, request = draft.state, draft.permitted, draft.name, draft.request
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
        preferred=draft.preferred,
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
