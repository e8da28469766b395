"""Rules for what has happened to containers after the decisions on them: created, failed, exited, removed.

As all rules of ``proxy.engine.handle``, each takes a state and an event, and returns the state after the
event and the effects to perform. Records come first, then changes of the pools, then the notifications of
observers.
"""

from __future__ import annotations

from msgspec import structs

from proxy.engine.container_events import (
    ContainerCreated,
    ContainerIsBack,
    ContainersRemoved,
    ContainersUpdated,
    ContainerTouched,
    CpusAssigned,
    CreateFailed,
    CreateLost,
    PhaseChanged,
)
from proxy.engine.node_effects import (
    NOTHING,
    NodeEffect,
    NodeEffects,
    NotifyCpusAssigned,
    NotifyCreated,
    NotifyEntered,
    NotifyFailed,
    NotifyRemoved,
    PutRecord,
    SyncRuntimeSoon,
    WriteCpusets,
    pool_changes,
)
from proxy.engine.node_state_fact_rules import with_quotas
from proxy.engine.quotas import quotas_after_create
from proxy.engine.reservation_effects import RequestReconcile
from proxy.engine.state import NodeState
from proxy.model.workload import CONTAINER_RECORD, CREATE_RECORD, POD_RECORD, Container, Phase, Pool


def container_created(state: NodeState, event: ContainerCreated) -> tuple[NodeState, NodeEffects]:
    """Replace the token of a container with the id that the runtime has assigned."""
    token, container_id, sent = event.token, event.container_id, event.sent
    container = state.containers.get(token)
    if container is None or container.phase is not Phase.CREATING:
        return state, NOTHING
    container = container.in_phase(Phase.CREATED, container_id)
    after = state.with_container(token, container, state.runtime.created(token, container, sent))
    record, placement = PutRecord(CONTAINER_RECORD + container_id, container), container.placement
    notice = NotifyCreated(token, container)
    change = pool_changes(state, after)
    if placement.pool is Pool.OWN or placement.hook_cpus is not None:
        after, quota = _with_its_quota(after, container)
        return after, (record, PutRecord(CREATE_RECORD + token, None), *quota, *change, notice)
    return after, (record, *change, notice)


def _with_its_quota(state: NodeState, container: Container) -> tuple[NodeState, NodeEffects]:
    """Record the quota of an owner's request, if it was left out of the request."""
    if container.placement.pool is not Pool.OWN:
        return state, NOTHING
    return with_quotas(state, quotas_after_create(state, container))


def create_failed(state: NodeState, event: CreateFailed) -> tuple[NodeState, NodeEffects]:
    """Remove the container of a create; the containers that moved for it return to their CPUs."""
    token = event.token
    runtime, container = state.runtime.without_lost_create(token), state.containers.get(token)
    if container is None:
        return state.with_runtime(runtime), NOTHING
    after = state.changed(drop=(token,), runtime=runtime.with_failed_create(container))
    change = pool_changes(state, after)
    return after, (PutRecord(CREATE_RECORD + token, None), *change, NotifyFailed(token))


def create_lost(state: NodeState, event: CreateLost) -> tuple[NodeState, NodeEffects]:
    """Request a reconcile soon: the runtime's list shows whether a lost create made a container."""
    container = state.containers.get(event.token)
    if container is None:
        return state, NOTHING
    return state.with_runtime(state.runtime.with_lost_create(container, event.at)), (RequestReconcile(),)


def phase_changed(state: NodeState, event: PhaseChanged) -> tuple[NodeState, NodeEffects]:
    """Move a container from one phase to another.

    A container that runs although no start of it is known was started while calls passed unchanged, so its
    start was not prepared. The runtime may have saved any cpuset for it, so the right one is sent.
    """
    container_id, phase = event.container_id, event.phase
    container = state.containers.get(container_id)
    if container is None and phase is Phase.EXITED:
        return state.with_runtime(state.runtime.touched(container_id)), NOTHING
    if container is None or container.phase in (phase, Phase.EXITED):
        return state, NOTHING  # a container that has exited stays so; if a later list has it, it is adopted
    changed = container.in_phase(phase)
    after = state.changed(put=(changed,), runtime=state.runtime.touched(container_id))
    effects: list[NodeEffect] = [PutRecord(CONTAINER_RECORD + container_id, changed)]
    if phase is Phase.RUNNING:
        sandbox_id, before = changed.pod.sandbox_id, after
        after = after.started(changed)  # init containers release memory
        if after is not before:
            released = (c for c in after.in_sandbox(sandbox_id) if c is not before.containers[c.id])
            effects += (PutRecord(CONTAINER_RECORD + c.id, c) for c in released)
        if container.phase is Phase.CREATED:
            after = after.with_runtime(after.runtime.with_awaiting_sync((container_id,)))
            effects += WriteCpusets((container_id,)), SyncRuntimeSoon()
        pod = after.pods.get(sandbox_id)
        if pod is not None and pod is not before.pods.get(sandbox_id):
            effects.append(PutRecord(POD_RECORD + sandbox_id, pod))
    effects += pool_changes(state, after)
    return after, (*effects, NotifyEntered(changed, phase))


def containers_removed(state: NodeState, event: ContainersRemoved) -> tuple[NodeState, NodeEffects]:
    """Remove containers."""
    runtime = state.runtime
    for container_id in event.ids:
        runtime = runtime.removed(container_id)
    gone = state.existing(event.ids)
    if not gone:
        return state.with_runtime(runtime), NOTHING
    after = state.changed(drop=[c.id for c in gone], runtime=runtime)
    records = [PutRecord(CONTAINER_RECORD + container.id, None) for container in gone]
    change = pool_changes(state, after)
    return after, (*records, *change, *map(NotifyRemoved, gone))


def containers_updated(state: NodeState, event: ContainersUpdated) -> tuple[NodeState, NodeEffects]:
    """Replace containers with their new values."""
    after = state.changed(put=event.containers)
    records = [
        PutRecord((CREATE_RECORD if c.phase is Phase.CREATING else CONTAINER_RECORD) + c.id, c)
        for c in (event.containers if event.recorded else ())
    ]
    return after, (*records, *pool_changes(state, after))


def cpus_assigned(state: NodeState, event: CpusAssigned) -> tuple[NodeState, NodeEffects]:
    """Notify observers that containers may use other CPUs."""
    containers = (state.containers.get(container_id) for container_id in event.ids)
    return state, tuple(NotifyCpusAssigned(container) for container in containers if container is not None)


def container_touched(state: NodeState, event: ContainerTouched) -> tuple[NodeState, NodeEffects]:
    """Number a change of a container, so that older lists of the runtime are ignored for it."""
    return state.with_runtime(state.runtime.touched(event.container_id)), NOTHING


def container_is_back(state: NodeState, event: ContainerIsBack) -> tuple[NodeState, NodeEffects]:
    """Forget that a container was removed, so that it can be adopted again."""
    changes = state.runtime.changes.forgotten(event.container_id)
    return state.with_runtime(structs.replace(state.runtime, changes=changes)), NOTHING
