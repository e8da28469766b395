"""Apply a change of mode or selection to running pods, a few at a time.

Theory of operation. Mode and selection (``proxy.model.pod_selection``) define the *target* of each pod: in
mode ``enforce`` the plan is applied to the selected pods, in mode ``observe`` to none. If mode or selection
change, running pods do not change at once. Pods that are not treated according to their target *lag*, and are
changed in steps of a few pods (``EnforcementStepDue``). A pod that does not lag is treated according to its
target, whatever changes happened in which order.

    target changes --> lagging --EnforcementStepDue--> moving --EnforcementStepDone--> as the target says
                          ^                               |
                          +---- EnforcementStepFailed ----+   and what was written is given back

A pod in ``moving`` is treated in the new way from the beginning of the step: its calls are rewritten, or pass
unchanged. Until the step is done, the kernel and the runtime may have any intermediate state for it. So only
the end of the step takes a pod out of ``moving``. Another change of its target does not: it only changes
whether the pod lags. The step continues towards the way in which the pod is treated, and a later step brings
a lagging pod to its target. The actions of a step (``proxy.staging``) reach their goal from any intermediate
state, so a daemon repeats a step in which it was killed. Pods without a live container never lag, because
there is nothing to move.

Order. When the plan is applied, pods that only share CPUs come before pods that own CPUs; when it is given
up, they come after them. So when an owner gets its CPUs to itself, as many other containers as possible have
left them already. The pools exclude the CPUs of every owner in the plan, including observed ones. So a
container to which the plan is applied never runs on the CPUs of another owner to which it is applied;
observed containers may.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import structs

from proxy.engine.enforcement import is_selected, live_pods, was_applied_to
from proxy.engine.enforcement_state import APPLIED_TO_ALL, ENFORCEMENT_RECORD, Enforcement, canonical
from proxy.engine.node_effects import EnforcementStep, NodeEffects, PutRecord, fact_records
from proxy.engine.node_events import (
    EnforcementChanged,
    EnforcementPaused,
    EnforcementRead,
    EnforcementStepDone,
    EnforcementStepDue,
    EnforcementStepFailed,
    ModeChanged,
)
from proxy.engine.state import NodeState
from proxy.model.koordinator import BeCpuset
from proxy.model.mode import NodeMode
from proxy.model.pod_selection import number_of
from proxy.model.workload import Pod, Pool

Handled = tuple[NodeState, NodeEffects]


# -- changes of mode and selection --------------------------------------------------------------------------


def mode_changed(state: NodeState, event: ModeChanged) -> Handled:
    """Change the mode. A release, or its end, concerns all pods at once; every other change goes in steps.

    If a release is given up, the same pods lag as before, unless the new mode is ``observe``: then all pods
    lag for which the plan may still be in effect. Once the node is released, the plan is in effect for no
    pod, so none lags any more.
    """
    if event.mode.in_release or state.mode.in_release:
        # While the node is released, other programs may give containers other memory nodes and cpusets.
        facts = structs.replace(state.facts, mems=state.facts.mems.forgotten())
        runtime = state.runtime if event.mode.in_release else state.runtime.with_nothing_saved()
        state = structs.replace(state, facts=facts, runtime=runtime)
        if NodeMode.RELEASED not in (event.mode, state.mode):
            return _retargeted(state, event.mode, state.enforcement)
        after = structs.replace(state, mode=event.mode, enforcement=_without_steps(state.enforcement))
        narrowed = state.node.be_cpuset is BeCpuset.ERASE  # they are narrowed again if the release is undone
        after = after.with_facts(be_groups=narrowed)
        return after, (*fact_records(state, after), *_enforcement_record(state, after))
    return _retargeted(state, event.mode, state.enforcement)


def enforcement_changed(state: NodeState, event: EnforcementChanged) -> Handled:
    """Change the selection. Once the node is released, the plan is applied to no pod, so none can lag."""
    changed = structs.replace(state.enforcement, selection=event.selection)
    if state.mode is NodeMode.RELEASED:
        after = structs.replace(state, enforcement=_without_steps(changed))
        return after, _enforcement_record(state, after)
    return _retargeted(state, state.mode, changed)


def enforcement_read(state: NodeState, event: EnforcementRead) -> Handled:
    """Continue where the last daemon stopped, towards the current mode and selection."""
    before = structs.replace(state, mode=event.mode, enforcement=event.enforcement)
    enforcement = structs.replace(event.enforcement, selection=state.enforcement.selection)
    if state.mode is NodeMode.RELEASED:
        after = structs.replace(state, enforcement=_without_steps(enforcement))
        return after, _enforcement_record(before, after)
    return _retargeted(before, state.mode, enforcement)


def enforcement_paused(state: NodeState, event: EnforcementPaused) -> Handled:
    """Pause the steps, or continue with them."""
    changed = structs.replace(state.enforcement, paused=event.paused)
    after = structs.replace(state, enforcement=canonical(changed))
    return after, _enforcement_record(state, after)


def labels_learned(before: NodeState, after: NodeState, known: Pod, pod: Pod) -> Handled:
    """Return the state after labels of a pod have changed: a running pod whose target differs lags."""
    key, enforcement = pod.key, after.enforcement
    if was_applied_to(before, known) is was_applied_to(after, pod) or key not in live_pods(after):
        return after, ()
    changed = structs.replace(enforcement, lagging=enforcement.lagging ^ {key})
    after = structs.replace(after, enforcement=canonical(changed))
    return after, _enforcement_record(before, after)


def _without_steps(enforcement: Enforcement) -> Enforcement:
    """Return the value in which no pod lags and no step is under way."""
    return canonical(structs.replace(enforcement, lagging=frozenset(), moving=frozenset()))


def _retargeted(before: NodeState, mode: NodeMode, changed: Enforcement) -> Handled:
    """Return the state with other targets: pods that are not treated according to them lag."""
    without_lag = structs.replace(changed, lagging=frozenset())
    target = structs.replace(before, mode=mode, enforcement=without_lag)
    pods = live_pods(before)
    lagging = frozenset(
        key for key, pod in pods.items() if was_applied_to(before, pod) is not is_selected(target, pod)
    )
    enforcement = structs.replace(without_lag, lagging=lagging, moving=changed.moving & pods.keys())
    after = structs.replace(target, enforcement=canonical(enforcement))
    return after, _enforcement_record(before, after)


def _enforcement_record(before: NodeState, after: NodeState) -> NodeEffects:
    """Return the record of a change. It has the mode, too, because a restart in another mode is a change."""
    record = after.enforcement.dump(after.mode)
    return () if record == before.enforcement.dump(before.mode) else (PutRecord(ENFORCEMENT_RECORD, record),)


# -- steps --------------------------------------------------------------------------------------------------


def step_due(state: NodeState, event: EnforcementStepDue) -> Handled:
    """Begin the next step, or repeat the one under way; answer with the pods that it changes."""
    enforcement = state.enforcement
    if enforcement is APPLIED_TO_ALL or state.mode.in_release:
        return state, ()
    live = live_pods(state)
    moving, lagging = enforcement.moving & live.keys(), enforcement.lagging & live.keys()
    if not moving and not enforcement.paused:
        moving = frozenset(_next(state, live, lagging - event.skip, event.count))
        lagging -= moving
    changed = structs.replace(enforcement, lagging=lagging, moving=moving)
    after = structs.replace(state, enforcement=canonical(changed))
    step = (EnforcementStep(tuple(sorted(moving))),) if moving else ()
    return after, (*_enforcement_record(state, after), *step)


def _next(state: NodeState, live: dict[str, Pod], keys: Collection[str], count: int) -> list[str]:
    """Return the next pods: those that are given back, owners first; then the others, owners last."""
    own = {c.pod.key for c in state.containers.values() if c.placement.pool is Pool.OWN}

    def order(key: str) -> tuple[bool, bool, int, str]:
        applied = was_applied_to(state, live[key])
        return not applied, (key in own) is not applied, number_of(key), key

    return sorted(keys, key=order)[:count]


def step_done(state: NodeState, event: EnforcementStepDone) -> Handled:
    """Remove pods from the step, because their target is in effect."""
    changed = structs.replace(state.enforcement, moving=state.enforcement.moving - event.keys)
    after = structs.replace(state, enforcement=canonical(changed))
    return after, _enforcement_record(state, after)


def step_failed(state: NodeState, event: EnforcementStepFailed) -> Handled:
    """Stop applying the plan to pods for which that failed; what was written will be undone.

    Such a pod lags again, unless its target has changed during the step.
    """
    enforcement, live = state.enforcement, live_pods(state)
    failed = {
        key for key in event.keys & enforcement.moving & live.keys() if was_applied_to(state, live[key])
    }
    changed = structs.replace(enforcement, lagging=enforcement.lagging ^ failed)
    after = structs.replace(state, enforcement=canonical(changed))
    return after, _enforcement_record(state, after)
