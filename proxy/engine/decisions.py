"""Decisions about containers and their calls, as rules of ``proxy.engine.handle``.

Where a container is placed, the answer is ``PlanDecided``, and what is decided is in the state at once, so
that no later decision uses the same CPUs. The other rules answer a call that waits (``call_answers``).
"""

from __future__ import annotations

from msgspec import structs

from proxy.allocation.devices.allocate import PreferenceMissing
from proxy.engine.admission import assigned_cpus
from proxy.engine.adoption import adopt
from proxy.engine.call_answers import (
    AskPreference,
    create_answer,
    start_answer,
    unallocated_verdict,
    unreserved_verdict,
    update_answer,
)
from proxy.engine.call_events import StartRequested, UpdateRequested
from proxy.engine.container_events import (
    ContainerFound,
    ContainersUpdated,
    CpusNotFreed,
    CreateDelegated,
    CreateFailed,
    CreateNotReserved,
    CreateRequested,
    CreateResumed,
    CreateWithoutDevices,
)
from proxy.engine.create import Plan, place
from proxy.engine.delegated_creates import DelegatedCreate, clients_request
from proxy.engine.device_grants import devices_recorded
from proxy.engine.effects import AbortReason
from proxy.engine.enforcement import applies_to
from proxy.engine.fact_changes import with_quotas
from proxy.engine.lifecycle import containers_updated, create_failed
from proxy.engine.node_effects import Follow, NodeEffects, PlanDecided, PutRecord, followed
from proxy.engine.quotas import requested_quota
from proxy.engine.state import NodeState
from proxy.model.phrases import listed
from proxy.model.workload import Container, Phase, Pool

_NOTHING: NodeEffects = ()


def create_requested(state: NodeState, event: CreateRequested) -> tuple[NodeState, NodeEffects]:
    """Place a container, or refuse it; an earlier decision about the same create is withdrawn.

    Where a device plug-in has to be queried first, nothing changes, and the answer is that query.
    """
    before, first, withdrawn = state, _NOTHING, ""
    if state.runtime.delegated:
        state, event, withdrawn, first = _withdrawn(state, event)
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
    except PreferenceMissing as question:
        return before, (AskPreference.of(question),)
    after, container = plan.state, plan.container
    if after.devices is not state.devices:
        first = (*first, *devices_recorded(state, after, event.pod.key))
    answer = create_answer(after, event.pod, container, plan.verdict)
    decided = PlanDecided(plan, answer, withdrawn)
    if container is None:
        return state, (*first, decided)
    if after.pools is state.pools and after.node is state.node:
        return after, (*first, decided)
    # The reservation writes the containers that leave an owner's CPUs, and waits for that.
    follow = Follow.CALLER if container.placement.pool is Pool.OWN else Follow.MOVED
    return after, (*first, *followed(state, after, "container placed", follow), decided)


def _withdrawn(
    state: NodeState, event: CreateRequested
) -> tuple[NodeState, CreateRequested, str, NodeEffects]:
    """Withdraw an earlier decision about a create that another program sends.

    Returns:
        The state without it, the event with the values of the client, the token of the container, and what is
        to be done; the token is empty where there was no such decision.
    """
    attempt = event.pod.sandbox_id, event.name, event.attempt
    known = state.runtime.delegated.get(attempt)
    if known is None:
        return state, event, "", ()
    state = state.knowing(state.runtime.undelegated(attempt))
    first = state.containers.get(known.token)
    if first is None:
        return state, event, "", ()
    state, effects = create_failed(state, CreateFailed(known.token))
    request = clients_request(event.request, known, first.request)
    return state, structs.replace(event, request=request), known.token, effects


def create_delegated(state: NodeState, event: CreateDelegated) -> tuple[NodeState, NodeEffects]:
    """Remember what was returned to a caller, in case that the create comes again."""
    container = state.containers.get(event.token)
    if container is None:
        return state, ()
    one = DelegatedCreate(*structs.astuple(event))
    return state.knowing(state.runtime.delegating(container, one)), ()


def create_resumed(state: NodeState, event: CreateResumed) -> tuple[NodeState, NodeEffects]:
    """Continue a create, with its container as it is now."""
    container = state.containers.get(event.container.id)
    answer = create_answer(
        state, event.container.pod, container, is_reserved=event.is_reserved, has_devices=True
    )
    return state, (answer,)


def create_without_devices(state: NodeState, event: CreateWithoutDevices) -> tuple[NodeState, NodeEffects]:
    """Refuse a create that cannot use its devices; its container goes."""
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
    """Let an update continue with the CPUs and the quota that the container is to have.

    A set that a client names is remembered: the container gets it back when topoproxy leaves the node. The
    sets of kubelet's static policy are in kubelet's state file, and named all the time.
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
        state, effects = containers_updated(state, ContainersUpdated((container,), "container updated"))
    if applies_to(state, container.pod):
        quotas, quota = requested_quota(state, container, event.cpu_quota)
        state, records = with_quotas(state, quotas)
        effects = (*effects, *records)
    return state, (*effects, update_answer(state, container, quota))


def cpus_not_freed(state: NodeState, event: CpusNotFreed) -> tuple[NodeState, NodeEffects]:
    """Withdraw a placement whose CPUs cannot be freed, and make another one; nothing where there is none."""
    container = state.containers.get(event.token)
    if container is None:
        return state, ()
    without, effects = create_failed(state, CreateFailed(event.token))
    plan = place_elsewhere(without, container, event.reason, event.new_token)
    if plan is None:
        return state, ()
    change = followed(without, plan.state, "container placed", Follow.CALLER)
    return plan.state, (*effects, *change, PlanDecided(plan))


def container_found(state: NodeState, event: ContainerFound) -> tuple[NodeState, NodeEffects]:
    """Assign a container that is not known the CPUs that it runs on."""
    container_id, phase, saved = event.container_id, event.phase, event.saved
    plan = adopt(state, container_id, event.pod, event.name, event.attempt, event.request, phase)
    assert plan.container is not None
    after = plan.state
    if saved is not None:
        after = after.knowing(after.runtime.saving(container_id, saved))
    record = PutRecord(f"c/{container_id}", plan.container)
    return after, (record, *followed(state, after, "container adopted"), PlanDecided(plan))


STUCK = "cannot be freed"
"""In place of the pod that is on CPUs that cannot be freed, while others are chosen."""


def place_elsewhere(state: NodeState, container: Container, reason: AbortReason, token: str) -> Plan | None:
    """Decide a container again, without CPUs that cannot be freed.

    Args:
        state: The node without the container.
        container: What is to be placed, as it was placed.
        reason: The CPUs, and why they cannot be freed.
        token: Its id until the runtime names it.

    Returns:
        A plan that gives it CPUs of its own; None where its CPUs were named by another party or set aside for
        its pod, or where there are no others.
    """
    pod = state.pods.get(container.pod.sandbox_id) or container.pod
    if assigned_cpus(state.node, pod) or pod.reserved_for_pod is not None:
        return None
    walled = state.with_kubelet_cpus({**state.kubelet, STUCK: {"": reason.cpus}})
    plan = place(walled, pod, container.name, container.attempt, container.request, token)
    new = plan.container
    if new is None or new.placement.pool is not Pool.OWN or new.placement.exclusive & reason.cpus:
        return None
    message = f"not on CPUs {listed(reason.cpus)}, which could not be freed: {reason.message}"
    placement = structs.replace(new.placement, reasons=(*new.placement.reasons, message))
    new = structs.replace(new, placement=placement)
    why = plan.explanation
    if why is not None:
        why = structs.replace(why, reasons=(*why.reasons, message))
    after = plan.state.with_kubelet_cpus(state.kubelet).changed(put=(new,))
    return structs.replace(plan, state=after, container=new, explanation=why)
