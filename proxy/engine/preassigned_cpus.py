"""Placements on CPUs that a scheduler or kubelet has chosen already."""

from __future__ import annotations

from msgspec import Struct, field

from proxy.allocation.cpu_request import CPU
from proxy.allocation.providers.provider import NO_PREFERENCES, Preferences, ProviderRequest
from proxy.engine.admission import EMPTY_SHARED_POOL
from proxy.engine.placement import counted_nodes, owner_memory_nodes
from proxy.engine.pod_admission import detailed_verdict
from proxy.engine.shortfall import holders_of, with_holders
from proxy.engine.state import NodeState, with_grants
from proxy.engine.topology_manager import (
    TopologyDecision,
    allocate,
    build_context,
    pod_requests,
    requests_devices,
)
from proxy.model.admission import SHARED_POOL_EXHAUSTED, AdmissionRule
from proxy.model.defects import DefectKind, InputDefect
from proxy.model.explanation import Shortfall
from proxy.model.grants import Grants
from proxy.model.grpc_status import GrpcStatus
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet
from proxy.model.phrases import cpus as named_cpus
from proxy.model.phrases import cpus_are
from proxy.model.workload import Phase, Placement, Pod, Pool, Request, Verdict
from proxy.pools.claims import STRICT, Claim, pool_of

MAX_NAMED_HOLDERS = 4
"""How many conflicting owners a message names at most."""


class PlacementRejectedError(Exception):
    """A container cannot be placed."""

    def __init__(
        self,
        verdict: Verdict,
        decision: TopologyDecision | None = None,
        shortfalls: tuple[Shortfall, ...] = (),
        limit: AdmissionRule | None = None,
    ) -> None:
        super().__init__(verdict.operator_message)
        self.verdict = verdict
        self.decision = decision
        self.shortfalls = shortfalls
        self.limit = limit


class FoundPlacement(Struct, frozen=True):
    """A placement, with the owner of its CPUs, the problem, and the decision of the topology manager."""

    placement: Placement
    owner: str = ""
    problem: str = ""
    decision: TopologyDecision | None = None


def place_on_named_cpus(
    state: NodeState,
    pod: Pod,
    name: str,
    request: Request,
    claimed: Claim,
    cpus: CpuSet,
    preferred: Preferences = NO_PREFERENCES,
) -> FoundPlacement | Claim:
    """Place a container on the CPUs that the scheduler or kubelet chose for it.

    Returns:
        The placement; or the remaining claim, if the container cannot have these CPUs.

    Raises:
        PlacementRejectedError: The container cannot have the CPUs and must not run without them, or another
            resource is missing.
        PreferenceMissing: A device plugin has to be queried first.
    """
    owner = pod.key if claimed.per_pod else pod.owner_key(name)
    ref = f"{pod.ref}/{name}"
    others = state.cpus_set_aside(pod.key) | state.blocked_cpus
    own = {owner} if claimed.per_pod else {owner, *_owners_of_init_containers(state, pod)}
    for key, held in state.owners.items():
        if key not in own:
            others |= held.cpus
    conflict = _conflict(state, cpus, others, owner)
    if conflict is not None:
        return _fall_back(state, pod, claimed, conflict, ref)
    decision = _grant_others(state, pod, name, request, cpus, preferred)
    if decision is not None and not decision.verdict.admitted:
        raise PlacementRejectedError(detailed_verdict(decision.verdict, ref, decision), decision)
    granted = decision.granted if decision else Grants()
    mems, reasons = owner_memory_nodes(
        state, request, cpus, f"{owner} {name}", counted_nodes(pod, granted.blocks)
    )
    placement = with_grants(
        Placement(Pool.OWN, cpus, mems, (claimed.reason, *reasons), claimed.excludes_be), granted
    )
    return FoundPlacement(placement, owner, claimed.problem, decision)


def _owners_of_init_containers(state: NodeState, pod: Pod) -> set[str]:
    """Return the owners of a pod that are in kubelet's state and whose containers do not exist.

    kubelet lets containers of a pod reuse the CPUs of its init containers, and keeps the entries of both.
    """
    existing = {c.owner for c in state.in_sandbox(pod.sandbox_id) if c.phase is not Phase.EXITED}
    return {f"{pod.uid}/{name}" for name in state.kubelet_cpus.get(pod.uid, ())} - existing


def _grant_others(
    state: NodeState, pod: Pod, name: str, request: Request, cpus: CpuSet, preferred: Preferences
) -> TopologyDecision | None:
    """Grant the other resources to a container whose CPUs are named, near these CPUs if possible."""
    node = state.node
    if not node.serves(pod) and not requests_devices(state, pod, name):
        return None
    requests = pod_requests(pod, name, request, 0, state.devices)
    provider_request = ProviderRequest(pod, requests, name, request, exclusive=False, preferred=preferred)
    context = build_context(state, provider_request)
    homes = node.machine.nodes_of(cpus) & node.machine.memory_nodes
    near = allocate(context, TopologyHint(homes or None, preferred=False))
    return near if near.verdict.admitted else allocate(context, TopologyHint(None, preferred=False))


def _conflict(state: NodeState, cpus: CpuSet, others: CpuSet, owner: str) -> CpuConflict | None:
    """Return why a container cannot have the CPUs that were chosen for it; None if it can."""
    clash = cpus & others
    if clash and clash <= state.blocked_cpus:
        text = f"{cpus_are(clash)} used by containers that cannot be moved"
        return CpuConflict("CPUsInUse", text, clash=clash)
    if clash:
        holders = holders_of(state, clash, owner)
        refs = sorted(holder.ref for holder in holders)
        if len(refs) > MAX_NAMED_HOLDERS:
            refs[MAX_NAMED_HOLDERS:] = [f"{len(refs) - MAX_NAMED_HOLDERS} more"]
        owned_text = f"{cpus_are(clash)} owned by"
        whose_text = "another pod" if len(holders) == 1 else "other pods"
        return CpuConflict(
            "CPUsInUse",
            f"{owned_text} {', '.join(refs)} already",
            f"{owned_text} {whose_text} already",
            clash,
        )
    if state.node.shareable <= cpus | others:
        return CpuConflict(SHARED_POOL_EXHAUSTED, EMPTY_SHARED_POOL)
    return None


class CpuConflict(Struct, frozen=True):
    """Why a container cannot have the CPUs that were named.

    Attributes:
        reason: As in ``Verdict``.
        text: The cause for operators.
        public: The cause without names of other pods; empty if ``text`` names none.
        clash: The named CPUs that others own.
    """

    reason: str
    text: str
    public: str = ""
    clash: CpuSet = field(default_factory=CpuSet)

    def verdict(self, action: str, *, name_others: bool) -> Verdict:
        """Return the verdict that rejects an action because of the conflict."""
        detail = f"cannot {action}: {self.text}"
        if name_others or not self.public:
            return Verdict(GrpcStatus.FAILED_PRECONDITION, self.reason, detail)
        return Verdict(GrpcStatus.FAILED_PRECONDITION, self.reason, f"cannot {action}: {self.public}", detail)


def _fall_back(state: NodeState, pod: Pod, claimed: Claim, conflict: CpuConflict, ref: str) -> Claim:
    """Return the claim without the named CPUs, or reject an LSE or LSR pod.

    If kubelet's CPU manager named them for one container, the same number of other CPUs is chosen. Other
    containers run on their pool.
    """
    if pod.qos in STRICT:
        name_others = state.node.admission.name_others
        cpus = claimed.cpus or CpuSet()
        action = f"give {named_cpus(cpus)} to {ref}"
        shortfall = Shortfall(CPU, None, len(cpus), len(cpus - conflict.clash), named=conflict.clash)
        raise PlacementRejectedError(
            conflict.verdict(action, name_others=name_others),
            shortfalls=(with_holders(state, shortfall, pod),) if conflict.clash else (),
        )
    text = conflict.text
    fault = InputDefect(text, DefectKind.OVERLAP)
    if not claimed.per_pod and claimed.cpus:
        reason = f"{claimed.reason}, but {text}: others are chosen"
        return Claim(
            Pool.OWN, reason, count=len(claimed.cpus), excludes_be=claimed.excludes_be, problem=fault
        )
    pool, _ = pool_of(pod)
    return Claim(pool, f"{claimed.reason}, but {text}: it runs on the {pool} pool", problem=fault)
