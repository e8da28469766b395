"""Decide a RunPodSandbox call: under scope ``pod``, one decision for all containers of the pod.

Source: kubernetes v1.36, pkg/kubelet/cm/topologymanager/scope_pod.go ``Admit``. The providers are queried for
the pod as a whole, one hint is merged from their answers, and every provider allocates for the containers
under that hint, in the order of the pod. Because the containers are created later, one by one, the resources
granted to them are *set aside*: no other container gets these CPUs or this memory while the sandbox exists.
Pools use the CPUs until a container that owns them is created.

If kubelet reported the requests of the containers, each container has its part. If only the CRI is known, the
sum that it carries for the sandbox is set aside as a whole, and each container takes its share when it is
created.

An LSE (latency-sensitive exclusive) or LSR (latency-sensitive reserved) pod for which no scheduler chose CPUs
gets CPUs here as a whole, in any scope: its containers own them together (``owners``). A pod that requests
alignment by its own policy is decided here too (``numa_alignment``).

If a sandbox is created again for a known pod, the pod keeps its earlier decision.
"""

from __future__ import annotations

from msgspec import Struct, structs

from proxy.allocation.cpu_request import MILLI, container_cpus, pod_cpus
from proxy.allocation.providers.devices import DeviceProvider
from proxy.allocation.providers.provider import NO_PREFERENCES, Preferences, ProviderRequest
from proxy.allocation.rejection import AllocationRejectedError
from proxy.engine.admission import (
    exhausted_verdict,
    ownership_problem,
    permitted_claim,
    rejection_verdict,
    rejects_claims,
    sharing_problem,
)
from proxy.engine.enforcement import applies_to
from proxy.engine.explain_record import explain
from proxy.engine.node import Node
from proxy.engine.numa_alignment import align_pod, bind_to_nodes, shared_request_milli, wants_alignment
from proxy.engine.owners import (
    cpus_to_avoid,
    exceeded_limit,
    needs_cpus_for_whole_pod,
    pod_as_one_container,
    pod_cpu_count,
    request_is_known,
)
from proxy.engine.shortfall import FLOORS, on_machine, shortfall
from proxy.engine.state import NodeState
from proxy.engine.topology_manager import (
    ANYWHERE,
    AdmissionContext,
    TopologyDecision,
    allocate,
    apply_policy,
    build_context,
    conflict_verdict,
    container_request,
    for_allocation,
    pod_requests,
)
from proxy.engine.volcano_hints import decide_with_preferences
from proxy.model.admission import AdmissionRule, Breach
from proxy.model.defects import InputDefect
from proxy.model.explanation import AllocationStep, Explanation
from proxy.model.grants import Grants
from proxy.model.grpc_status import GrpcStatus
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet
from proxy.model.options import Scope
from proxy.model.phrases import listed
from proxy.model.workload import ContainerPart, Pod, QosClass, Request, SetAside, Verdict
from proxy.pools.claims import may_own, whole_cpus

EVENT = "RunPodSandbox"


class PodAdmission(Struct, frozen=True):
    """The decision about a pod before its sandbox is created.

    Attributes:
        verdict: Admit or reject.
        pod: The pod with what was set aside for it; unchanged if nothing was.
        state: The state afterwards; the state before if nothing was set aside, or if the pod was rejected.
        explanation: The record of the decision; None if there was nothing to decide.
        problem: A request of the pod that could not be met, for the operator; empty if all were.
        limit: The admission rule that the claim exceeded; None if it exceeded none.
    """

    verdict: Verdict
    pod: Pod
    state: NodeState
    explanation: Explanation | None = None
    problem: str = ""
    limit: AdmissionRule | None = None


def admit(
    state: NodeState, pod: Pod, total: Request, preferred: Preferences = NO_PREFERENCES
) -> PodAdmission:
    """Decide about a pod before its sandbox is created.

    Args:
        state: The node as it is.
        pod: The pod; ``sandbox_id`` is a provisional id until the runtime has assigned one.
        total: The resources of the pod as a whole in the CRI call, and the devices of all its containers.
        preferred: What device plugins prefer.

    Raises:
        PreferenceMissing: A device plugin has to be queried first.
    """
    if not decides_pod(state.node, pod):
        return PodAdmission(Verdict(), pod, state)
    permitted, breach = permitted_claim(state.node, pod)
    if breach is not None and rejects_claims(state.node):
        verdict = rejection_verdict(breach, f"place {pod.ref}")
        explanation = explain(EVENT, pod, "", pod.attempt, total, verdict)
        return PodAdmission(verdict, pod, state, explanation, limit=breach.rule)
    if permitted is not pod:
        return _admit_permitted(state, pod, permitted, total, breach, preferred)
    earlier = next(
        (p for p in state.pods.values() if p.key == pod.key and p.reserved_for_pod is not None), None
    )
    if earlier is not None:
        decided = with_earlier_decision(pod, earlier)
        return PodAdmission(Verdict(), decided, state.with_pod(decided))
    if needs_cpus_for_whole_pod(state.node, pod) and request_is_known(pod, total):
        if problem := ownership_problem(pod, total):
            verdict = Verdict(
                GrpcStatus.INVALID_ARGUMENT, "InvalidCPURequest", f"cannot place {pod.ref}: {problem}"
            )
            return PodAdmission(verdict, pod, state, explain(EVENT, pod, "", pod.attempt, total, verdict))
        count = pod_cpu_count(pod, total)
        whole = pod_as_one_container(pod, total, count)
        request = ProviderRequest(pod, whole, "", total, Scope.POD, cpus=count, preferred=preferred)
        return _decide(state, request, owned_by_pod=True)
    if not state.node.decides_pods and not wants_alignment(pod):
        return PodAdmission(Verdict(), pod, state)
    owns = state.node.static and may_own(pod) and pod.cpuset is None
    requests = pod_requests(pod, "", total, whole_cpus(total) if owns else 0)
    cpu_count = pod_cpus(requests) if owns else 0
    owns = owns and (
        cpu_count > 0 or any(container_cpus(requests, container) for container in requests.containers)
    )
    request = ProviderRequest(
        pod, requests, "", total, Scope.POD, exclusive=owns, cpus=cpu_count, preferred=preferred
    )
    return _decide(state, request, owned_by_pod=False)


def _admit_permitted(
    state: NodeState,
    pod: Pod,
    permitted: Pod,
    total: Request,
    breach: Breach | None,
    preferred: Preferences,
) -> PodAdmission:
    """Decide about a pod by its permitted claim; the recorded pod keeps what its author wrote."""
    admission = admit(state, permitted, total, preferred)
    problem, limit = admission.problem, admission.limit
    if breach is not None:
        problem, limit = problem or sharing_problem(breach), limit or breach.rule
    if admission.pod is permitted:
        return structs.replace(admission, pod=pod, problem=problem, limit=limit)
    decided = admission.pod
    recorded = structs.replace(
        pod,
        reserved_for_pod=decided.reserved_for_pod,
        nodes=decided.nodes or pod.nodes,
        cpuset=decided.cpuset if decided.cpuset_chosen_locally else pod.cpuset,
        cpuset_chosen_locally=decided.cpuset_chosen_locally,
        total=decided.total,
    )
    return structs.replace(
        admission, pod=recorded, state=state.with_pod(recorded), problem=problem, limit=limit
    )


def with_earlier_decision(pod: Pod, earlier: Pod) -> Pod:
    """Return a pod with the decision for its earlier sandbox, or from before more was known about the pod."""
    decided = structs.replace(
        pod, reserved_for_pod=earlier.reserved_for_pod, nodes=pod.nodes or earlier.nodes
    )
    return (
        structs.replace(decided, cpuset=earlier.cpuset, cpuset_chosen_locally=True, total=earlier.total)
        if earlier.cpuset_chosen_locally
        else decided
    )


def decides_pod(node: Node, pod: Pod) -> bool:
    """Return whether a pod is decided as a whole, before its containers are created."""
    pod, breach = permitted_claim(node, pod)
    if breach is not None:
        return True
    return node.decides_pods or needs_cpus_for_whole_pod(node, pod) or wants_alignment(pod)


def _decide(state: NodeState, request: ProviderRequest, *, owned_by_pod: bool) -> PodAdmission:
    """Query the providers about a pod, and set aside what they grant within the limits of the node."""
    pod = request.pod
    admission = _decide_once(state, request, owned_by_pod=owned_by_pod)
    if admission.limit is AdmissionRule.SHARED_FLOOR:
        request_above_floor = structs.replace(request, avoid=cpus_to_avoid(state, pod))
        above_floor = _decide_once(state, request_above_floor, owned_by_pod=owned_by_pod)
        admission = above_floor if above_floor.verdict.admitted else admission
    if admission.limit is None or rejects_claims(state.node):
        return admission
    message = admission.verdict.message.partition(": ")[2]
    problem = sharing_problem(Breach(admission.limit, message))
    return PodAdmission(Verdict(), pod, state, problem=problem, limit=admission.limit)


def _decide_once(state: NodeState, request: ProviderRequest, *, owned_by_pod: bool) -> PodAdmission:
    """Query the providers about a pod, and set aside what they grant.

    Args:
        state: The node as it is.
        request: The request of the pod as a whole. If its containers are unknown, one without a name
            represents them.
        owned_by_pod: Whether its containers own the CPUs together.
    """
    pod, total = request.pod, request.cri_resources
    try:
        context = build_context(state, request)
    except AllocationRejectedError as conflict:
        return _reject(state, request, TopologyDecision(conflict_verdict(conflict), ANYWHERE), None)
    milli = request.cpus * MILLI if request.exclusive else shared_request_milli(pod, total)
    aligns = wants_alignment(pod) and (milli > 0 or bool(request.assigned_devices))
    if not aligns and not any(provider.wants(request) for provider in context.providers):
        return PodAdmission(Verdict(), pod, state)
    unmet: InputDefect | None = None
    if aligns:
        decision = _decide_by_pod_policy(state, context, milli)
    else:
        decision, unmet = decide_with_preferences(context, _decide_by_node_policy)
    if not decision.verdict.admitted:
        return _reject(state, request, decision, context)
    promised = _pod_with_grants(state, request, decision, aligned=aligns, owned_by_pod=owned_by_pod)
    after = _with_devices(state.with_pod(promised), pod, decision)
    action = f"set CPUs {listed(decision.cpus)} aside for {pod.ref}"
    if not after.pools.shared - after.cpus_set_aside():
        decision = structs.replace(decision, verdict=exhausted_verdict(action))
        return _reject(state, request, decision, context)
    breach = exceeded_limit(state, after, promised, "", decision.cpus)
    if breach is not None:
        decision = structs.replace(decision, verdict=rejection_verdict(breach, action))
        return structs.replace(_reject(state, request, decision, context), limit=breach.rule)
    explanation = explain(EVENT, promised, "", pod.attempt, total, Verdict(), decision)
    return PodAdmission(Verdict(), promised, after, explanation, unmet or "")


def _with_devices(state: NodeState, pod: Pod, decision: TopologyDecision) -> NodeState:
    """Return the state in which the containers of a pod hold the devices that were set aside for them."""
    granted = next((each.state for each in decision.providers if type(each) is DeviceProvider), None)
    if granted is None or granted is state.devices or not applies_to(state, pod):
        return state
    return structs.replace(state, devices=granted)


def _pod_with_grants(
    state: NodeState,
    request: ProviderRequest,
    decision: TopologyDecision,
    *,
    aligned: bool,
    owned_by_pod: bool,
) -> Pod:
    """Return the pod with the granted CPUs, memory and shares set aside for it."""
    hint, granted = decision.hint, decision.granted
    aside = SetAside(
        hint.affinity, hint.preferred, granted.cpus, granted.blocks, decision.parts, granted.shares
    )
    promised = structs.replace(request.pod, reserved_for_pod=aside)
    if aligned and not request.exclusive:
        promised = bind_to_nodes(promised, hint, state.node.nodes)
    if owned_by_pod:
        whole = request.cri_resources
        total = Request(whole.cpu_shares, whole.cpu_quota, whole.cpu_period)
        promised = structs.replace(promised, cpuset=granted.cpus, cpuset_chosen_locally=True, total=total)
    return promised


def _decide_by_node_policy(context: AdmissionContext) -> TopologyDecision:
    """Decide a pod by the node's policy, and allocate for its containers.

    If a scheduler has named the CPUs of a pod, there is nothing to merge: the pod gets the other resources
    near these CPUs if possible, as its containers do in scope ``container`` (``preassigned_cpus``).
    """
    pod, machine = context.request.pod, context.node.machine
    if pod.cpuset and pod.qos is not QosClass.BE:
        homes = machine.nodes_of(pod.cpuset) & machine.memory_nodes
        hint = TopologyHint(homes or None, preferred=False)
        near = _allocate_containers(context, TopologyDecision(Verdict(), hint))
        return (
            near
            if near.verdict.admitted
            else _allocate_containers(context, TopologyDecision(Verdict(), ANYWHERE))
        )
    decision = apply_policy(context, context.hints(), Scope.POD)
    return _allocate_containers(for_allocation(context), decision) if decision.verdict.admitted else decision


def _decide_by_pod_policy(state: NodeState, context: AdmissionContext, milli: int) -> TopologyDecision:
    """Decide a pod by its own policy, and allocate for its containers."""
    try:
        decision = align_pod(state, context, milli)
    except AllocationRejectedError as error:
        return TopologyDecision(conflict_verdict(error), ANYWHERE)
    if not decision.verdict.admitted:
        return decision
    even = structs.replace(context.request, even=True)
    return _allocate_containers(structs.replace(context, request=even), decision)


def _reject(
    state: NodeState, request: ProviderRequest, decision: TopologyDecision, context: AdmissionContext | None
) -> PodAdmission:
    pod, total = request.pod, request.cri_resources
    verdict = detailed_verdict(decision.verdict, pod.ref, decision)
    shortfalls = shortfall(state, context, verdict.reason) if context is not None else ()
    if verdict.reason in FLOORS:
        shortfalls = on_machine(state, pod, len(decision.cpus))
    explanation = explain(EVENT, pod, "", pod.attempt, total, verdict, decision, shortfalls=shortfalls)
    return PodAdmission(verdict, pod, state, explanation)


def detailed_verdict(verdict: Verdict, ref: str, decision: TopologyDecision) -> Verdict:
    """Return kubelet's reason and text, followed by the container or pod and the conflicts."""
    if verdict.message.startswith("cannot "):
        return verdict
    conflicts = (
        f": {'; '.join(decision.merge.conflicts)}" if decision.merge and decision.merge.conflicts else ""
    )
    return structs.replace(verdict, message=f"{verdict.reason}: {verdict.message} ({ref}{conflicts})")


def _allocate_containers(context: AdmissionContext, decision: TopologyDecision) -> TopologyDecision:
    """Allocate for the containers in the order in which they will be created, under the hint of the pod."""
    granted: list[tuple[str, Grants]] = []
    steps: list[AllocationStep] = []
    cpus = CpuSet()
    for container in context.request.requests.containers:
        container_context = structs.replace(
            context, request=container_request(context.request, container.name)
        )
        allocation = allocate(container_context, decision.hint)
        prefix = f"{container.name}: " if container.name else ""
        steps += [AllocationStep(step.provider, prefix + step.what) for step in allocation.steps]
        if not allocation.verdict.admitted:
            return structs.replace(decision, verdict=allocation.verdict, steps=tuple(steps))
        cpus |= allocation.cpus
        granted.append((container.name, allocation.granted))
        context = structs.replace(context, providers=allocation.providers)
    decision = structs.replace(
        decision, granted=Grants(cpus), steps=tuple(steps), providers=context.providers
    )
    if len(granted) == 1 and not granted[0][0]:
        return structs.replace(decision, granted=granted[0][1])
    parts = (_part(name, _final_grants(context, name, each)) for name, each in granted)
    return structs.replace(decision, parts=tuple(parts))


def _final_grants(context: AdmissionContext, name: str, granted: Grants) -> Grants:
    """Return the final grants of a container: later containers may have taken over part of them."""
    for provider in context.providers:
        granted = provider.holds(context.request, name, granted)
    return granted


def _part(name: str, granted: Grants) -> ContainerPart:
    return ContainerPart(name, granted.cpus, granted.blocks, granted.shares)
