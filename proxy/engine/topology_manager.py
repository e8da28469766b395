"""The topology manager: hints, policy and allocation for one container, and the record of all three.

Every provider reports on which NUMA nodes it could serve the container. The policy merges one hint from the
answers, or rejects the container. Then every provider allocates under that hint, in the order in which the
node holds them (kubernetes v1.36, pkg/kubelet/cm/topologymanager/scope_container.go ``Admit``; scope_pod.go
for a pod as a whole, see ``proxy.engine.pod_admission``). Nothing here changes anything: the outcome is
always a ``TopologyDecision``, even for a rejection.

Under policy ``none`` nothing is merged, and kubelet's allocators choose by themselves. Here the request is
marked (``ProviderRequest.unmerged``), and a provider takes CPUs from one NUMA node if they fit there.

``build_context`` builds the input of a decision from the state of a node.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field, structs

from proxy.allocation.cpu_request import CPU, MILLI
from proxy.allocation.devices.state import DeviceState
from proxy.allocation.merge_record import record_answer, record_merge
from proxy.allocation.policies import decide
from proxy.allocation.providers.devices import DeviceProvider
from proxy.allocation.providers.provider import Provider, ProviderRequest
from proxy.allocation.rejection import UNEXPECTED, AllocationRejectedError
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.model.explanation import AllocationStep, Merge, ProviderAnswer
from proxy.model.grants import Blocks, Grants
from proxy.model.grpc_status import GrpcStatus
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import CpuSet
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import ContainerPart, KubeQos, Pod, Request, Verdict

ANYWHERE = TopologyHint(None, preferred=False)
"""The hint if nothing was merged."""


class AdmissionContext(Struct, frozen=True):
    """The input of a decision: the request, the rules and the providers.

    Attributes:
        node: The machine and the rules.
        request: The request, as every provider reads it.
        providers: The providers, prepared for the request.
        pod_hint: The hint that was decided for the pod as a whole, if it binds the container too.
        policy: The policy for this pod, in place of the node's; None to use the node's.
        volcano_hint: The NUMA nodes that Volcano's scheduler prefers, as one more hint.
    """

    node: Node
    request: ProviderRequest
    providers: tuple[Provider, ...]
    pod_hint: TopologyHint | None = None
    policy: TopologyPolicy | None = None
    volcano_hint: TopologyHint | None = None

    def hints(self) -> list[tuple[str, Hints]]:
        """Return the hints of every provider, with its name."""
        return [(provider.name, provider.hints(self.request)) for provider in self.providers]


class TopologyDecision(Struct, frozen=True):
    """A decision of the topology manager.

    Attributes:
        verdict: Admit or reject; a rejected request is granted nothing.
        hint: The merged hint, which the allocators followed.
        granted: The CPUs, memory and devices that were granted.
        answers, merge, steps: The record of the decision.
        reasons: Sentences that explain the grant.
        providers: The providers after the grant; empty for a rejected request.
        parts: For a pod as a whole, what each of its containers gets, if the containers are known.
    """

    verdict: Verdict
    hint: TopologyHint
    granted: Grants = field(default_factory=Grants)
    answers: tuple[ProviderAnswer, ...] = ()
    merge: Merge | None = None
    steps: tuple[AllocationStep, ...] = ()
    reasons: tuple[str, ...] = ()
    providers: tuple[Provider, ...] = ()
    parts: tuple[ContainerPart, ...] = ()

    @property
    def cpus(self) -> CpuSet:
        """Exclusive CPUs."""
        return self.granted.cpus

    @property
    def blocks(self) -> Blocks:
        """Memory by NUMA node."""
        return self.granted.blocks

    @property
    def devices(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Resource and device ids."""
        return self.granted.devices


def admit_container(context: AdmissionContext) -> TopologyDecision:
    """Decide on one container: hints, policy, allocation."""
    answers = context.hints()
    if context.pod_hint is not None and context.pod_hint.affinity is not None:
        answers.append(("pod", {"pod": (context.pod_hint,)}))
    decision = apply_policy(context, answers, Scope.CONTAINER)
    if not decision.verdict.admitted:
        return decision
    return allocate(for_allocation(context), decision.hint, decision.answers, decision.merge)


def for_allocation(context: AdmissionContext) -> AdmissionContext:
    """Return the context for the allocation: under ``none`` and ``best-effort``, its request has a flag."""
    policy = context.policy or context.node.policy
    if policy is TopologyPolicy.NONE:
        request = structs.replace(context.request, unmerged=True)
    elif policy is TopologyPolicy.BEST_EFFORT:
        request = structs.replace(context.request, may_leave_hint=True)
    else:
        return context
    return structs.replace(context, request=request)


def apply_policy(
    context: AdmissionContext, answers: Iterable[tuple[str, Hints]], scope: Scope
) -> TopologyDecision:
    """Merge the hints of the providers under the policy, and record them.

    Returns:
        A decision that grants nothing yet; its hint is ``ANYWHERE`` if the policy merges nothing.
    """
    # A provider without hints is left out of the record and the merge, which has the same result without it.
    with_hints = [(provider, hints) for provider, hints in answers if hints]
    node, policy = context.node, context.policy or context.node.policy
    if policy is TopologyPolicy.NONE:
        return TopologyDecision(Verdict(), ANYWHERE)
    if with_hints and context.volcano_hint is not None:
        with_hints.append(("volcano", {"nodes": (context.volcano_hint,)}))
    decision = decide(policy, [hints for _, hints in with_hints], node.nodes, node.distances)
    recorded = tuple(record for provider, hints in with_hints for record in record_answer(provider, hints))
    merge = record_merge(decision, scope) if with_hints else None
    return TopologyDecision(decision.verdict, decision.hint, answers=recorded, merge=merge)


def allocate(
    context: AdmissionContext,
    hint: TopologyHint,
    answers: tuple[ProviderAnswer, ...] = (),
    merge: Merge | None = None,
) -> TopologyDecision:
    """Let every provider allocate for a container under a hint; if one refuses, the container is rejected."""
    steps: list[AllocationStep] = []
    granted = Grants()
    after: list[Provider] = []
    try:
        for provider in context.providers:
            allocation = provider.allocate(context.request, hint, granted)
            granted = allocation.grants
            after.append(allocation.provider)
            steps += [AllocationStep(provider.name, text) for text in allocation.steps]
    except AllocationRejectedError as refusal:
        return TopologyDecision(
            conflict_verdict(refusal), hint, answers=answers, merge=merge, steps=tuple(steps)
        )
    return TopologyDecision(
        Verdict(), hint, granted, answers, merge, steps=tuple(steps), providers=tuple(after)
    )


def conflict_verdict(error: AllocationRejectedError) -> Verdict:
    """Return the verdict for a refused allocation, in kubelet's words.

    Source: kubernetes v1.36, pkg/kubelet/cm/admission/errors.go ``GetPodAdmitResult``.
    """
    text = str(error)
    if error.reason == UNEXPECTED:
        text = f"Allocate failed due to {text}, which is unexpected"
    return Verdict(GrpcStatus.FAILED_PRECONDITION, error.reason, text)


def pod_requests(
    pod: Pod, name: str, request: Request, cpus: int, devices: DeviceState | None = None
) -> PodRequests:
    """Return the requests of a container's pod: as kubelet reported them, or else those of the CRI call.

    Args:
        pod: The pod.
        name: The container; empty for the pod as a whole.
        request: The container's resources in the CRI call.
        cpus: Exclusive CPUs that it claims.
        devices: The devices that containers hold. Without kubelet's report, a container requests the devices
            that it holds, because the CRI call does not carry such requests.
    """
    if pod.requests is not None and (
        not name or any(container.name == name for container in pod.requests.containers)
    ):
        return pod.requests if pod.requests.uid == pod.key else structs.replace(pod.requests, uid=pod.key)
    amounts = {CPU: cpus * MILLI, "memory": request.memory_limit, **dict(request.huge_pages)}
    amounts = {resource: amount for resource, amount in amounts.items() if amount > 0}
    held = devices.held.get(pod.key, {}).get(name, {}) if devices is not None else {}
    limits = {**amounts, **{resource: len(ids) for resource, ids in held.items()}}
    return PodRequests(
        pod.key,
        (ContainerResources(name, ContainerKind.APP, amounts, limits),),
        pod.kube_qos is KubeQos.GUARANTEED,
    )


def requests_devices(state: NodeState, pod: Pod, name: str) -> bool:
    """Return whether a container requests devices that topoproxy assigns, or holds some."""
    devices = state.devices
    if not devices.registered and not devices.held:
        return False
    if devices.held.get(pod.key, {}).get(name):
        return True
    if pod.requests is None:
        return False
    for container in pod.requests.containers:
        if container.name == name:
            return not devices.registered.keys().isdisjoint(container.limits)
    return False


def build_context(state: NodeState, request: ProviderRequest) -> AdmissionContext:
    """Prepare every provider for a request.

    Raises:
        AllocationRejectedError: The request contradicts the settings of the node, such as its bind policy.
    """
    providers = tuple(provider.prepare(state, request) for provider in state.providers)
    if state.devices.registered or state.devices.held:
        providers = (DeviceProvider(state.node.nodes, state.devices), *providers)
    return AdmissionContext(state.node, request, providers)


def container_request(request: ProviderRequest, name: str) -> ProviderRequest:
    """Return the request of one container of a pod that is decided as a whole."""
    return structs.replace(request, name=name, scope=Scope.CONTAINER, under_pod_hint=True)
