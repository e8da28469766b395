"""Adopt an existing container, which was created without topoproxy or before topoproxy started.

Running containers are moved as little as possible. A container that may own CPUs owns those that it runs on,
if they are as many as it requests, belong to no other owner and are not set aside for another pod. Otherwise
it runs on a pool, and the plan gives the reason. An existing container is never rejected.

The ledger records the memory that was promised when a container was placed. If memory was not counted at that
time (other settings, an older version), a container that is bound to NUMA nodes uses their memory anyway, so
its memory is counted when it is adopted. Running containers are never rejected, so after a change of
``reservedMemory`` more memory may be promised than the machine has.
"""

from __future__ import annotations

from collections import Counter

from msgspec import structs

from proxy.engine.admission import sharing_problem
from proxy.engine.container_claim import permitted_container_claim
from proxy.engine.container_create import Plan, place
from proxy.engine.container_events import ContainerFound, CreateFailed
from proxy.engine.container_lifecycle_rules import create_failed
from proxy.engine.node_effects import NOTHING, NodeEffect, NodeEffects, PlanDecided, PutRecord, pool_changes
from proxy.engine.placement import moves, named_memory_nodes, pool_placement, with_burst_limit
from proxy.engine.quotas import pool_forbids_quota, without_quota
from proxy.engine.state import NodeState, grants_of, with_grants
from proxy.model.idset import CpuSet
from proxy.model.workload import (
    CONTAINER_RECORD,
    Container,
    ContainerPart,
    Phase,
    Placement,
    Pod,
    Pool,
    Request,
    Verdict,
)
from proxy.pools.claims import Claim, claim


def adopt(state: NodeState, found: ContainerFound) -> Plan:
    """Return the plan that adopts a container.

    Args:
        state: The node as it is.
        found: The container; ``request.cpuset_cpus`` is its current cpuset.

    Returns:
        A plan whose verdict always admits; ``shrink`` names the other containers that run on its CPUs.
    """
    pod, request, phase = found.pod, found.request, found.phase
    if phase is Phase.EXITED:
        placement = pool_placement(Pool.SHARED, state.node.machine.memory_nodes, "it has exited")
        exited = _container(found, placement)
        return Plan(Verdict(), state.changed(put=(exited,)), exited)
    permitted, breach = permitted_container_claim(state, pod, found.name, request)
    claimed = claim(permitted, request, state.node.machine.present, static=state.node.static)
    limit = None if breach is None else breach.rule
    if breach is not None:
        claimed = structs.replace(claimed, problem=claimed.problem or sharing_problem(breach))
    if claimed.pool is not Pool.OWN and not claimed.fatal and phase is not Phase.CREATED:
        claimed = with_burst_limit(state, pod, request, claimed)
        plan = _pooled(state, found, claimed.reason, claimed)
        return structs.replace(plan, problem=claimed.problem, limit=limit)
    if claimed.pool is Pool.OWN and claimed.cpus is None and phase is not Phase.CREATED:
        plan_with_cpus = _keep_cpus(state, found, claimed)
        reason = f"{claimed.reason}, but it was started without exclusive CPUs and gets none while it runs"
        plan = plan_with_cpus or _pooled(state, found, reason)
        return structs.replace(plan, problem=claimed.problem, limit=limit)
    # The container may use its memory already, so it keeps its NUMA nodes; no others are considered.
    may_run = phase is not Phase.CREATED
    mems = named_memory_nodes(state, request)
    requested = structs.replace(request, cpuset_mems=str(mems)) if may_run else request
    current_cpus = parse_cpus(request.cpuset_cpus) if may_run else None
    # A device that its plugin has not allocated cannot be assigned to an existing container.
    without_free_devices = structs.replace(state, devices=structs.replace(state.devices, registered={}))
    plan = place(
        without_free_devices,
        pod,
        found.name,
        found.attempt,
        requested,
        found.container_id,
        state.node.machine.present,
        current_cpus,
    )
    plan = structs.replace(plan, state=structs.replace(plan.state, devices=state.devices))
    if plan.container is None:
        limit, problem = plan.limit, plan.problem or plan.verdict.operator_message
        plan = _pooled(state, found, problem)
        return structs.replace(plan, problem=problem, limit=limit)
    adopted = structs.replace(plan.container, phase=phase, request=request)
    # The decision counts no memory on NUMA nodes that the request names, but a running container uses it.
    placement = structs.replace(adopted.placement, mems=mems) if may_run else adopted.placement
    adopted = structs.replace(adopted, placement=_adopted(state, pod, request, placement, running=may_run))
    return structs.replace(plan, state=plan.state.changed(put=(adopted,)), container=adopted)


def parse_cpus(text: str) -> CpuSet | None:
    """Parse a list of CPUs; None if the text is not such a list."""
    try:
        return CpuSet.parse(text)
    except ValueError:
        return None


def _keep_cpus(state: NodeState, found: ContainerFound, claimed: Claim) -> Plan | None:
    pod, name, request = found.pod, found.name, found.request
    current_cpus = parse_cpus(request.cpuset_cpus)
    if current_cpus is None:
        return None
    owner = pod.owner_key(name)
    if len(current_cpus) != claimed.count or not current_cpus <= state.node.machine.present:
        return None
    if any(key != owner and not owned.cpus.isdisjoint(current_cpus) for key, owned in state.owners.items()):
        return None
    if not state.cpus_set_aside(pod.key).isdisjoint(current_cpus):
        return None
    reason = f"{claimed.reason}; runs on CPUs {current_cpus} already"
    mems = named_memory_nodes(state, request)
    placement = _adopted(
        state, pod, request, Placement(Pool.OWN, current_cpus, mems, (reason,), claimed.excludes_be)
    )
    if pool_forbids_quota(state, pod, name, Pool.OWN):
        placement = without_quota(placement, request)
    container = _container(found, placement, owner)
    after = state.changed(put=(container,))
    if not after.pools.shared:
        return None
    return Plan(Verdict(), after, container, moves(state, after)[0])


def _pooled(state: NodeState, found: ContainerFound, reason: str, claimed: Claim | None = None) -> Plan:
    mems = named_memory_nodes(state, found.request)
    placement = pool_placement(Pool.SHARED, mems, reason)
    if claimed is not None:
        placement = pool_placement(claimed.pool, mems, reason, claimed.within, claimed.nodes)
    container = _container(found, _adopted(state, found.pod, found.request, placement))
    return Plan(Verdict(), state.changed(put=(container,)), container)


def _container(found: ContainerFound, placement: Placement, owner: str = "") -> Container:
    """Return an existing container, with its placement."""
    return Container(
        found.container_id,
        found.name,
        found.pod,
        found.request,
        placement,
        found.phase,
        found.attempt,
        owner,
    )


def _adopted(
    state: NodeState, pod: Pod, request: Request, placement: Placement, *, running: bool = True
) -> Placement:
    """Return the placement of an existing container, with what it holds according to the providers."""
    recorded = grants = grants_of(placement)
    for provider in state.providers:
        grants = provider.adopt(pod, request, placement.mems, grants, running=running)
    return placement if grants == recorded else with_grants(placement, grants)


def with_unrecorded_grants(state: NodeState) -> NodeState:
    """Return the state with resources that containers hold without a record; the same state if none do."""
    if not state.node.accounts:
        return state
    late = tuple(after for c in state.containers.values() if (after := _with_unrecorded(state, c)) is not c)
    return state.changed(put=late) if late else state


def _with_unrecorded(state: NodeState, container: Container) -> Container:
    aside = container.pod.reserved_for_pod
    promised = aside is not None and (aside.blocks or aside.shares or any(map(_is_promised, aside.parts)))
    if promised or container.phase is Phase.EXITED:
        return container
    before = container.placement
    after = _adopted(state, container.pod, container.request, before, running=False)
    return container if after is before else structs.replace(container, placement=after)


def _is_promised(part: ContainerPart) -> bool:
    return bool(part.blocks or part.shares)


def overcommitted_memory(state: NodeState) -> dict[str, tuple[int, int]]:
    """Return the resources of which more is promised than exists: the bytes promised, and the bytes in total.

    Promises count as excess only if no NUMA node could be charged for them, so both numbers are for the whole
    machine.
    """
    if state.memory is None:
        return {}
    promised: Counter[str] = Counter()
    for pod in state.memory.assignments.values():
        for blocks in pod.values():
            for block in blocks:
                promised[block.resource] += block.size
    charged: Counter[str] = Counter()
    in_use: Counter[str] = Counter()
    for node in state.memory.nodes.values():
        for resource, table in node.tables.items():
            charged[resource] += table.reserved
            in_use[resource] += table.allocatable
    return {name: (size, in_use[name]) for name, size in sorted(promised.items()) if size > charged[name]}


def container_found(state: NodeState, event: ContainerFound) -> tuple[NodeState, NodeEffects]:
    """Adopt a container that the state does not have, on the CPUs that it runs on."""
    container_id, saved = event.container_id, event.saved
    state, plan, dropped = _adopted_without_lost_creates(state, event)
    assert plan.container is not None
    after = plan.state
    if saved is not None:
        after = after.with_runtime(after.runtime.with_saved(container_id, saved))
    record = PutRecord(CONTAINER_RECORD + container_id, plan.container)
    return after, (*dropped, record, *pool_changes(state, after), PlanDecided(plan))


def _adopted_without_lost_creates(
    state: NodeState, event: ContainerFound
) -> tuple[NodeState, Plan, NodeEffects]:
    """Return the plan for a container, and the state without lost creates that conflict with it.

    If an owner runs on the CPUs of a lost create, that create has failed, because the owner is newer. The
    ledger still has the create if its removal could not be written any more.
    """
    plan = adopt(state, event)
    assert plan.container is not None
    if plan.container.placement.pool is Pool.OWN or event.phase is not Phase.RUNNING:
        return state, plan, NOTHING
    current = parse_cpus(event.request.cpuset_cpus)
    lost = _lost_creates_on(state, current, event) if current else []
    without, effects = state, list[NodeEffect]()
    for token in lost:
        without, more = create_failed(without, CreateFailed(token))
        effects += more
    again = adopt(without, event) if lost else plan
    assert again.container is not None
    if again.container.placement.exclusive != current:
        return state, plan, NOTHING
    return without, again, tuple(effects)


def _lost_creates_on(state: NodeState, cpus: CpuSet, event: ContainerFound) -> list[str]:
    """Return the tokens of lost creates whose containers (other ones) would own some of these CPUs."""
    lost = ((token, state.containers.get(token)) for token in state.runtime.lost_creates)
    return [
        token
        for token, container in lost
        if container is not None
        and not container.placement.exclusive.isdisjoint(cpus)
        and (container.pod.key, container.name) != (event.pod.key, event.name)
    ]
