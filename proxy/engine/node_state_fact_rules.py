"""Rules for the facts in ``NodeStateFacts``: quotas, partitions, BE suppression, memory nodes, losses, drift.

Like all rules of ``proxy.engine.handle``, each takes a state and an event, and returns the state after the
event and the effects. Most of them apply the function ``step`` of the subject's own module, and add the
ledger's records that have changed.
"""

from __future__ import annotations

from msgspec import structs

from proxy.engine import partition, quotas, suppression, systemd_masks, write_conflicts
from proxy.engine.hotplug import changed_losses
from proxy.engine.node_effects import LossesChanged, NodeEffects, WriteScope, fact_records, pool_changes
from proxy.engine.node_events import LossesDue, MemoryNodesCompared
from proxy.engine.state import NodeState


def cpu_controller_checked(
    state: NodeState, event: quotas.CpuControllerChecked
) -> tuple[NodeState, NodeEffects]:
    """Record whether CFS quotas can be written."""
    return state.with_facts(has_cpu_controller=event.found), ()


def quotas_read(state: NodeState, event: quotas.QuotasRead) -> tuple[NodeState, NodeEffects]:
    """Record the quotas that an earlier run has removed."""
    return state.with_facts(quotas=quotas.RemovedQuotas(event.records)), ()


def with_quotas(state: NodeState, known: quotas.RemovedQuotas) -> tuple[NodeState, NodeEffects]:
    """Return the state with other removed CFS quotas, and the ledger records that differ."""
    if known == state.facts.quotas:
        return state, ()
    after = state.with_facts(quotas=known)
    return after, fact_records(state, after)


def quotas_changed(state: NodeState, event: quotas.QuotaEvent) -> tuple[NodeState, NodeEffects]:
    """Apply an event about CFS quotas."""
    known, effects = quotas.step(state, event)
    after, records = with_quotas(state, known)
    return after, (*records, *effects)


def partitions_read(state: NodeState, event: partition.PartitionsRead) -> tuple[NodeState, NodeEffects]:
    """Record the partitions of an earlier run."""
    known = partition.PartitionFacts(event.records)
    return state.with_facts(partitions=known), ()


def partitions_changed(state: NodeState, event: partition.PartitionEvent) -> tuple[NodeState, NodeEffects]:
    """Apply an event about partitions."""
    known, effects = partition.step(state, event)
    after = state.with_facts(partitions=known)
    return after, (*fact_records(state, after), *effects)


def be_quotas_read(state: NodeState, event: suppression.BeQuotasRead) -> tuple[NodeState, NodeEffects]:
    """Record the quotas of BE pods that an earlier run has written."""
    known = suppression.BeSuppression(above=min(event.paths, default=""), written=event.paths)
    return state.with_facts(suppression=known), ()


def suppression_changed(
    state: NodeState, event: suppression.SuppressionEvent
) -> tuple[NodeState, NodeEffects]:
    """Apply an event about BE suppression; the caller writes the BE pool to the kernel."""
    after, effects = suppression.step(state, event)
    change = pool_changes(state, after, WriteScope.CALLER)
    return after, (*fact_records(state, after), *change, *effects)


def memory_nodes_compared(state: NodeState, event: MemoryNodesCompared) -> tuple[NodeState, NodeEffects]:
    """Record the memory nodes that containers have."""
    mems = structs.replace(
        state.facts.mems, as_planned=event.as_planned, wider_than_planned=event.wider_than_planned
    )
    return state.with_facts(mems=mems), ()


def losses_due(state: NodeState, event: LossesDue) -> tuple[NodeState, NodeEffects]:
    """Compare the current hardware losses of containers with those that were reported."""
    losses, changes = changed_losses(state.facts.losses, state)
    return state.with_facts(losses=losses), (LossesChanged(tuple(changes)),)


def unit_cpus_read(state: NodeState, event: systemd_masks.UnitCpusRead) -> tuple[NodeState, NodeEffects]:
    """Record what a systemd unit shows about the CPU masks that the runtime sends."""
    masks, effects = systemd_masks.step(state.facts.masks, event)
    return state.with_facts(masks=masks), effects


def drift_changed(state: NodeState, event: write_conflicts.DriftEvent) -> tuple[NodeState, NodeEffects]:
    """Record cpusets in the kernel that differ from the plan."""
    drift, effects = write_conflicts.step(state.facts.drift, event)
    return state.with_facts(drift=drift), effects
