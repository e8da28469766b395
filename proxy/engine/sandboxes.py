"""The life of a sandbox: admitted, running, stopped, removed. Rules of ``proxy.engine.handle``."""

from __future__ import annotations

from proxy.allocation.devices.allocate import PreferenceMissing
from proxy.engine.call_answers import pod_answer
from proxy.engine.container_events import ContainersRemoved, PhaseChanged
from proxy.engine.container_lifecycle_rules import containers_removed, phase_changed
from proxy.engine.device_grants import devices_recorded
from proxy.engine.node_effects import (
    NOTHING,
    NodeEffect,
    NodeEffects,
    NotifyPodFound,
    NotifyPodRemoved,
    NotifyPodStopped,
    PodDecided,
    PutRecord,
    pool_changes,
)
from proxy.engine.pod_admission import admit
from proxy.engine.pod_events import (
    PodChangedByHook,
    PodLearned,
    SandboxFailed,
    SandboxRemoved,
    SandboxRequested,
    SandboxRunning,
    SandboxStopped,
)
from proxy.engine.staging import labels_learned
from proxy.engine.state import NodeState
from proxy.model.workload import POD_RECORD, Phase, Pod


def sandbox_requested(state: NodeState, event: SandboxRequested) -> tuple[NodeState, NodeEffects]:
    """Decide on a pod before its sandbox is made; the resources set aside for it are taken at once.

    If a device plugin has to be queried first, nothing changes, and the answer is that query.
    """
    try:
        admission = admit(state, event.pod, event.total, event.preferred)
    except PreferenceMissing as missing:
        return state, (missing.query,)
    decided = PodDecided(admission, pod_answer(state, admission.pod, admission.verdict))
    if not admission.verdict.admitted or admission.pod.reserved_for_pod is None:
        return state, (decided,)
    token, after = event.pod.sandbox_id, admission.state
    after = after.with_runtime(after.runtime.with_arriving_sandbox(token))
    records = (PutRecord(POD_RECORD + token, admission.pod), *devices_recorded(state, after, event.pod.key))
    return after, (*records, *pool_changes(state, after), decided)


def pod_changed_by_hook(state: NodeState, event: PodChangedByHook) -> tuple[NodeState, NodeEffects]:
    """Record the changes of hooks to a pod, unless it is already recorded with its resources set aside."""
    pod = event.pod
    if pod.sandbox_id in state.runtime.arriving_sandboxes:
        return state, ()
    after = state.with_pod(pod)
    after = after.with_runtime(after.runtime.with_arriving_sandbox(pod.sandbox_id))
    record = PutRecord(POD_RECORD + pod.sandbox_id, pod)
    return after, (record, *pool_changes(state, after))


def pod_learned(state: NodeState, event: PodLearned) -> tuple[NodeState, NodeEffects]:
    """Add a sandbox, or update the known facts about its pod."""
    after, effects = _learned(state, event)
    known = state.pods.get(event.pod.sandbox_id)
    # The runtime's list lacks the cgroup parent of a sandbox of an earlier run; a later create may have it.
    is_known = known is not None and (known.cgroup_parent or not event.pod.cgroup_parent)
    return (after if is_known else _inherited(after, event.pod)), effects


def _learned(state: NodeState, event: PodLearned) -> tuple[NodeState, NodeEffects]:
    pod, after = event.pod, state.with_pod(event.pod)
    records: NodeEffects = (PutRecord(POD_RECORD + pod.sandbox_id, pod),) if event.recorded else ()
    known = state.pods.get(pod.sandbox_id)
    if known is not None and known.labels != pod.labels:
        after, more = labels_learned(state, after, known, pod)
        records = (*records, *more)
    return after, (*records, *pool_changes(state, after))


def _inherited(state: NodeState, pod: Pod) -> NodeState:
    """Return the state with a pod whose sandbox was not made through this run of the daemon."""
    return state.with_runtime(state.runtime.with_inherited_cgroups((pod.cgroup_parent,)))


def sandbox_running(state: NodeState, event: SandboxRunning) -> tuple[NodeState, NodeEffects]:
    """Add a sandbox, in place of the token under which it was admitted."""
    pod, effects = event.pod, list[NodeEffect]()
    state = _arrived(state, event.token, effects)  # its devices stay with the pod
    for container in state.containers.values():
        is_pods = container.pod.uid == pod.uid != "" and container.pod.sandbox_id != pod.sandbox_id
        if is_pods and container.pod.attempt < pod.attempt and container.phase is not Phase.CREATING:
            state, more = phase_changed(state, PhaseChanged(container.id, Phase.EXITED))
            effects += more
    state, more = _learned(state, PodLearned(pod))
    effects += more
    if event.is_relayed_elsewhere:
        state = _inherited(state, pod)
        effects.append(NotifyPodFound(pod))
    return state, tuple(effects)


def sandbox_failed(state: NodeState, event: SandboxFailed) -> tuple[NodeState, NodeEffects]:
    """Release what was set aside for a pod whose sandbox could not be made."""
    effects, pod = list[NodeEffect](), state.pods.get(event.token)
    state = _arrived(state, event.token, effects)
    return _without_devices(state, pod, effects), tuple(effects)


def sandbox_stopped(state: NodeState, event: SandboxStopped) -> tuple[NodeState, NodeEffects]:
    """Mark the containers of a sandbox as exited, and release what was promised to its pod."""
    effects = list[NodeEffect]()
    for container in state.in_sandbox(event.sandbox_id):
        if container.phase is not Phase.CREATING:
            state, more = phase_changed(state, PhaseChanged(container.id, Phase.EXITED))
            effects += more
    state = _over(state, event.sandbox_id, effects)
    return state, tuple(effects)


def sandbox_removed(state: NodeState, event: SandboxRemoved) -> tuple[NodeState, NodeEffects]:
    """Remove a sandbox and its containers."""
    inside = state.in_sandbox(event.sandbox_id)
    ids = tuple(c.id for c in inside if c.phase is not Phase.CREATING)
    state, removed = containers_removed(state, ContainersRemoved(ids)) if ids else (state, NOTHING)
    effects = list(removed)
    state = _over(state, event.sandbox_id, effects)
    return state, (*effects, NotifyPodRemoved(event.sandbox_id))


def _arrived(state: NodeState, token: str, effects: list[NodeEffect]) -> NodeState:
    """Drop the token of a sandbox whose creation has ended."""
    if token not in state.runtime.arriving_sandboxes:
        return state
    return _dropped(state.with_runtime(state.runtime.without_arriving_sandbox(token)), token, effects)


def _over(state: NodeState, sandbox_id: str, effects: list[NodeEffect]) -> NodeState:
    """Release what was promised to the pod of a sandbox that has ended."""
    state = state.with_runtime(state.runtime.touched(sandbox_id))
    pod = state.pods.get(sandbox_id)
    if pod is not None:
        state = _dropped(state, sandbox_id, effects)
        state = _without_devices(state, pod, effects)
        effects.append(NotifyPodStopped(pod))
    return state


def _without_devices(state: NodeState, pod: Pod | None, effects: list[NodeEffect]) -> NodeState:
    """Free the devices of a pod that has no sandbox any more."""
    if pod is None:
        return state
    after = state.without_devices(pod.key)
    effects += devices_recorded(state, after, pod.key)
    return after


def _dropped(state: NodeState, sandbox_id: str, effects: list[NodeEffect]) -> NodeState:
    after = state.without_pod(sandbox_id)
    effects.append(PutRecord(POD_RECORD + sandbox_id, None))
    effects += pool_changes(state, after)
    return after
