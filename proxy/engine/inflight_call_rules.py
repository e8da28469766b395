"""Handle calls in flight, from the moment they are sent to their end: rules of ``proxy.engine.handle``.

As long as calls for a container do not overlap, the runtime starts or updates it with the cpuset of the last
update (``RuntimeKnowledge.saved``). A created container has no cgroup yet: runc makes it at the start, with
the cpuset that was saved last.
"""

from __future__ import annotations

from msgspec import structs
from msgspec.structs import replace

from proxy.engine.call_events import (
    CallCompleted,
    CallConfined,
    CallOrphaned,
    CallSent,
    OrphanEnded,
    OrphanListed,
    ResendWanted,
    StartEnded,
    StartRefused,
    UpdateAccepted,
    UpdateEnded,
)
from proxy.engine.container_events import ContainersUpdated, PhaseChanged
from proxy.engine.container_lifecycle_rules import containers_updated, phase_changed
from proxy.engine.memory_resize import with_memory_limit
from proxy.engine.node_effects import (
    CallOver,
    CompareCpusets,
    CompareUnits,
    NodeEffect,
    NodeEffects,
    OrphanOver,
    PutRecord,
    SyncRuntimeSoon,
    WriteCpusets,
)
from proxy.engine.pod_resize import aside_after_update
from proxy.engine.reservation_effects import RequestReconcile
from proxy.engine.state import NodeState
from proxy.model.workload import POD_RECORD, Phase

ORPHAN_GRACE_S = 2.0
"""For how many seconds a runtime that answers other calls may still be executing an orphan."""

Handled = tuple[NodeState, NodeEffects]


def call_sent(state: NodeState, event: CallSent) -> Handled:
    """Add a call to the calls in flight; a container that it starts is now starting."""
    call = event.call
    after = structs.replace(state, inflight=state.inflight.added(call))
    container = state.containers.get(call.container_id) if call.is_start and not call.suspected else None
    if container is not None and container.phase is Phase.CREATED:
        runtime = state.runtime.touched(container.id)
        after = after.changed(put=(container.in_phase(Phase.STARTING),), runtime=runtime)
    return after, () if call.orphaned_since is None else (RequestReconcile(),)


def call_completed(state: NodeState, event: CallCompleted) -> Handled:
    """Remove a call from the calls in flight."""
    call = event.call
    if state.inflight.current(call) is None:
        return state, ()
    return structs.replace(state, inflight=state.inflight.removed(call)), (CallOver(call.number),)


def call_orphaned(state: NodeState, event: CallOrphaned) -> Handled:
    """Record that the answer to a call is no longer awaited; the runtime may still execute the call."""
    call = state.inflight.current(event.call)
    if call is None:
        return state, ()
    orphan = replace(call, orphaned_since=event.at, answered_at=None)
    return structs.replace(state, inflight=state.inflight.updated(orphan)), (RequestReconcile(),)


def start_refused(state: NodeState, event: StartRefused) -> Handled:
    """Make the start an orphan: the next list shows whether its container exists, runs, or has exited."""
    call = state.inflight.current(event.call)
    state = state.with_runtime(state.runtime.touched(event.call.container_id))
    if call is None:
        return state, ()
    orphan = replace(call, refused=True, orphaned_since=event.at)
    return structs.replace(state, inflight=state.inflight.updated(orphan)), (RequestReconcile(),)


def call_confined(state: NodeState, event: CallConfined) -> Handled:
    """Mark a call whose container is confined to its current cpuset, or no longer is."""
    call = state.inflight.current(event.call)
    if call is None or call.confined is event.confined:
        return state, ()
    return structs.replace(state, inflight=state.inflight.updated(replace(call, confined=event.confined))), ()


def start_ended(state: NodeState, event: StartEnded) -> Handled:
    """End a start; its container enters the phase that the runtime has reported, if it has reported one."""
    call, phase = event.call, event.phase
    before = state.inflight.current(call)
    state, over = call_completed(state, CallCompleted(call))
    container = state.containers.get(call.container_id)
    if container is None or phase is None:
        return state, over
    if phase is Phase.CREATED and (
        container.phase is not Phase.STARTING or state.inflight.is_starting(container.id)
    ):
        return state, over
    state, entered = phase_changed(state, PhaseChanged(container.id, phase))
    if phase is not Phase.RUNNING:
        return state, (*over, *entered)
    written, sent = WriteCpusets((container.id,)), before or call
    if not sent.confined and not sent.overlapped and call.carries == state.desired_cpus(container):
        return state, (*over, *entered, written)
    # The runtime has saved the cpuset of the start, or that of an update that overlapped with it.
    return _with_awaiting_sync(state, container.id), (*over, *entered, written, SyncRuntimeSoon())


def update_accepted(state: NodeState, event: UpdateAccepted) -> Handled:
    """Record the new memory limit of a container, and the changes that follow from it."""
    container = state.containers.get(event.container_id)
    if container is None or container.phase is Phase.EXITED:
        return state, ()
    resized = with_memory_limit(state, container, event.memory_limit)
    if resized is container:
        return state, ()
    if resized.placement.mems != container.placement.mems:  # the new nodes must not count as drift
        bindings = state.facts.mems
        state = state.with_facts(mems=replace(bindings, as_planned=bindings.as_planned - {container.id}))
    state, effects = containers_updated(state, ContainersUpdated((resized,)))
    pod = aside_after_update(state, container, resized)
    if pod is None:
        return state, effects
    return state.with_pod(pod), (PutRecord(POD_RECORD + pod.sandbox_id, pod), *effects)


def update_ended(state: NodeState, event: UpdateEnded) -> Handled:
    """End an update; unless it overlapped with another call, record what the runtime has saved."""
    call, saved = state.inflight.current(event.call), event.saved
    if call is None:
        return state, ()
    container_id = call.container_id
    state, over = call_completed(state, CallCompleted(call))
    container = state.containers.get(container_id)
    if container is None:
        return state, over
    is_alone, effects = not call.overlapped, list[NodeEffect](over)
    state = state.with_runtime(state.runtime.with_saved(container_id, saved if is_alone else None))
    if saved is not None and not (is_alone and saved == state.desired_cpus(container)):
        # The order of the calls is unknown, so the planned CPUs are sent after all of them.
        if state.inflight.is_busy(container_id):
            state, _ = resend_wanted(state, ResendWanted(container_id))
        else:
            state = _with_awaiting_sync(state, container_id)
            effects.append(SyncRuntimeSoon())
    if saved == state.desired_cpus(container) and is_alone:
        effects.append(
            CompareCpusets((container_id,))
        )  # most probably right, so only compared: many updates may complete together
    else:
        effects.append(WriteCpusets((container_id,)))
    return state, tuple(effects)


def resend_wanted(state: NodeState, event: ResendWanted) -> Handled:
    """Send a container's CPUs to the runtime once the calls in flight for it have ended."""
    inflight = state.inflight
    for call in inflight.of(event.container_id):
        if not call.resend:
            inflight = inflight.updated(replace(call, resend=True))
    return structs.replace(state, inflight=inflight), ()


def orphan_listed(state: NodeState, event: OrphanListed) -> Handled:
    """Decide whether an orphan is over, by the runtime's list or by the time that has passed."""
    call = state.inflight.current(event.call)
    if call is None or call.orphaned_since is None:
        return state, ()  # it is over, or another reconcile is ending it
    phase, requested_at = event.phase, event.requested_at
    if call.answered_at is None and requested_at >= call.orphaned_since:
        call = replace(call, answered_at=event.now)
    is_late = (
        call.answered_at is not None
        and requested_at - call.answered_at >= ORPHAN_GRACE_S
        and not event.is_exempt_from_timeout
    )
    end: Phase = Phase.CREATED
    if phase is Phase.EXITED or (call.is_start and phase is Phase.RUNNING):
        end = phase
    elif not is_late and not (call.refused and phase is Phase.CREATED):
        return structs.replace(state, inflight=state.inflight.updated(call)), ()
    ending = replace(call, orphaned_since=None)
    return structs.replace(state, inflight=state.inflight.updated(ending)), (OrphanOver(ending, end),)


def orphan_ended(state: NodeState, event: OrphanEnded) -> Handled:
    """End an orphan. The reconcile that found it over writes the kernel afterwards."""
    call, phase = event.call, event.phase
    effects, container_id = list[NodeEffect](), call.container_id
    last_known = state.inflight.current(call) or call
    if call.is_start:
        state, ended = start_ended(state, StartEnded(call, phase))
        effects += ended
    elif state.inflight.current(call) is not None:
        state, over = call_completed(state, CallCompleted(call))
        effects += over
        if container_id in state.containers:
            state = state.with_runtime(state.runtime.with_saved(container_id, None))
            effects.append(CompareUnits((container_id,)))  # the runtime may have sent systemd another cpuset
    if phase is Phase.EXITED:
        state, entered = phase_changed(state, PhaseChanged(container_id, phase))
        effects += entered
    elif last_known.resend and container_id in state.containers:
        state = _with_awaiting_sync(state, container_id)
        effects.append(SyncRuntimeSoon())
    return state, tuple(effects)


def _with_awaiting_sync(state: NodeState, container_id: str) -> NodeState:
    return state.with_runtime(state.runtime.with_awaiting_sync((container_id,)))
