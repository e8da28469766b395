"""Changes of single facts of the node: rules of ``proxy.engine.handle``."""

from __future__ import annotations

from msgspec import structs

from proxy.engine import partition, quotas, suppression, systemd_masks, write_conflicts
from proxy.engine.hotplug import changed_losses
from proxy.engine.node_effects import Follow, LossesChanged, NodeEffects, PutRecord, followed
from proxy.engine.node_events import LossesDue, MemoryNodesCompared
from proxy.engine.state import NodeState


def recorded(before: NodeState, after: NodeState) -> tuple[PutRecord, ...]:
    """Return the records of facts that differ, for the ledger."""
    if before.facts.kept() == after.facts.kept():
        return ()
    old, new = before.facts.records(), after.facts.records()
    return tuple(PutRecord(key, new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key))


def cpu_groups_sought(state: NodeState, event: quotas.CpuGroupsSought) -> tuple[NodeState, NodeEffects]:
    """Record whether CFS quotas can be written."""
    return state.with_facts(cpu_groups=event.found), ()


def quotas_read(state: NodeState, event: quotas.QuotasRead) -> tuple[NodeState, NodeEffects]:
    """Record the quotas that an earlier run has removed."""
    return state.with_facts(quotas=quotas.RemovedQuotas(event.records)), ()


def with_quotas(state: NodeState, known: quotas.RemovedQuotas) -> tuple[NodeState, NodeEffects]:
    """Return the state in which something else is known of CFS quotas."""
    if known == state.facts.quotas:
        return state, ()
    after = state.with_facts(quotas=known)
    return after, recorded(state, after)


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
    return after, (*recorded(state, after), *effects)


def be_quotas_read(state: NodeState, event: suppression.BeQuotasRead) -> tuple[NodeState, NodeEffects]:
    """Record the quotas of BE pods that an earlier run has written."""
    known = suppression.BeSuppression(above=min(event.paths, default=""), written=event.paths)
    return state.with_facts(suppression=known), ()


def suppression_changed(
    state: NodeState, event: suppression.SuppressionEvent
) -> tuple[NodeState, NodeEffects]:
    """Apply an event about BE suppression; the caller writes the BE pool to the kernel."""
    found, effects = suppression.step(state, event)
    change = followed(state, found, "BE pool suppressed", Follow.CALLER)
    return found, (*recorded(state, found), *change, *effects)


def memory_nodes_compared(state: NodeState, event: MemoryNodesCompared) -> tuple[NodeState, NodeEffects]:
    """Record the memory nodes that containers have."""
    mems = structs.replace(state.facts.mems, held=event.right, wide=event.wide)
    return state.with_facts(mems=mems), ()


def losses_due(state: NodeState, event: LossesDue) -> tuple[NodeState, NodeEffects]:
    """Compare what containers lack with what was reported."""
    losses, changes = changed_losses(state.facts.losses, state)
    return state.with_facts(losses=losses), (LossesChanged(tuple(changes)),)


def unit_cpus_read(state: NodeState, event: systemd_masks.UnitCpusRead) -> tuple[NodeState, NodeEffects]:
    """Record what a unit shows about the masks that the runtime sends."""
    masks, effects = systemd_masks.step(state.facts.masks, event)
    return state.with_facts(masks=masks), effects


def cpusets_written(state: NodeState, event: write_conflicts.DriftEvent) -> tuple[NodeState, NodeEffects]:
    """Record what was found in the kernel and differs from the plan."""
    drift, effects = write_conflicts.step(state.facts.drift, event)
    return state.with_facts(drift=drift), effects
