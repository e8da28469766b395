"""Decide a CreateContainer call: the request and the node's state in, a plan out.

The order is: the claim (what the pod's class and request entitle it to), the CPUs (named by a scheduler or
kubelet, or chosen by the topology manager), the verdict (no other container owns these CPUs, the shared pool
keeps at least one CPU), the memory nodes, and the containers that have to move. Nothing here changes
anything: the plan holds the whole next state.
"""

from __future__ import annotations

from msgspec import Struct, structs

from proxy.allocation.providers.provider import NO_PREFERENCES, Preferences
from proxy.engine.admission import (
    NO_POOL_CPUS,
    RESTRICTED_CLASSES,
    exhausted_verdict,
    permitted_claim,
    rejection_verdict,
    rejects_claims,
    sharing_problem,
)
from proxy.engine.claim_placement import find_placement
from proxy.engine.container_claim import container_claim, permitted_container_claim
from proxy.engine.explain_record import explain, moved_containers
from proxy.engine.held_devices import granted
from proxy.engine.owners import cpus_to_avoid, exceeded_limit
from proxy.engine.placement import moves, pool_placement
from proxy.engine.preassigned_cpus import FoundPlacement, PlacementRejectedError
from proxy.engine.quotas import pool_forbids_quota, without_quota
from proxy.engine.shortfall import FLOORS, on_machine
from proxy.engine.state import NodeState
from proxy.engine.topology_manager import TopologyDecision, requests_devices
from proxy.model.admission import AdmissionRule, Breach
from proxy.model.defects import DefectKind, InputDefect
from proxy.model.explanation import CREATE, Explanation, Shortfall
from proxy.model.idset import CpuSet
from proxy.model.phrases import cpus as named_cpus
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, Request, Verdict
from proxy.pools.claims import Claim, claim, pool_of, whole_cpus


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
    claimed = container_claim(state, permitted, name, request, allowed, breach)
    draft = ContainerDraft(
        state, pod, permitted, name, request, token, attempt, current or CpuSet(), preferred
    )
    if breach is not None and rejects_claims(state.node):
        return draft.rejected(rejection_verdict(breach, f"place {pod.ref}/{name}"), limit=breach.rule)
    try:
        drafted = _within_limits(draft, claimed)
    except PlacementRejectedError as rejection:
        return draft.rejected(
            rejection.verdict, rejection.decision, rejection.shortfalls, claimed.problem, rejection.limit
        )
    return _planned(draft, drafted, breach)


def rejected_without_cpus(state: NodeState, container: Container) -> Plan:
    """Return the plan that rejects a container whose pool has no CPUs; ``state`` is the state before."""
    verdict = exhausted_verdict(f"place {container.ref}", NO_POOL_CPUS)
    pod, name, attempt = container.pod, container.name, container.attempt
    explanation = explain(CREATE, pod, name, attempt, container.request, verdict, None)
    return Plan(verdict, state, explanation=explanation)


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
        return find_placement(
            self.state, self.permitted, self.name, self.request, claimed, self.preferred, avoid
        )

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
