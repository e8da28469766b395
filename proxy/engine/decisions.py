"""Rules for the calls of containers: create, start and update.

If a rule places a container, the answer is ``PlanDecided``, and the decision is in the state at once, so that
no later decision uses the same CPUs. The other rules answer a call that waits (``call_answers``).

All are rules of ``proxy.engine.handle``: each takes a state and an event, and returns the state after the
event and the effects to perform. Records come first, then changes of the pools, then the notifications of
observers.
"""

from __future__ import annotations

from msgspec import structs

from proxy.allocation.devices.allocate import PreferenceMissing
from proxy.engine.admission import assigned_cpus
from proxy.engine.call_answers import (
    ForwardUnchanged,
    create_answer,
    start_answer,
    unallocated_verdict,
    unreserved_verdict,
    update_answer,
)
from proxy.engine.call_events import StartRequested, UpdateRequested
from proxy.engine.container_create import Plan, place, rejected_without_cpus
from proxy.engine.container_events import (
    ContainersUpdated,
    CpusNotFreed,
    CreateDelegated,
    CreateFailed,
    CreateNotReserved,
    CreateRequested,
    CreateResumed,
    CreateWithoutDevices,
)
from proxy.engine.container_lifecycle_rules import containers_updated, create_failed
from proxy.engine.device_grants import devices_recorded
from proxy.engine.enforcement import applies_to
from proxy.engine.node_effects import NOTHING, NodeEffects, PlanDecided, PutRecord, WriteScope, pool_changes
from proxy.engine.node_state_fact_rules import with_quotas
from proxy.engine.pod_admission import with_earlier_decision
from proxy.engine.pod_resize import aside_after_create, with_cpus_chosen_again
from proxy.engine.quotas import requested_quota
from proxy.engine.reservation_effects import AbortReason
from proxy.engine.runtime_knowledge import CreateKey, DelegatedCreate, clients_request
from proxy.engine.state import NodeState
from proxy.model.idset import CpuSet
from proxy.model.phrases import listed
from proxy.model.workload import POD_RECORD, Container, Phase, Pod, Pool
from proxy.pools.cri_resources import carries_other_amounts, with_amounts_of_create


def create_requested(state: NodeState, event: CreateRequested) -> tuple[NodeState, NodeEffects]:
    """Place a container, or reject it; an earlier decision about the same create is withdrawn.

    If a device plugin has to be queried first, nothing changes, and the answer is that query.
    """
    before, first, withdrawn = state, NOTHING, ""
    if state.runtime.delegated_creates:
        state, event, withdrawn, first = _withdrawn(state, event)
    if (pod := _as_created(event)) is not event.pod:
        event = structs.replace(event, pod=pod)
    chosen = event.pod.cpuset_chosen_locally
    if chosen and (pod := with_cpus_chosen_again(state, event.pod)) is not event.pod:
        event = structs.replace(event, pod=pod)
        state, more = _with_chosen_cpus(state, pod)
        first = (*first, *more)
    try:
        plan = place(
            state,
            event.pod,
            event.name,
            event.attempt,
            event.request,
            event.token,
            preferred=event.preferred,
        )
    except PreferenceMissing as missing:
        return before, (missing.query,)
    placed, shared = plan.container, plan.state.pools.shared
    # If the shared pool has CPUs, all pools have some.
    if placed is not None and not shared and not plan.state.desired_cpus(placed):
        plan = rejected_without_cpus(state, placed)
    after, container = plan.state, plan.container
    if container is not None and container.pod.reserved_for_pod is not None:
        plan, records = _with_resized_pod(plan, container)
        after, first = plan.state, (*first, *records)
    if after.devices is not state.devices:
        first = (*first, *devices_recorded(state, after, event.pod.key))
    answer = create_answer(after, event.pod, container, plan.verdict)
    decided = PlanDecided(plan, answer, withdrawn)
    if container is None:
        return state, (*first, decided)
    if after.pools is state.pools and after.node is state.node:
        return after, (*first, decided)
    # The reservation writes the cpusets of the containers that leave an owner's CPUs, and waits for the
    # result. The create of an observed pod is forwarded unchanged, without a reservation.
    is_reserved = container.placement.pool is Pool.OWN and type(answer) is not ForwardUnchanged
    write_scope = WriteScope.CALLER if is_reserved else WriteScope.MOVED
    return after, (*first, *pool_changes(state, after, write_scope), decided)


def _with_chosen_cpus(state: NodeState, decided: Pod) -> tuple[NodeState, NodeEffects]:
    """Return the state in which a pod has the CPUs that were newly chosen for it as a whole."""
    known = with_earlier_decision(state.current_pod(decided), decided)
    after = state.with_pod(known)
    record = PutRecord(POD_RECORD + known.sandbox_id, known)
    return after, (record, *pool_changes(state, after))


def _as_created(event: CreateRequested) -> Pod:
    """Return the pod with the amounts of the create, if kubelet's report has those from before a resize."""
    pod, name, request = event.pod, event.name, event.request
    if pod.requests is None or not carries_other_amounts(pod.requests, name, request):
        return pod
    requests = with_amounts_of_create(pod.requests, name, request)
    if requests is pod.requests:
        return pod
    return structs.replace(pod, requests=requests, source=f"{pod.source}; {name} as its create has it")


def _with_resized_pod(plan: Plan, container: Container) -> tuple[Plan, NodeEffects]:
    """Return the plan with what stays set aside for a pod that now requests other amounts."""
    pod = aside_after_create(plan.state, container)
    if pod is None:
        return plan, NOTHING
    return structs.replace(plan, state=plan.state.with_pod(pod)), (
        PutRecord(POD_RECORD + pod.sandbox_id, pod),
    )


def _withdrawn(
    state: NodeState, event: CreateRequested
) -> tuple[NodeState, CreateRequested, str, NodeEffects]:
    """Withdraw an earlier decision about a create that another program sends.

    Returns:
        The state without that decision, the event with the values of the client, the token of the container,
        and the effects to perform. The token is empty if there was no such decision.
    """
    key = CreateKey(event.pod.sandbox_id, event.name, event.attempt)
    known = state.runtime.delegated_creates.get(key)
    if known is None:
        return state, event, "", ()
    state = state.with_runtime(state.runtime.without_delegated_create(key))
    first = state.containers.get(known.token)
    if first is None:
        return state, event, "", ()
    state, effects = create_failed(state, CreateFailed(known.token))
    request = clients_request(event.request, known, first.request)
    return state, structs.replace(event, request=request), known.token, effects


def create_delegated(state: NodeState, event: CreateDelegated) -> tuple[NodeState, NodeEffects]:
    """Record the decision that was returned to a caller, in case the create comes again."""
    container = state.containers.get(event.token)
    if container is None:
        return state, ()
    create = DelegatedCreate(*structs.astuple(event))
    return state.with_runtime(state.runtime.with_delegated_create(container, create)), ()


def create_resumed(state: NodeState, event: CreateResumed) -> tuple[NodeState, NodeEffects]:
    """Continue a create, with its container as it is now."""
    container = state.containers.get(event.container.id)
    answer = create_answer(
        state, event.container.pod, container, is_reserved=event.is_reserved, has_devices=True
    )
    return state, (answer,)


def create_without_devices(state: NodeState, event: CreateWithoutDevices) -> tuple[NodeState, NodeEffects]:
    """Refuse a create whose container cannot use its devices, and remove the container from the state."""
    container = event.container
    verdict = unallocated_verdict(container, event.cause)
    after, effects = create_failed(state, CreateFailed(container.id))
    return after, (*effects, create_answer(state, container.pod, None, verdict))


def create_not_reserved(state: NodeState, event: CreateNotReserved) -> tuple[NodeState, NodeEffects]:
    """Refuse a create whose CPUs cannot be freed."""
    verdict = unreserved_verdict(state, event.container, event.reason)
    return state, (create_answer(state, event.container.pod, None, verdict),)


def start_requested(state: NodeState, event: StartRequested) -> tuple[NodeState, NodeEffects]:
    """Let a container start, or prepare it first."""
    answer = start_answer(state, event.container_id, is_prepared=event.is_prepared, obstacle=event.obstacle)
    return state, (answer,)


def update_requested(state: NodeState, event: UpdateRequested) -> tuple[NodeState, NodeEffects]:
    """Let an update continue with the CPUs and the quota that the plan has for the container.

    A set that a client names is recorded: the container gets it back when topoproxy releases the node. The
    sets of kubelet's static policy are not: kubelet's state file has them, and kubelet names them all the
    time.
    """
    container, quota = state.containers.get(event.container_id), 0
    if container is None or container.phase is Phase.EXITED:
        return state, (update_answer(state, container, quota),)
    effects: NodeEffects = ()
    known = container.request
    cpus, mems = event.cpus or known.cpuset_cpus, event.mems or known.cpuset_mems
    is_new = (cpus, mems) != (known.cpuset_cpus, known.cpuset_mems)
    if is_new and state.facts.cpu_manager.policy != "static":
        request = structs.replace(known, cpuset_cpus=cpus, cpuset_mems=mems)
        container = structs.replace(container, request=request)
        state, effects = containers_updated(state, ContainersUpdated((container,)))
    if applies_to(state, container.pod):
        quotas, quota = requested_quota(state, container, event.cpu_quota)
        state, records = with_quotas(state, quotas)
        effects = (*effects, *records)
    return state, (*effects, update_answer(state, container, quota, event.memory_limit))


def cpus_not_freed(state: NodeState, event: CpusNotFreed) -> tuple[NodeState, NodeEffects]:
    """Replace a placement whose CPUs cannot be freed with another one; keep it if there is no other."""
    container = state.containers.get(event.token)
    if container is None:
        return state, ()
    without, effects = create_failed(state, CreateFailed(event.token))
    plan = place_elsewhere(without, container, event.reason, event.new_token)
    if plan is None:
        return state, ()
    change = pool_changes(without, plan.state, WriteScope.CALLER)
    return plan.state, (*effects, *change, PlanDecided(plan))


def place_elsewhere(state: NodeState, container: Container, reason: AbortReason, token: str) -> Plan | None:
    """Decide a container again, without CPUs that cannot be freed.

    Args:
        state: The node without the container.
        container: The container as it was placed.
        reason: The CPUs, and why they cannot be freed.
        token: The id of the container until the runtime assigns one.

    Returns:
        A plan that gives the container CPUs of its own; None if its CPUs were named by another party or set
        aside for its pod, or if there are no other CPUs.
    """
    pod = state.current_pod(container.pod)
    if assigned_cpus(state.node, pod) or pod.reserved_for_pod is not None:
        return None
    created = container.pod  # with the amounts of the create, and the sum that it carries
    pod = structs.replace(pod, requests=created.requests, source=created.source, total=created.total)
    # kubelet's CPU manager may hold some of them for this container, which is then their owner. Those are not
    # blocked, so that no other CPUs are chosen in place of CPUs that kubelet has named.
    shared = reason.cpus - CpuSet.union_of(owner.cpus for owner in state.owners.values())
    blocked = structs.replace(state, blocked_cpus=shared)
    plan = place(blocked, pod, container.name, container.attempt, container.request, token)
    new = plan.container
    if new is None or new.placement.pool is not Pool.OWN or new.placement.exclusive & reason.cpus:
        return None
    message = f"not on CPUs {listed(reason.cpus)}, which could not be freed: {reason.message}"
    placement = structs.replace(new.placement, reasons=(*new.placement.reasons, message))
    new = structs.replace(new, placement=placement)
    explanation = plan.explanation
    if explanation is not None:
        explanation = structs.replace(explanation, reasons=(*explanation.reasons, message))
    after = structs.replace(plan.state, blocked_cpus=state.blocked_cpus).changed(put=(new,))
    return structs.replace(plan, state=after, container=new, explanation=explanation)
