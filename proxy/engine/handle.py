"""The engine: takes a state and an event, and returns the next state and the effects to perform.

On a node, ``NodeStore`` is the only caller: it replaces the state, and performs the effects in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from msgspec import structs

from proxy.engine import (
    call_events,
    container_events,
    container_lifecycle_rules,
    decisions,
    device_grants,
    inflight_call_rules,
    node_effects,
    node_events,
    node_policy_applied,
    node_state_fact_rules,
    partition,
    pod_events,
    quotas,
    sandboxes,
    staging,
    suppression,
    systemd_masks,
    write_conflicts,
)
from proxy.engine.adoption import container_found, with_unrecorded_grants
from proxy.engine.held_devices import restored
from proxy.engine.kubelet_cpus import changed_cpus
from proxy.engine.node_effects import NodeEffects, NotifyListed, SyncRuntimeSoon, WriteScope, pool_changes
from proxy.engine.node_events import NodeEvent
from proxy.engine.runtime_knowledge import superseded_pods
from proxy.engine.state import NodeState
from proxy.model.koordinator import BeCpuset
from proxy.model.workload import Phase

Handled = tuple[NodeState, NodeEffects]


def handle(state: NodeState, event: NodeEvent) -> Handled:
    """Return the state after an event, and the effects to perform.

    Args:
        state: The node as it is.
        event: What has happened.
    """
    return _RULES[type(event)](state, event)


def _saved_cpus_learned(state: NodeState, event: call_events.SavedCpusLearned) -> Handled:
    container = state.containers.get(event.container_id)
    if (container is None or container.phase is Phase.CREATING) and event.cpus is not None:
        return state, ()  # no later event would remove the value of a container that is gone
    return state.with_runtime(state.runtime.with_saved(event.container_id, event.cpus)), ()


def _runtime_sync_due(state: NodeState, event: call_events.RuntimeSyncDue) -> Handled:
    # A container may have gone since its cpuset was written; no later event would remove its id.
    known = [container_id for container_id in event.ids if container_id in state.containers]
    if not known:
        return state, ()
    return state.with_runtime(state.runtime.with_awaiting_sync(known)), (SyncRuntimeSoon(),)


def _runtime_sync_started(state: NodeState, event: call_events.RuntimeSyncStarted) -> Handled:
    return state.with_runtime(state.runtime.without_awaiting_sync(event.container_id)), ()


def _ledger_read(state: NodeState, event: node_events.LedgerRead) -> Handled:
    restored_state = NodeState.of(
        state.node, event.pods, event.containers, reservation_cpus=event.reservation_cpus
    )
    lost = dict.fromkeys(event.lost_creates, event.at)
    superseded = superseded_pods(event.pods)
    runtime = structs.replace(
        state.runtime, lost_creates=lost, arriving_sandboxes=event.arriving_sandboxes, superseded=superseded
    )
    runtime = runtime.with_inherited_cgroups(pod.cgroup_parent for pod in event.pods)
    restored_state = structs.replace(
        restored_state,
        runtime=runtime,
        mode=state.mode,
        inflight=state.inflight,
        facts=state.facts,
        enforcement=state.enforcement,
        devices=restored(state.devices, event.devices, event.resources),
    )
    be_groups = event.be_groups or state.node.be_cpuset is BeCpuset.ERASE
    after = with_unrecorded_grants(restored_state).with_facts(be_groups=be_groups)
    records = (
        *node_effects.fact_records(state, after),
        *device_grants.unanswered_dropped(after, event.devices),
    )
    return after, (*records, *pool_changes(state, after))


def _runtime_listed(state: NodeState, event: node_events.RuntimeListed) -> Handled:
    after, effects = device_grants.devices_of_unknown_pods(state)
    if state.runtime.inherited_cgroups:
        parents = {pod.cgroup_parent for pod in state.pods.values()}
        after = after.with_runtime(after.runtime.trimmed(parents))
    return after, (*effects, NotifyListed(*structs.astuple(event)))


def _takeover_changed(state: NodeState, event: node_events.TakeoverChanged) -> Handled:
    after = state.with_facts(kubelet_reserved=event.reserved)
    if state.node.static != event.static:
        after = after.with_node(state.node.with_static(static=event.static))
    return after, pool_changes(state, after, WriteScope.ALL)


def _machine_changed(state: NodeState, event: node_events.HardwareChanged) -> Handled:
    after = state.with_machine(event.machine)
    nodes_before, nodes_after = state.node.machine.memory_nodes, after.node.machine.memory_nodes
    if nodes_before != nodes_after:
        mems = after.facts.mems.changed(nodes_after - nodes_before)
        after = after.with_facts(mems=mems)
    return after, pool_changes(state, after, WriteScope.ALL)


def _kubelet_cpus_read(state: NodeState, event: node_events.KubeletCpusRead) -> Handled:
    after = state.with_facts(cpu_manager=event.manager).with_kubelet_cpus(event.held)
    if after.kubelet_cpus is state.kubelet_cpus:
        return after, ()
    added, removed = changed_cpus(state.kubelet_cpus, after.kubelet_cpus)
    change = pool_changes(state, after)
    return after, (*change, node_effects.KubeletCpusChanged(added, removed))


def _reservation_cpus_changed(state: NodeState, event: node_events.ReservationCpusChanged) -> Handled:
    placed = state.changed(put=event.placed) if event.placed else state
    after = placed.with_reservation(event.reservation, event.cpus)
    # The reservation writes the kernel itself, as long as it holds CPUs.
    holds_cpus = event.cpus is not None and bool(event.cpus.cpus)
    write_scope = WriteScope.CALLER if holds_cpus and not event.placed else WriteScope.MOVED
    return after, pool_changes(state, after, write_scope)


_RULES: dict[type[NodeEvent], Callable[[NodeState, Any], Handled]] = {
    container_events.ContainerCreated: container_lifecycle_rules.container_created,
    container_events.CreateFailed: container_lifecycle_rules.create_failed,
    container_events.CreateLost: container_lifecycle_rules.create_lost,
    container_events.PhaseChanged: container_lifecycle_rules.phase_changed,
    container_events.ContainersRemoved: container_lifecycle_rules.containers_removed,
    container_events.ContainerTouched: container_lifecycle_rules.container_touched,
    container_events.ContainerIsBack: container_lifecycle_rules.container_is_back,
    container_events.ContainersUpdated: container_lifecycle_rules.containers_updated,
    container_events.CpusAssigned: container_lifecycle_rules.cpus_assigned,
    container_events.CreateRequested: decisions.create_requested,
    container_events.CreateResumed: decisions.create_resumed,
    container_events.CreateDelegated: decisions.create_delegated,
    container_events.CreateNotReserved: decisions.create_not_reserved,
    container_events.CreateWithoutDevices: decisions.create_without_devices,
    container_events.DevicesAllocated: device_grants.devices_allocated,
    container_events.AllocateFailed: device_grants.allocate_failed,
    call_events.StartRequested: decisions.start_requested,
    call_events.UpdateRequested: decisions.update_requested,
    container_events.CpusNotFreed: decisions.cpus_not_freed,
    container_events.ContainerFound: container_found,
    pod_events.SandboxRequested: sandboxes.sandbox_requested,
    pod_events.PodChangedByHook: sandboxes.pod_changed_by_hook,
    pod_events.PodLearned: sandboxes.pod_learned,
    pod_events.SandboxRunning: sandboxes.sandbox_running,
    pod_events.SandboxFailed: sandboxes.sandbox_failed,
    pod_events.SandboxStopped: sandboxes.sandbox_stopped,
    pod_events.SandboxRemoved: sandboxes.sandbox_removed,
    node_events.ReservationCpusChanged: _reservation_cpus_changed,
    call_events.CallSent: inflight_call_rules.call_sent,
    call_events.CallCompleted: inflight_call_rules.call_completed,
    call_events.CallOrphaned: inflight_call_rules.call_orphaned,
    call_events.StartRefused: inflight_call_rules.start_refused,
    call_events.StartEnded: inflight_call_rules.start_ended,
    call_events.UpdateAccepted: inflight_call_rules.update_accepted,
    call_events.UpdateEnded: inflight_call_rules.update_ended,
    call_events.ResendWanted: inflight_call_rules.resend_wanted,
    call_events.CallConfined: inflight_call_rules.call_confined,
    call_events.OrphanListed: inflight_call_rules.orphan_listed,
    call_events.OrphanEnded: inflight_call_rules.orphan_ended,
    node_events.RuntimeListed: _runtime_listed,
    node_events.NodePolicyRead: node_policy_applied.node_policy_read,
    node_events.TakeoverChanged: _takeover_changed,
    node_events.HardwareChanged: _machine_changed,
    node_events.KubeletCpusRead: _kubelet_cpus_read,
    node_events.DevicesChanged: device_grants.devices_changed,
    node_events.DevicesImported: device_grants.devices_imported,
    call_events.SavedCpusLearned: _saved_cpus_learned,
    call_events.RuntimeSyncDue: _runtime_sync_due,
    call_events.RuntimeSyncStarted: _runtime_sync_started,
    systemd_masks.UnitCpusRead: node_state_fact_rules.unit_cpus_read,
    **dict.fromkeys(get_args(write_conflicts.DriftEvent), node_state_fact_rules.drift_changed),
    quotas.CpuControllerChecked: node_state_fact_rules.cpu_controller_checked,
    quotas.QuotasRead: node_state_fact_rules.quotas_read,
    **dict.fromkeys(get_args(quotas.QuotaEvent), node_state_fact_rules.quotas_changed),
    partition.PartitionsRead: node_state_fact_rules.partitions_read,
    **dict.fromkeys(get_args(partition.PartitionEvent), node_state_fact_rules.partitions_changed),
    suppression.BeQuotasRead: node_state_fact_rules.be_quotas_read,
    **dict.fromkeys(get_args(suppression.SuppressionEvent), node_state_fact_rules.suppression_changed),
    node_events.MemoryNodesCompared: node_state_fact_rules.memory_nodes_compared,
    node_events.LossesDue: node_state_fact_rules.losses_due,
    node_events.ModeChanged: staging.mode_changed,
    node_events.EnforcementChanged: staging.enforcement_changed,
    node_events.EnforcementRead: staging.enforcement_read,
    node_events.EnforcementPaused: staging.enforcement_paused,
    node_events.EnforcementStepDue: staging.step_due,
    node_events.EnforcementStepDone: staging.step_done,
    node_events.EnforcementStepFailed: staging.step_failed,
    node_events.LedgerRead: _ledger_read,
}
