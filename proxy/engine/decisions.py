"""Decisions about containers, as rules of ``proxy.engine.handle``: each answers with ``PlanDecided``.

What is decided is in the state at once, so that no later decision uses the same CPUs.
"""

from __future__ import annotations

from msgspec import structs

from proxy.engine.adoption import adopt
from proxy.engine.create import place
from proxy.engine.elsewhere import place_elsewhere
from proxy.engine.lifecycle import create_failed
from proxy.engine.node_effects import Follow, NodeEffects, PlanDecided, PutRecord, followed
from proxy.engine.node_events import ContainerFound, CpusNotFreed, CreateFailed, CreateRequested
from proxy.engine.state import NodeState
from proxy.model.workload import Pool


def create_requested(state: NodeState, event: CreateRequested) -> tuple[NodeState, NodeEffects]:
    """Place a container, or refuse it."""
    plan = place(state, *structs.astuple(event))
    after, container = plan.state, plan.container
    if container is None:
        return state, (PlanDecided(plan),)
    if after.pools is state.pools and after.node is state.node:
        return after, (PlanDecided(plan),)
    # The reservation writes the containers that leave an owner's CPUs, and waits for that.
    follow = Follow.CALLER if container.placement.pool is Pool.OWN else Follow.MOVED
    return after, (*followed(state, after, "container placed", follow), PlanDecided(plan))


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
    """Let a container that is not known have what it runs on."""
    container_id, phase, saved = event.container_id, event.phase, event.saved
    plan = adopt(state, container_id, event.pod, event.name, event.attempt, event.request, phase)
    assert plan.container is not None
    after = plan.state
    if saved is not None:
        after = after.knowing(after.runtime.saving(container_id, saved))
    record = PutRecord(f"c/{container_id}", plan.container)
    return after, (record, *followed(state, after, "container adopted"), PlanDecided(plan))
