"""Handle the lifecycle of a container: created, failed, lost, started, ended, removed.

Rules of ``proxy.engine.handle``: each takes a state and an event, and returns the state after it and what is
to be done. Records come first, then the pools, then the notifications of observers.
"""

from __future__ import annotations

from msgspec import structs

from proxy.engine.container_events import (
    ContainerCreated,
    ContainerIsBack,
    ContainersRemoved,
    ContainersUpdated,
    ContainerTouched,
    CpusGiven,
    CreateFailed,
    CreateLost,
    PhaseChanged,
)
from proxy.engine.effects import RequestReconcile
from proxy.engine.fact_changes import with_quotas
from proxy.engine.node_effects import (
    NodeEffect,
    NodeEffects,
    NotifyCreated,
    NotifyEntered,
    NotifyFailed,
    NotifyGiven,
    NotifyGone,
    PutRecord,
    SettleSoon,
    WriteCpusets,
    followed,
)
from proxy.engine.quotas import quotas_after_create
from proxy.engine.state import NodeState
from proxy.model.workload import Container, Phase, Pool

NOTHING: NodeEffects = ()


def container_created(state: NodeState, event: ContainerCreated) -> tuple[NodeState, NodeEffects]:
    """Replace the token of a container by the id that the runtime has assigned."""
    token, container_id, sent = event.token, event.container_id, event.sent
    container = state.containers.get(token)
    if container is None or container.phase is not Phase.CREATING:
        return state, NOTHING
    container = container.in_phase(Phase.CREATED, container_id)
    after = state.renamed(token, container, state.runtime.created(token, container, sent))
    record, placement = PutRecord(f"c/{container_id}", container), container.placement
    notice = NotifyCreated(token, container)
    change = followed(state, after, "container created")
    if placement.pool is Pool.OWN or placement.hook_cpus is not None:
        after, quota = _with_its_quota(after, container)
        return after, (record, PutRecord(f"i/{token}", None), *quota, *change, notice)
    return after, (record, *change, notice)


def _with_its_quota(state: NodeState, container: Container) -> tuple[NodeState, NodeEffects]:
    """Record the quota of an owner's request where it was left out."""
    if container.placement.pool is not Pool.OWN:
        return state, NOTHING
    return with_quotas(state, quotas_after_create(state, container))


def create_failed(state: NodeState, event: CreateFailed) -> tuple[NodeState, NodeEffects]:
    """Remove the container of a create; the containers that moved for it return to their CPUs."""
    token = event.token
    runtime, container = state.runtime.finding(token), state.containers.get(token)
    if container is None:
        return state.knowing(runtime), NOTHING
    after = state.changed(drop=(token,), runtime=runtime.failing(container))
    change = followed(state, after, "create failed")
    return after, (PutRecord(f"i/{token}", None), *change, NotifyFailed(token))


def create_lost(state: NodeState, event: CreateLost) -> tuple[NodeState, NodeEffects]:
    """Request a comparison with the runtime soon, which shows whether a lost create made a container."""
    container = state.containers.get(event.token)
    if container is None:
        return state, NOTHING
    return state.knowing(state.runtime.losing(container, event.at)), (RequestReconcile(),)


def phase_changed(state: NodeState, event: PhaseChanged) -> tuple[NodeState, NodeEffects]:
    """Move a container from one phase to another.

    A container that runs although no start of it is known was started while calls passed unchanged, and was
    not prepared: the runtime may have saved any cpuset for it, and is to be sent the right one.
    """
    container_id, phase = event.container_id, event.phase
    container = state.containers.get(container_id)
    if container is None and phase is Phase.EXITED:
        return state.knowing(state.runtime.touched(container_id)), NOTHING
    if container is None or container.phase in (phase, Phase.EXITED):
        return state, NOTHING  # a container that has exited stays so: what a list shows later is adopted
    changed = container.in_phase(phase)
    after = state.changed(put=(changed,), runtime=state.runtime.touched(container_id))
    effects: list[NodeEffect] = [PutRecord(f"c/{container_id}", changed)]
    if phase is Phase.RUNNING:
        sandbox_id, before = changed.pod.sandbox_id, after
        after = after.started(changed)  # init containers release memory
        if container.phase is Phase.CREATED:
            after = after.knowing(after.runtime.unsettling((container_id,)))
            effects += WriteCpusets((container_id,)), SettleSoon()
        pod = after.pods.get(sandbox_id)
        if pod is not None and pod is not before.pods.get(sandbox_id):
            effects.append(PutRecord(f"p/{sandbox_id}", pod))
    effects += followed(state, after, f"container {phase.value}")
    return after, (*effects, NotifyEntered(changed, phase))


def containers_removed(state: NodeState, event: ContainersRemoved) -> tuple[NodeState, NodeEffects]:
    """Remove containers."""
    runtime, containers = state.runtime, state.containers
    for container_id in event.ids:
        runtime = runtime.removed(container_id)
    gone = [c for i in event.ids if (c := containers.get(i)) is not None]
    if not gone:
        return state.knowing(runtime), NOTHING
    after = state.changed(drop=[c.id for c in gone], runtime=runtime)
    records = [PutRecord(f"c/{container.id}", None) for container in gone]
    change = followed(state, after, "container removed")
    return after, (*records, *change, *map(NotifyGone, gone))


def containers_updated(state: NodeState, event: ContainersUpdated) -> tuple[NodeState, NodeEffects]:
    """Replace containers by what they are from now on."""
    after = state.changed(put=event.containers)
    records = [
        PutRecord(f"{'i' if c.phase is Phase.CREATING else 'c'}/{c.id}", c)
        for c in (event.containers if event.recorded else ())
    ]
    return after, (*records, *followed(state, after, event.reason))


def cpus_given(state: NodeState, event: CpusGiven) -> tuple[NodeState, NodeEffects]:
    """Notify observers of containers that may use other CPUs."""
    there = (state.containers.get(container_id) for container_id in event.ids)
    return state, tuple(NotifyGiven(container) for container in there if container is not None)


def container_touched(state: NodeState, event: ContainerTouched) -> tuple[NodeState, NodeEffects]:
    """Note that something has happened to a container."""
    return state.knowing(state.runtime.touched(event.container_id)), NOTHING


def container_is_back(state: NodeState, event: ContainerIsBack) -> tuple[NodeState, NodeEffects]:
    """Let a container be adopted again that was believed to be gone."""
    changes = state.runtime.changes.forgotten(event.container_id)
    return state.knowing(structs.replace(state.runtime, changes=changes)), NOTHING
