"""The engine: a state and an event in; the next state, and what is to be done, out.

``NodeStore`` is its only caller: it replaces the state, and performs the effects in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from proxy.engine import call_ends, decisions, fact_changes, lifecycle, sandboxes, staging, write_conflicts
from proxy.engine import node_events as events
from proxy.engine.adoption import with_unrecorded_grants
from proxy.engine.node_effects import Follow, NodeEffects, NotifyListed, SettleSoon, followed
from proxy.engine.node_events import NodeEvent
from proxy.engine.state import NodeState
from proxy.model.workload import Phase

Handled = tuple[NodeState, NodeEffects]


def handle(state: NodeState, event: NodeEvent) -> Handled:
    """Return the state after an event, and what is to be done.

    Args:
        state: The node as it is.
        event: What has happened.
    """
    return _RULES[type(event)](state, event)


def _saved_cpus_learned(state: NodeState, event: events.SavedCpusLearned) -> Handled:
    container = state.containers.get(event.container_id)
    if (container is None or container.phase is Phase.CREATING) and event.cpus is not None:
        return state, ()  # nothing would forget it any more
    return state.knowing(state.runtime.saving(event.container_id, event.cpus)), ()


def _containers_unsettled(state: NodeState, event: events.ContainersUnsettled) -> Handled:
    return state.knowing(state.runtime.unsettling(event.ids)), (SettleSoon(),)


def _settling_began(state: NodeState, event: events.SettlingBegan) -> Handled:
    return state.knowing(state.runtime.settling(event.container_id)), ()


def _ledger_read(state: NodeState, event: events.LedgerRead) -> Handled:
    found = NodeState.of(state.node, event.pods, event.containers, holds=event.holds)
    runtime = structs.replace(state.runtime, lost=dict.fromkeys(event.lost, event.at))
    found = structs.replace(
        found,
        runtime=runtime,
        mode=state.mode,
        inflight=state.inflight,
        facts=state.facts,
        enforcement=state.enforcement,
    )
    after = with_unrecorded_grants(found)
    return after, followed(state, after, "ledger read")


def _runtime_listed(state: NodeState, event: events.RuntimeListed) -> Handled:
    return state, (NotifyListed(*structs.astuple(event)),)


def _node_rules_changed(state: NodeState, event: events.NodeRulesChanged) -> Handled:
    if event.node is state.node:
        return state, ()
    after = state.under(event.node)
    return after, followed(state, after, event.reason, event.follow)


def _machine_changed(state: NodeState, event: events.HardwareChanged) -> Handled:
    after = state.on(event.machine)
    return after, followed(state, after, "machine changed", Follow.ALL)


def _kubelet_assigned(state: NodeState, event: events.KubeletAssigned) -> Handled:
    after = state.with_kubelet_cpus(event.held)
    return after, followed(state, after, "kubelet's CPU manager changed")


def _be_limited(state: NodeState, event: events.BeLimited) -> Handled:
    after = state.suppressing(event.cpus)
    return after, followed(state, after, "BE pool suppressed", Follow.CALLER)


def _cpus_held(state: NodeState, event: events.CpusHeld) -> Handled:
    placed = state.changed(put=event.placed) if event.placed else state
    after = placed.holding(event.reservation, event.hold)
    # The reservation writes the kernel itself, until it holds nothing any more.
    follow = Follow.MOVED if event.hold is None or event.placed else Follow.CALLER
    return after, followed(state, after, event.reason, follow)


_RULES: dict[type[NodeEvent], Callable[[NodeState, Any], Handled]] = {
    events.ContainerCreated: lifecycle.container_created,
    events.CreateFailed: lifecycle.create_failed,
    events.CreateLost: lifecycle.create_lost,
    events.PhaseChanged: lifecycle.phase_changed,
    events.ContainersRemoved: lifecycle.containers_removed,
    events.ContainerTouched: lifecycle.container_touched,
    events.ContainerIsBack: lifecycle.container_is_back,
    events.ContainersUpdated: lifecycle.containers_updated,
    events.CpusGiven: lifecycle.cpus_given,
    events.CreateRequested: decisions.create_requested,
    events.CreateResumed: decisions.create_resumed,
    events.CreateNotReserved: decisions.create_not_reserved,
    events.StartRequested: decisions.start_requested,
    events.UpdateRequested: decisions.update_requested,
    events.CpusNotFreed: decisions.cpus_not_freed,
    events.ContainerFound: decisions.container_found,
    events.SandboxRequested: sandboxes.sandbox_requested,
    events.PodLearned: sandboxes.pod_learned,
    events.SandboxRunning: sandboxes.sandbox_running,
    events.SandboxFailed: sandboxes.sandbox_failed,
    events.SandboxStopped: sandboxes.sandbox_stopped,
    events.SandboxRemoved: sandboxes.sandbox_removed,
    events.CpusHeld: _cpus_held,
    events.CallDeparted: call_ends.call_departed,
    events.CallLanded: call_ends.call_landed,
    events.CallStrayed: call_ends.call_strayed,
    events.StartRefused: call_ends.start_refused,
    events.StartEnded: call_ends.start_ended,
    events.UpdateEnded: call_ends.update_ended,
    events.ResendWanted: call_ends.resend_wanted,
    events.CallConfined: call_ends.call_confined,
    events.StrayListed: call_ends.stray_listed,
    events.StrayEnded: call_ends.stray_ended,
    events.RuntimeListed: _runtime_listed,
    events.NodeRulesChanged: _node_rules_changed,
    events.HardwareChanged: _machine_changed,
    events.KubeletAssigned: _kubelet_assigned,
    events.BeLimited: _be_limited,
    events.SavedCpusLearned: _saved_cpus_learned,
    events.ContainersUnsettled: _containers_unsettled,
    events.SettlingBegan: _settling_began,
    events.FactsLearned: fact_changes.facts_learned,
    write_conflicts.CpusetsRepaired: fact_changes.cpusets_written,
    write_conflicts.WritersFound: fact_changes.cpusets_written,
    write_conflicts.ConflictsDue: fact_changes.cpusets_written,
    events.ModeChanged: staging.mode_changed,
    events.EnforcementChanged: staging.enforcement_changed,
    events.EnforcementRead: staging.enforcement_read,
    events.EnforcementPaused: staging.enforcement_paused,
    events.EnforcementStepDue: staging.step_due,
    events.EnforcementStepDone: staging.step_done,
    events.EnforcementStepFailed: staging.step_failed,
    events.LedgerRead: _ledger_read,
}
